"""Decides when to poll a queue again: often while messages come, rarely while it is empty.

Rules
1. After a full batch the next poll follows at once. After a smaller one it follows `GATHER` seconds
   later: the worker is busy with that batch, and the next one is fuller. Every poll costs money.
2. While the queue is empty the pause grows: it is the share `GROWTH` of the time since the last
   message, up to the ceiling. So a message that comes soon after the last one is found soon.
3. A send of this process ends the pause (`Polling.notify`).
4. Each pause is shortened by up to the share `JITTER`, so that many workers do not poll in step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from aztask.support import chance
from aztask.support.clock import SYSTEM_CLOCK, Clock

FLOOR: Final = 0.02
GATHER: Final = 0.05
GROWTH: Final = 0.15
JITTER: Final = 0.05
CEILING: Final = 1.0


class Polling:
    """The polling intervals of one receiver. Any thread may call."""

    def __init__(
        self,
        ceiling: float = CEILING,
        *,
        clock: Clock = SYSTEM_CLOCK,
        dice: Callable[[], float] = chance.share,
    ) -> None:
        """ceiling: the longest pause, seconds. dice: gives random numbers from 0 to 1."""
        self._ceiling = ceiling
        self._clock = clock
        self._dice = dice
        self._condition = threading.Condition(threading.Lock())
        self._last_found = clock.monotonic()
        self._next_poll = 0.0
        self._closed = False

    def polled(self, found: int, limit: int) -> None:
        """A poll has returned `found` messages of at most `limit`."""
        now = self._clock.monotonic()
        if found:
            self._last_found = now
        pause = 0.0
        if found < limit:
            idle = now - self._last_found
            least = GATHER if found else FLOOR
            pause = min(max(least, GROWTH * idle), max(FLOOR, self._ceiling))
        with self._condition:
            self._next_poll = now + pause * (1.0 - JITTER * self._dice())

    def wait(self, seconds: float) -> bool:
        """Wait until the next poll is due, for at most `seconds`; returns whether it is due."""
        until = self._clock.monotonic() + seconds
        with self._condition:
            while not self._closed:
                now = self._clock.monotonic()
                if now >= self._next_poll:
                    return True
                if now >= until:
                    return False
                self._condition.wait(min(self._next_poll, until) - now)
        return False

    def notify(self) -> None:
        """A message was sent: poll at once, and often for a while."""
        with self._condition:
            self._last_found = self._clock.monotonic()
            self._next_poll = 0.0
            self._condition.notify_all()

    def close(self) -> None:
        """End all waits, now and in the future."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, so that no wait waits."""
        return self._closed
