"""Converts envelopes to Service Bus messages, and received messages to envelopes.

Rules
1. A field that the service has is used: body (bytes, unchanged), content type and encoding, message
   id, correlation id, subject, session id, partition key, time to live, scheduled enqueue time,
   reply-to, priority. Headers become application properties.
2. Application properties hold only simple values: text, booleans, floats and 32-bit integers (what
   the SDK writes). All other values travel in one property, `PACKED`: base64 of a msgpack map
   ``{"headers": {...}, "properties": {...}}``.
3. The SDK returns text as bytes; here, a property's bytes become text again if they are UTF-8. Our
   own bytes are packed, so the two are never confused. Foreign values that no header can hold
   (decimals, UUIDs) become text, so that a retry's clone can carry them.
4. A damaged message becomes an envelope of its bytes, with the reason.
5. The service needs absolute times: the caller gives the service's current time.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgpack
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage

from aztask.errors import (
    ConfigurationError,
    ContentRefused,
    DecodeError,
    EncodeError,
    MessageTooLarge,
)
from aztask.message.bounds import MessageLimits, check_msgpack
from aztask.message.envelope import Envelope
from aztask.message.message import build
from aztask.queues.base import Delivery, MessageState, Peeked, Position
from aztask.queues.delivery import OwnDelivery, unsettled
from aztask.queues.servicebus.kind import MESSAGE_LIMIT
from aztask.queues.servicebus.reading import damage_of
from aztask.settlement import Abandon, Complete, DeadLetter, Defer, Release, Resubmit, Settlement

PACKED: Final = "aztask-packed"
EXPIRES_AT: Final = "aztask-expires-at"

ID_LIMIT: Final = 128
"""Characters of message ids, session ids and partition keys (the service's documented quota)."""

UNREADABLE: Final = "application/octet-stream"
"""Content type of an unreadable message."""

LONGEST_LIFE: Final = (2**32 - 1) / 1000
"""The longest time to live in an AMQP header, seconds (part 3, 3.2.1: ttl is uint milliseconds)."""

_PACKED_LIMITS: Final = MessageLimits(depth=16, items=4096)
"""Limits of `PACKED`: more than the codec accepts, and little memory. A checkpoint may be long."""
_OVERHEAD: Final = 64
_LATEST: Final = datetime(9998, 12, 31, tzinfo=UTC).timestamp()
_REASON: Final = b"DeadLetterReason"
_DESCRIPTION: Final = b"DeadLetterErrorDescription"
_OURS: Final = frozenset({PACKED.encode(), EXPIRES_AT.encode(), _REASON, _DESCRIPTION})
_NATIVE: Final = (str, bool, float)
_STATES: Final = (MessageState.ACTIVE, MessageState.DEFERRED, MessageState.SCHEDULED)


def message_of(envelope: Envelope, now: float, limit: int = MESSAGE_LIMIT) -> ServiceBusMessage:
    """The message to send. now: the service's current time, UTC epoch seconds.

    Raises EncodeError, MessageTooLarge (more than `limit` bytes) and ConfigurationError.
    """
    properties = _application_properties(envelope)
    _check_size(envelope, properties, limit)
    if not 0 <= envelope.delay < math.inf:
        raise ConfigurationError(
            f"a delay is a number of seconds of at least 0, not {envelope.delay!r}"
        )
    due = now + envelope.delay
    if due > _LATEST:
        raise ConfigurationError(f"a delay of {envelope.delay:g} s ends after the year 9998")
    message_id = _checked_id(envelope.message_id, "message id") or None
    try:
        message = ServiceBusMessage(
            envelope.body,
            application_properties=properties,
            session_id=envelope.session,
            message_id=message_id,
            content_type=envelope.content_type,
            correlation_id=envelope.correlation_id,
            subject=envelope.subject,
            partition_key=envelope.partition_key,
            reply_to=_text(envelope.properties.get("reply_to")),
        )
    except ValueError as error:  # a foreign message's field is longer than the service allows
        raise EncodeError(
            f"message {envelope.message_id!r} cannot be sent: {str(error).rstrip('.')}; leave it "
            "among the dead letters, or send it anew"
        ) from None
    raw = message.raw_amqp_message
    assert raw.properties is not None  # noqa: S101  # ServiceBusMessage makes them
    raw.properties.content_encoding = envelope.content_encoding
    if envelope.delay:
        message.scheduled_enqueue_time_utc = datetime.fromtimestamp(due, UTC)
    if envelope.expires_at is not None and envelope.expires_at < _LATEST:
        # the SDK writes whole seconds; the worker checks the exact time
        left = max(1, math.ceil(max(0.0, envelope.expires_at - due)))  # it may be minus infinity
        if left < LONGEST_LIFE:  # otherwise only the worker checks it
            message.time_to_live = timedelta(seconds=left)
    priority = envelope.properties.get("priority")
    if _is_priority(priority) and raw.header is not None:
        raw.header.priority = priority
    return message


def envelope_of(message: ServiceBusReceivedMessage) -> Envelope:
    """The envelope of a message of `message_of`, or the closest one for a foreign producer's.

    Never raises; see rule 4.
    """
    damage = damage_of(message)
    if damage is not None:
        return _unreadable(message, damage.raw, damage.problem)
    try:
        return _envelope_of(message)
    except Exception as error:  # noqa: BLE001  # any content: it must harm only this message
        return _unreadable(message, b"", f"{type(error).__name__}: {error}")


def _unreadable(message: ServiceBusReceivedMessage, raw: bytes, problem: str) -> Envelope:
    native: Any = message.raw_amqp_message.properties
    return Envelope(
        body=raw,
        message_id=_text(native.message_id if native is not None else None) or "",
        content_type=UNREADABLE,
        session=_text(native.group_id if native is not None else None),
        problem=problem,
    )


def _envelope_of(message: ServiceBusReceivedMessage) -> Envelope:
    raw = message.raw_amqp_message
    native: Any = raw.properties  # compared with None: its truth costs a look at all it has
    headers, properties, expires_at = _headers_of(raw.application_properties or {})
    if native is not None and native.reply_to is not None:
        properties["reply_to"] = _text(native.reply_to)
    if raw.header is not None and raw.header.priority is not None:
        properties["priority"] = raw.header.priority
    partition_key = (raw.annotations or {}).get(b"x-opt-partition-key")
    return build(
        Envelope,
        {
            "body": _body_of(message),
            "headers": headers,
            "message_id": _text(native.message_id if native is not None else None) or "",
            "content_type": _text(native.content_type if native is not None else None) or "",
            "content_encoding": _text(native.content_encoding if native is not None else None)
            or "binary",
            "subject": _text(native.subject if native is not None else None),
            "correlation_id": _text(native.correlation_id if native is not None else None),
            "session": _text(native.group_id if native is not None else None),
            "partition_key": _text(partition_key),
            "delay": 0.0,
            "expires_at": expires_at,
            "properties": properties,
            "problem": "",
        },
    )


def dead_letter_texts(message: ServiceBusReceivedMessage) -> tuple[str | None, str | None]:
    """(reason, description) of a dead letter; None for a missing one."""
    properties: Any = message.raw_amqp_message.application_properties or {}
    return _text(properties.get(_REASON)), _text(properties.get(_DESCRIPTION))


def epoch_of(message: ServiceBusReceivedMessage, annotation: bytes) -> float | None:
    """A time from an annotation, UTC epoch seconds of the service's clock, or None."""
    value: Any = (message.raw_amqp_message.annotations or {}).get(annotation)
    return value / 1000.0 if isinstance(value, int) else None


ENQUEUED: Final = b"x-opt-enqueued-time"
LOCKED_UNTIL: Final = b"x-opt-locked-until"
SCHEDULED: Final = b"x-opt-scheduled-enqueue-time"
FIRST_NUMBER: Final = b"x-opt-enqueue-sequence-number"


def position_of(message: ServiceBusReceivedMessage) -> int:
    """The sequence number; 0 if a damaged message has none."""
    number: Any = message.sequence_number
    return number if isinstance(number, int) else 0


def sequence_number(position: Position) -> int:
    """A position as the service's sequence number."""
    try:
        return max(-1, min(int(position), 2**63 - 2))
    except ValueError:
        raise ConfigurationError(
            f"{position!r} is not a position in Service Bus; use a number that peek shows"
        ) from None


def is_direct(message: ServiceBusReceivedMessage) -> bool:
    """Whether the message was enqueued when it was sent: neither scheduled nor forwarded."""
    annotations: Any = message.raw_amqp_message.annotations or {}
    return SCHEDULED not in annotations and annotations.get(FIRST_NUMBER) in (
        None,
        0,
        position_of(message),
    )


def state_of(message: ServiceBusReceivedMessage) -> MessageState:
    """The state of a peeked message; `MessageState.ACTIVE` if it is unknown."""
    state: Any = (message.raw_amqp_message.annotations or {}).get(b"x-opt-message-state", 0)
    known = isinstance(state, int) and 0 <= state < len(_STATES)  # Decimal(1) is in a range, too
    return _STATES[state] if known else MessageState.ACTIVE


def peeked_of(message: ServiceBusReceivedMessage, *, dead_letter: bool) -> Peeked:
    """The `Peeked` value for one of the SDK's peeked messages."""
    reason, description = dead_letter_texts(message) if dead_letter else (None, None)
    state = state_of(message)
    return Peeked(
        envelope_of(message),
        position_of(message),
        state,
        message.delivery_count or 0,
        epoch_of(message, ENQUEUED) or 0.0,
        epoch_of(message, SCHEDULED) if state is MessageState.SCHEDULED else None,
        reason,
        description,
    )


def _application_properties(envelope: Envelope) -> dict[str | bytes, Any]:
    properties: dict[str | bytes, Any] = {}
    packed: dict[str, Any] = {}
    for name, value in envelope.headers.items():
        if type(value) in _NATIVE or (type(value) is int and -(2**31) <= value < 2**31):
            properties[name] = value
        else:
            packed[name] = value
    others = {
        name: value
        for name, value in envelope.properties.items()
        if not (name == "reply_to" and isinstance(value, str))
        and not (name == "priority" and _is_priority(value))
    }
    if packed or others:
        content = {"headers": packed, "properties": others}
        try:
            properties[PACKED] = base64.b64encode(msgpack.packb(content)).decode("ascii")
        except (TypeError, ValueError, OverflowError) as error:
            raise EncodeError(
                f"the headers of message {envelope.message_id!r} cannot be written ({error}); "
                "use text, numbers, bytes, and lists and maps of those"
            ) from error
    if envelope.expires_at is not None:
        properties[EXPIRES_AT] = float(envelope.expires_at)
    return properties


def _headers_of(
    application_properties: Mapping[Any, Any],
) -> tuple[dict[str, Any], dict[str, Any], float | None]:
    """(headers, properties, expiry). Values that we did not write are passed on unchanged."""
    headers = {
        _text(name) or "": _readable(value)
        for name, value in application_properties.items()
        if name not in _OURS
    }
    properties: dict[str, Any] = {}
    packed = application_properties.get(PACKED.encode())
    if packed is not None:
        try:
            content = _unpacked(packed)
            headers.update(content["headers"])
            properties.update(content["properties"])
        except (ValueError, TypeError, KeyError, DecodeError, msgpack.UnpackException):
            headers[PACKED] = _readable(packed)
    expires_at = application_properties.get(EXPIRES_AT.encode())
    return headers, properties, expires_at if isinstance(expires_at, float) else None


def _unpacked(packed: Any) -> Any:
    """The content of `PACKED`. Raises ContentRefused before it is unpacked if it is too much."""
    if len(packed) > _PACKED_LIMITS.body_bytes * 4 // 3 + 4:
        raise ContentRefused(
            f"the property {PACKED} has {len(packed)} bytes; at most"
            f" {_PACKED_LIMITS.body_bytes * 4 // 3 + 4} are read"
        )
    data = base64.b64decode(packed)
    check_msgpack(data, _PACKED_LIMITS)
    return msgpack.unpackb(data, strict_map_key=False)


def _readable(value: Any) -> Any:
    """The value in a form that a header can hold (rule 3)."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {_text(_readable(name)) or "": _readable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    return str(value) if isinstance(value, Decimal | UUID) else value


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)


def _body_of(message: ServiceBusReceivedMessage) -> bytes:
    """The body as bytes; ``b""`` for a message without a body.

    A foreign producer's body may be a value or a sequence. A text or bytes becomes its bytes, any
    other value its text.
    """
    body = message.body
    if body is None or isinstance(body, bytes):
        return body or b""
    try:
        return b"".join(body)
    except TypeError:
        return str(message.body).encode("utf-8", "replace")


def _is_priority(value: object) -> bool:
    return type(value) is int and 0 <= value <= 255


def _checked_id(value: str, what: str) -> str:
    if len(value) > ID_LIMIT:
        raise EncodeError(
            f"the {what} has {len(value)} characters; Service Bus takes at most {ID_LIMIT}"
        )
    return value


def _check_size(envelope: Envelope, properties: Mapping[str | bytes, Any], limit: int) -> None:
    """Raise MessageTooLarge before anything is sent. The estimate is a little too high."""
    size = len(envelope.body) + _OVERHEAD * 4
    texts = sum([len(value) for value in properties.values() if type(value) is str])
    if size + 4 * texts + _OVERHEAD * len(properties) <= limit:
        return  # certainly small enough: the usual case, without encoding
    size += sum(
        len(name) + (len(value.encode()) if isinstance(value, str) else 9) + 6
        for name, value in properties.items()
    )
    if size > limit:
        raise MessageTooLarge(
            f"message {envelope.message_id!r} has {size} bytes, the queue accepts {limit}; "
            "store the data elsewhere and send a reference to it"
        )


# -- Deliveries ------------------------------------------------------------------------------------
#
# A delivery from Service Bus, and the verbs of its settlements.


@dataclass(slots=True, eq=False)
class BusDelivery(OwnDelivery):
    """A delivery that knows its lock.

    lock: the lock token; None after receive-and-delete.
    message: the SDK's message.
    attempted: a settlement got no answer, so it may have taken effect.
    holder: the connection that held the session when the delivery came; None without sessions.
    """

    lock: UUID | None = None
    message: ServiceBusReceivedMessage | None = None
    attempted: bool = False
    holder: object = None


def delivery_of(
    message: ServiceBusReceivedMessage,
    queue: str,
    deadline: float,
    lease: float,
    *,
    dead_letter: bool,
    delete: bool,
) -> BusDelivery:
    """A received message as a delivery under a lease that ends at `deadline`."""
    lock: Any = message.lock_token
    reason, description = dead_letter_texts(message) if dead_letter else (None, None)
    envelope = envelope_of(message)
    return BusDelivery(
        queue,
        envelope,
        position_of(message),
        str(lock or ""),
        (message.delivery_count or 0) + 1,
        epoch_of(message, ENQUEUED) or 0.0,
        deadline,
        lease,
        envelope.session,
        reason,
        description,
        settled=delete,
        lock=lock,
        message=message,
    )


def ages(message: ServiceBusReceivedMessage) -> tuple[float, float] | None:
    """(enqueued time, end of the lock), by the service's clock.

    None if one is missing, and for a damaged message, whose times may be the sender's.
    """
    if damage_of(message) is not None:
        return None
    enqueued, locked = epoch_of(message, ENQUEUED), epoch_of(message, LOCKED_UNTIL)
    return None if enqueued is None or locked is None else (enqueued, locked)


def all_unsettled(deliveries: Sequence[Delivery]) -> list[BusDelivery]:
    """Check that all deliveries are ours and not settled.

    Raises AlreadySettled, ConfigurationError.
    """
    return [unsettled(BusDelivery, delivery) for delivery in deliveries]


def verb_of(settlement: Settlement) -> tuple[str, str, str]:
    """(verb, reason, description) for the service. Resubmit completes: its clone is sent first."""
    match settlement:
        case Complete() | Resubmit():
            return "complete", "", ""
        case Abandon() | Release():
            return "abandon", "", ""
        case Defer():
            return "defer", "", ""
        case DeadLetter(reason, description):
            return "dead-letter", reason, description
