"""Learns how far the service's clock is ahead of ours, from the times that the service writes.

Schedules are given to Service Bus in absolute time, so a clock that is an hour off would make every
delay an hour longer or shorter. Leases do not need this: their deadlines are relative.

Rules
1. A time on a message that has just arrived is never later than the service's current time, so the
   highest recent one is the best estimate. Schedules use this estimate.
2. A time that the service certainly wrote between two instants of our clock is a *pin*: it bounds
   the difference of the two clocks from both sides. Leases are checked with pins; see
   `aztask.queues.servicebus.lock`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Final

from aztask.support.clock import Clock

STEP_SECONDS: Final = 2.0
"""If a sample is this much lower than the estimate, one of the clocks was set."""

DRIFT: Final = 200e-6
"""The fastest drift of two clocks, in seconds per second: twice that of a bad quartz."""

PIN_SECONDS: Final = 3600.0
"""How long a pin is used."""


@dataclass(frozen=True, slots=True)
class ClockBounds:
    """The service's time minus our monotonic clock lies between `low` and `high`, at instant `at`
    of that clock. number: tells one pin from another.
    """

    low: float
    high: float
    at: float
    number: int = 0

    def widened(self, now: float) -> ClockBounds:
        """The bounds at `now`, wider by what the clocks may have drifted apart."""
        drifted = abs(now - self.at) * DRIFT
        return replace(self, low=self.low - drifted, high=self.high + drifted)


class ServiceClock:
    """Estimates the service's time. Any thread may call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: float | None = None
        self._pin: ClockBounds | None = None
        self._pins = 0
        self._lock = threading.Lock()

    @property
    def known(self) -> bool:
        """Whether the service's time was learned."""
        return self._offset is not None

    @property
    def offset(self) -> float:
        """Seconds that the service's clock is ahead of ours; 0 until it is known."""
        return self._offset or 0.0

    def now(self) -> float:
        """The service's current time, UTC epoch seconds."""
        return self._clock.wall() + self.offset

    def learn(self, service_time: float) -> None:
        """Learn from `service_time`, which the service wrote on a message that has just arrived."""
        sample = service_time - self._clock.wall()
        with self._lock:
            known = self._offset
            if known is None or sample > known or sample < known - STEP_SECONDS:
                self._offset = sample

    def pin(self, service_time: float, after: float, before: float) -> None:
        """Set the pin: the service wrote `service_time` between these instants of our clock.

        The newest pin is used: it comes from the node that serves the queue now.
        """
        with self._lock:
            self._pins += 1
            self._pin = ClockBounds(service_time - before, service_time - after, before, self._pins)

    def unpin(self) -> None:
        """Forget the pin: it contradicts other facts."""
        with self._lock:
            self._pin = None

    @property
    def pinned(self) -> ClockBounds | None:
        """The bounds as of now; None without a recent pin."""
        pin, now = self._pin, self._clock.monotonic()
        return None if pin is None or now - pin.at > PIN_SECONDS else pin.widened(now)
