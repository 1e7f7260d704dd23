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
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Final, TypeAlias

from aztask.errors import AztaskError, CapabilityError, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Lost, Renewed, Settled, Unknown
from aztask.queues.storagequeue.delivery import (
    FailedRequest,
    PendingRenewal,
    QueueRequests,
    StorageDelivery,
    persist,
    reading_time,
)
from aztask.queues.storagequeue.errors import MESSAGE_NOT_FOUND, Effect, RequestFailure
from aztask.queues.storagequeue.messages import StorageClient
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
from aztask.support.threadpool import ThreadPool

# -- Renewal ---------------------------------------------------------------------------------------
#
# Renews leases of Storage queue messages. Every renewal makes the old token stale.
#
# Rules
# 1. If a renewal's connection breaks, the lease is unknown: the renewal may have taken effect, and
#    then the new token was lost with the answer.
#    An answer that names an error of the service (HTTP 500) breaks nothing: the renewal is sent
#    again, with the same token. If that is refused, the first one took effect after all, and the
#    lease is unknown.
# 2. If a renewal's answer is only late, the renewal is sent a second time, with the same token.
#    Only one of the two can take effect. If the second is refused while the lease lasts, the first
#    one took effect: the lease is extended, and the new token comes with the first one's answer. If
#    the connection of one of them breaks, a refusal of the other proves nothing: the lease is
#    unknown.
# 3. A renewal to an earlier end shortens the lease from the moment it is sent: the message may
#    become visible at the earlier time, even if the answer is lost.
# 4. No call waits long. While there is no answer, the result is "not yet" (`Unknown.untouched`),
#    and the next call continues from there.

Outcome: TypeAlias = Renewed | Lost | Unknown

PATIENCE: Final = 0.25
"""One call waits for this share of the remaining lease."""

LONGEST_WAIT: Final = 1.0
GONE: Final = Lost("the lease has ended, or the message was already settled")
ENDED: Final = Lost("the deadline of the lease has passed")
LATE: Final = Unknown("no answer yet", untouched=True)
VANISHED: Final = Unknown("the answer to a renewal was lost, and with it the new token")


class Renewals:
    """Renews the leases of one queue's deliveries."""

    def __init__(self, requests: QueueRequests, thread_pool: ThreadPool) -> None:
        self._requests = requests
        self._clock = requests.clock
        self._thread_pool = thread_pool

    def renew(self, delivery: StorageDelivery, seconds: float) -> Outcome:
        """Extend the lease to `seconds` from now. The caller holds the delivery's lock."""
        if delivery.removed:  # by our own settlement, whose answer was lost
            return _extended(delivery, self._clock.monotonic(), seconds)
        if (answer := self.collect(delivery)) is not None:
            return answer
        now = self._clock.monotonic()
        if now >= delivery.deadline:
            return ENDED
        if self._is_request_due(delivery, now):
            self._ask(delivery, now, seconds)
        patience = min(PATIENCE * (delivery.deadline - now), LONGEST_WAIT)
        wait(_answers(delivery), patience, FIRST_COMPLETED)
        return self.collect(delivery) or LATE

    @staticmethod
    def _is_request_due(delivery: StorageDelivery, now: float) -> bool:
        """Whether to send a request: none is in progress, or the first answer is late."""
        if not delivery.attempts:
            return True
        first = delivery.attempts[0]
        if len(delivery.attempts) > 1 or first.confirmed:
            return False
        return now - first.asked_at >= PATIENCE * (delivery.deadline - first.asked_at)

    def finish(self, delivery: StorageDelivery, until: float) -> Outcome | None:
        """Wait for the renewals in progress; returns None if the token is valid afterwards."""
        while delivery.attempts:
            left = until - self._clock.monotonic()
            if left <= 0:
                return LATE
            wait(_answers(delivery), left, FIRST_COMPLETED)
            answer = self.collect(delivery)
            if isinstance(answer, Lost) or (isinstance(answer, Unknown) and not answer.untouched):
                return answer
        return None

    def _ask(self, delivery: StorageDelivery, now: float, seconds: float) -> None:
        call: Callable[[], str] = partial(
            self._requests.hide_by, delivery, delivery.token, seconds, seconds
        )
        delivery.deadline = min(delivery.deadline, now + seconds)
        delivery.attempts.append(PendingRenewal(self._thread_pool.submit(call), now, seconds))

    def collect(self, delivery: StorageDelivery) -> Outcome | None:
        """Take the answers that have arrived; None while nothing is decided."""
        for attempt in [each for each in delivery.attempts if each.answer.done()]:
            delivery.attempts.remove(attempt)
            try:
                token = attempt.answer.result()
            except FailedRequest as failed:
                outcome = self._failed(delivery, attempt, failed.failure)
            else:
                delivery.token = token
                delivery.attempts.clear()
                delivery.doubtful = delivery.broken = False
                outcome = None
                if not attempt.confirmed:
                    outcome = _extended(delivery, attempt.asked_at, attempt.seconds)
            if outcome is not None:
                return outcome
        return None

    def _failed(
        self, delivery: StorageDelivery, attempt: PendingRenewal, failure: RequestFailure
    ) -> Outcome | None:
        """The meaning of a failed attempt; None while another answer can still come."""
        others = delivery.attempts
        if failure.code == MESSAGE_NOT_FOUND and delivery.unsure:
            delivery.removed = True
            return _extended(delivery, attempt.asked_at, attempt.seconds)
        ended = self._clock.monotonic() >= delivery.deadline
        if failure.gone and (ended or not delivery.doubtful):
            if ended or not others:
                return GONE
            others[0].confirmed = True
            return _extended(delivery, others[0].asked_at, others[0].seconds)
        unsure = failure.effect is Effect.UNSURE
        delivery.doubtful |= unsure
        delivery.broken |= unsure and not failure.answered
        if others:
            return None
        if attempt.confirmed or delivery.broken or failure.gone:
            return VANISHED
        return Unknown(str(failure.error), untouched=True)


def _answers(delivery: StorageDelivery) -> list[Future[str]]:
    return [attempt.answer for attempt in delivery.attempts]


def _extended(delivery: StorageDelivery, asked_at: float, seconds: float) -> Renewed:
    delivery.deadline = asked_at + seconds
    delivery.lease_seconds = seconds
    return Renewed(delivery.deadline)


# -- Settlement ------------------------------------------------------------------------------------


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
    ) -> RequestFailure | None:
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


def _note(delivery: StorageDelivery, failure: RequestFailure) -> bool:
    """Note what a failed request may have done; returns True if a retry is useless."""
    delivery.unsure |= failure.effect is Effect.UNSURE
    return failure.gone


def _decided(
    delivery: StorageDelivery, failure: RequestFailure | None
) -> Settled | Lost | Unknown | None:
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
