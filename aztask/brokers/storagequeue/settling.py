"""Settling Storage queue messages: each settlement is one request, or two for a dead letter.

Rules
1. A request without an answer is repeated while the lease lasts. If the repetition is refused, the
   first one took effect: it is settled. If there is no answer at all the settlement is unknown, and
   a later try goes on from there.
2. The original of a dead letter is deleted only after its copy is stored. If the process dies in
   between, or an answer is lost, the dead letter may be stored twice.
3. A resubmission is one update of the message: new content, hidden for the delay. It cannot happen
   by half, and the service's delivery count goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from aztask.brokers.delivery import Lost, Settled, Unknown
from aztask.brokers.storagequeue.client import StorageClient
from aztask.brokers.storagequeue.delivery import (
    QueueRequests,
    StorageDelivery,
    persist,
    reading_time,
)
from aztask.brokers.storagequeue.errors import Effect, Failure
from aztask.brokers.storagequeue.renewal import ENDED, Renewals
from aztask.brokers.storagequeue.wire import TEXT_LIMIT, dead_text_of, text_of
from aztask.errors import AztaskError, CapabilityError, ConfigurationError
from aztask.message.envelope import Envelope
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
"""Seconds of tries after which a settlement is put off; its caller holds other deliveries too."""

SHORTEST_LEFT: Final = 2.0
"""Seconds of a lease that is settled together with others; a shorter one has its own time-outs."""

DONE: Final = Settled()


def check(settlement: Settlement) -> None:
    """Refuse what can never be carried out, before any of a batch is. Raises AztaskError."""
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
        """poison: where dead letters go. living: where a replayed dead letter goes; else None."""
        self._client = client
        self._requests = requests
        self._poison = poison
        self._living = living
        self._renewals = renewals
        self._clock = requests.clock

    def settle(self, delivery: StorageDelivery, settlement: Settlement) -> Settled | Lost | Unknown:
        """Carry it out. The caller holds the delivery's lock and has seen that it is unsettled."""
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
        except AztaskError as error:  # what cannot be written or stored: the original stays
            answer = Unknown(str(error))
        if isinstance(answer, Unknown):
            logger.warning(
                "message %s of %s is not settled: %s",
                delivery.position,
                delivery.queue,
                answer.reason,
            )
        return answer

    def complete_all(
        self, pairs: Sequence[tuple[StorageDelivery, Settlement]]
    ) -> list[Settled | Lost | Unknown | None]:
        """One try for what is simply to be deleted, side by side.

        None for everything that `settle` has still to do, or to go on with. What another thread
        deals with is left to it. If the process dies meanwhile some are deleted; the others come
        again, and their recorded outcomes are settled once more.
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
                _seen(delivery, failure)
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
                raise RuntimeError("refused by `check`")

    def delete(self, delivery: StorageDelivery, until: float) -> Settled | Lost | Unknown:
        """Delete the message. A refusal after a lost answer means that it was deleted by us."""
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
        """Crash window: between the copy and the deletion; see rule 2."""
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
        assert settlement.envelope is not None  # checked
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
        """Put a message that a delivery turns into; an answer that is lost means another try."""
        return persist(
            lambda seconds: requests.put(text, delay, seconds),
            until,
            self._clock,
            lambda failure: False,
        )

    def _persist(
        self, delivery: StorageDelivery, until: float, call: Callable[[float], object]
    ) -> Settled | Lost | Unknown:
        failure = persist(call, until, self._clock, partial(_seen, delivery))
        return _decided(delivery, failure) or Unknown(str(failure.error if failure else ""))


def _simple(delivery: StorageDelivery, now: float) -> bool:
    """Whether nothing is in doubt about it, and its lease lasts for a try and another one."""
    busy = delivery.settled or delivery.removed or delivery.attempts
    return not busy and delivery.deadline - now >= SHORTEST_LEFT


def _seen(delivery: StorageDelivery, failure: Failure) -> bool:
    """Remember what a failed request may have done; True where another try is of no use."""
    delivery.unsure |= failure.effect is Effect.UNSURE
    return failure.gone


def _decided(delivery: StorageDelivery, failure: Failure | None) -> Settled | Lost | Unknown | None:
    """What a request's outcome says of the settlement; None where another try may be made."""
    if failure is None or (failure.gone and delivery.unsure):
        delivery.removed = True
        return DONE
    if failure.gone:
        return Lost(f"{failure.code}: another worker took the message, or it was settled")
    return Unknown(str(failure.error)) if failure.effect is Effect.REFUSED else None
