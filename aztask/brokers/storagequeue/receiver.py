"""Receivers of Storage queues.

Rules
1. One request takes up to 32 messages. What is to be received later (a delay longer than the
   service's seven days) is hidden again, and nobody sees it.
2. Leases are whole seconds at the service, rounded up; ours end at the fraction that was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from azure.core.exceptions import AzureError

from aztask.brokers.base import (
    Delivery,
    Lost,
    Position,
    ReceiverOptions,
    Renewed,
    Settled,
    Unknown,
)
from aztask.brokers.storagequeue.client import StorageClient
from aztask.brokers.storagequeue.delivery import (
    FailedRequest,
    QueueRequests,
    StorageDelivery,
    reading_time,
)
from aztask.brokers.storagequeue.errors import Effect, failure_of
from aztask.brokers.storagequeue.messages import ReceivedMessage
from aztask.brokers.storagequeue.names import poison_name
from aztask.brokers.storagequeue.polling import Polling
from aztask.brokers.storagequeue.renewal import ENDED, Renewals
from aztask.brokers.storagequeue.settling import StorageSettler, check
from aztask.brokers.storagequeue.wire import (
    TEXT_LIMIT,
    WireMessage,
    read_text,
    text_of,
    whole_seconds,
)
from aztask.errors import AlreadySettled, CapabilityError, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.settlement import Settlement
from aztask.support.clock import Clock
from aztask.support.threadpool import ThreadPool

RECEIVE_LIMIT: Final = 32
LONGEST_RECEIVE: Final = 15.0
EARLY: Final = 2.0
"""Seconds that a message may come before its due time: the service's time is known to a second."""


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
        """workers, renewers: threads for settlements and for renewals, which never share one."""
        queue, dead_letter = options.queue, options.dead_letter
        self._client = client
        self._queue = queue
        self._lease = options.lease
        self._polling = polling
        self._clock = clock
        self._workers = workers
        self._delete = options.delete
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
        """Ask for leases of so many seconds from the next receive on."""
        self._lease = seconds

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` (at most 32) deliveries, as soon as there is one; [] after `wait` seconds.

        With no time to wait it looks once, whatever the pause.
        """
        until = self._clock.monotonic() + wait
        asked = min(limit, RECEIVE_LIMIT)
        while not self._polling.closed:
            if wait > 0 and not self._polling.wait(until - self._clock.monotonic()):
                break
            found, deliveries = self._take(asked)
            self._polling.looked(found, asked)
            if deliveries or wait <= 0:
                return deliveries
        return []

    def _take(self, limit: int) -> tuple[int, list[Delivery]]:
        """One look: (messages found, deliveries). If its answer is lost, what it took comes again
        when the lease ends."""
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
            if left > EARLY:
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
        """The next link of a chained delay. If it fails the message comes again after the lease."""
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
        """Receive-and-delete: what could be deleted is delivered, and cannot be settled."""
        ours = [_ours(delivery) for delivery in deliveries]
        if not ours:
            return []
        answers = self._workers.map(self._delete_one, ours)
        return [each for each, answer in zip(ours, answers, strict=True) if answer]

    def _delete_one(self, delivery: StorageDelivery) -> bool:
        delivery.settled = True
        return isinstance(self._settling.delete(delivery, delivery.deadline), Settled)

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """There is nothing like it here: raises CapabilityError."""
        raise CapabilityError("Storage queues cannot defer; use Service Bus or the local broker")

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend each lease to `seconds` from now, a request for each, side by side."""
        lease = self._lease if seconds is None else seconds

        def renew_one(delivery: StorageDelivery) -> Renewed | Lost | Unknown:
            with delivery.lock:
                return self._renewals.renew(delivery, lease)

        return self._renewers.map(renew_one, [_ours(each) for each in deliveries])

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """Replace the message's content, which renews the lease as well.

        Raises MessageTooLarge. If the answer is lost, so is the new token. A lease that was
        extended beyond the receiver's is renewed for as long as it was.
        """
        ours = _ours(delivery)
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
                if failure.gone:
                    return Lost(f"{failure.code}: another worker took the message")
                return Unknown(str(failure.error), untouched=failure.effect is not Effect.UNSURE)
            ours.envelope, ours.text = envelope, text
            ours.deadline, ours.lease_seconds = now + lease, lease
            return Renewed(ours.deadline)

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement, side by side. Each happens, or not, by itself."""
        checked = [(_unsettled(delivery), settlement) for delivery, settlement in pairs]
        for _, settlement in checked:
            check(settlement)

        def settle_one(pair: tuple[StorageDelivery, Settlement]) -> Settled | Lost | Unknown:
            delivery, settlement = pair
            with delivery.lock:
                answer = self._settling.settle(_unsettled(delivery), settlement)
                delivery.settled = isinstance(answer, Settled)
                return answer

        answers = self._settling.complete_all(checked)
        left = [pair for pair, answer in zip(checked, answers, strict=True) if answer is None]
        settled = iter(self._workers.map(settle_one, left))
        return [next(settled) if answer is None else answer for answer in answers]

    def close(self) -> None:
        """Stop receiving. What is leased stays leased until its lease ends."""
        self._polling.close()


def _due(message: ReceivedMessage, written: WireMessage) -> float | None:
    if written.due is not None:
        return written.due
    if written.delay is None or not message.put_at:
        return None
    return message.put_at + written.delay


def _ours(delivery: Delivery) -> StorageDelivery:
    if not isinstance(delivery, StorageDelivery):
        raise ConfigurationError("this delivery came from another broker; settle it there")
    return delivery


def _unsettled(delivery: Delivery) -> StorageDelivery:
    ours = _ours(delivery)
    if ours.settled:
        raise AlreadySettled(
            f"message {delivery.position} of queue {delivery.queue!r} was settled before, or was "
            "received and deleted; settle each delivery once"
        )
    return ours
