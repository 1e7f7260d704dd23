"""Counts each queue's deliveries from the event log, as evidence for decisions on leases.

Rules
1. One job reads the events. It returns counts by bin (`aztask.leaseadvice.observation`), a few
   hundred for each task of a queue, however many events there are.
2. The bins are those in which workers count, so the same decision serves both.
3. A run that a lost lease cut off is counted apart: it would look like a short run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from aztask.leaseadvice.advice import Evidence
from aztask.leaseadvice.learning import SAME
from aztask.leaseadvice.observation import (
    BINS_PER_DOUBLING,
    FIRST_EDGE,
    LAST_BIN,
    Observation,
    bin_of,
    edge_of,
)
from aztask.spark.events.statistics import OUTCOMES, RAN

HELD: Final = "held"
CUT: Final = "cut"
RUN: Final = "run"
LOST: Final = "lost"
FAILED: Final = "failed"
LEASE: Final = "lease"


@dataclass(slots=True)
class TaskEvidence:
    """One task's deliveries on one queue, by bin of seconds.

    held: how long leases were held until settlement. cut: until they were lost. run: how long runs
    took.
    """

    held: Counter[int] = field(default_factory=Counter)
    cut: Counter[int] = field(default_factory=Counter)
    run: Counter[int] = field(default_factory=Counter)

    def add(self, other: TaskEvidence) -> None:
        """Add the counts of another task."""
        self.held += other.held
        self.cut += other.cut
        self.run += other.run

    def runs(self) -> Evidence:
        """Percentiles of run time; a run that was cut off took at least as long as it was held."""
        return Observation(_counts(self.run), _counts(self.cut)).evidence()

    def longer_than(self, seconds: float) -> float:
        """The part of the deliveries held for longer than `seconds`, by the bins' upper edges."""
        both = self.held + self.cut
        beyond = sum(count for number, count in both.items() if edge_of(number) > seconds)
        return beyond / both.total() if both else 0.0


@dataclass(slots=True)
class QueueEvidence:
    """One queue's deliveries.

    lease_seconds: the lease of the newest run, None if unknown. tasks: by name. lost, failed: lost
    leases and refused settlements, by bin of the lease.
    """

    queue: str
    lease_seconds: float | None = None
    tasks: dict[str, TaskEvidence] = field(default_factory=dict)
    lost: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)

    def all_tasks(self) -> TaskEvidence:
        """The counts of all tasks together."""
        total = TaskEvidence()
        for task in self.tasks.values():
            total.add(task)
        return total

    def evidence(self, in_force: float | None) -> Evidence:
        """The evidence for a decision. in_force: the lease in force, in seconds.

        Losses under a shorter lease do not raise it further. They count as cut off, so that two
        jobs over the same events do not raise the lease and then lower it again.
        """
        least = 0 if in_force is None else bin_of(SAME * in_force)
        total = self.all_tasks()
        evidence = Observation(
            _counts(total.held),
            _counts(total.cut),
            float(sum(count for number, count in self.lost.items() if number >= least)),
            float(sum(count for number, count in self.failed.items() if number >= least)),
        ).evidence()
        losses = self.lost.total() + self.failed.total()
        return replace(evidence, cut_off=max(evidence.cut_off, losses - evidence.losses))


def observe(events: DataFrame) -> dict[str, QueueEvidence]:
    """What happened on each queue, by its name. Runs a job.

    events: as `aztask.spark.read_events` gives them, each one once.
    """
    measured = (
        events.where(F.col("event").isin(*_relevant_kinds()))
        .select("queue", "task", "ts", F.explode(F.filter(_measures(), _is_known)).alias("m"))
        .select("queue", "task", "ts", "m.kind", "m.seconds", _bin("m.seconds").alias("bin"))
    )
    rows = measured.groupBy("queue", "task", "kind", "bin").agg(
        F.count("*").alias("count"),
        F.max(F.struct("ts", "seconds")).alias("newest"),
    )
    return gathered(row.asDict(recursive=True) for row in rows.toLocalIterator())


def gathered(rows: Iterable[Mapping[str, Any]]) -> dict[str, QueueEvidence]:
    """Sum rows of (queue, task, kind, bin, count, newest) by queue."""
    found: dict[str, QueueEvidence] = {}
    newest: dict[str, float] = {}
    for row in rows:
        queue, kind, number, count = row["queue"], row["kind"], int(row["bin"]), int(row["count"])
        evidence = found.setdefault(queue, QueueEvidence(queue))
        if kind == LEASE:
            if row["newest"]["ts"] >= newest.get(queue, float("-inf")):
                newest[queue] = row["newest"]["ts"]
                evidence.lease_seconds = row["newest"]["seconds"]
        elif kind == LOST:
            evidence.lost[number] += count
        elif kind == FAILED:
            evidence.failed[number] += count
        else:
            task = evidence.tasks.setdefault(row["task"], TaskEvidence())
            {HELD: task.held, CUT: task.cut, RUN: task.run}[kind][number] += count
    return dict(sorted(found.items()))


def _relevant_kinds() -> tuple[str, ...]:
    return (*OUTCOMES, "started", "lease_lost", "settle_failed")


def _measures() -> Column:
    """Up to three pairs of kind and seconds from each event."""
    kind = F.col("event")
    ended = kind.isin(*OUTCOMES, "settle_failed")
    lost = kind == "lease_lost"
    pairs = [
        (HELD, ended, "held_seconds"),
        (CUT, lost, "held_seconds"),
        (RUN, kind.isin(*RAN), "duration_seconds"),
        (LOST, lost, "lease_seconds"),
        (FAILED, kind == "settle_failed", "lease_seconds"),
        (LEASE, kind == "started", "lease_seconds"),
    ]
    return F.array(
        *(
            F.when(which, F.struct(F.lit(name).alias("kind"), F.col(column).alias("seconds")))
            for name, which, column in pairs
        )
    )


def _is_known(measure: Column) -> Column:
    seconds = measure["seconds"]
    return measure.isNotNull() & seconds.isNotNull() & (seconds >= 0) & ~F.isnan(seconds)


def _bin(name: str) -> Column:
    """`aztask.leaseadvice.observation.bin_of` as an expression of Spark."""
    seconds = F.col(name)
    number = F.ceil(BINS_PER_DOUBLING * F.log2(seconds / FIRST_EDGE) - 1e-9)
    return F.when(seconds > FIRST_EDGE, F.least(number, F.lit(LAST_BIN))).otherwise(0).cast("int")


def _counts(bins: Mapping[int, int]) -> dict[int, float]:
    return {number: float(count) for number, count in bins.items()}
