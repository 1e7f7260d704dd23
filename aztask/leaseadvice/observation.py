"""How long deliveries of a queue are held, counted so that the counts of many workers add up.

A histogram with log-spaced bins: 8 for each doubling, so a percentile is known to 9 %. Each bin
counts with its upper edge, so percentiles err on the long side. Counts fade with a half-life, so
that last week's load does not keep a lease long forever; therefore they are not whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aztask.leaseadvice.advice import Evidence

BINS_PER_DOUBLING: Final = 8
FIRST_EDGE: Final = 0.01
"""Seconds: shorter times share the first bin."""
LAST_BIN: Final = 8 * 27
"""The bin of 15 days and more, twice the longest lease."""
HALF_LIFE: Final = 6 * 3600.0
"""Seconds after which half of a count remains."""
FADED: Final = 0.01
"""Smaller counts are dropped."""

NO_BINS: Final[Mapping[int, float]] = {}


def bin_of(seconds: float) -> int:
    """The number of the bin for a held time."""
    if not seconds > FIRST_EDGE:  # true for nan too
        return 0
    return min(math.ceil(BINS_PER_DOUBLING * math.log2(seconds / FIRST_EDGE) - 1e-9), LAST_BIN)


def edge_of(number: int) -> float:
    """The upper edge of a bin, in seconds."""
    return float(FIRST_EDGE * 2 ** (number / BINS_PER_DOUBLING))


@dataclass(frozen=True, slots=True)
class Observation:
    """Faded counts of one queue.

    * `at`: when they were last faded, UTC epoch seconds.
    * `held`, `cut`: deliveries by bin of held time: settled ones, and those that a lost lease cut
      off.
    * `lost`, `failed`: leases lost and settlements refused under the lease now in force.
    * `lost_ever`, `failed_ever`: under any lease, not faded.
    """

    held: Mapping[int, float] = field(default_factory=dict)
    cut: Mapping[int, float] = field(default_factory=dict)
    lost: float = 0.0
    failed: float = 0.0
    lost_ever: int = 0
    failed_ever: int = 0
    at: float = 0.0

    def faded(self, now: float) -> Observation:
        """The same counts at `now`; a clock that ran backwards fades nothing."""
        age = now - self.at
        if age <= 0.0 or not self.at:
            return self if self.at else self._with(1.0, now)
        return self._with(0.5 ** (age / HALF_LIFE), now)

    def plus(self, other: Observation) -> Observation:
        """The sum of both; fade them to the same time first."""
        return Observation(
            _sum(self.held, other.held),
            _sum(self.cut, other.cut),
            self.lost + other.lost,
            self.failed + other.failed,
            self.lost_ever + other.lost_ever,
            self.failed_ever + other.failed_ever,
            max(self.at, other.at),
        )

    def after_change(self) -> Observation:
        """The counts under a new lease: losses under the previous one no longer count."""
        return Observation(self.held, self.cut, 0.0, 0.0, self.lost_ever, self.failed_ever, self.at)

    def evidence(self) -> Evidence:
        """The counts in the form that `aztask.leaseadvice.advice.decide` takes."""
        both = _sum(self.held, self.cut)
        samples = sum(both.values())
        return Evidence(
            round(samples),
            _percentile(both, samples, 0.50),
            _percentile(both, samples, 0.99),
            round(sum(self.cut.values())),
            round(self.lost),
            round(self.failed),
        )

    def _with(self, factor: float, at: float) -> Observation:
        return Observation(
            _scaled(self.held, factor),
            _scaled(self.cut, factor),
            self.lost * factor,
            self.failed * factor,
            self.lost_ever,
            self.failed_ever,
            at,
        )


def _sum(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    total = dict(one)
    for number, count in other.items():
        total[number] = total.get(number, 0.0) + count
    return total


def _scaled(bins: Mapping[int, float], factor: float) -> dict[int, float]:
    return {number: count * factor for number, count in bins.items() if count * factor >= FADED}


def _percentile(bins: Mapping[int, float], samples: float, part: float) -> float | None:
    if round(samples) < 1:
        return None
    below = 0.0
    for number in sorted(bins):
        below += bins[number]
        if below >= part * samples - 1e-9:
            return edge_of(number)
    return edge_of(max(bins))
