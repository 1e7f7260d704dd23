"""Leases, renewals, prefetch and queues, recommended from the event log."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from aztask.errors import AztaskError
from aztask.leaseadvice.advice import (
    BINS_PER_DOUBLING,
    FIRST_EDGE,
    LAST_BIN,
    Advice,
    Evidence,
    Observation,
    bin_of,
    decide,
    edge_of,
)
from aztask.leaseadvice.document import LeaseDocument, LeaseStore, publish_advice
from aztask.leaseadvice.learning import SAME
from aztask.queues.lease.bounds import Bounds
from aztask.queues.lease.state import RENEW_AT
from aztask.spark.events.lengths import CUT_OFF, cut_off_runs
from aztask.spark.events.statistics import OUTCOMES, RAN

__all__ = ["publish", "recommend"]


# -- recommend -------------------------------------------------------------------------------
#
# From the event log to published lease advice.
#
# Rules
# 1. The job over the events runs once. Decisions are cheap: if another writer publishes first, they
#    are made again from the newest document. So another writer's advice is never overwritten.
# 2. Only lease advice is published. Recommendations on prefetch and splits are for people.


# -- Evidence --------------------------------------------------------------------------------------
#
# Counts each queue's deliveries from the event log, as evidence for decisions on leases.
#
# Rules
# 1. One job reads the events. It returns counts by bin (`aztask.leaseadvice.advice`), a few
#    hundred for each task of a queue, however many events there are.
# 2. The bins are those in which workers count, so the same decision serves both.
# 3. A run that a lost lease cut off is counted apart: it would look like a short run. A delivery
#    whose lease was lost before its task started is a loss, but no run, and held nothing up.

HELD: Final = "held"
CUT: Final = "cut"
RUN: Final = "run"
STOPPED: Final = "stopped"
LOST: Final = "lost"
FAILED: Final = "failed"
LEASE: Final = "lease"


@dataclass(slots=True)
class TaskEvidence:
    """One task's deliveries on one queue, by bin of seconds.

    held: how long leases were held until settlement. cut: until they were lost, of those whose task
    had started. run: how long runs took. stopped: how long those are known to have taken that did
    not end.
    """

    held: Counter[int] = field(default_factory=Counter)
    cut: Counter[int] = field(default_factory=Counter)
    run: Counter[int] = field(default_factory=Counter)
    stopped: Counter[int] = field(default_factory=Counter)

    def add(self, other: TaskEvidence) -> None:
        """Add the counts of another task."""
        self.held += other.held
        self.cut += other.cut
        self.run += other.run
        self.stopped += other.stopped

    def runs(self) -> Evidence:
        """Percentiles of run time; None if too many runs were cut off before."""
        both, cut = self.run + self.stopped, self.stopped.total()
        p50, p99 = (survived(self.run, self.stopped, part) for part in (0.5, 0.99))
        return Evidence(both.total(), p50, p99, cut)

    def longer_than(self, seconds: float) -> float:
        """The part of the deliveries held for longer than `seconds`, by the bins' upper edges."""
        return self.between(seconds)[0]

    def between(self, seconds: float) -> tuple[float, float]:
        """As `longer_than`: (at least, at most); how long those cut off take is unknown."""
        both = self.held + self.cut
        if not both:
            return 0.0, 0.0
        beyond = sum(count for number, count in both.items() if edge_of(number) > seconds)
        unknown = sum(count for number, count in self.cut.items() if edge_of(number) <= seconds)
        return beyond / both.total(), (beyond + unknown) / both.total()


def survived(ended: Mapping[int, int], stopped: Mapping[int, int], part: float) -> float | None:
    """The Kaplan-Meier estimate of a percentile, from counts by bin; see `events.lengths`."""
    survival, at_risk = 1.0, sum(ended.values()) + sum(stopped.values())
    for number in sorted({*ended, *stopped}):
        survival *= 1 - ended.get(number, 0) / at_risk
        if survival <= 1 - part + 1e-9:
            return edge_of(number)
        at_risk -= ended.get(number, 0) + stopped.get(number, 0)
    return None


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
        .select("queue", "task", "ts", "m.kind", "m.seconds")
    )
    started = cut_off_runs(events)
    for kind, column in ((STOPPED, "seconds"), (CUT, "held")):
        known = started.where(F.col(column).isNotNull())
        seconds = F.col(column).alias("seconds")
        measured = measured.unionByName(
            known.select("queue", "task", "ts", F.lit(kind).alias("kind"), seconds)
        )
    measured = measured.withColumn("bin", _bin("seconds"))
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
            bins = {HELD: task.held, CUT: task.cut, RUN: task.run, STOPPED: task.stopped}
            bins[kind][number] += count
    return dict(sorted(found.items()))


def _relevant_kinds() -> tuple[str, ...]:
    return (*OUTCOMES, "started", "lease_lost", "settle_failed")


def _measures() -> Column:
    """Up to three pairs of kind and seconds from each event."""
    kind = F.col("event")
    ended = kind.isin(*OUTCOMES, "settle_failed")
    lost = kind == "lease_lost"
    stopped = F.coalesce(F.col("error_type").isin(*CUT_OFF), F.lit(False))
    pairs = [
        (HELD, ended, "held_seconds"),
        (RUN, kind.isin(*RAN) & ~stopped, "duration_seconds"),
        (STOPPED, kind.isin(*RAN) & stopped, "duration_seconds"),
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
    """`aztask.leaseadvice.advice.bin_of` as an expression of Spark."""
    seconds = F.col(name)
    number = F.ceil(BINS_PER_DOUBLING * F.log2(seconds / FIRST_EDGE) - 1e-9)
    return F.when(seconds > FIRST_EDGE, F.least(number, F.lit(LAST_BIN))).otherwise(0).cast("int")


def _counts(bins: Mapping[int, int]) -> dict[int, float]:
    return {number: float(count) for number, count in bins.items()}


# -- recommends a queue's lease, renewals and prefetch, and whether to split it ------------
#
# Pure functions from evidence to values. Workers decide on leases the same way
# (`aztask.leaseadvice.advice`).
#
# Rules
# 1. `decide` chooses the lease: it asks for a minimum sample, changes a published lease only if it
#    is far off, never shortens it by durations that lost leases cut off, and raises it when too
#    many leases were lost. If the service does not grant a lease that long, it advises to renew.
# 2. Prefetch keeps a slot busy for `PREFETCH_SECONDS`, but no message waits for more than a part of
#    its lease. If one run takes longer than that, it is 0, and idle workers get the message.
# 3. Tasks whose typical runs differ by more than `MAGNITUDE` get different queues, if each has
#    enough runs to compare and the longest ones are long enough to matter.


PREFETCH_SECONDS: Final = 0.25
"""As the worker chooses without --prefetch."""
MAX_PREFETCH: Final = 1000
WAITING_PART: Final = 0.25
"""The part of a lease that a prefetched delivery may wait."""
MAGNITUDE: Final = 10.0
SPLIT_FROM: Final = 1.0
"""Seconds. If even the longest tasks take less, no other task waits for them noticeably."""
SPLIT_SAMPLES: Final = 20
"""Runs of a task that suffice to assign it to a class of duration."""
NAMES: Final = {2: ("fast", "slow"), 3: ("fast", "medium", "slow")}


@dataclass(frozen=True, slots=True)
class DurationClass:
    """Tasks of one queue that take about equally long. queue: a name for their own queue."""

    queue: str
    tasks: tuple[str, ...]
    runs: int
    p50_seconds: float
    p99_seconds: float
    lease_seconds: float | None
    renew: bool


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a lease would have meant for the deliveries of the log. Parts are of 1.

    lease_seconds: also the longest time after which a killed worker's message is delivered again.
    lost_at_least, lost_at_most: deliveries that would have lost it without a renewal; they differ
    by those that were cut off earlier, whose length is unknown. The former ones are of the lease
    that is in force, None if that is unknown.
    """

    lease_seconds: float
    lost_at_least: float
    lost_at_most: float
    former_lease_seconds: float | None
    former_lost_at_least: float | None
    former_lost_at_most: float | None

    @classmethod
    def of(cls, deliveries: TaskEvidence, lease: float, former: float | None) -> Simulation:
        """Compare both leases with how long each delivery was held."""
        before = (None, None) if former is None else deliveries.between(former)
        return cls(lease, *deliveries.between(lease), former, *before)

    def __str__(self) -> str:
        text = f"{_parts(self.lost_at_least, self.lost_at_most)} of these deliveries would have "
        text += f"lost a lease of {self.lease_seconds:g} s without a renewal"
        again = f"a killed worker's messages come again after {self.lease_seconds:g} s at most"
        at_least, at_most = self.former_lost_at_least, self.former_lost_at_most
        if at_least is None or at_most is None or self.former_lease_seconds == self.lease_seconds:
            return f"{text}; {again}"
        text += f", {_parts(at_least, at_most)} one of {self.former_lease_seconds:g} s"
        return f"{text}; {again} instead of {self.former_lease_seconds:g} s"


def _parts(at_least: float, at_most: float) -> str:
    low, high = (f"{100 * part:.3g}" for part in (at_least, at_most))
    return f"{low} %" if low == high else f"{low} to {high} %"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommendations for one queue. Durations are seconds, parts are of 1.

    current_lease_seconds: as published, otherwise of the newest run. advice: the lease with its
    reason and evidence. renewed_part: of the deliveries, those that need a renewal under the
    advised lease. prefetch: deliveries to hold for each task that runs at once; None: too little is
    known. split: classes of duration; empty if one queue suffices. simulated: what the advised
    lease would have meant for these deliveries. reasons: one sentence for each of lease,
    simulation, renewal, prefetch and split.
    """

    queue: str
    current_lease_seconds: float | None
    advice: Advice
    renewed_part: float
    run_p50_seconds: float | None
    run_p99_seconds: float | None
    prefetch: int | None
    split: tuple[DurationClass, ...]
    simulated: Simulation | None
    reasons: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        return {**asdict(self), "reasons": dict(self.reasons)}


def recommended(
    deliveries: QueueEvidence, published: Advice | None, bounds: Bounds, *, at: float
) -> Recommendation:
    """The recommendations that follow from a queue's deliveries.

    published: the advice in force, None if there is none. at: seconds since 1970 (UTC).
    """
    in_force = published if published is not None and published.at > 0.0 else None
    lease = in_force.lease_seconds if in_force is not None else deliveries.lease_seconds
    evidence = deliveries.evidence(lease)
    current: Advice | float | None = in_force if in_force is not None else lease
    advice = decide(evidence, current, bounds, source="pipeline", at=at)
    total = deliveries.all_tasks()
    runs = total.runs()
    advised = advice.lease_seconds
    renewed = total.longer_than(RENEW_AT * advised) if advised is not None else 0.0
    prefetch, why_prefetch = prefetch_of(runs, advised, bounds.min_samples)
    split, why_split = split_of(deliveries, bounds)
    known = advised is not None and evidence.samples > 0
    simulated = Simulation.of(total, advised, lease) if advised is not None and known else None
    return Recommendation(
        deliveries.queue,
        lease,
        advice,
        renewed,
        runs.p50_seconds,
        runs.p99_seconds,
        prefetch,
        split,
        simulated,
        {
            "lease": advice.latest or advice.reason,
            "simulation": str(simulated) if simulated else "none: nothing is known yet",
            "renewal": _renewal(renewed, evidence, advice),
            "prefetch": why_prefetch,
            "split": why_split,
        },
    )


def prefetch_of(
    runs: Evidence, lease: float | None, min_samples: int = 1
) -> tuple[int | None, str]:
    """(deliveries for each task that runs at once, why); see rule 2."""
    if runs.samples < min_samples or lease is None:
        return None, f"leave it to the worker: {runs.samples} runs are too few to decide"
    if not runs.p50_seconds or not runs.p99_seconds:
        return None, (
            f"leave it to the worker: {runs.cut_off} of {runs.samples} runs were cut off, so "
            "it is unknown how long they take"
        )
    waiting = WAITING_PART * lease
    if runs.p99_seconds > waiting:
        return 0, (
            f"none: a run of up to {runs.p99_seconds:.1f} s (p99) would keep a prefetched message "
            f"waiting for more than a quarter of its lease of {lease:g} s"
        )
    enough = math.ceil(PREFETCH_SECONDS / runs.p50_seconds)
    limit = int(waiting / runs.p99_seconds)
    count = max(1, min(enough, limit, MAX_PREFETCH))
    return count, (
        f"{count} for each task that runs at once: {PREFETCH_SECONDS:g} s of work at "
        f"{runs.p50_seconds:.3g} s a run (p50), waiting for less than a quarter of the lease"
    )


def split_of(deliveries: QueueEvidence, bounds: Bounds) -> tuple[tuple[DurationClass, ...], str]:
    """(classes of duration, why); see rule 3."""
    known = [
        (runs.p50_seconds, task)
        for task, its in deliveries.tasks.items()
        if (runs := its.runs()).samples >= SPLIT_SAMPLES and runs.p50_seconds is not None
    ]
    if len(known) < 2:
        return (), "no: fewer than two tasks have enough runs to compare"
    classes: list[list[str]] = []
    shortest = 0.0
    for p50, task in sorted(known):
        if not classes or p50 > MAGNITUDE * shortest:
            classes.append([])
            shortest = p50
        classes[-1].append(task)
    longest = max(known)[0]
    ratio = longest / min(known)[0]
    if len(classes) < 2:
        return (), f"no: typical runs differ only by a factor of {ratio:.1f}"
    if longest < SPLIT_FROM:
        return (
            (),
            f"no: even the longest tasks take {longest:.2g} s (p50), too short to delay others",
        )
    made = tuple(
        _class(deliveries, name, tasks, bounds)
        for name, tasks in zip(_names(deliveries.queue, len(classes)), classes, strict=True)
    )
    where = "; ".join(f"{', '.join(each.tasks)} to {each.queue}" for each in made)
    return made, (
        f"yes: typical runs differ by a factor of {ratio:.0f}, so short ones wait for long ones "
        f"and share their lease: {where}"
    )


def _class(
    deliveries: QueueEvidence, name: str, tasks: Sequence[str], bounds: Bounds
) -> DurationClass:
    total = TaskEvidence()
    for task in tasks:
        total.add(deliveries.tasks[task])
    runs = total.runs()
    part = QueueEvidence(name, None, {"": total})
    advice = decide(
        part.evidence(None), None, Bounds(bounds.least, bounds.most, 1), source="pipeline"
    )
    return DurationClass(
        name,
        tuple(tasks),
        runs.samples,
        runs.p50_seconds or 0.0,
        runs.p99_seconds or 0.0,
        advice.lease_seconds if not advice.renew else bounds.most,
        advice.renew,
    )


def _names(queue: str, count: int) -> list[str]:
    ends = NAMES.get(count) or tuple(f"class-{number}" for number in range(1, count + 1))
    return [f"{queue[: 55 - len(end)].rstrip('-')}-{end}" for end in ends]


def _renewal(renewed: float, evidence: Evidence, advice: Advice) -> str:
    if advice.renew:
        return "needed: nearly all deliveries are held for longer than the longest lease allowed"
    if advice.lease_seconds is None or not evidence.samples:
        return "keep it on: nothing is known yet"
    if renewed == 0.0:
        return f"none of {evidence.samples} deliveries needs one under {advice.lease_seconds:g} s"
    return (
        f"{100 * renewed:.2g} % of {evidence.samples} deliveries need one under "
        f"{advice.lease_seconds:g} s: keep it on"
    )


TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class AdvicePublication:
    """The result of a publication. revision: of the document now. queues: with changed advice."""

    recommendations: tuple[Recommendation, ...]
    revision: int
    queues: tuple[str, ...]


def recommend(
    events: DataFrame,
    *,
    published: LeaseDocument = LeaseDocument(),
    bounds: Bounds = Bounds(),
    queues: Sequence[str] = (),
    at: float | None = None,
) -> tuple[Recommendation, ...]:
    """The recommendations for each queue of the events, or for `queues` only. Runs a job.

    published: the advice in force; see `aztask.leaseadvice.stores.open_lease_store`. bounds: the
    shortest and the longest lease; ``most`` is what the service grants. at: seconds since 1970
    (UTC); None: now.
    """
    return decide_queues(observe(events), published, bounds, queues=queues, at=at)


def publish(
    events: DataFrame,
    store: LeaseStore,
    *,
    bounds: Bounds = Bounds(),
    queues: Sequence[str] = (),
    at: float | None = None,
) -> AdvicePublication:
    """`recommend` with the document in `store`, and publish the leases that change.

    Another writer's document is never overwritten: it is read, and the decisions are made again.
    Raises AztaskError if that happens `TRIES` times, BrokerUnavailable, and DecodeError if the
    stored document is damaged. If the process dies, the document is either the old or the new one.
    """
    return publish_evidence(observe(events), store, bounds=bounds, queues=queues, at=at)


def decide_queues(
    evidence: Mapping[str, QueueEvidence],
    published: LeaseDocument,
    bounds: Bounds,
    *,
    queues: Sequence[str] = (),
    at: float | None = None,
) -> tuple[Recommendation, ...]:
    """The recommendations that follow from the evidence, by queue."""
    now = time.time() if at is None else at
    return tuple(
        recommended(each, published.entry(queue).advice, bounds, at=now)
        for queue, each in sorted(evidence.items())
        if queue and (not queues or queue in queues)
    )


def publish_evidence(
    evidence: Mapping[str, QueueEvidence],
    store: LeaseStore,
    *,
    bounds: Bounds = Bounds(),
    queues: Sequence[str] = (),
    at: float | None = None,
) -> AdvicePublication:
    """As `publish`, with evidence that was collected before."""
    for _ in range(TRIES):
        stored = store.load()
        found = decide_queues(evidence, stored.document, bounds, queues=queues, at=at)
        changed = {each.queue: each.advice for each in found if _changes_lease(each)}
        if not changed:
            return AdvicePublication(found, stored.document.revision, ())
        if publish_advice(store, changed, stored):
            return AdvicePublication(found, stored.document.revision + 1, tuple(changed))
    raise AztaskError(
        f"nothing was published: another writer published first {TRIES} times; try again"
    )


def _changes_lease(recommendation: Recommendation) -> bool:
    """Whether the advice changes the lease in force; advice to keep it is not published."""
    advice, lease = recommendation.advice, recommendation.current_lease_seconds
    return advice.lease_seconds is not None and (advice.lease_seconds != lease or advice.renew)
