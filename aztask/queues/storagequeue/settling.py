"""Settles Storage queue messages: each settlement is one request, or two for a dead letter.

Rules
1. A request without an answer is repeated while the lease lasts. If the repetition is refused, the
   first one took effect: the message is settled. If no answer comes at all, the settlement is
   unknown, and a later attempt continues from there.
2. The original of a dead letter is deleted only after its copy is stored. If the process dies in
   between, or an answer is lost, the dead letter may be stored twice.
3. A resubmission is one update of the message: new content, hidden for the delay. It happens as a
   whole or not at all, and the service's delivery count continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from aztask.errors import AztaskError, CapabilityError, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.storagequeue.client import StorageClient
from aztask.queues.storagequeue.delivery import (
    QueueRequests,
    StorageDelivery,
    persist,
    reading_time,
)
from aztask.queues.storagequeue.errors import MESSAGE_NOT_FOUND, Effect, Failure
from aztask.queues.storagequeue.renewal import ENDED, VANISHED, Renewals
from aztask.queues.storagequeue.wire import TEXT_LIMIT, dead_text_of, text_of
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Release,
    Resubmit,
    Settlement,
)
from aztask.support.failpoint import hit

logger = logging.getLogger(__name__)

LONGEST_SETTLING: Final = 30.0
"""Seconds after which a settlement is put off; its caller has other deliveries to settle too."""

SHORTEST_LEFT: Final = 2.0
"""Deliveries with fewer seconds left are settled one by one, with their own time-outs."""

DONE: Final = Settled()


def check(settlement: Settlement) -> None:
    """Raise AztaskError for a settlement that can never be carried out.

    Called for all settlements of a batch before the first one is carried out.
    """
    if isinstance(settlement, Defer):
        raise CapabilityError(
            "Storage queues cannot defer; resubmit with a delay, or use Service Bus"
        )
    if isinstance(settlement, Resubmit) and settlement.envelope is None:
        raise ConfigurationError(
            "a resubmission needs its clone; give it with aztask.settlement.with_envelope"
        )


class StorageSettler:
    """Settles deliveries of one queue, or of its dead letters."""

    def __init__(
        self,
        client: StorageClient,
        requests: QueueRequests,
        *,
        poison: QueueRequests,
        living: QueueRequests | None,
        renewals: Renewals,
    ) -> None:
        """poison: the queue for dead letters.

        living: the queue for replayed dead letters; None if `requests` is not for dead letters.
        """
        self._client = client
        self._requests = requests
        self._poison = poison
        self._living = living
        self._renewals = renewals
        self._clock = requests.clock

    def settle(self, delivery: StorageDelivery, settlement: Settlement) -> Settled | Lost | Unknown:
        """Carry out one settlement. The caller holds the delivery's lock; it is not settled yet."""
        if delivery.removed:
            return DONE
        now = self._clock.monotonic()
        if now >= delivery.deadline:
            return ENDED
        until = min(delivery.deadline, now + LONGEST_SETTLING)
        pending = self._renewals.finish(delivery, until)
        if isinstance(pending, Lost | Unknown):
            return pending
        until = min(delivery.deadline, self._clock.monotonic() + LONGEST_SETTLING)
        try:
            answer = self._carry_out(delivery, settlement, until)
        except AztaskError as error:  # the content cannot be stored: the original stays
            answer = Unknown(str(error))
        if isinstance(answer, Unknown):
            logger.warning(
                "message %s of queue %s was not settled: %s",
                delivery.position,
                delivery.queue,
                answer.reason,
            )
        return answer

    def complete_all(
        self, pairs: Sequence[tuple[StorageDelivery, Settlement]]
    ) -> list[Settled | Lost | Unknown | None]:
        """Try once to delete the completed messages in parallel.

        The answer is None for each delivery that `settle` still has to settle, and for each one
        that another thread works on. If the process dies, some messages are deleted; the others
        come again, and the worker repeats their recorded settlements.
        """
        answers: list[Settled | Lost | Unknown | None] = [None] * len(pairs)
        held: list[int] = []
        try:
            for n, (delivery, settlement) in enumerate(pairs):
                if isinstance(settlement, Complete) and delivery.lock.acquire(blocking=False):
                    held.append(n)
            now = self._clock.monotonic()
            ready = [n for n in held if _simple(pairs[n][0], now)]
            if len(ready) > 1:
                deliveries = [pairs[n][0] for n in ready]
                for n, answer in zip(ready, self._delete_once(deliveries, now), strict=True):
                    answers[n] = answer
                    pairs[n][0].settled = isinstance(answer, Settled)
        finally:
            for n in held:
                pairs[n][0].lock.release()
        return answers

    def _delete_once(
        self, deliveries: Sequence[StorageDelivery], now: float
    ) -> list[Settled | Lost | Unknown | None]:
        seconds = min(reading_time(each.deadline, now) for each in deliveries)
        failures = self._requests.delete_all(deliveries, seconds)
        if failures is None:
            return [None] * len(deliveries)
        tried = list(zip(deliveries, failures, strict=True))
        for delivery, failure in tried:
            if failure is not None:
                _note(delivery, failure)
        return [_decided(delivery, failure) for delivery, failure in tried]

    def _carry_out(
        self, delivery: StorageDelivery, settlement: Settlement, until: float
    ) -> Settled | Lost | Unknown:
        match settlement:
            case Complete():
                return self.delete(delivery, until)
            case Abandon() | Release():
                return self._hide(delivery, until, 0.0, None)
            case DeadLetter():
                return self._dead_letter(delivery, settlement, until)
            case Resubmit():
                return self._resubmit(delivery, settlement, until)
            case Defer():
                raise RuntimeError("`check` refuses Defer")

    def delete(self, delivery: StorageDelivery, until: float) -> Settled | Lost | Unknown:
        """Delete the message. A refusal after a lost answer means that we deleted it before."""
        return self._persist(delivery, until, partial(self._requests.delete, delivery))

    def _hide(
        self, delivery: StorageDelivery, until: float, delay: float, text: str | None
    ) -> Settled | Lost | Unknown:
        return self._persist(
            delivery, until, lambda seconds: self._requests.hide(delivery, delay, seconds, text)
        )

    def _dead_letter(
        self, delivery: StorageDelivery, dead: DeadLetter, until: float
    ) -> Settled | Lost | Unknown:
        """Crash window: between storing the copy and deleting the original; see rule 2."""
        if not delivery.stored_dead:
            text = dead_text_of(delivery.envelope, delivery.text, dead)
            failure = self._put(self._poison, text, 0.0, until)
            if failure is not None:
                return Unknown(f"the dead letter could not be stored: {failure.error}")
            delivery.stored_dead = True
            hit("stored")
        return self.delete(delivery, until)

    def _resubmit(
        self, delivery: StorageDelivery, settlement: Resubmit, until: float
    ) -> Settled | Lost | Unknown:
        assert settlement.envelope is not None  # noqa: S101  # `check` refuses it
        text = self._clone_text(settlement.envelope, settlement.delay)
        if self._living is None:
            return self._hide(delivery, until, settlement.delay, text)
        if not delivery.stored_again:
            failure = self._put(self._living, text, settlement.delay, until)
            if failure is not None:
                return Unknown(f"the message could not be put back: {failure.error}")
            delivery.stored_again = True
        return self.delete(delivery, until)

    def _clone_text(self, envelope: Envelope, delay: float) -> str:
        due = self._clock.wall() + self._client.offset + delay if delay else None
        return text_of(envelope, limit=TEXT_LIMIT, due=due)

    def _put(
        self, requests: QueueRequests, text: str, delay: float, until: float
    ) -> Failure | None:
        """Put a dead letter or a replay. After a lost answer it is put again, so maybe twice."""
        return persist(
            lambda seconds: requests.put(text, delay, seconds),
            until,
            self._clock,
            lambda failure: False,
        )

    def _persist(
        self, delivery: StorageDelivery, until: float, call: Callable[[float], object]
    ) -> Settled | Lost | Unknown:
        failure = persist(call, until, self._clock, partial(_note, delivery))
        return _decided(delivery, failure) or Unknown(str(failure.error if failure else ""))


def _simple(delivery: StorageDelivery, now: float) -> bool:
    """Whether nothing is in doubt, and the lease lasts for two attempts."""
    busy = delivery.settled or delivery.removed or delivery.attempts
    return not busy and delivery.deadline - now >= SHORTEST_LEFT


def _note(delivery: StorageDelivery, failure: Failure) -> bool:
    """Note what a failed request may have done; returns True if a retry is useless."""
    delivery.unsure |= failure.effect is Effect.UNSURE
    return failure.gone


def _decided(delivery: StorageDelivery, failure: Failure | None) -> Settled | Lost | Unknown | None:
    """The answer after a request with this outcome; None if the request may be repeated.

    After a renewal in doubt, a refusal may only mean that this renewal took effect. A message that
    exists no more was removed by our settlement all the same.
    """
    removed = delivery.unsure and failure is not None and failure.code == MESSAGE_NOT_FOUND
    if failure is not None and failure.gone and delivery.doubtful and not removed:
        return VANISHED
    if failure is None or (failure.gone and delivery.unsure):
        delivery.removed = True
        return DONE
    if failure.gone:
        return Lost(f"{failure.code}: another worker took the message, or it was already settled")
    return Unknown(str(failure.error)) if failure.effect is Effect.REFUSED else None
