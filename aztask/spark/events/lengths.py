"""How long runs take, when some were cut off before they ended.

Rules
1. A run was cut off if its lease was lost, its worker or process was killed, a time limit stopped
   it, or the log ends before it did. It took at least as long as it is known to have run: until its
   limit, or until its lease was last known to be held. It never counts as a run of that length.
2. A delivery whose lease was lost before its task started is no run.
3. Percentiles with runs that were cut off are Kaplan-Meier estimates. They assume that a run is
   cut off for reasons other than its own length: right for a lease or limit that cuts every run at
   one time, and for a killed worker; wrong for a run that kills its worker because it is long. What
   lies beyond the longest completed runs is unknown, and null.
4. The interval of a percentile is the one of its survival curve (Greenwood's variance, log-log),
   at 95 %. An end that the runs do not tell is null.
5. In an hour of a queue, or a step of time, with such runs the percentiles are estimates, too. A
   run without an end counts where its loss, or else its last renewal, was noted.
6. A task has two classes of runs if a gap of `CLASS_GAP` doublings parts its completed runs.
7. Durations are counted in bins of `BINS_PER_DOUBLING`, by their upper edge: up to 1.1 % too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from aztask.spark.events.statistics import HOUR, RAN, SHARES, plain
from aztask.spark.kind import kept, release

CUT_OFF: Final = ("TimeLimitExceeded", "MaxLeaseExceeded", "WorkerCrashed")
"""Error types of runs that were stopped: by a limit, or because their process was killed."""
BINS_PER_DOUBLING: Final = 64
FIRST_EDGE: Final = 1e-4
"""Seconds: shorter runs share the first bin."""
INTERVAL_RUNS: Final = 1000
"""With fewer runs, a percentile is shown with its interval."""
Z: Final = 1.959964
LEVELS: Final = {"task": 0b01, "queue": 0b10, "total": 0b11, "queue_hour": 4, "step": 5}
"""Of the first three, the keys that they sum over, as the bits of Spark's ``grouping_id``."""
CLASS_GAP: Final = 2.0
"""Doublings between the 95th percentile of the short runs and the 5th of the long ones."""
CLASS_SHARE: Final = 0.05
"""Each class has at least this share of the runs."""
CLASS_RUNS: Final = 20

_KEYS: Final = ("level", "task", "queue", "hour", "at")
_WORKER: Final = ("worker", "task", "queue")
_DELIVERY: Final = (*_WORKER, "task_id", "delivery_count", "resubmit_count")


def cut_off_runs(events: DataFrame, doubtful: DataFrame | None = None) -> DataFrame:
    """The runs that started and never ended in the log.

    Columns: queue, task, ts. noted: when the log last knows of it. seconds: how long the run is
    known to have gone on. held: how long its lease had been held when it was lost; null if the log
    has no loss, because the worker was killed or still runs it.

    Only events of workers that started more runs of a task than ended are shuffled: `doubtful`, if
    the caller knows them.
    """
    kinds = events.where(F.col("event").isin("started", "renewed", "lease_lost", *RAN))
    ended = F.col("event").isin(*RAN)
    if doubtful is None:
        doubtful = _doubtful(_counted(events))
    granted = F.col("event").isin("started", "renewed")
    until = F.col("ts") + F.col("lease_seconds")
    lost = F.col("event") == "lease_lost"
    runs = (
        kinds.join(F.broadcast(doubtful), list(_WORKER), "left_semi")
        .groupBy(*_DELIVERY)
        .agg(
            F.min(F.when(F.col("event") == "started", F.col("ts"))).alias("ts"),
            F.count(F.when(ended, 1)).alias("ended"),
            F.max(F.when(granted, F.col("ts"))).alias("seen"),
            F.max(F.when(granted, until)).alias("until"),
            F.max(F.when(lost, F.col("ts"))).alias("lost"),
            F.max(F.when(lost, F.col("held_seconds"))).alias("held"),
        )
        .where("ts IS NOT NULL AND ended = 0")
    )
    # A frozen worker notices a loss late; its run went on for as long as the lease at most.
    end = F.least("lost", "until")  # of the two that are known
    known = F.when(F.col("lost").isNotNull(), end).otherwise(F.col("seen"))
    seconds = F.greatest(F.lit(0.0), known - F.col("ts"))
    held = F.when(F.col("lost").isNotNull(), F.coalesce("held", F.lit(0.0)))
    noted = F.coalesce("lost", "seen").alias("noted")
    return runs.select("queue", "task", "ts", noted, seconds.alias("seconds"), held.alias("held"))


@dataclass(frozen=True, slots=True)
class RunClasses:
    """Two classes of completed runs of one task: how many, and their medians in seconds."""

    task: str
    short_runs: int
    short_p50: float
    long_runs: int
    long_p50: float


@dataclass(frozen=True, slots=True)
class RunLengths:
    """rows: see `run_lengths`. classes: the tasks with two classes of runs, sorted by name."""

    rows: list[dict[str, Any]]
    classes: list[RunClasses]


def run_lengths(events: DataFrame, step: int | None = None) -> RunLengths:
    """The lengths of runs by task, by queue and in total: one row for each.

    Fields: level (`LEVELS`); task, queue; run_ended, run_cut_off: numbers of runs; run_longest:
    the longest time that one is known to have taken; for each of `SHARES` run_p50 and so on, with
    run_p50_low and run_p50_high, the ends of its interval.

    step: also by queue and hour (field hour), and by step of so many seconds (field at), where runs
    were cut off.

    Reads the events once, once more if runs are open, and with `step` twice more if any were cut
    off: all else is made of their counts.
    """
    counted = kept(_counted(events))
    open_ = None
    try:
        finest = counted.where("bin IS NOT NULL").groupBy("task", "queue", "bin").agg(*_sums())
        doubtful = _doubtful(counted)
        if not doubtful.isEmpty():
            number = _bin_of("seconds")
            open_ = kept(cut_off_runs(events, doubtful).withColumn("bin", number))
            stopped = (F.lit(0).alias("d"), F.count("*").alias("c"))
            binned = open_.where("bin IS NOT NULL").groupBy("task", "queue", "bin")
            finest = finest.unionByName(binned.agg(*stopped, F.max("seconds").alias("longest")))
        task, queue, bin_ = F.col("task"), F.col("queue"), F.col("bin")
        levels = finest.groupingSets([[task, bin_], [queue, bin_], [bin_]], task, queue, bin_).agg(
            F.shiftright(F.grouping_id(), 1).alias("level"), *_sums()
        )
        by_task = finest.groupBy("task", "bin").agg(*_sums()).collect()
        if step is not None and any(row["c"] for row in by_task):
            timed = _over_time(events, open_, step)
            levels = levels.unionByName(timed, allowMissingColumns=True)
        else:
            levels = levels.withColumns({name: F.lit(None).cast("long") for name in ("hour", "at")})
        rows = plain(_percentiles(_curve(levels)))
        return RunLengths(rows, _all_classes(by_task))
    finally:
        release(counted)
        if open_ is not None:
            release(open_)


def _sums() -> tuple[Column, Column, Column]:
    return (F.sum("d").alias("d"), F.sum("c").alias("c"), F.max("longest").alias("longest"))


def _over_time(events: DataFrame, open_: DataFrame | None, step: int) -> DataFrame:
    """The counts of each bin, by queue and hour and by step, where runs were cut off."""

    def timed(ts: str) -> list[Column]:
        return [
            (F.floor(F.col(ts) / length) * length).cast("long").alias(name)
            for name, length in (("hour", HOUR), ("at", step))
        ]

    runs = events.where(F.col("event").isin(*RAN)).select(
        "queue", *timed("ts"), _bin_of("duration_seconds").alias("bin"),
        F.col("duration_seconds").alias("seconds"), _stopped().alias("stopped"),
    ).where("bin IS NOT NULL")  # fmt: skip
    if open_ is not None:
        lost = open_.where("bin IS NOT NULL").select(
            "queue", *timed("noted"), "bin", "seconds", F.lit(True).alias("stopped")
        )
        runs = runs.unionByName(lost)
    # The hours and steps are few, and often none: all other runs are not shuffled.
    cut = runs.where("stopped").select("queue", "hour", "at").distinct().collect()
    spark = events.sparkSession
    hours = spark.createDataFrame(
        list({(row["queue"], row["hour"]) for row in cut}), "queue STRING, hour BIGINT"
    )
    steps = spark.createDataFrame(list({(row["at"],) for row in cut}), "at BIGINT")
    counts = (
        F.count(F.when(~F.col("stopped"), 1)).alias("d"),
        F.count(F.when(F.col("stopped"), 1)).alias("c"),
        F.max("seconds").alias("longest"),
    )

    def level(name: str, keys: list[str], marked: DataFrame) -> DataFrame:
        its = runs.join(F.broadcast(marked), keys, "left_semi").groupBy(*keys, "bin").agg(*counts)
        return its.withColumn("level", F.lit(LEVELS[name]))

    return level("queue_hour", ["queue", "hour"], hours).unionByName(
        level("step", ["at"], steps), allowMissingColumns=True
    )


def _all_classes(rows: Sequence[Row]) -> list[RunClasses]:
    """The classes of each task. rows: task, bin and the number d of completed runs."""
    tasks: dict[str, dict[int, int]] = {}
    for row in rows:
        if row["d"]:
            tasks.setdefault(row["task"], {})[row["bin"]] = row["d"]
    found = ((task, classes_of(tasks[task])) for task in sorted(tasks))
    return [
        RunClasses(task, sum(short.values()), _median(short), sum(long.values()), _median(long))
        for task, both in found
        if both is not None
        for short, long in [both]
    ]


def classes_of(runs: dict[int, int]) -> tuple[dict[int, int], dict[int, int]] | None:
    """The short and the long runs, {bin: their number}; None if they are of one class.

    They are parted where the variance of the logarithm between both is largest (Otsu's method), and
    are two classes if a gap lies between most runs of the one and most of the other.
    """
    order = sorted(runs)
    count, total = sum(runs.values()), sum(bin_ * number for bin_, number in runs.items())
    least = max(CLASS_RUNS, CLASS_SHARE * count)
    best, parted = 0.0, None
    below = sum_below = 0
    for place, bin_ in enumerate(order[:-1]):
        below += runs[bin_]
        sum_below += bin_ * runs[bin_]
        above = count - below
        if below < least or above < least:
            continue
        apart = below * above * (sum_below / below - (total - sum_below) / above) ** 2
        if apart > best:
            best, parted = apart, place + 1
    if parted is None:
        return None
    short = {bin_: runs[bin_] for bin_ in order[:parted]}
    long = {bin_: runs[bin_] for bin_ in order[parted:]}
    gap = _rank(long, CLASS_SHARE) - _rank(short, 1 - CLASS_SHARE)
    return (short, long) if gap >= CLASS_GAP * BINS_PER_DOUBLING else None


def _rank(runs: dict[int, int], share: float) -> int:
    """The bin at which this share of the runs is reached."""
    wanted, seen = share * sum(runs.values()), 0
    for bin_ in sorted(runs):
        seen += runs[bin_]
        if seen >= wanted:
            return bin_
    return max(runs)


def _median(runs: dict[int, int]) -> float:
    return float(FIRST_EDGE * 2.0 ** (_rank(runs, 0.5) / BINS_PER_DOUBLING))


def _counted(events: DataFrame) -> DataFrame:
    """By worker, task, queue and bin: runs that started, ended, and of measured ones d and c.

    d: ended by themselves. c: were stopped. bin: null for starts, and for ends without a length.
    """
    kind, seconds = F.col("event"), F.col("duration_seconds")
    ended = kind.isin(*RAN)
    stopped = _stopped()
    measured = ended & (seconds >= 0) & ~F.isnan(seconds)
    return (
        events.where(ended | (kind == "started"))
        .groupBy(*_WORKER, F.when(measured, _bin("duration_seconds")).alias("bin"))
        .agg(
            F.count(F.when(kind == "started", 1)).alias("started"),
            F.count(F.when(ended, 1)).alias("ended"),
            F.count(F.when(measured & ~stopped, 1)).alias("d"),
            F.count(F.when(measured & stopped, 1)).alias("c"),
            F.max(F.when(measured, seconds)).alias("longest"),
        )
    )


def _doubtful(counted: DataFrame) -> DataFrame:
    """The workers that have started more runs of a task than ended."""
    sums = [F.sum(name).alias(name) for name in ("started", "ended")]
    return counted.groupBy(*_WORKER).agg(*sums).where("started > ended").select(*_WORKER)


def _stopped() -> Column:
    """Whether the event ended a run that was stopped."""
    return F.coalesce(F.col("error_type").isin(*CUT_OFF), F.lit(False))


def _bin_of(seconds: str) -> Column:
    """The bin of a length; null without one."""
    known = (F.col(seconds) >= 0) & ~F.isnan(seconds)
    return F.when(known, _bin(seconds))


def _bin(seconds: str) -> Column:
    number = F.ceil(BINS_PER_DOUBLING * F.log2(F.col(seconds) / FIRST_EDGE) - 1e-9)
    return F.when(F.col(seconds) > FIRST_EDGE, number).otherwise(0).cast("int")


def _curve(counted: DataFrame) -> DataFrame:
    """The survival after each bin, and the ends of its interval.

    Runs that were cut off in a bin count as at risk in it: they took at least that long.
    """
    each = Window.partitionBy(*_KEYS)
    order = each.orderBy("bin")
    until = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    left = order.rowsBetween(Window.currentRow, Window.unboundedFollowing)
    d, n = F.col("d"), F.col("n")
    some = d < n
    rows = counted.withColumn("n", F.sum(F.col("d") + F.col("c")).over(left)).withColumns(
        {
            "log": F.sum(F.when(some, F.log(1 - d / n))).over(until),
            "variance": F.sum(F.when(some, d / (n * (n - d)))).over(until),
            "none": F.max(F.when(some, 0).otherwise(1)).over(until),
        }
    )
    log = F.coalesce(F.col("log"), F.lit(0.0))
    width = F.exp(Z * F.sqrt("variance") / log)
    gone, whole = F.col("none") == 1, log == 0
    return rows.withColumns(
        {
            "survival": F.when(gone, 0.0).otherwise(F.exp(log)),
            "lower": F.when(gone, 0.0).when(whole, 1.0).otherwise(F.exp(log / width)),
            "upper": F.when(gone | whole, 1.0).otherwise(F.exp(log * width)),
        }
    )


def _percentiles(curve: DataFrame) -> DataFrame:
    edge = FIRST_EDGE * F.pow(F.lit(2.0), F.col("bin") / BINS_PER_DOUBLING)

    def first(column: str, part: float) -> Column:
        return F.min(F.when(F.col(column) <= 1 - part + 1e-12, edge))

    ends = {"": "survival", "_low": "lower", "_high": "upper"}
    return curve.groupBy(*_KEYS).agg(
        F.sum("d").alias("run_ended"),
        F.sum("c").alias("run_cut_off"),
        F.max("longest").alias("run_longest"),
        *(
            first(column, part).alias(f"run_{share}{end}")
            for share, part in SHARES.items()
            for end, column in ends.items()
        ),
    )
