"""Sends messages over pooled connections, in batches of the size that the service allows.

Rules
1. Only one thread at a time uses a sender. Each queue has at most `MAX_SENDERS`; if all are busy,
   the caller waits for one.
2. An idle connection is checked before it is used. If the service has ended it, a new one is
   opened, so no message is sent into a dead connection.
3. Messages without an answer may be stored: `SendUnconfirmed` carries them, under the same ids. An
   error that means "nothing was stored" is raised only if the service refused the messages or they
   were never sent.
4. Messages of one session or one partition key stay in order. A batch holds only one such key, as
   partitioned queues require.
"""

from __future__ import annotations

import inspect
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from struct import Struct
from typing import Any, Final, NamedTuple

from azure.core.settings import settings
from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch, ServiceBusSender
from azure.servicebus._common import tracing
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._pyamqp.message import Message, Properties
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.exceptions import MessageSizeExceededError

from aztask.errors import BrokerError, MessageTooLarge, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.servicebus import private
from aztask.queues.servicebus.client import REQUEST_SECONDS, SEND_SECONDS, BusClient
from aztask.queues.servicebus.clock import DUE_SECONDS, MARGIN, PREFIX, TIME_TO_LIVE
from aztask.queues.servicebus.errors import SDK_ERRORS, error_of, is_refusal
from aztask.queues.servicebus.wire import ENQUEUED, epoch_of
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.support.quiet import is_quiet

# -- Encoding --------------------------------------------------------------------------------------
#
# Encodes the messages of a batch once, and faster than the SDK.
#
# `ServiceBusMessageBatch.add_message` encodes a message to learn its size, and encodes it again to
# add it ([seen] in azure-servicebus 7.15). It asks its transport for both, and encoding is
# most of what a send costs.
#
# Rules
# 1. The transport of a batch keeps the bytes of the first answer for the second.
# 2. The sections that our messages have are encoded here. What they have rarely (header,
#    annotations, times, values of other types) is left to the SDK.
# 3. The bytes are those of the SDK, which a property test compares.
# 4. An SDK without these two calls, or whose messages have other properties, keeps its transport.
#
# Source: OASIS AMQP 1.0, part 1 (types) and part 3, section 3.2 (messages).

_PROPERTIES: Final = b"\x00\x53\x73"
_APPLICATION_PROPERTIES: Final = b"\x00\x53\x74"
_DATA: Final = b"\x00\x53\x75"
_NULL: Final = b"\x40"
_DOUBLE: Final = Struct(">Bd")
_INT: Final = Struct(">Bi")


class _OtherTypeError(Exception):
    """A value of a type that the SDK has to encode."""


class OnceEncoding(PyamqpTransport):
    """The transport of one batch, which only one thread fills."""

    def __init__(self) -> None:
        self._message: Any = None
        self._encoded = bytearray()

    def get_message_encoded_size(self, message: Any) -> int:  # type: ignore[override]
        """The size of an encoded message, in bytes."""
        self._message, self._encoded = message, encoded(message)
        return len(self._encoded)

    def add_batch(  # type: ignore[override]
        self, sb_message_batch: Any, outgoing_sb_message: Any
    ) -> None:
        """Add the message whose size was asked for last; another one is encoded now."""
        if outgoing_sb_message._message is not self._message:
            self.get_message_encoded_size(outgoing_sb_message._message)
        sb_message_batch._message[5].append(self._encoded)


@cache
def _supported() -> bool:
    """True if the SDK's batch asks its transport as `OnceEncoding` answers, with our fields."""
    calls = {
        "get_message_encoded_size": ["message"],
        "add_batch": ["sb_message_batch", "outgoing_sb_message"],
    }
    for name, parameters in calls.items():
        function = getattr(PyamqpTransport, name, None)
        if function is None or list(inspect.signature(function).parameters) != parameters:
            return False
    return len(Properties._fields) == len(_FIELDS)


def encode_once(batch: ServiceBusMessageBatch) -> ServiceBusMessageBatch:
    """Have this new batch encode its messages once; returns it."""
    own: Any = batch
    if _supported() and getattr(own, "_amqp_transport", None) is PyamqpTransport:
        own._amqp_transport = OnceEncoding()
    return batch


def encoded(message: Message) -> bytearray:
    """The bytes of a message of the SDK. Raises what its encoder raises."""
    output = bytearray()
    header, before, annotations, properties, application, data, *others = message
    if before or any(others) or not isinstance(data, list):
        encode_payload(output, message)
        return output
    if header or annotations:
        encode_payload(output, Message(header=header, message_annotations=annotations))
    if properties:
        try:
            output += _properties(properties)
        except _OtherTypeError:
            encode_payload(output, Message(properties=properties))
    if application:
        try:
            output += _application_properties(application)
        except _OtherTypeError:
            encode_payload(output, Message(application_properties=application))
    for each in data:
        output += _DATA
        output += _sized(0xA0, each)
        output += each
    return output


# -- sections -------------------------------------------------------------------------------------


def _properties(fields: Sequence[Any]) -> bytes:
    items = [
        _NULL if value is None else encode(value)
        for value, encode in zip(fields, _FIELDS, strict=True)
    ]
    return _PROPERTIES + _compound(0xC0, b"".join(items), len(items))


def _application_properties(pairs: Mapping[Any, Any]) -> bytes:
    items = []
    for name, value in pairs.items():
        items.append(_name(name) if type(name) is str else _other(name))
        items.append(_ENCODERS.get(type(value), _other)(value))
    return _APPLICATION_PROPERTIES + _compound(0xC1, b"".join(items), len(items))


def _compound(small: int, content: bytes, count: int) -> bytes:
    """A list or a map. small: the constructor for up to 255 bytes."""
    if count <= 255 and len(content) < 255:
        return bytes((small, len(content) + 1, count)) + content
    head = bytes((small + 0x10,)) + (len(content) + 4).to_bytes(4, "big")
    return head + count.to_bytes(4, "big") + content


# -- values ---------------------------------------------------------------------------------------


def _sized(small: int, data: bytes) -> bytes:
    """The constructor and the size of `data`. small: the constructor for up to 255 bytes."""
    size = len(data)
    if size <= 255:
        return bytes((small, size))
    return bytes((small + 0x10,)) + size.to_bytes(4, "big")


def _string(value: Any) -> bytes:
    if type(value) is not str:
        _other(value)
    data: bytes = value.encode()
    return _sized(0xA1, data) + data


def _symbol(value: Any) -> bytes:
    if type(value) is not str:
        _other(value)
    return _cached_symbol(value)


@lru_cache(256)
def _cached_symbol(value: str) -> bytes:
    """The same few content types and encodings, again and again."""
    data = value.encode()
    return _sized(0xA3, data) + data


_name: Final = lru_cache(1024)(_string)
"""The same few names of properties, again and again."""


def _number(value: int) -> bytes:
    if -128 <= value <= 127:
        return bytes((0x54, value & 0xFF))
    if -(2**31) <= value < 2**31:
        return _INT.pack(0x71, value)
    return _other(value)


def _double(value: float) -> bytes:
    return _DOUBLE.pack(0x82, value)


def _boolean(value: bool) -> bytes:
    return b"\x56\x01" if value else b"\x56\x00"


def _null(_: None) -> bytes:
    return _NULL


def _other(_: object) -> bytes:
    raise _OtherTypeError


_ENCODERS: Final[dict[type, Callable[[Any], bytes]]] = {
    str: _string,
    bool: _boolean,
    int: _number,
    float: _double,
    type(None): _null,
}

_FIELDS: Final[tuple[Callable[[Any], bytes], ...]] = (
    _string,  # message-id
    _other,  # user-id
    _string,  # to
    _string,  # subject
    _string,  # reply-to
    _string,  # correlation-id
    _symbol,  # content-type
    _symbol,  # content-encoding
    _other,  # absolute-expiry-time
    _other,  # creation-time
    _string,  # group-id
    _other,  # group-sequence
    _string,  # reply-to-group-id
)
"""The encoders of the properties section, in the order of its fields (part 3, section 3.2.4)."""


# -- Switches the SDK's own tracing off for single requests, see `aztask.support.quiet`.
#
# The SDK's tracing is a setting of the whole process (``azure.core.settings``). It makes spans for
# each message, and overwrites the message's ``traceparent`` with theirs. The program may want that
# for its other Service Bus clients, so the setting itself stays as it is: only the SDK's view of it
# depends on the current request.


class _Settings:
    """``azure.core.settings`` as the SDK's tracing sees it."""

    def tracing_implementation(self) -> Any:
        """The class of the SDK's spans; None while aztask makes the spans."""
        return None if is_quiet() else settings.tracing_implementation()

    def __getattr__(self, name: str) -> Any:
        return getattr(settings, name)


if hasattr(tracing, "settings"):  # an SDK that keeps its settings elsewhere is left alone
    vars(tracing)["settings"] = _Settings()

MAX_SENDERS: Final = 4
IDLE_SECONDS: Final = 1.0
OPEN_SECONDS: Final = 10.0

Pair = tuple[Envelope, ServiceBusMessage]


class ClockProbe(NamedTuple):
    """The service wrote `time` (UTC epoch seconds) between two instants of our monotonic clock.

    after, before: these instants, in seconds.
    """

    time: float
    after: float
    before: float


class NoUsableTime(BrokerError):
    """The service put no usable time on the message of a clock probe."""


class Senders:
    """The pool of senders of one queue. Any thread may call."""

    def __init__(self, client: BusClient, queue: str) -> None:
        self._client = client
        self._queue = queue
        self._room = threading.BoundedSemaphore(MAX_SENDERS)
        self._free: list[tuple[ServiceBusSender, float]] = []
        self._closed = False

    def send(self, pairs: Sequence[Pair]) -> None:
        """Store all messages; see `Broker.send` for the errors.

        If the connection breaks between two batches, or a message after the first batch is too
        large, the earlier batches are stored: then SendUnconfirmed carries the rest.
        """
        sent = 0
        try:
            with self.sender() as sender:
                for batch, count in _batches(sender, pairs):
                    self._send(sender, batch, pairs, sent)
                    sent += count
        except MessageTooLarge as error:
            if not sent:
                raise
            raise SendUnconfirmed(
                f"queue {self._queue!r} did not receive {len(pairs) - sent} of {len(pairs)} "
                f"messages ({error}); send those again under the same ids",
                [envelope for envelope, _ in pairs[sent:]],
            ) from None

    def _send(
        self,
        sender: ServiceBusSender,
        batch: ServiceBusMessage | ServiceBusMessageBatch,
        pairs: Sequence[Pair],
        sent: int,
    ) -> None:
        try:
            sender.send_messages(batch, timeout=SEND_SECONDS)
        except SDK_ERRORS as error:
            if is_refusal(error) and not sent:
                raise error_of(error, self._queue) from None
            raise SendUnconfirmed(
                f"queue {self._queue!r} did not confirm {len(pairs) - sent} of {len(pairs)} "
                f"messages ({error_of(error, self._queue)}); they may or may not be stored: send "
                "them again under the same ids",
                [envelope for envelope, _ in pairs[sent:]],
            ) from None

    def timed(self, message: ServiceBusMessage) -> int:
        """Schedule one message for its time; returns its sequence number, 0 if there is none.

        Raises BrokerError; the message may be stored if the connection has broken.
        """
        due = message.scheduled_enqueue_time_utc
        assert due is not None  # noqa: S101  # the caller gives it one
        with self.sender() as sender:
            try:
                numbers = sender.schedule_messages(message, due, timeout=REQUEST_SECONDS)
            except SDK_ERRORS as error:
                raise error_of(error, self._queue) from None
        return max(0, *numbers) if numbers else 0

    def cancelled(self, number: int) -> bool:
        """Cancel a scheduled message; False if it is due or was cancelled already."""
        with self.sender() as sender:
            try:
                sender.cancel_scheduled_messages(number, timeout=REQUEST_SECONDS)
            except SDK_ERRORS as error:
                if "message-not-found" in str(error):
                    return False
                raise error_of(error, self._queue) from None
        return True

    def probed(
        self, clock: Clock, peek: Callable[[int], list[Any]], *, in_session: bool = False
    ) -> ClockProbe:
        """Get a time from the service: schedule a message, peek at it, and cancel it.

        peek: peeks at a sequence number; returns the messages from there on.
        in_session: the queue requires a session for every message.
        Crash window: if the process dies in between, the message is due soon, and expires or is
        dropped by a worker; see `clockprobe`. Raises BrokerError if the service put no usable time
        on the message.
        """
        for ahead in DUE_SECONDS[:-1]:
            with suppress(NoUsableTime):
                return self._probed(clock, peek, ahead, in_session=in_session)
        return self._probed(clock, peek, DUE_SECONDS[-1], in_session=in_session)

    def _probed(
        self, clock: Clock, peek: Callable[[int], list[Any]], ahead: float, *, in_session: bool
    ) -> ClockProbe:
        name = f"{PREFIX}{uuid.uuid4()}"
        probe = ServiceBusMessage(
            b"",
            message_id=name,
            session_id=name if in_session else None,
            time_to_live=timedelta(seconds=TIME_TO_LIVE),
        )
        due = clock.wall() + ahead
        with self.sender() as sender:
            after = clock.monotonic()
            (number,) = sender.schedule_messages(
                probe, datetime.fromtimestamp(due, UTC), timeout=REQUEST_SECONDS
            )
            before = clock.monotonic()
        hit("probed")
        try:
            (found,) = [each for each in peek(number) if each.message_id == name] or [None]
            enqueued = None if found is None else epoch_of(found, ENQUEUED)
        finally:
            self.cancelled(number)
        if enqueued is None or abs(enqueued - due) < MARGIN:
            raise NoUsableTime("the service does not say when it accepted the message")
        return ClockProbe(enqueued, after, before)

    @contextmanager
    def sender(self) -> Iterator[ServiceBusSender]:
        """A connected sender that only this thread uses inside the block."""
        with self._room:
            sender = self._ready()
            try:
                yield sender
            except BaseException:  # the connection may hold half a request, so it is not used again
                self._client.drop(sender)
                raise
            self._back(sender)

    def _ready(self) -> ServiceBusSender:
        while (free := self._next_free()) is not None:
            sender, used_at = free
            if not private.is_open(sender):
                self._client.drop(sender)  # the service ended the link; we have to close the socket
                continue
            if time.monotonic() - used_at < IDLE_SECONDS or not private.has_unread(sender):
                return sender
            self._client.drop(sender)
        sender = self._client.sender(self._queue)
        try:
            private.open_link(sender, OPEN_SECONDS)
        except SDK_ERRORS as error:
            self._client.drop(sender)
            raise error_of(error, self._queue) from None
        except BaseException:
            self._client.drop(sender)
            raise
        return sender

    def _next_free(self) -> tuple[ServiceBusSender, float] | None:
        try:
            return self._free.pop()
        except IndexError:  # not asked before: another thread could take the last one in between
            return None

    def _back(self, sender: ServiceBusSender) -> None:
        self._free.append((sender, time.monotonic()))
        if self._closed:  # asked last: `close` either sees this sender or is seen here
            self._close_free()

    def close(self) -> None:
        """Close the idle connections; those in use are closed when they come back."""
        self._closed = True
        self._close_free()

    def _close_free(self) -> None:
        while (free := self._next_free()) is not None:
            self._client.close(free[0])


def _batches(
    sender: ServiceBusSender, pairs: Sequence[Pair]
) -> Iterator[tuple[ServiceBusMessage | ServiceBusMessageBatch, int]]:
    """Split the messages into as few batches as possible; yields (batch, number of messages)."""
    if len(pairs) == 1:
        yield pairs[0][1], 1
        return
    batch: Any = None
    key: tuple[str | None, str | None] = (None, None)
    for envelope, message in pairs:
        own = (envelope.session, envelope.partition_key)
        if batch is not None and (own != key or not _added(batch, message)):
            yield batch, len(batch)
            batch = None
        if batch is None:
            batch, key = encode_once(sender.create_message_batch()), own
            if not _added(batch, message):
                raise MessageTooLarge(
                    f"message {envelope.message_id!r} is larger than the {batch.max_size_in_bytes} "
                    "bytes of a batch; store the data elsewhere and send a reference to it"
                )
    if batch is not None:
        yield batch, len(batch)


def _added(batch: ServiceBusMessageBatch, message: ServiceBusMessage) -> bool:
    try:
        batch.add_message(message)
    except MessageSizeExceededError:
        return False
    return True
