"""Two clocks, injected wherever time matters, so that no unit test sleeps.

Deadlines of leases use a clock that never jumps and also runs while the machine is suspended. Times
that leave the process (due times, expiry, event times) are UTC epoch seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

if hasattr(time, "CLOCK_BOOTTIME"):
    boot_seconds: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    """Seconds since boot, suspend included (clock_gettime(2)); read for every message."""

elif hasattr(time, "clock_gettime"):
    boot_seconds = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    """Seconds on the monotonic clock; on macOS CLOCK_MONOTONIC runs during sleep."""

else:
    boot_seconds = time.monotonic
    """Seconds on the monotonic clock of Windows."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A pair of functions that return seconds.

    * `monotonic`: for durations and deadlines.
    * `wall`: UTC epoch seconds.
    """

    monotonic: Callable[[], float] = boot_seconds
    wall: Callable[[], float] = time.time


SYSTEM_CLOCK = Clock()
