"""Two clocks and the sleep between, injected wherever time matters, so that no unit test sleeps.

Deadlines of leases use a clock that never jumps and also runs while the machine is suspended. Times
that leave the process (due times, expiry, event times) are UTC epoch seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """A pair of functions that return seconds, and one that lets some pass.

    * `monotonic`: for durations and deadlines.
    * `wall`: UTC epoch seconds.
    * `sleep`: between two tries of the same request; no loop of a worker sleeps.
    """

    monotonic: Callable[[], float] = boot_seconds
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()

_ambient: list[Clock] = [SYSTEM_CLOCK]


@contextmanager
def replaced(clock: Clock) -> Iterator[None]:
    """Have `wall`, `monotonic` and `sleep` use `clock` inside the ``with`` block.

    They serve code without a worker around it, such as a program that sends. A simulation replaces
    their clock whenever another program of its world goes on.
    """
    _ambient.append(clock)
    try:
        yield
    finally:
        # The last one: blocks may end in another order than they began.
        del _ambient[-1 - _ambient[::-1].index(clock)]


def current() -> Clock:
    """The clock that `wall`, `monotonic` and `sleep` use now."""
    return _ambient[-1]


def wall() -> float:
    """UTC epoch seconds, for code that has no clock of its own."""
    return _ambient[-1].wall()


def monotonic() -> float:
    """Seconds for durations and deadlines, for code that has no clock of its own."""
    return _ambient[-1].monotonic()


def sleep(seconds: float) -> None:
    """Let some time pass between two tries, for code that has no clock of its own."""
    _ambient[-1].sleep(seconds)
