"""Pacing: how fast one partition sends, and how long it waits when the service is busy.

Rules
1. A partition waits before it sends: after t seconds it has sent at most rate * t messages, in
   whatever batches. Unused time is not saved up.
2. After each refusal the pause doubles, up to `MAX_PAUSE`. It is never shorter than the service
   asked for. Pauses are random, so that partitions do not retry together.
3. Patience is counted from the first failure after the last success.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_PAUSE = 0.2
MAX_PAUSE = 30.0


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

    def batch(self, limit: int) -> int:
        """The size of a batch: half a second's messages, at least 1 and at most `limit`."""
        return limit if self._rate is None else max(1, min(limit, int(self._rate / 2)))

    def pay(self, count: int) -> None:
        """Wait until the rate allows `count` more messages."""
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
        """Reset pause and patience after a success."""
        self._give_up_at = None
        self._pause = FIRST_PAUSE

    def wait(self, asked: float | None) -> bool:
        """Pause before the next attempt. False, without a pause, if patience has ended.

        asked: seconds to wait that the service asked for.
        """
        now = self._clock()
        if self._give_up_at is None:
            self._give_up_at = now + self._seconds
        pause = max(self._pause * (0.5 + self._chance()), asked or 0.0)
        if now + pause > self._give_up_at:
            return False
        self._pause = min(2 * self._pause, MAX_PAUSE)
        self._sleep(pause)
        return True
