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
from dataclasses import dataclass, replace
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
