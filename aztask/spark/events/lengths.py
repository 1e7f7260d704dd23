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
5. Durations are counted in bins of `BINS_PER_DOUBLING`, by their upper edge: up to 1.1 % too long.
"""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from aztask.spark.events.statistics import RAN, SHARES, plain
from aztask.spark.kind import kept, release

CUT_OFF: Final = ("TimeLimitExceeded", "MaxLeaseExceeded", "WorkerCrashed")
"""Error types of runs that were stopped: by a limit, or because their process was killed."""
BINS_PER_DOUBLING: Final = 64
FIRST_EDGE: Final = 1e-4
"""Seconds: shorter runs share the first bin."""
INTERVAL_RUNS: Final = 1000
"""With fewer runs, a percentile is shown with its interval."""
Z: Final = 1.959964
LEVELS: Final = {"task": 0b01, "queue": 0b10, "total": 0b11}
"""The keys that a level sums over, as the bits of Spark's ``grouping_id``."""

_WORKER: Final = ("worker", "task", "queue")
_DELIVERY: Final = (*_WORKER, "task_id", "delivery_count", "resubmit_count")


def cut_off_runs(events: DataFrame, doubtful: DataFrame | None = None) -> DataFrame:
    """The runs that started and never ended in the log: columns queue, task, ts, seconds, held.

    seconds: how long the run is known to have gone on. held: how long its lease had been held when
    it was lost; null if the log has no loss, because the worker was killed or still runs it.

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
    return runs.select("queue", "task", "ts", seconds.alias("seconds"), held.alias("held"))


def run_lengths(events: DataFrame) -> list[dict[str, Any]]:
    """The lengths of runs by task, by queue and in total: one row for each.

    Fields: level (`LEVELS`); task, queue; run_ended, run_cut_off: numbers of runs; run_longest:
    the longest time that one is known to have taken; for each of `SHARES` run_p50 and so on, with
    run_p50_low and run_p50_high, the ends of its interval.

    Reads the events once, and once more if runs are open: all else is made of their counts.
    """
    counted = kept(_counted(events))
    try:
        sums = (F.sum("d").alias("d"), F.sum("c").alias("c"), F.max("longest").alias("longest"))
        finest = counted.where("bin IS NOT NULL").groupBy("task", "queue", "bin").agg(*sums)
        doubtful = _doubtful(counted)
        if not doubtful.isEmpty():
            known = (F.col("seconds") >= 0) & ~F.isnan("seconds")
            number = F.when(known, _bin("seconds")).alias("bin")
            open_ = cut_off_runs(events, doubtful).select("task", "queue", number, "seconds")
            stopped = (
                F.lit(0).alias("d"),
                F.count("*").alias("c"),
                F.max("seconds").alias("longest"),
            )
            binned = open_.where("bin IS NOT NULL").groupBy("task", "queue", "bin")
            finest = finest.unionByName(binned.agg(*stopped))
        task, queue, bin_ = F.col("task"), F.col("queue"), F.col("bin")
        levels = finest.groupingSets([[task, bin_], [queue, bin_], [bin_]], task, queue, bin_).agg(
            F.shiftright(F.grouping_id(), 1).alias("level"), *sums
        )
        return plain(_percentiles(_curve(levels)))
    finally:
        release(counted)


def _counted(events: DataFrame) -> DataFrame:
    """By worker, task, queue and bin: runs that started, ended, and of measured ones d and c.

    d: ended by themselves. c: were stopped. bin: null for starts, and for ends without a length.
    """
    kind, seconds = F.col("event"), F.col("duration_seconds")
    ended = kind.isin(*RAN)
    stopped = F.coalesce(F.col("error_type").isin(*CUT_OFF), F.lit(False))
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


def _bin(seconds: str) -> Column:
    number = F.ceil(BINS_PER_DOUBLING * F.log2(F.col(seconds) / FIRST_EDGE) - 1e-9)
    return F.when(F.col(seconds) > FIRST_EDGE, number).otherwise(0).cast("int")


def _curve(counted: DataFrame) -> DataFrame:
    """The survival after each bin, and the ends of its interval.

    Runs that were cut off in a bin count as at risk in it: they took at least that long.
    """
    each = Window.partitionBy("level", "task", "queue")
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
    return curve.groupBy("level", "task", "queue").agg(
        F.sum("d").alias("run_ended"),
        F.sum("c").alias("run_cut_off"),
        F.max("longest").alias("run_longest"),
        *(
            first(column, part).alias(f"run_{share}{end}")
            for share, part in SHARES.items()
            for end, column in ends.items()
        ),
    )
