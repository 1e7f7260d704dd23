"""Advice on lease durations: evidence in, advice out, without I/O and without a clock.

Workers use it while they run, and the data pipeline uses it on the event log; both publish their
advice in a `aztask.leaseadvice.document`.

Rules
1. The advised lease is `FACTOR` times the p99 of the time that deliveries are held, within bounds.
   If that exceeds the upper bound, the advice is to renew, not a lease cut to the bound.
2. Fewer than ``min_samples`` deliveries change nothing, except by rule 4.
3. Hysteresis: a lease is raised only if the target exceeds `RAISE_BEYOND` times the current one,
   and lowered only if it is below `LOWER_BELOW` times.
4. Losses (lost leases, and settlements refused because the message had become visible) above a
   threshold at least double the lease, whatever the sample. A lease is never lowered while there
   are losses, or durations that a lost lease cut off: they would have been longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from aztask.queues.lease.bounds import Bounds

FACTOR: Final = 1.5
"""With a lease of this many times the p99 of held time, nearly all deliveries need no renewal."""
RAISE_BEYOND: Final = 1.25
LOWER_BELOW: Final = 0.5
MIN_LOSSES: Final = 3
LOSS_SHARE: Final = 0.001
"""The share of deliveries that must be lost, besides `MIN_LOSSES`, before the lease is raised."""

Source: TypeAlias = Literal["worker", "pipeline"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The measurements of one queue's deliveries.

    * `samples`: deliveries that have ended.
    * `p50_seconds`, `p99_seconds`: how long they were held, from the grant of the lease to the
      settlement; a delivery that was cut off counts with its time so far. None without samples.
    * `cut_off`: deliveries whose lease was lost before they were done.
    * `lost_leases`: lost leases; `failed_settlements`: settlements refused because the message had
      become visible. Both count only under the lease now in force: losses under a shorter one say
      nothing about it.
    """

    samples: int = 0
    p50_seconds: float | None = None
    p99_seconds: float | None = None
    cut_off: int = 0
    lost_leases: int = 0
    failed_settlements: int = 0

    @property
    def losses(self) -> int:
        """Deliveries that were too late to be settled."""
        return self.lost_leases + self.failed_settlements


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice for one queue.

    * `lease_seconds`: the lease to request; None if none is known to be better than the configured
      one.
    * `renew`: True if nearly all deliveries take longer than the longest allowed lease, so that
      they depend on renewals.
    * `reason`: for people.
    * `source`: what decided, a worker or the data pipeline.
    * `at`: UTC epoch seconds of the last change.
    """

    lease_seconds: float | None
    renew: bool
    reason: str
    evidence: Evidence
    source: Source
    at: float
    latest: str = ""


def decide(
    evidence: Evidence,
    current: Advice | float | None,
    bounds: Bounds = Bounds(),
    *,
    source: Source = "worker",
    at: float = 0.0,
) -> Advice:
    """The advice that follows from `evidence`, given the lease in force.

    * `current`: the previous advice, or the configured lease in seconds, or None if unknown.
    * `source`, `at`: written into the advice if it changes something; otherwise the previous ones
      stay.
    """
    lease = current.lease_seconds if isinstance(current, Advice) else current
    target = FACTOR * (evidence.p99_seconds or 0.0)
    renew = target > bounds.most and evidence.samples >= bounds.min_samples
    advised, reason = _advised_lease(evidence, lease, target, bounds)
    if advised is not None:
        advised = round(advised, 3)
    advice = Advice(advised, renew, reason, evidence, source, at, reason)
    former = current if isinstance(current, Advice) else None
    if former is not None and (former.lease_seconds, former.renew) == (advised, renew):
        reason = former.reason if former.at > 0.0 else reason
        return replace(advice, reason=reason, source=former.source, at=former.at)
    return advice


def _advised_lease(
    evidence: Evidence, lease: float | None, target: float, bounds: Bounds
) -> tuple[float | None, str]:
    """(the lease to request, the reason)."""
    if _too_many_losses(evidence):
        return _raised(evidence, lease, target, bounds)
    if evidence.samples < bounds.min_samples:
        return lease, f"kept: {evidence.samples} deliveries so far, {bounds.min_samples} are needed"
    if target > bounds.most:
        return lease, (
            f"renew: {_p99(evidence)} needs {target:.1f} s, more than the {bounds.most:g} s "
            "allowed; such deliveries depend on renewals, so set max_lease longer than they take"
        )
    return _with_hysteresis(evidence, lease, bounds.clamp(target), bounds)


def _with_hysteresis(
    evidence: Evidence, lease: float | None, advised: float, bounds: Bounds
) -> tuple[float | None, str]:
    """Apply hysteresis: the target if it differs enough from the current lease."""
    why = f"{FACTOR:g} x {_p99(evidence)}, at least {bounds.least:g} s"
    if lease is None or advised > RAISE_BEYOND * lease:
        return advised, f"{'set' if lease is None else 'raised'}: {why}"
    if advised >= LOWER_BELOW * lease:
        return lease, f"kept: {advised:.1f} s ({why}) is not far from it"
    if evidence.losses or evidence.cut_off:
        return lease, (
            f"kept: with {evidence.losses} losses and {evidence.cut_off} deliveries cut off, the "
            "measured durations are too short"
        )
    return advised, f"lowered: {why}"


def _too_many_losses(evidence: Evidence) -> bool:
    return evidence.losses >= max(MIN_LOSSES, math.ceil(LOSS_SHARE * evidence.samples))


def _raised(
    evidence: Evidence, lease: float | None, target: float, bounds: Bounds
) -> tuple[float | None, str]:
    """At least double the lease under which deliveries were lost, as far as the bounds allow."""
    why = (
        f"{evidence.lost_leases} leases were lost and {evidence.failed_settlements} settlements "
        f"came too late in {evidence.samples} deliveries"
    )
    base = bounds.least if lease is None else 2.0 * lease
    advised = bounds.clamp(max(base, min(target, bounds.most)))
    if lease is not None and advised <= lease:
        return lease, f"kept at its upper bound although {why}; check why renewals fail"
    return advised, f"raised: {why}"


def _p99(evidence: Evidence) -> str:
    return f"the p99 of {evidence.p99_seconds or 0.0:.1f} s held"


# -- Observations ----------------------------------------------------------------------------------
#
# How long deliveries of a queue are held, counted so that the counts of many workers add up.
#
# A histogram with log-spaced bins: 8 for each doubling, so a percentile is known to 9 %. Each bin
# counts with its upper edge, so percentiles err on the long side. Counts fade with a half-life, so
# that last week's load does not keep a lease long forever; therefore they are not whole numbers.

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
