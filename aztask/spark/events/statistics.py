"""Statistics of events: per task, per queue, per queue and hour, and in all.

Rules
1. Counts and sums are exact. Percentiles are Spark's ``percentile_approx`` with `ACCURACY`: the
   value is one that occurred, and its rank is off by at most count / `ACCURACY`.
2. A figure is null where there is nothing to count; nothing is made up. Durations are seconds,
   rates are parts of 1.
3. Two jobs over the events: one for counts, one for percentiles; every level comes out of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from aztask.events.event import EVENT_KINDS

ACCURACY: Final = 10_000
"""Of percentiles: their rank is off by at most one in so many."""
HOUR: Final = 3600
RAN: Final = ("succeeded", "failed", "resubmitted", "snoozed")
"""How a run ends. A failure that is tried again is "resubmitted", a final one is "failed"."""
OUTCOMES: Final = (*RAN, "cancelled", "expired")
KEYS: Final = ("task", "queue", "hour")
LEVELS: Final = {"task": 0b011, "queue": 0b101, "queue_hour": 0b100, "total": 0b111}
"""Which keys are summed away, as Spark's ``grouping_id`` counts them."""
SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MARGIN_SHARES: Final = {"p01": 0.01, "p10": 0.1, "p50": 0.5}
SPREADS: Final = {"wait": SHARES, "run": SHARES, "held": SHARES, "margin": MARGIN_SHARES}


@dataclass(frozen=True, slots=True)
class Statistics:
    """What happened, as DataFrames of one layout (`aztask.spark.events.statistics.columns`).

    by_task: key task. by_queue: key queue. by_queue_hour: keys queue and hour (its beginning, in
    seconds since 1970). total: one row. errors: task, error_type, runs that ended so.
    The figures are computed once, when the first of the frames is used; `close` forgets them.
    """

    events: DataFrame
    figures: DataFrame

    @property
    def by_task(self) -> DataFrame:
        """One row for each task."""
        return self._level("task", "task")

    @property
    def by_queue(self) -> DataFrame:
        """One row for each queue."""
        return self._level("queue", "queue")

    @property
    def by_queue_hour(self) -> DataFrame:
        """One row for each queue and hour."""
        return self._level("queue_hour", "queue", "hour")

    @property
    def total(self) -> DataFrame:
        """One row."""
        return self._level("total")

    @property
    def errors(self) -> DataFrame:
        """How many runs of each task failed for which type of error."""
        failed = self.events.where(F.col("event").isin("failed", "resubmitted"))
        return (
            failed.where(F.col("error_type").isNotNull())
            .groupBy("task", "error_type")
            .agg(F.count("*").alias("runs"))
            .orderBy(F.desc("runs"), "task", "error_type")
        )

    def over_time(self, seconds: int) -> DataFrame:
        """Counts by outcome, waits and runs (p50, p99), in steps of so many seconds. Key: at."""
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
        """{level: its rows, by key} of all levels in one job; a row has the keys of its level."""
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
        """Forget what was computed."""
        self.figures.unpersist()

    def _level(self, level: str, *keys: str) -> DataFrame:
        rows = self.figures.where(F.col("level") == LEVELS[level])
        unused = [key for key in KEYS if key not in keys]
        rows = rows.drop("level", *unused)
        return rows.orderBy(*keys) if keys else rows


def statistics(events: DataFrame) -> Statistics:
    """The statistics of events, each of which stands there once (`read_events` sees to that).

    Lazy: the first use of a figure runs two jobs.
    """
    measured = _measured(events)
    counts = _counts(measured)
    spreads = _spreads(measured)
    same = [counts[name].eqNullSafe(spreads[name]) for name in ("level", *KEYS)]
    joined = counts.join(spreads, same, "left").select(counts["*"], *_spread_columns(spreads))
    # In one partition, for the rows are few: those of a persisted frame are not put together, and
    # each use of it would be as many tasks as a shuffle has partitions.
    return Statistics(events, _derived(joined).repartition(1).persist())


def columns() -> list[str]:
    """The names of the figures, in their order; the keys come first."""
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
    """The keys and, where they mean something, the four measures.

    A wait counts at the start, a run where there was one, a margin at the settlement (not at a
    renewal), and how long a lease was held wherever it is told.
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
    """Counts and sums at the finest level, then those of every level from these."""
    sums = [f"{name}_{what}" for name in SPREADS for what in ("sum", "count")]
    finest = measured.groupBy(*KEYS).agg(
        F.count("*").alias("events"),
        *(_count(kind) for kind in sorted(EVENT_KINDS)),
        *(F.sum(name).alias(f"{name}_sum") for name in SPREADS),
        *(F.count(name).alias(f"{name}_count") for name in SPREADS),
        # as a double: the counter of a damaged line may be so large that whole numbers overflow
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
    """Least and greatest values: of the measures, or of what was found finer (`source` None)."""
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
    """The percentiles of every level: each event that measures something counts at all four."""
    telling = measured.where(F.coalesce(*(F.col(name) for name in SPREADS)).isNotNull()).select(
        *KEYS, *SPREADS
    )
    return _every_level(
        telling,
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
    """Rates, means and throughput, and the columns in their order."""
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
    """The rows as dicts; only for frames of figures, which are small."""
    return [row.asDict(recursive=True) for row in frame.collect()]
