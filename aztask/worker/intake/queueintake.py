"""An intake: the threads that receive from one queue, as long as there is room.

Rules
1. One thread always receives. Helper threads receive at the same time if the broker gains from it
   (`Capabilities.receives_at_once`), but only while batches are full and there is room for another
   one: a quiet queue costs no further request.
2. The deliveries that a pending receive may bring count as room that is taken.
3. An intake that shares its worker's room with others (`Shares`) does not wait in a receive while
   its queue has messages: as soon as the queue is empty, the others get its room.
4. Whatever a receive raises, the room that it took is free again, and it is tried again.
5. A configuration error before anything was received ends the worker (`is_refused`): it would be
   repeated with each receive. Later ones are retried: keys and permissions change while it runs.
"""

from __future__ import annotations

import logging
import threading

from aztask.errors import (
    AztaskError,
    BrokerError,
    ConfigurationError,
    LeaseRefused,
    QueueNotFound,
)
from aztask.queues.base import Broker, Receiver
from aztask.queues.delivery import Delivery
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.parts import Part
from aztask.worker.ports import IntakeReports, QueueSource

logger = logging.getLogger(__name__)

SHORTEST_PAUSE = 0.2
LONGEST_PAUSE = 15.0
LONGEST_RECEIVE = 90.0
"""Seconds for one receive: the wait for a message or a session, and the time-outs of requests."""


class Intake:
    """Receives and hands over. An unreachable broker is retried, with growing pauses."""

    session = None

    def __init__(
        self,
        broker: Broker,
        source: QueueSource,
        intakes: IntakeReports,
        *,
        shares: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """intakes: takes the deliveries. shares: the worker's room with others, see rule 3; then it
        is told when a queue that had messages is empty.

        `live` is True if the last receive found something.
        """
        self.queue = source.queue
        self._broker = broker
        self._source = source
        self._clock = clock
        self._asked = 0.0
        self._intakes = intakes
        self._limit = broker.capabilities.receive_limit
        self._room = 0
        self._under_way = 0
        # Helpers that receive; at first each of them, until it has waited once.
        self._helping = set(range(1, broker.capabilities.receives_at_once))
        self._full = self._empty = False
        self._shares = shares
        self.live = False
        self._stopping = self._worked = False
        self._condition = threading.Condition()
        self._receiver: Receiver | None = None
        self.part = Part(f"intake {self.queue}", longest=LONGEST_RECEIVE, essential="receive")
        self._threads = [
            self.part.thread(self._run, f"aztask-in-{self.queue}-{n}", n)
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
        self.part.stop()

    def join(self, timeout: float) -> None:
        """Wait until the threads have ended, for `timeout` seconds in all."""
        until = self._clock.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock.monotonic()))

    @property
    def receiver(self) -> Receiver:
        """The receiver through which the deliveries are renewed and settled."""
        if self._receiver is None:
            self._asked = self._intakes.lease(self.queue)
            self._receiver = self._broker.receiver(
                self.queue, lease=self._asked, poll_ceiling=self._source.poll_ceiling
            )
        return self._receiver

    def close(self) -> None:
        """Close the receiver, once `join` has returned."""
        if self._receiver is not None:
            self._receiver.close()

    def _run(self, number: int) -> None:
        failures = 0
        while (limit := self._begin(number)) > 0:
            self.part.begin()
            asked_at = self._clock.wall()
            failed: Exception | None = None
            deliveries: list[Delivery] = []
            found: int | None = None
            try:
                wait = 0.0 if number or (self.live and self._shares) else self._source.wait
                deliveries = self._at_the_lease_of_now().receive(limit, wait)
                found = len(deliveries)
            except QueueNotFound as error:
                failed, found = error, 0  # it is empty, or --burst would never end
            except Exception as error:  # noqa: BLE001  # an SDK may raise anything
                failed = error
            finally:
                self._end(limit, found)
            if failed is not None:
                if is_refused(failed, self._worked):
                    self._intakes.refused(failed)
                    return
                failures += 1
                self._pause(failed, failures)
                continue
            if deliveries:
                self._intakes.take(self, deliveries, asked_at)
            self.part.rest()
            if failures:
                logger.info("queue %s: receiving works again", self.queue)
                failures = 0
            self._worked = True

    def _begin(self, number: int) -> int:
        """Wait until this thread may receive; returns how many deliveries, 0 to end."""
        helps = number > 0
        with self._condition:
            self._helping.discard(number)
            while not self._stopping:
                room = self._room - self._under_way
                if room > 0 and (not helps or (self._full and room >= self._limit)):
                    limit = min(room, self._limit)
                    self._under_way += limit
                    if helps:
                        self._helping.add(number)
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
        if fell_quiet and self._shares:
            self._intakes.fell_quiet()

    def _at_the_lease_of_now(self) -> Receiver:
        receiver, lease = self.receiver, self._intakes.lease(self.queue)
        if lease != self._asked:
            self._asked = lease
            receiver.set_lease(lease)
        return receiver

    def _pause(self, error: Exception, failures: int) -> None:
        seconds = pause_after(self.part, self.queue, error, failures)
        with self._condition:
            self._condition.wait_for(lambda: self._stopping, timeout=seconds)


def is_refused(error: Exception, worked: bool) -> bool:
    """Whether a failed receive ends the worker. worked: an earlier one of the queue succeeded.

    A refused lease does not: it is asked for again, and the queue's lock can be changed.
    """
    known = isinstance(error, ConfigurationError) and not isinstance(error, LeaseRefused)
    return known and not worked


def pause_after(part: Part, queue: str, error: Exception, failures: int) -> float:
    """Log the part's `error`; returns how long to wait after `failures` in a row, in seconds."""
    part.idle()
    if isinstance(error, AztaskError):
        part.trouble(error)
    else:
        part.failed(error)
    seconds = min(LONGEST_PAUSE, SHORTEST_PAUSE * 2.0 ** min(failures, 10))
    if isinstance(error, AztaskError) and not isinstance(error, BrokerError):
        seconds = LONGEST_PAUSE
    logger.warning("queue %s: cannot receive, retry in %.1f s: %s", queue, seconds, error)
    return seconds
