"""Receivers of Storage queues.

Rules
1. One request receives up to 32 messages. A message whose delay has not ended yet (a delay longer
   than the service's seven days) is hidden again and not delivered.
2. The service's leases are whole seconds, rounded up. Ours end exactly when the caller asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from azure.core.exceptions import AzureError

from aztask.errors import (
    CapabilityError,
    EncodeError,
    MessageTooLarge,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    Delivery,
    Lost,
    Position,
    ReceiverOptions,
    Renewed,
    Settled,
    Unknown,
)
from aztask.queues.delivery import own, unsettled
from aztask.queues.storagequeue.delivery import (
    FailedRequest,
    QueueRequests,
    StorageDelivery,
    reading_time,
)
from aztask.queues.storagequeue.errors import Effect, failure_of
from aztask.queues.storagequeue.kind import RECEIVE_LIMIT, poison_name
from aztask.queues.storagequeue.messages import ReceivedMessage, StorageClient
from aztask.queues.storagequeue.settling import ENDED, VANISHED, Renewals, StorageSettler, check
from aztask.queues.storagequeue.wire import (
    TEXT_LIMIT,
    WireMessage,
    read_text,
    text_of,
    whole_seconds,
)
from aztask.settlement import Settlement
from aztask.support import chance
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.threadpool import ThreadPool

# -- Polling ---------------------------------------------------------------------------------------
#
# Decides when to poll a queue again: often while messages come, rarely while it is empty.
#
# Rules
# 1. After a full batch the next poll follows at once. After a smaller one it follows `GATHER`
#    seconds later: the worker is busy with that batch, and the next one is fuller. Every poll costs
#    money.
# 2. While the queue is empty the pause grows: it is the share `GROWTH` of the time since the last
#    message, up to the ceiling. So a message that comes soon after the last one is found soon.
# 3. A send of this process ends the pause (`Polling.notify`).
# 4. Each pause is shortened by up to the share `JITTER`, so that many workers do not poll in step.

FLOOR: Final = 0.02
GATHER: Final = 0.05
GROWTH: Final = 0.15
JITTER: Final = 0.05
CEILING: Final = 1.0


class Polling:
    """The polling intervals of one receiver. Any thread may call."""

    def __init__(
        self,
        ceiling: float = CEILING,
        *,
        clock: Clock = SYSTEM_CLOCK,
        dice: Callable[[], float] = chance.share,
    ) -> None:
        """ceiling: the longest pause, seconds. dice: gives random numbers from 0 to 1."""
        self._ceiling = ceiling
        self._clock = clock
        self._dice = dice
        self._condition = threading.Condition(threading.Lock())
        self._last_found = clock.monotonic()
        self._next_poll = 0.0
        self._closed = False

    def polled(self, found: int, limit: int) -> None:
        """A poll has returned `found` messages of at most `limit`."""
        now = self._clock.monotonic()
        if found:
            self._last_found = now
        pause = 0.0
        if found < limit:
            idle = now - self._last_found
            least = GATHER if found else FLOOR
            pause = min(max(least, GROWTH * idle), max(FLOOR, self._ceiling))
        with self._condition:
            self._next_poll = now + pause * (1.0 - JITTER * self._dice())

    def wait(self, seconds: float) -> bool:
        """Wait until the next poll is due, for at most `seconds`; returns whether it is due."""
        until = self._clock.monotonic() + seconds
        with self._condition:
            while not self._closed:
                now = self._clock.monotonic()
                if now >= self._next_poll:
                    return True
                if now >= until:
                    return False
                self._condition.wait(min(self._next_poll, until) - now)
        return False

    def notify(self) -> None:
        """A message was sent: poll at once, and often for a while."""
        with self._condition:
            self._last_found = self._clock.monotonic()
            self._next_poll = 0.0
            self._condition.notify_all()

    def close(self) -> None:
        """End all waits, now and in the future."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, so that no wait waits."""
        return self._closed


# -- Receivers -------------------------------------------------------------------------------------


LONGEST_RECEIVE: Final = 15.0
EARLY: Final = 2.0
"""A message this many seconds early is delivered: the service's time is known only to a second."""


class StorageReceiver:
    """Takes deliveries from one queue, or from its dead letters."""

    def __init__(
        self,
        client: StorageClient,
        options: ReceiverOptions,
        polling: Polling,
        *,
        clock: Clock,
        workers: ThreadPool,
        renewers: ThreadPool,
    ) -> None:
        """workers: threads for settlements. renewers: other threads, so renewals never wait."""
        queue, dead_letter = options.queue, options.dead_letter
        self._client = client
        self._queue = queue
        self._lease = options.lease
        self._polling = polling
        self._clock = clock
        self._workers = workers
        self._delete = options.delete
        self._ahead = False
        poison = poison_name(queue)
        name = poison if dead_letter else queue
        self._messages = client.messages(name)
        self._requests = QueueRequests(name, self._messages, clock)
        self._renewals = Renewals(self._requests, renewers)
        self._renewers = renewers
        self._settling = StorageSettler(
            client,
            self._requests,
            poison=QueueRequests(poison, client.messages(poison), clock),
            living=QueueRequests(queue, client.messages(queue), clock) if dead_letter else None,
            renewals=self._renewals,
        )

    def set_lease(self, seconds: float) -> None:
        """Set the lease, in seconds, for the next receives."""
        self._lease = seconds

    def read_ahead(self) -> None:
        """Deliver a message although its delay goes on: see `ReadsAhead`."""
        self._ahead = True

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` (at most 32) deliveries, as soon as there is one; [] after `wait` seconds.

        With `wait` 0 it polls once, without a pause.
        """
        until = self._clock.monotonic() + wait
        limit = min(limit, RECEIVE_LIMIT)
        while not self._polling.closed:
            if wait > 0 and not self._polling.wait(until - self._clock.monotonic()):
                break
            found, deliveries = self._take(limit)
            self._polling.polled(found, limit)
            if deliveries or wait <= 0:
                return deliveries
        return []

    def _take(self, limit: int) -> tuple[int, list[Delivery]]:
        """Poll once; returns (number of messages, deliveries).

        If the answer is lost, its messages come again when their leases end.
        """
        asked_at, lease = self._clock.monotonic(), self._lease
        seconds = max(2.0, min(0.8 * lease, LONGEST_RECEIVE))
        try:
            messages, headers = self._messages.receive(limit, whole_seconds(lease), seconds=seconds)
        except AzureError as error:
            raise failure_of(error, self._requests.queue).error from None
        self._client.learn_time(headers)
        deliveries: list[Delivery] = []
        for message in messages:
            written = read_text(message.text)
            left = self._left(message, written)
            delivery = self._delivery(message, written, asked_at, lease)
            if left > EARLY and not self._ahead:
                self._hide_again(delivery, written, left)
            else:
                deliveries.append(delivery)
        if self._delete:
            deliveries = self._only_deleted(deliveries)
        return len(messages), deliveries

    def _left(self, message: ReceivedMessage, written: WireMessage) -> float:
        """Seconds until the message is due, by the service's clock."""
        due = _due(message, written)
        return 0.0 if due is None else due - self._clock.wall() - self._client.offset

    def _delivery(
        self, message: ReceivedMessage, written: WireMessage, asked_at: float, lease: float
    ) -> StorageDelivery:
        return StorageDelivery(
            self._queue,
            written.envelope,
            message.position,
            message.token,
            max(1, message.count - written.hidden),
            max(message.put_at, _due(message, written) or 0.0),
            asked_at + lease,
            lease,
            dead_letter_reason=written.dead.reason if written.dead else None,
            dead_letter_description=written.dead.description if written.dead else None,
            text=message.text,
        )

    def _hide_again(self, delivery: StorageDelivery, written: WireMessage, left: float) -> None:
        """Hide the message for the next part of a long delay.

        If the request fails, the message comes again after the lease. A text without room for the
        note of it stays as it is, and then this receive counts as a delivery.
        """
        text: str | None = None
        with suppress(EncodeError, MessageTooLarge):  # it must not end the receive of the others
            text = text_of(
                written.envelope,
                limit=TEXT_LIMIT,
                due=written.due,
                delay=written.delay,
                hidden=written.hidden + 1,
            )
        try:
            now = self._clock.monotonic()
            self._requests.hide(delivery, left, reading_time(delivery.deadline, now), text)
        except FailedRequest as failed:
            if failed.failure.effect is Effect.REFUSED and not failed.failure.gone:
                raise failed.failure.error from None

    def _only_deleted(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Receive-and-delete: deliver only messages that were deleted; they cannot be settled."""
        ours = [own(StorageDelivery, delivery) for delivery in deliveries]
        if not ours:
            return []
        answers = self._workers.map(self._delete_one, ours)
        return [each for each, answer in zip(ours, answers, strict=True) if answer]

    def _delete_one(self, delivery: StorageDelivery) -> bool:
        delivery.settled = True
        return isinstance(self._settling.delete(delivery, delivery.deadline), Settled)

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """Not supported by Storage queues: raises CapabilityError."""
        raise CapabilityError("Storage queues cannot defer; use Service Bus or the local broker")

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend each lease to `seconds` from now, with one request each, in parallel."""
        lease = self._lease if seconds is None else seconds

        def renew_one(delivery: StorageDelivery) -> Renewed | Lost | Unknown:
            with delivery.lock:
                return self._renewals.renew(delivery, lease)

        return self._renewers.map(renew_one, [own(StorageDelivery, each) for each in deliveries])

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """Replace the message's content, which also renews the lease.

        If the task extended its lease beyond the receiver's, the longer duration is kept. If the
        answer is lost, the new token is lost with it. Raises MessageTooLarge.
        """
        ours = own(StorageDelivery, delivery)
        lease = max(self._lease, ours.lease_seconds)
        text = text_of(envelope, limit=TEXT_LIMIT)
        with ours.lock:
            pending = self._renewals.finish(ours, ours.deadline)
            if isinstance(pending, Lost | Unknown):
                return pending
            now = self._clock.monotonic()
            if now >= ours.deadline:
                return ENDED
            try:
                seconds = reading_time(ours.deadline, now)
                ours.token = self._requests.hide(ours, lease, seconds, text)
            except FailedRequest as failed:
                failure = failed.failure
                if failure.gone and ours.doubtful:
                    return VANISHED
                if failure.gone:
                    return Lost(f"{failure.code}: another worker took the message")
                return Unknown(str(failure.error), untouched=failure.effect is not Effect.UNSURE)
            ours.envelope, ours.text, ours.doubtful = envelope, text, False
            ours.deadline, ours.lease_seconds = now + lease, lease
            return Renewed(ours.deadline)

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out the settlements in parallel. Each one succeeds or fails on its own."""
        checked = [
            (unsettled(StorageDelivery, delivery), settlement) for delivery, settlement in pairs
        ]
        for _, settlement in checked:
            check(settlement)

        def settle_one(pair: tuple[StorageDelivery, Settlement]) -> Settled | Lost | Unknown:
            delivery, settlement = pair
            with delivery.lock:
                answer = self._settling.settle(unsettled(StorageDelivery, delivery), settlement)
                delivery.settled = isinstance(answer, Settled)
                return answer

        answers = self._settling.complete_all(checked)
        left = [pair for pair, answer in zip(checked, answers, strict=True) if answer is None]
        settled = iter(self._workers.map(settle_one, left))
        return [next(settled) if answer is None else answer for answer in answers]

    def close(self) -> None:
        """Stop receiving. Leased messages stay leased until their leases end."""
        self._polling.close()


def _due(message: ReceivedMessage, written: WireMessage) -> float | None:
    if written.due is not None:
        return written.due
    if written.delay is None or not message.put_at:
        return None
    return message.put_at + written.delay
