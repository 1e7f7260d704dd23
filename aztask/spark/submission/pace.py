"""Pacing: how fast one partition sends, and how long it waits when the service is busy.

Rules
1. Who may send `rate` messages a second pays before sending: after t seconds at most rate * t were
   sent, whatever the batches. Time that was not used is not saved up.
2. After a refusal the pause doubles, up to a limit, and is never shorter than what the service
   asked for. Pauses differ by chance, so that partitions do not come back together.
3. Patience is counted from the last success.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 30.0


class Pace:
    """The sending rate of one partition, in messages a second; None: unlimited."""

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._paid_until = clock()

    def batch(self, most: int) -> int:
        """How many to send at once: what half a second allows, at least 1, at most `most`."""
        return most if self._rate is None else max(1, min(most, int(self._rate / 2)))

    def pay(self, count: int) -> None:
        """Wait until `count` more may be sent."""
        if self._rate is None:
            return
        now = self._clock()
        self._paid_until = max(self._paid_until, now) + count / self._rate
        self._sleep(self._paid_until - now)


class Backoff:
    """The pauses between attempts, until `seconds` have passed without a success."""

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._give_up_at: float | None = None
        self._pause = FIRST_PAUSE

    def succeeded(self) -> None:
        """All is well again."""
        self._give_up_at = None
        self._pause = FIRST_PAUSE

    def wait(self, asked: float | None) -> bool:
        """Pause before the next attempt; False, at once, when there should be none.

        asked: seconds that the service asked for.
        """
        now = self._clock()
        if self._give_up_at is None:
            self._give_up_at = now + self._seconds
        pause = max(self._pause * (0.5 + self._chance()), asked or 0.0)
        if now + pause > self._give_up_at:
            return False
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._sleep(pause)
        return True
