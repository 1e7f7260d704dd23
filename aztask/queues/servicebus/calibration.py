"""Finds pins: times that the service certainly wrote between two instants of our clock.

Rules
1. With the permission to send, schedule a message, peek at it, and cancel it.
2. Without it, peek behind the last message of the queue. A message that appears there later was
   enqueued after that peek, so its enqueued time is a pin. This works because sequence numbers rise
   without gaps. In a partitioned queue they do so only within each partition, so it gives no pins
   (the service's documentation, "Message sequencing and timestamps").
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from azure.servicebus import ServiceBusReceivedMessage

from aztask.errors import AztaskError, BrokerUnavailable
from aztask.queues.servicebus.clock import ServiceClock
from aztask.queues.servicebus.reading import damage_of
from aztask.queues.servicebus.wire import ENQUEUED, epoch_of, is_direct, position_of
from aztask.support.clock import Clock

PARTITIONED: Final = 1 << 48
"""Sequence numbers from this one on belong to a partition."""

MAX_PEEKS: Final = 100
"""Peeks in one attempt: enough to find the end of any queue."""


class ClockCalibration:
    """Finds pins in one queue. Any thread may call; `once` one at a time."""

    def __init__(
        self,
        service_clock: ServiceClock,
        clock: Clock,
        probe: Callable[[], None],
        peek: Callable[[int], ServiceBusReceivedMessage | None],
    ) -> None:
        """probe: does rule 1. peek: peeks at the next message from a sequence number on.

        Both raise AztaskError or `SDK_ERRORS`. If `probe` is not permitted, `peek` is used.
        """
        self.service_clock = service_clock
        self.clock = clock
        self._probe = probe
        self._peek = peek
        self._may_send = True
        self._last = 0
        self._empty: tuple[int, float] | None = None
        self._lock = threading.Lock()

    def once(self) -> None:
        """Try to find a pin. Raises as `probe` and `peek` do."""
        if self._may_send:
            try:
                self._probe()
                return
            except BrokerUnavailable:
                raise
            except AztaskError:  # no permission to send, or no time on the message
                self._may_send = False
        gap = 1
        for _ in range(MAX_PEEKS):
            number = self._next(gap)
            asked_at = self.clock.monotonic()
            found = self._peek(number)
            if found is not None:
                gap *= 2
                if self.message(found, self.clock.monotonic()) or self._last >= PARTITIONED:
                    return
                continue
            with self._lock:
                self._empty = (number, asked_at)
                if number <= self._last + 1:
                    return

    def _next(self, gap: int) -> int:
        """Where to peek: further and further behind the last message, then in between."""
        with self._lock:
            if self._empty is None:
                return self._last + gap
            return (self._last + 1 + self._empty[0]) // 2

    def message(self, message: ServiceBusReceivedMessage, read_at: float) -> bool:
        """Note a message that was received or peeked at; returns whether its time is a pin.

        A damaged message is ignored: its times may be the sender's.
        """
        if damage_of(message) is not None:
            return False
        number, enqueued = position_of(message), epoch_of(message, ENQUEUED)
        with self._lock:
            self._last = max(self._last, number)
            if self._empty is None or number < self._empty[0]:
                return False
            asked_at = self._empty[1]
            self._empty = None
        if enqueued is None or number >= PARTITIONED or not is_direct(message):
            return False
        self.service_clock.pin(enqueued, asked_at, read_at)
        return True
