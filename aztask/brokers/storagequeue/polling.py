"""When to look at a queue again: at once while there is work, seldom while there is none.

Rules
1. After a full batch the next look follows at once; after a smaller one, `GATHER` later: there is
   work to do meanwhile, and the next batch is fuller. Every look costs money.
2. The pause grows with the time that the queue has been empty: a share `GROWTH` of it, up to the
   ceiling. So a message that comes soon after the last one is found soon.
3. A ring (a send of this process) ends the pause.
4. Each pause is shortened by up to `JITTER` of it, so that many workers do not look in step.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Final

from aztask.support.clock import SYSTEM_CLOCK, Clock

FLOOR: Final = 0.02
GATHER: Final = 0.05
GROWTH: Final = 0.15
JITTER: Final = 0.05
CEILING: Final = 1.0


class Polling:
    """The rhythm of one receiver. Any thread may ask."""

    def __init__(
        self,
        ceiling: float = CEILING,
        *,
        clock: Clock = SYSTEM_CLOCK,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """ceiling: the longest pause, seconds. dice: numbers from 0 to 1."""
        self._ceiling = ceiling
        self._clock = clock
        self._dice = dice
        self._condition = threading.Condition(threading.Lock())
        self._last_found = clock.monotonic()
        self._next_look = 0.0
        self._closed = False

    def looked(self, found: int, limit: int) -> None:
        """A look brought `found` messages of at most `limit`."""
        now = self._clock.monotonic()
        if found:
            self._last_found = now
        pause = 0.0
        if found < limit:
            idle = now - self._last_found
            least = GATHER if found else FLOOR
            pause = min(max(least, GROWTH * idle), max(FLOOR, self._ceiling))
        with self._condition:
            self._next_look = now + pause * (1.0 - JITTER * self._dice())

    def wait(self, seconds: float) -> bool:
        """Wait for the next look to be due, up to `seconds`; whether it is due."""
        until = self._clock.monotonic() + seconds
        with self._condition:
            while not self._closed:
                now = self._clock.monotonic()
                if now >= self._next_look:
                    return True
                if now >= until:
                    return False
                self._condition.wait(min(self._next_look, until) - now)
        return False

    def ring(self) -> None:
        """There is something now: look at once, and often for a while."""
        with self._condition:
            self._last_found = self._clock.monotonic()
            self._next_look = 0.0
            self._condition.notify_all()

    def close(self) -> None:
        """End every wait, now and later."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return self._closed
