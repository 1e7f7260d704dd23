"""Runs that the result store knows and the event log lacks: a killed worker loses its last events.

Rules
1. Only the last run of each task is compared, and only if it started in the span of the log: of the
   runs before it the store keeps little.
2. A run is accounted for by its start or its end in the log. `CLOCK` is how far the times of both,
   which one worker notes, may be apart.
3. The newest runs of the store are read, on the driver, up to a limit.
"""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from aztask.spark.events.statistics import RAN, plain
from aztask.stores.records.base import ResultStore

CLOCK: Final = 1.0
STORE_RUNS: Final = 100_000
"""The newest runs of the store that are compared."""
_COLUMNS: Final = (
    "task_id STRING, task STRING, queue STRING, worker STRING, state STRING, at DOUBLE"
)


def unaccounted_runs(
    events: DataFrame, store: ResultStore, *, limit: int = STORE_RUNS
) -> DataFrame:
    """The last runs of tasks that the store knows and the log lacks.

    Columns: task_id, task, queue, worker, state, at (of its start, in seconds since 1970). In a
    running system, the events of the last minutes are not published yet, so their runs are among
    them if other workers have published later events. Raises BrokerUnavailable.
    """
    logged = events.where(F.col("event").isin("started", *RAN))
    first, last = logged.agg(F.min("ts"), F.max("ts")).collect()[0]
    rows = [] if first is None else started_between(store, first, last, limit)
    known = events.sparkSession.createDataFrame(rows, _COLUMNS)
    theirs = logged.select(F.col("task_id").alias("id"), "ts")
    same = (F.col("task_id") == F.col("id")) & (F.col("ts") >= F.col("at") - CLOCK)
    return known.join(theirs, same, "left_anti")


def started_between(
    store: ResultStore, first: float, last: float, limit: int
) -> list[tuple[str, str, str, str, str, float]]:
    """Of the newest runs of the store those that started then, with the values of `_COLUMNS`."""
    return [
        (run.key.task_id, run.task, run.queue, run.worker, run.shown_state, run.started_at)
        for run in store.recent(limit=limit)
        if run.started_at is not None and first <= run.started_at <= last
    ]


def unaccounted_by_task(
    events: DataFrame, store: ResultStore, *, limit: int = STORE_RUNS
) -> list[dict[str, Any]]:
    """By task, the number of `unaccounted_runs` and the id of one of them."""
    number, example = F.count("*").alias("runs"), F.min("task_id").alias("example")
    runs = unaccounted_runs(events, store, limit=limit)
    return plain(runs.groupBy("task").agg(number, example).orderBy("task"))
