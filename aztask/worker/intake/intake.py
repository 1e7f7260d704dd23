"""An intake: the threads that receive from one queue, as long as there is room.

Rules
1. One thread always receives. Helper threads receive at the same time if the broker gains from it
   (`Capabilities.receives_at_once`), but only while batches are full and there is room for another
   one: a quiet queue costs no further request.
2. The deliveries that a pending receive may bring count as room that is taken.
3. An intake that shares its worker's room with others (`Shares`) does not wait in a receive while
   its queue has messages: as soon as the queue is empty, the others get its room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from aztask.brokers.base import Broker, Receiver
from aztask.brokers.delivery import Delivery
from aztask.errors import AztaskError, BrokerError, QueueNotFound

logger = logging.getLogger(__name__)

SHORTEST_PAUSE = 0.2
LONGEST_PAUSE = 15.0


@dataclass(frozen=True, slots=True)
class QueueSource:
    """How an intake receives from one queue.

    lease: called before each receive; the lease to ask for, in seconds. wait: the longest time that
    one receive takes when the queue is empty, in seconds. poll_ceiling: as `Broker.receiver` takes
    it.
    """

    queue: str
    lease: Callable[[], float]
    wait: float
    poll_ceiling: float | None = None


class Intake:
    """Receives and hands over. An unreachable broker is retried, with growing pauses."""

    def __init__(
        self,
        broker: Broker,
        source: QueueSource,
        take: Callable[[Intake, list[Delivery], float], None],
        *,
        on_quiet: Callable[[], None] | None = None,
    ) -> None:
        """take: gets the deliveries, on a thread of this intake, and when the receive began (UTC
        epoch seconds).

        on_quiet: for an intake that shares its worker's room, see rule 3. It is called when a queue
        that had messages is empty, or cannot be received from.

        `live` is True if the last receive found something.
        """
        self.queue = source.queue
        self._broker = broker
        self._source = source
        self._asked = 0.0
        self._take = take
        self._limit = broker.capabilities.receive_limit
        self._room = 0
        self._under_way = 0
        self._helping = broker.capabilities.receives_at_once - 1  # each one until its first wait
        self._full = self._empty = False
        self._on_quiet = on_quiet
        self.live = False
        self._stopping = False
        self._condition = threading.Condition()
        self._receiver: Receiver | None = None
        self._threads = [
            threading.Thread(
                target=self._run, args=(n > 0,), name=f"aztask-in-{self.queue}-{n}", daemon=True
            )
            for n in range(broker.capabilities.receives_at_once)
        ]

    @property
    def idle(self) -> bool:
        """Whether the last receive found nothing and no helper is still receiving."""
        return self._empty and not self._helping

    def start(self) -> None:
        """Start to receive as soon as there is room."""
        for thread in self._threads:
            thread.start()

    def allow(self, room: int) -> None:
        """Set how many more deliveries there is room for."""
        if room != self._room:
            with self._condition:
                self._room = room
                if room > 0:
                    self._condition.notify_all()

    def grant(self, change: int) -> None:
        """Change by `change` how many more deliveries there is room for."""
        if change:
            with self._condition:
                self._room += change
                self._condition.notify_all()

    def stop(self) -> None:
        """Stop receiving; the deliveries of a pending receive are still handed over."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()

    def join(self, timeout: float) -> None:
        """Wait until the threads have ended, for `timeout` seconds in all."""
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    @property
    def receiver(self) -> Receiver:
        """The receiver through which the deliveries are renewed and settled."""
        if self._receiver is None:
            self._asked = self._source.lease()
            self._receiver = self._broker.receiver(
                self.queue, lease=self._asked, poll_ceiling=self._source.poll_ceiling
            )
        return self._receiver

    def close(self) -> None:
        """Close the receiver, once `join` has returned."""
        if self._receiver is not None:
            self._receiver.close()

    def _run(self, helps: bool) -> None:
        failures = 0
        while (limit := self._begin(helps)) > 0:
            try:
                wait = 0.0 if helps or (self.live and self._on_quiet) else self._source.wait
                asked_at = time.time()
                deliveries = self._at_the_lease_of_now().receive(limit, wait)
            except Exception as error:  # an SDK may raise anything; the worker must keep receiving
                if not isinstance(error, AztaskError):
                    logger.exception("queue %s: the receive failed unexpectedly", self.queue)
                failures += 1
                # a queue that does not exist is empty, or --burst would never end
                self._end(limit, 0 if isinstance(error, QueueNotFound) else None)
                self._pause(error, failures)
                continue
            if failures:
                logger.info("queue %s: receiving works again", self.queue)
                failures = 0
            self._end(limit, len(deliveries))
            if deliveries:
                self._take(self, deliveries, asked_at)

    def _begin(self, helps: bool) -> int:
        """Wait until this thread may receive; returns how many deliveries, 0 to end."""
        with self._condition:
            self._helping -= helps
            while not self._stopping:
                room = self._room - self._under_way
                if room > 0 and (not helps or (self._full and room >= self._limit)):
                    limit = min(room, self._limit)
                    self._under_way += limit
                    self._helping += helps
                    return limit
                self._condition.wait()
            return 0

    def _end(self, limit: int, found: int | None) -> None:
        """A receive of at most `limit` deliveries brought `found`, or failed (None)."""
        with self._condition:
            self._under_way -= limit
            self._room -= found or 0
            if found is not None:
                self._empty = not found
            self._full = found == self._limit
            fell_quiet, self.live = self.live and not found, bool(found)
            self._condition.notify_all()
        if fell_quiet and self._on_quiet is not None:
            self._on_quiet()

    def _at_the_lease_of_now(self) -> Receiver:
        receiver, lease = self.receiver, self._source.lease()
        if lease != self._asked:
            self._asked = lease
            receiver.set_lease(lease)
        return receiver

    def _pause(self, error: Exception, failures: int) -> None:
        seconds = pause_after(self.queue, error, failures)
        with self._condition:
            self._condition.wait_for(lambda: self._stopping, timeout=seconds)


def pause_after(queue: str, error: Exception, failures: int) -> float:
    """Log `error`; returns how long to wait after `failures` in a row, in seconds."""
    seconds = min(LONGEST_PAUSE, SHORTEST_PAUSE * 2.0 ** min(failures, 10))
    if not isinstance(error, BrokerError):
        seconds = LONGEST_PAUSE
    logger.warning("queue %s: cannot receive, retry in %.1f s: %s", queue, seconds, error)
    return seconds
