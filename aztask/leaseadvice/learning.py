"""What one worker has observed since its last report, and how it goes into the shared document.

Rules
1. Only losses under the lease in force count for raising it: for a while after a raise, deliveries
   that were received under a shorter lease are still being lost.
2. Advice that never changed anything (`Advice.at` is 0) is not followed: the configured lease
   applies, also after you configure another one.
3. Advice of the data pipeline stands for a day against the workers' shorter memory, except that
   workers may raise it: losses happen now.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from aztask.leaseadvice.advice import Advice, Evidence, Observation, bin_of, decide
from aztask.leaseadvice.document import LeaseDocument, QueueEntry
from aztask.queues.lease.bounds import Bounds

PIPELINE_STANDS: Final = 86400.0
SAME: Final = 0.99
"""Two leases count as equal if one is at least this share of the other: services round."""


@dataclass(slots=True)
class LeaseCounts:
    """The counts of one queue.

    * `held`, `cut`: by bin, see `aztask.leaseadvice.advice`.
    * `lost`, `failed`: by the lease, in seconds.
    """

    held: Counter[int] = field(default_factory=Counter)
    cut: Counter[int] = field(default_factory=Counter)
    lost: Counter[float] = field(default_factory=Counter)
    failed: Counter[float] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.held or self.cut or self.lost or self.failed)

    @property
    def losses(self) -> int:
        """Leases lost and settlements refused."""
        return self.lost.total() + self.failed.total()

    def settled(self, held_seconds: float) -> None:
        """Count a delivery that was settled after `held_seconds`."""
        self.held[bin_of(held_seconds)] += 1

    def cut_off(self, held_seconds: float, lease_seconds: float) -> None:
        """Count a delivery whose lease was lost before its work was done."""
        self.cut[bin_of(held_seconds)] += 1
        self.lost[lease_seconds] += 1

    def refused(self, held_seconds: float, lease_seconds: float) -> None:
        """Count a delivery whose work was done, but whose settlement came too late."""
        self.held[bin_of(held_seconds)] += 1
        self.failed[lease_seconds] += 1

    def unsettled(self, held_seconds: float, lease_seconds: float) -> None:
        """Count a delivery whose work was done, but whose token was stale after a lost answer."""
        self.held[bin_of(held_seconds)] += 1
        self.lost[lease_seconds] += 1

    def put_back(self, other: LeaseCounts) -> None:
        """Add counts that could not be reported."""
        self.held += other.held
        self.cut += other.cut
        self.lost += other.lost
        self.failed += other.failed

    def observation(self, in_force: float, now: float) -> Observation:
        """The counts as an `Observation`, which can be added to others; see rule 1."""

        def recent(losses: Counter[float]) -> float:
            return float(sum(n for lease, n in losses.items() if lease >= SAME * in_force))

        return Observation(
            {number: float(count) for number, count in self.held.items()},
            {number: float(count) for number, count in self.cut.items()},
            recent(self.lost),
            recent(self.failed),
            self.lost.total(),
            self.failed.total(),
            now,
        )


def followed(entry: QueueEntry) -> float | None:
    """The lease that the document says to use; None means the configured one. See rule 2."""
    advice = entry.advice
    return advice.lease_seconds if advice is not None and advice.at > 0.0 else None


def learn(
    document: LeaseDocument,
    queue: str,
    counts: LeaseCounts,
    *,
    configured: float,
    bounds: Bounds,
    now: float,
) -> LeaseDocument:
    """Add what was observed of `queue` to the document and decide anew.

    * `configured`: the lease that applies without advice.
    * `now`: UTC epoch seconds.
    """
    entry = document.entry(queue)
    current = entry.advice
    if current is None or current.at <= 0.0:
        current = Advice(configured, False, "as configured", Evidence(), "worker", 0.0)
    in_force = current.lease_seconds or configured
    observed = entry.observed.faded(now).plus(counts.observation(in_force, now))
    advice = decide(observed.evidence(), current, bounds, source="worker", at=now)
    if _stands(current, advice, now):
        advice = current
    return document.with_entry(queue, QueueEntry(current, observed)).with_advice(queue, advice)


def _stands(current: Advice, advice: Advice, now: float) -> bool:
    """True if the current advice stays against `advice`; see rule 3."""
    raised = (advice.lease_seconds or 0.0) > (current.lease_seconds or 0.0)
    return current.source == "pipeline" and now - current.at < PIPELINE_STANDS and not raised
