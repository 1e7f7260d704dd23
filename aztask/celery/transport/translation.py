"""Convert Kombu's message dict into an envelope and back, for the transport. No I/O.

Rules
1. The body travels as raw bytes: no base64, no JSON around it.
2. An AMQP property goes into the envelope's field for it. Other properties are passed on if they
   are plain values; AMQP would drop them.
3. A message without an id gets a fresh one, also written into the producer's own properties, so
   that Kombu's retry of the same publish sends the same id again.
4. Delays come from the property ``delay`` or ``countdown`` (seconds), or from Celery's ``eta``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

from aztask.errors import ConfigurationError, ContentRefused, DecodeError, EncodeError
from aztask.message.bounds import MessageLimits, check_size
from aztask.message.compression import decompress
from aztask.message.encryption import is_encrypted
from aztask.message.envelope import Envelope
from aztask.message.headers import COMPRESSION, read_time, to_iso
from aztask.message.message import MESSAGE_ID_LIMIT
from aztask.message.signatures import ANNOUNCED
from aztask.support.durations import to_seconds
from aztask.support.frozen import build

LONGEST_DELAY: Final = 6 * 86400.0
"""Seconds: longer delays are chained, as a Storage queue hides a message for at most seven days."""

HELD_SECONDS: Final = 3.0
"""A message that arrives so many seconds before its eta, or less, is held until then."""

_PLACED: Final = frozenset(
    {
        "message_id",
        "correlation_id",
        "type",
        "session",
        "partition_key",
        "delay",
        "countdown",
        "expires_at",
        "expiration",
        "delivery_mode",
        "delivery_info",
        "delivery_tag",
        "body_encoding",
    }
)


_PLAIN: Final = (str, bytes, bool, int, float, list, tuple, dict)


def to_envelope(message: dict[str, Any], now: float, lead: float = 0.0) -> Envelope:
    """The envelope of a message that Kombu publishes; `now` is in UTC epoch seconds.

    lead: seconds before its eta at which a message becomes visible.

    Raises EncodeError for an impossible delay or expiry.
    """
    properties: dict[str, Any] = message["properties"]
    headers: Mapping[str, Any] = message["headers"]
    body = message["body"]
    message_id = properties.get("message_id")
    if message_id is None:
        message_id = properties["message_id"] = str(uuid4())
    elif not isinstance(message_id, str) or not 0 < len(message_id) <= MESSAGE_ID_LIMIT:
        raise EncodeError(f"message_id must be a text of 1 to {MESSAGE_ID_LIMIT} characters")
    delay = properties.get("delay")
    if delay is None:
        delay, headers = _delay(properties, headers, now, lead)
    expires_at = properties.get("expires_at")
    if expires_at is None and "expiration" in properties:
        expires_at = now + _milliseconds(properties["expiration"])
    values = {
        "body": body.encode("utf-8") if isinstance(body, str) else bytes(body),
        "headers": headers,
        "message_id": message_id,
        "content_type": message["content-type"] or "application/data",
        "content_encoding": message["content-encoding"] or "binary",
        "subject": properties.get("type"),
        "correlation_id": properties.get("correlation_id"),
        "session": properties.get("session"),
        "partition_key": properties.get("partition_key"),
        "delay": delay,
        "expires_at": expires_at,
        "properties": {
            name: value
            for name, value in properties.items()
            if name not in _PLACED and isinstance(value, _PLAIN)
        },
        "problem": "",
    }
    return build(Envelope, values)


def _delay(
    properties: Mapping[str, Any], headers: Mapping[str, Any], now: float, lead: float
) -> tuple[float, Mapping[str, Any]]:
    """(seconds to hide the message, its headers): a long delay needs an eta for its chain."""
    delay = 0.0
    if properties.get("countdown") is not None:
        try:
            delay = to_seconds(properties["countdown"], "countdown")
        except ConfigurationError as error:
            raise EncodeError(str(error)) from None
    elif headers.get("eta") is not None:
        try:
            left = read_time("eta", headers["eta"]) - lead - now
        except DecodeError as error:
            raise EncodeError(str(error)) from None
        return min(LONGEST_DELAY, max(0.0, left)), headers
    if delay > LONGEST_DELAY:
        return LONGEST_DELAY, {**headers, "eta": to_iso(now + delay)}
    return delay, headers


def _milliseconds(value: object) -> float:
    """AMQP's expiration as a number: a text of milliseconds, as Kombu writes it."""
    try:
        return to_seconds(float(str(value)[:32]) / 1000.0, "expiration")
    except (ValueError, ConfigurationError):
        raise EncodeError(f"expiration {str(value)[:32]!r} is not milliseconds") from None


def to_message(envelope: Envelope, limits: MessageLimits) -> dict[str, Any]:
    """The arguments of Kombu's Message for a received envelope, with its body decompressed.

    Raises CodecError for a message that could not be read, and for a body that is too long or
    cannot be decompressed.
    """
    if envelope.problem:
        raise DecodeError(envelope.problem)
    headers = dict(envelope.headers)
    properties = {
        "delivery_mode": 2,
        "priority": 0,
        **envelope.properties,
        "message_id": envelope.message_id,
        "correlation_id": envelope.correlation_id,
    }
    for name, value in (
        ("type", envelope.subject),
        ("session", envelope.session),
        ("expires_at", envelope.expires_at),
    ):
        if value is not None:
            properties[name] = value
    body = envelope.body
    check_size(len(body), limits)
    if is_encrypted(body):
        raise ContentRefused(
            "its arguments are encrypted by aztask, and a Celery worker has no key for them: let a"
            " worker of aztask serve the queue"
        )
    compression = headers.pop(COMPRESSION, None)
    return {
        "body": decompress(body, compression, limits) if compression else body,
        "content_type": envelope.content_type.removesuffix(ANNOUNCED),
        "content_encoding": envelope.content_encoding,
        "headers": headers,
        "properties": properties,
    }


def seconds_early(envelope: Envelope, now: float) -> float | None:
    """Seconds until the ``eta`` in the headers, 0 if it has passed; None if there is none."""
    eta = envelope.headers.get("eta")
    if eta is None:
        return None
    try:
        return max(0.0, read_time("eta", eta) - now)
    except DecodeError:
        return None  # a header of another program: its consumer knows the meaning
