"""A delivery from a Storage queue, and the requests that concern its one message.

Rules
1. One thread at a time deals with a delivery: `lock` is held for a whole renewal or settlement.
2. Every request has a time-out inside the remaining lease. Past the deadline nothing is sent.
3. After an update the old pop receipt is stale. So a refusal of a request that we repeat, because
   the first answer got lost, says that the first one took effect, as long as the lease lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from azure.core.exceptions import AzureError

from aztask.brokers.delivery import Delivery
from aztask.brokers.storagequeue.errors import Effect, Failure, failure_of
from aztask.brokers.storagequeue.messages import QueueMessages
from aztask.brokers.storagequeue.wire import whole_seconds
from aztask.support.clock import Clock

Answer = TypeVar("Answer")

CONNECTIONS: Final = 16
"""For the requests of one batch."""
LONGEST_READ: Final = 15.0
SHORTEST_READ: Final = 0.25
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0


class FailedRequest(Exception):
    """A request that failed; `failure` says what is known of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


@dataclass(slots=True, eq=False)
class PendingRenewal:
    """A renewal under way. confirmed: it took effect, only its answer is still to come."""

    answer: Future[str]
    asked_at: float
    seconds: float
    confirmed: bool = False


@dataclass(slots=True, eq=False)
class StorageDelivery(Delivery):
    """text: the message as it lies in the queue. settled: nothing may be done any more.

    unsure: a settlement of ours may have taken effect. removed: the message is gone, by our doing.
    stored_dead: its copy is in the dead letters. stored_again: its clone is back in the queue.
    attempts: renewals whose answers are to come. doubtful: another one, whose answer was lost, may
    have taken effect.
    """

    text: str = ""
    settled: bool = False
    unsure: bool = False
    removed: bool = False
    stored_dead: bool = False
    stored_again: bool = False
    doubtful: bool = False
    attempts: list[PendingRenewal] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class QueueRequests:
    """What can be asked of one queue, with the time-outs that a lease allows."""

    def __init__(self, queue: str, messages: QueueMessages, clock: Clock) -> None:
        self.queue = queue
        self.clock = clock
        self._messages = messages

    def delete(self, delivery: StorageDelivery, seconds: float) -> None:
        """Delete the message. Raises Failed."""
        self._ask(self._messages.delete, delivery.position, delivery.token, seconds=seconds)

    def hide(
        self, delivery: StorageDelivery, visible_after: float, seconds: float, text: str | None
    ) -> str:
        """Hide the message for so long, with a new text or the old one; the new pop receipt."""
        return self.hide_by(delivery, delivery.token, visible_after, seconds, text)

    def hide_by(
        self,
        delivery: StorageDelivery,
        token: str,
        visible_after: float,
        seconds: float,
        text: str | None = None,
    ) -> str:
        """As `hide`, with a pop receipt that was taken before."""
        return self._ask(
            self._messages.update,
            delivery.position,
            token,
            whole_seconds(visible_after),
            text,
            seconds=seconds,
        )

    def put(self, text: str, delay: float, seconds: float) -> None:
        """Put a message; it never expires by the service's doing. Raises Failed."""
        self._ask(self._messages.put, text, whole_seconds(delay), seconds=seconds)

    def put_all(
        self, texts: Sequence[tuple[str, float]], seconds: float
    ) -> list[Failure | None] | None:
        """Put messages with their delays, side by side: what went wrong with each.

        None where they are to be put one by one.
        """
        whole = [(text, whole_seconds(delay)) for text, delay in texts]
        return self._failures(
            self._messages.put_all(whole, connections=CONNECTIONS, seconds=seconds)
        )

    def delete_all(
        self, deliveries: Sequence[StorageDelivery], seconds: float
    ) -> list[Failure | None] | None:
        """Delete messages side by side: what went wrong with each. None as in `put_all`."""

        def late(delivery: StorageDelivery) -> bool:
            return self.clock.monotonic() >= delivery.deadline

        leases = [(str(each.position), each.token, partial(late, each)) for each in deliveries]
        return self._failures(
            self._messages.delete_all(leases, connections=CONNECTIONS, seconds=seconds)
        )

    def _failures(self, errors: list[AzureError | None] | None) -> list[Failure | None] | None:
        if errors is None:
            return None
        return [failure_of(error, self.queue) if error else None for error in errors]

    def _ask(self, call: Callable[..., Answer], *args: Any, **options: Any) -> Answer:
        try:
            return call(*args, **options)
        except AzureError as error:
            raise FailedRequest(failure_of(error, self.queue)) from None


def reading_time(deadline: float, now: float) -> float:
    """How long to wait for an answer, so that another try fits the lease."""
    return max(SHORTEST_READ, min((deadline - now) / 2, LONGEST_READ))


def persist(
    call: Callable[[float], object], deadline: float, clock: Clock, seen: Callable[[Failure], bool]
) -> Failure | None:
    """`call` until it succeeds (None), is refused, or no time is left; the last failure.

    call: gets its time-out. seen: told of each failure; True ends the tries.
    """
    pause = FIRST_PAUSE
    while True:
        now = clock.monotonic()
        try:
            call(reading_time(deadline, now))
            return None
        except FailedRequest as failed:
            failure = failed.failure
        if seen(failure) or failure.effect is Effect.REFUSED:
            return failure
        if clock.monotonic() + pause + SHORTEST_READ >= deadline:
            return failure
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
