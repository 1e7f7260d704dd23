"""Renews leases of Storage queue messages. Every renewal makes the old token stale.

Rules
1. If a renewal's connection breaks, the lease is unknown: the renewal may have taken effect, and
   then the new token was lost with the answer.
   An answer that names an error of the service (HTTP 500) breaks nothing: the renewal is sent
   again, with the same token. If that is refused, the first one took effect after all, and the
   lease is unknown.
2. If a renewal's answer is only late, the renewal is sent a second time, with the same token. Only
   one of the two can take effect. If the second is refused while the lease lasts, the first one
   took effect: the lease is extended, and the new token comes with the first one's answer. If the
   connection of one of them breaks, a refusal of the other proves nothing: the lease is unknown.
3. A renewal to an earlier end shortens the lease from the moment it is sent: the message may become
   visible at the earlier time, even if the answer is lost.
4. No call waits long. While there is no answer, the result is "not yet" (`Unknown.untouched`), and
   the next call continues from there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Final, TypeAlias

from aztask.queues.delivery import Lost, Renewed, Unknown
from aztask.queues.storagequeue.delivery import (
    FailedRequest,
    PendingRenewal,
    QueueRequests,
    StorageDelivery,
)
from aztask.queues.storagequeue.errors import MESSAGE_NOT_FOUND, Effect, Failure
from aztask.support.threadpool import ThreadPool

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
        self, delivery: StorageDelivery, attempt: PendingRenewal, failure: Failure
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
