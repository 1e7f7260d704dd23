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

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from azure.core.settings import settings
from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch, ServiceBusSender
from azure.servicebus._common import tracing
from azure.servicebus.exceptions import MessageSizeExceededError

from aztask.errors import BrokerError, MessageTooLarge, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.servicebus import private
from aztask.queues.servicebus.client import REQUEST_SECONDS, SEND_SECONDS, BusClient
from aztask.queues.servicebus.clockprobe import DUE_SECONDS, MARGIN, PREFIX, TIME_TO_LIVE
from aztask.queues.servicebus.encoding import encode_once
from aztask.queues.servicebus.errors import SDK_ERRORS, error_of, is_refusal
from aztask.queues.servicebus.wire import ENQUEUED, epoch_of
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.support.quiet import is_quiet

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
