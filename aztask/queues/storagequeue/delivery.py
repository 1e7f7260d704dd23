"""A delivery from a Storage queue, and the requests for its message.

Rules
1. Only one thread at a time works on a delivery: it holds `lock` for a whole renewal or settlement.
2. Every request has a time-out within the remaining lease. After the deadline nothing is sent.
3. After an update the old pop receipt is stale. If an answer is lost, we repeat the request; if the
   repetition is refused while the lease lasts, the first request took effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from azure.core.exceptions import AzureError

from aztask.queues.delivery import OwnDelivery
from aztask.queues.storagequeue.errors import Effect, RequestFailure, failure_of
from aztask.queues.storagequeue.messages import QueueMessages
from aztask.queues.storagequeue.wire import whole_seconds
from aztask.support.clock import Clock

Answer = TypeVar("Answer")

CONNECTIONS: Final = 16
"""The most connections for the requests of one batch."""
LONGEST_READ: Final = 15.0
SHORTEST_READ: Final = 0.25
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0


class FailedRequest(Exception):
    """A request that failed; `failure` says what is known about its effect."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


@dataclass(slots=True, eq=False)
class PendingRenewal:
    """A renewal in progress. confirmed: it took effect, only its answer has not arrived yet."""

    answer: Future[str]
    asked_at: float
    seconds: float
    confirmed: bool = False


@dataclass(slots=True, eq=False)
class StorageDelivery(OwnDelivery):
    """A delivery with the state of its renewals and its settlement.

    text: the message's text in the queue.
    unsure: one of our settlements may have taken effect.
    removed: we deleted the message.
    stored_dead: its copy is in the dead letters.
    stored_again: its clone is back in the queue.
    doubtful: a renewal that failed may have taken effect.
    broken: as doubtful, and its connection broke before an answer came.
    attempts: renewals whose answers have not arrived yet.
    """

    text: str = ""
    unsure: bool = False
    removed: bool = False
    stored_dead: bool = False
    stored_again: bool = False
    doubtful: bool = False
    broken: bool = False
    attempts: list[PendingRenewal] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class QueueRequests:
    """The requests to one queue, with the time-outs that a lease allows."""

    def __init__(self, queue: str, messages: QueueMessages, clock: Clock) -> None:
        self.queue = queue
        self.clock = clock
        self._messages = messages

    def delete(self, delivery: StorageDelivery, seconds: float) -> None:
        """Delete the message. Raises FailedRequest."""
        self._ask(self._messages.delete, delivery.position, delivery.token, seconds=seconds)

    def hide(
        self, delivery: StorageDelivery, visible_after: float, seconds: float, text: str | None
    ) -> str:
        """Hide the message for `visible_after` seconds; returns the new pop receipt.

        text: the new text; None keeps the old one. Raises FailedRequest.
        """
        return self.hide_by(delivery, delivery.token, visible_after, seconds, text)

    def hide_by(
        self,
        delivery: StorageDelivery,
        token: str,
        visible_after: float,
        seconds: float,
        text: str | None = None,
    ) -> str:
        """As `hide`, with a pop receipt that the caller read earlier."""
        return self._ask(
            self._messages.update,
            delivery.position,
            token,
            whole_seconds(visible_after),
            text,
            seconds=seconds,
        )

    def put(self, text: str, delay: float, seconds: float) -> None:
        """Put a message, which the service never expires. Raises FailedRequest."""
        self._ask(self._messages.put, text, whole_seconds(delay), seconds=seconds)

    def put_all(
        self, texts: Sequence[tuple[str, float]], seconds: float
    ) -> list[RequestFailure | None] | None:
        """Put messages with their delays in parallel; returns the failure of each, or None.

        Returns None instead of a list if the caller must put them one by one.
        """
        rounded = [(text, whole_seconds(delay)) for text, delay in texts]
        return self._failures(
            self._messages.put_all(rounded, connections=CONNECTIONS, seconds=seconds)
        )

    def delete_all(
        self, deliveries: Sequence[StorageDelivery], seconds: float
    ) -> list[RequestFailure | None] | None:
        """Delete messages in parallel; returns as `put_all`."""

        def late(delivery: StorageDelivery) -> bool:
            return self.clock.monotonic() >= delivery.deadline

        leases = [(str(each.position), each.token, partial(late, each)) for each in deliveries]
        return self._failures(
            self._messages.delete_all(leases, connections=CONNECTIONS, seconds=seconds)
        )

    def _failures(
        self, errors: list[AzureError | None] | None
    ) -> list[RequestFailure | None] | None:
        if errors is None:
            return None
        return [failure_of(error, self.queue) if error else None for error in errors]

    def _ask(self, call: Callable[..., Answer], *args: Any, **options: Any) -> Answer:
        try:
            return call(*args, **options)
        except AzureError as error:
            raise FailedRequest(failure_of(error, self.queue)) from None


def reading_time(deadline: float, now: float) -> float:
    """Seconds to wait for an answer, so that another attempt still fits into the lease."""
    return max(SHORTEST_READ, min((deadline - now) / 2, LONGEST_READ))


def persist(
    call: Callable[[float], object],
    deadline: float,
    clock: Clock,
    stop: Callable[[RequestFailure], bool],
) -> RequestFailure | None:
    """Repeat `call` until it succeeds, is refused, or no time is left.

    call: gets its time-out in seconds.
    stop: gets each failure; True ends the attempts.
    Returns the last failure, or None after a success.
    """
    pause = FIRST_PAUSE
    while True:
        now = clock.monotonic()
        try:
            call(reading_time(deadline, now))
            return None
        except FailedRequest as failed:
            failure = failed.failure
        if stop(failure) or failure.effect is Effect.REFUSED:
            return failure
        if clock.monotonic() + pause + SHORTEST_READ >= deadline:
            return failure
        clock.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
