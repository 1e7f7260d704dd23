"""The circuit breaker of a task: when failures pause it. Values only.

Rules
1. The value decides nothing by itself: `aztask.worker.breaking` counts,
   `aztask.limits.breakers` keeps what is open in the result store, and the worker acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from aztask.errors import ConfigurationError
from aztask.support.checks import shown
from aztask.support.durations import to_seconds

LEAST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 86400.0
MOST_RUNS: Final = 1_000_000


@dataclass(frozen=True, slots=True, init=False)
class CircuitBreaker:
    """When failures pause a task, and for how long.

    ::

        @app.task(breaker=CircuitBreaker(share=0.5, window=60, minimum=10))
        def charge(order: int) -> None: ...

    If at least half of a worker's runs of the last 60 seconds failed, and there were at least 10,
    the breaker *opens*: all workers put the task's messages off. After `pause` seconds one worker
    *probes*: it runs one of them. If the probe succeeds the breaker closes, otherwise the pause
    doubles.

    * `share`: the share of failed runs that opens it, above 0 and at most 1; 0.5 by default.
    * `window`: the seconds (or a ``timedelta``) that a worker looks back, 60 by default.
    * `minimum`: how many runs the window must have, 10 by default.
    * `pause`: the seconds (or a ``timedelta``) until the first probe, 30 by default.
    * `longest`: the longest pause, in seconds or as a ``timedelta``; 600 by default.

    Failures are runs that raise an error, are killed at a time limit, or whose process dies. A
    snooze, a cancellation and an expired message count as nothing.

    Raises ConfigurationError if a value is not allowed.
    """

    share: float
    window: float
    minimum: int
    pause: float
    longest: float

    def __init__(
        self,
        share: float = 0.5,
        window: float | timedelta = 60.0,
        minimum: int = 10,
        pause: float | timedelta = 30.0,
        longest: float | timedelta = 600.0,
    ) -> None:
        values: dict[str, object] = {
            "share": _share(share),
            "window": _seconds(window, "window"),
            "minimum": _minimum(minimum),
            "pause": _seconds(pause, "pause"),
            "longest": _seconds(longest, "longest"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.longest < self.pause:
            raise ConfigurationError(
                f"a circuit breaker's longest pause ({self.longest:g} s) must not be shorter than "
                f"its pause ({self.pause:g} s)"
            )

    def pause_after(self, failures: int) -> float:
        """The seconds until the next probe. failures: of probes, in a row."""
        return float(min(self.longest, self.pause * 2.0 ** min(failures, 64)))


def breaker_of(value: object, what: str) -> CircuitBreaker | None:
    """Return `value` if it is a CircuitBreaker or None. Raises ConfigurationError."""
    if value is None or isinstance(value, CircuitBreaker):
        return value
    raise ConfigurationError(
        f"{what} takes a CircuitBreaker, such as CircuitBreaker(share=0.5), not {shown(value)}"
    )


def _seconds(value: object, name: str) -> float:
    name = f"a circuit breaker's {name}"
    return to_seconds(value, name, minimum=LEAST_SECONDS, maximum=LONGEST_SECONDS)


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigurationError(
            f"a circuit breaker's share is above 0 and at most 1, such as 0.5, not {shown(value)}"
        )
    return float(value)


def _minimum(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RUNS:
        raise ConfigurationError(
            f"a circuit breaker's minimum takes a whole number from 1 to {MOST_RUNS:,}, "
            f"not {shown(value)}"
        )
    return value
