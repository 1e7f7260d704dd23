"""Statistics of events: per task, per queue, per queue and hour, and in total.

Rules
1. Counts and sums are exact. Percentiles are Spark's ``percentile_approx`` with `ACCURACY`: a value
   that occurred, whose rank is off by at most count / `ACCURACY`.
2. A figure without data is null. Durations are seconds, rates are parts of 1.
3. Two jobs read the events, one for counts and one for percentiles; all levels come from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from aztask.spark.kind import kept, release
from aztask.stores.events.event import EVENT_KINDS

ACCURACY: Final = 10_000
"""The rank of a percentile is off by at most one in so many."""
HOUR: Final = 3600
RAN: Final = ("succeeded", "failed", "resubmitted", "snoozed", "waiting")
"""How a run ends. A failure that is retried is "resubmitted", a final one "failed"."""
OUTCOMES: Final = (*RAN, "cancelled", "expired")
KEYS: Final = ("task", "queue", "hour")
LEVELS: Final = {"task": 0b011, "queue": 0b101, "queue_hour": 0b100, "total": 0b111}
"""The keys that a level sums over, as the bits of Spark's ``grouping_id``."""
SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MARGIN_SHARES: Final = {"p01": 0.01, "p10": 0.1, "p50": 0.5}
SPREADS: Final = {"wait": SHARES, "run": SHARES, "held": SHARES, "margin": MARGIN_SHARES}


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures as DataFrames with the same columns (`aztask.spark.events.statistics.columns`).

    by_task: key task. by_queue: key queue. by_queue_hour: keys queue and hour (its beginning, in
    seconds since 1970). total: one row. errors: task, error_type, and the runs that ended with it.
    The first use of a frame computes all figures, once; `close` frees them.
    """

    events: DataFrame
    figures: DataFrame

    @property
    def by_task(self) -> DataFrame:
        """The figures of each task, one row per task."""
        return self._level("task", "task")

    @property
    def by_queue(self) -> DataFrame:
        """The figures of each queue, one row per queue."""
        return self._level("queue", "queue")

    @property
    def by_queue_hour(self) -> DataFrame:
        """The figures of each queue in each hour, one row for both."""
        return self._level("queue_hour", "queue", "hour")

    @property
    def total(self) -> DataFrame:
        """The figures of all events, one row."""
        return self._level("total")

    @property
    def errors(self) -> DataFrame:
        """Failed and retried runs of each task by type of error, the most frequent first."""
        failed = self.events.where(F.col("event").isin("failed", "resubmitted"))
        return (
            failed.where(F.col("error_type").isNotNull())
            .groupBy("task", "error_type")
            .agg(F.count("*").alias("runs"))
            .orderBy(F.desc("runs"), "task", "error_type")
        )

    def over_time(self, seconds: int) -> DataFrame:
        """Counts by outcome and the p50 and p99 of wait and run, per step of so many seconds."""
        at = (F.floor(F.col("ts") / seconds) * seconds).cast("long")
        kinds = ("enqueued", *OUTCOMES, "dead_lettered", "lease_lost", "settle_failed")
        return (
            _measured(self.events)
            .groupBy(at.alias("at"))
            .agg(
                *(_count(kind) for kind in kinds),
                F.percentile_approx("wait", [0.5, 0.99], ACCURACY).alias("wait"),
                F.percentile_approx("run", [0.5, 0.99], ACCURACY).alias("run"),
            )
            .orderBy("at")
        )

    def collect(self) -> dict[str, list[dict[str, Any]]]:
        """{level: its rows, sorted by key} of all levels, in one job."""
        rows = plain(self.figures)
        found: dict[str, list[dict[str, Any]]] = {}
        for level, number in LEVELS.items():
            keys = [key for key in KEYS if key in level.split("_")]
            unused = {"level", *KEYS} - set(keys)
            its = [row for row in rows if row["level"] == number]
            its = [{k: v for k, v in row.items() if k not in unused} for row in its]
            found[level] = sorted(its, key=lambda row: [row[key] for key in keys])
        return found

    def close(self) -> None:
        """Free the memory of the computed figures."""
        release(self.figures)

    def _level(self, level: str, *keys: str) -> DataFrame:
        rows = self.figures.where(F.col("level") == LEVELS[level])
        unused = [key for key in KEYS if key not in keys]
        rows = rows.drop("level", *unused)
        return rows.orderBy(*keys) if keys else rows


def statistics(events: DataFrame) -> Statistics:
    """The statistics of events. Lazy: the first use of a figure runs two jobs.

    events: each event once, as `read_events` gives them.
    """
    measured = _measured(events)
    counts = _counts(measured)
    spreads = _spreads(measured)
    same = [counts[name].eqNullSafe(spreads[name]) for name in ("level", *KEYS)]
    joined = counts.join(spreads, same, "left").select(counts["*"], *_spread_columns(spreads))
    # One partition, because the rows are few: Spark does not merge the partitions of a persisted
    # frame, and each use of it would run as many tasks as a shuffle has partitions.
    return Statistics(events, kept(_derived(joined).repartition(1)))


def columns() -> list[str]:
    """The names of the figures in the order of the columns, which follow the keys."""
    spread = [
        f"{name}_{share}"
        for name, shares in SPREADS.items()
        for share in ("mean", *shares, "min" if name == "margin" else "max")
    ]
    kinds = sorted(EVENT_KINDS)
    return [*_PLAIN, *kinds, *_RATES, *spread]


_PLAIN: Final = ("events", "runs", "first_ts", "last_ts", "throughput", "lease_min", "lease_max")
_RATES: Final = (
    "retry_rate",
    "dead_letter_rate",
    "lost_rate",
    "settle_failed_rate",
    "renewals_mean",
)


def _measured(events: DataFrame) -> DataFrame:
    """The keys and the four measures, each null where an event does not measure it.

    A wait counts at the start, a run at its end, a margin at the settlement (not at a renewal), and
    the time that a lease was held in every event that has it.
    """
    kind = F.col("event")
    return events.select(
        "task",
        "queue",
        (F.floor(F.col("ts") / HOUR) * HOUR).cast("long").alias("hour"),
        "event",
        "ts",
        F.when(kind == "started", F.col("wait_seconds")).alias("wait"),
        F.when(kind.isin(*RAN), F.col("duration_seconds")).alias("run"),
        F.when(kind.isin(*OUTCOMES), F.col("margin_seconds")).alias("margin"),
        F.when(kind.isin(*OUTCOMES), F.col("lease_seconds")).alias("lease"),
        F.col("held_seconds").alias("held"),
        "renewals",
    )


def _count(kind: str) -> Column:
    return F.count(F.when(F.col("event") == kind, 1)).alias(kind)


def _counts(measured: DataFrame) -> DataFrame:
    """Counts and sums of every level, computed from those of the finest one."""
    sums = [f"{name}_{what}" for name in SPREADS for what in ("sum", "count")]
    finest = measured.groupBy(*KEYS).agg(
        F.count("*").alias("events"),
        *(_count(kind) for kind in sorted(EVENT_KINDS)),
        *(F.sum(name).alias(f"{name}_sum") for name in SPREADS),
        *(F.count(name).alias(f"{name}_count") for name in SPREADS),
        # As a double: a damaged line may hold a counter so large that integers would overflow.
        F.sum(F.col("renewals").cast("double")).alias("renewals_sum"),
        *_edges("{}"),
    )
    return _every_level(
        finest,
        *(F.sum(name).alias(name) for name in ("events", *sorted(EVENT_KINDS), *sums)),
        F.sum("renewals_sum").alias("renewals_sum"),
        *_edges(None),
    )


def _edges(source: str | None) -> list[Column]:
    """Minima and maxima: of the measures, or of the finest level's edges if `source` is None."""
    edges = [
        ("first_ts", F.min, "ts"),
        ("last_ts", F.max, "ts"),
        ("lease_min", F.min, "lease"),
        ("lease_max", F.max, "lease"),
        ("margin_min", F.min, "margin"),
        *((f"{name}_max", F.max, name) for name in ("wait", "run", "held")),
    ]
    return [of(measure if source else name).alias(name) for name, of, measure in edges]


def _spreads(measured: DataFrame) -> DataFrame:
    """The percentiles of every level; each event with a measure counts in all four levels."""
    measuring = measured.where(F.coalesce(*(F.col(name) for name in SPREADS)).isNotNull()).select(
        *KEYS, *SPREADS
    )
    return _every_level(
        measuring,
        *(
            F.percentile_approx(name, list(shares.values()), ACCURACY).alias(f"{name}_spread")
            for name, shares in SPREADS.items()
        ),
    )


def _every_level(rows: DataFrame, *figures: Column) -> DataFrame:
    task, queue, hour = (F.col(name) for name in KEYS)
    sets = [[task], [queue], [queue, hour], []]
    return rows.groupingSets(sets, task, queue, hour).agg(F.grouping_id().alias("level"), *figures)


def _spread_columns(spreads: DataFrame) -> list[Column]:
    return [
        spreads[f"{name}_spread"][place].alias(f"{name}_{share}")
        for name, shares in SPREADS.items()
        for place, share in enumerate(shares)
    ]


def _derived(rows: DataFrame) -> DataFrame:
    """Add rates, means and throughput, and put the columns in order."""
    runs = _sum_of(RAN)
    ended = _sum_of(("succeeded", "dead_lettered", "cancelled", "expired"))
    settlements = _sum_of((*OUTCOMES, "settle_failed"))
    span = F.col("last_ts") - F.col("first_ts")
    derived: dict[str, Column] = {
        "runs": runs,
        "throughput": F.when(span > 0, runs / span),
        "retry_rate": _rate(F.col("resubmitted"), runs),
        "dead_letter_rate": _rate(F.col("dead_lettered"), ended),
        "lost_rate": _rate(F.col("lease_lost"), F.col("received")),
        "settle_failed_rate": _rate(F.col("settle_failed"), settlements),
        "renewals_mean": _rate(F.col("renewals_sum"), F.col("held_count")),
        **{f"{name}_mean": _rate(F.col(f"{name}_sum"), F.col(f"{name}_count")) for name in SPREADS},
    }
    return rows.withColumns(derived).select("level", *KEYS, *columns())


def _sum_of(names: tuple[str, ...]) -> Column:
    total = F.col(names[0])
    for name in names[1:]:
        total = total + F.col(name)
    return total


def _rate(part: Column, whole: Column) -> Column:
    return F.when(whole > 0, part / whole)


def plain(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows as dicts. Collects the frame, so only for small ones such as figures."""
    return [row.asDict(recursive=True) for row in frame.collect()]
