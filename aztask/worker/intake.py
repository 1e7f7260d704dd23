"""An intake: the thread that receives from one queue, as much as there is room for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from aztask.brokers.base import Broker, Receiver
from aztask.delivery import Delivery
from aztask.errors import AztaskError, BrokerError

logger = logging.getLogger(__name__)

SHORTEST_PAUSE = 0.2
LONGEST_PAUSE = 15.0


class Intake:
    """Receives and hands over. A broker that is away is tried again, slower and slower."""

    def __init__(
        self,
        broker: Broker,
        queue: str,
        *,
        lease: Callable[[], float],
        wait: float,
        poll_ceiling: float | None = None,
        take: Callable[[Intake, list[Delivery]], None],
    ) -> None:
        """lease: asked before each receive: seconds. wait: seconds that one receive may take.

        take: gets the deliveries, on this thread. poll_ceiling: as `Broker.receiver` takes it.
        """
        self.queue = queue
        self.idle = False
        self._broker = broker
        self._lease = lease
        self._asked = 0.0
        self._wait = wait
        self._poll_ceiling = poll_ceiling
        self._take = take
        self._room = 0
        self._stopping = False
        self._condition = threading.Condition()
        self._receiver: Receiver | None = None
        self._thread = threading.Thread(target=self._run, name=f"aztask-in-{queue}", daemon=True)

    def start(self) -> None:
        """Begin to receive, once there is room."""
        self._thread.start()

    def allow(self, room: int) -> None:
        """There is room for that many deliveries now."""
        if room != self._room:
            with self._condition:
                self._room = room
                if room > 0:
                    self._condition.notify()

    def stop(self) -> None:
        """Receive nothing more; a receive that is under way is still handed over."""
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def receiver(self) -> Receiver:
        """What the deliveries are renewed and settled through."""
        if self._receiver is None:
            self._asked = self._lease()
            self._receiver = self._broker.receiver(
                self.queue, lease=self._asked, poll_ceiling=self._poll_ceiling
            )
        return self._receiver

    def close(self) -> None:
        """Close the receiver."""
        if self._receiver is not None:
            self._receiver.close()

    def _run(self) -> None:
        failures = 0
        while (room := self._wait_for_room()) > 0:
            try:
                limit = min(room, self._broker.capabilities.receive_limit)
                deliveries = self._at_the_lease_of_now().receive(limit, self._wait)
            except AztaskError as error:
                failures += 1
                self._pause(error, failures)
                continue
            except Exception as error:  # whatever an SDK raises: a worker that is deaf helps nobody
                logger.exception("queue %s: receiving failed", self.queue)
                failures += 1
                self._pause(error, failures)
                continue
            if failures:
                logger.info("queue %s answers again", self.queue)
                failures = 0
            self.idle = not deliveries
            if deliveries:
                with self._condition:
                    self._room -= len(deliveries)
                self._take(self, deliveries)

    def _at_the_lease_of_now(self) -> Receiver:
        receiver, lease = self.receiver, self._lease()
        if lease != self._asked:
            self._asked = lease
            receiver.set_lease(lease)
        return receiver

    def _wait_for_room(self) -> int:
        with self._condition:
            while self._room <= 0 and not self._stopping:
                self._condition.wait()
            return 0 if self._stopping else self._room

    def _pause(self, error: Exception, failures: int) -> None:
        seconds = pause_after(self.queue, error, failures)
        with self._condition:
            self._condition.wait_for(lambda: self._stopping, timeout=seconds)


def pause_after(queue: str, error: Exception, failures: int) -> float:
    """How long to wait after that many failures in a row, the last one `error`; logged."""
    seconds = min(LONGEST_PAUSE, SHORTEST_PAUSE * 2.0 ** min(failures, 10))
    if not isinstance(error, BrokerError):
        seconds = LONGEST_PAUSE
    logger.warning("queue %s: %s; trying again in %.1f s", queue, error, seconds)
    return seconds
