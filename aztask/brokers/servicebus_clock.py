"""How far the service's clock is ahead of ours, learned from the times it puts on messages.

Schedules are given to Service Bus in absolute time, so a clock that is an hour off would make every
delay an hour longer or shorter. Leases do not need this: their deadlines are relative.
"""

from __future__ import annotations

import threading
from typing import Final

from aztask.clock import Clock

STEP_SECONDS: Final = 2.0
"""A sample that is this much lower than what was learned means that a clock was set."""


class ServiceClock:
    """The service's time. Any thread may call.

    A sample is never above the truth, since a message is older when it arrives than when the
    service wrote the time on it: the highest recent one counts.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: float | None = None
        self._lock = threading.Lock()

    @property
    def known(self) -> bool:
        """Whether anything was learned."""
        return self._offset is not None

    @property
    def offset(self) -> float:
        """Seconds that the service is ahead; 0 until something was learned."""
        return self._offset or 0.0

    def now(self) -> float:
        """The service's time of now, UTC epoch seconds."""
        return self._clock.wall() + self.offset

    def learn(self, service_time: float) -> None:
        """The service wrote `service_time` on something that has just arrived."""
        sample = service_time - self._clock.wall()
        with self._lock:
            known = self._offset
            if known is None or sample > known or sample < known - STEP_SECONDS:
                self._offset = sample
