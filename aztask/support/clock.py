"""Two clocks, injected wherever time matters, so that no unit test sleeps.

Deadlines of leases use a clock that never jumps and also runs while the machine is suspended. Times
that leave the process (due times, expiry, event times) are UTC epoch seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

if sys.platform == "linux":
    boot_seconds: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    """Seconds since boot, suspend included (clock_gettime(2)); read for every message."""

else:
    boot_seconds: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    """Seconds on the monotonic clock; on macOS CLOCK_MONOTONIC runs during sleep."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A pair of functions that return seconds.

    * `monotonic`: for durations and deadlines.
    * `wall`: UTC epoch seconds.
    """

    monotonic: Callable[[], float] = boot_seconds
    wall: Callable[[], float] = time.time


SYSTEM_CLOCK = Clock()
