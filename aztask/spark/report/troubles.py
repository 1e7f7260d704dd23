"""What went wrong in a log, for the report: error signatures with a sample, and each worker.

Rules
1. Errors are one when their signatures are (`aztask.operate.deadletters.letters`), so that numbers,
   ids and paths in a text do not divide them. Executors compute them; only the most frequent come
   to the driver.
2. A worker that was frozen has a silence that ends with a lost lease; one that was killed has
   started tasks whose end it never told. Both are counted from its own events, and no clock of
   another machine is compared with its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from aztask.operate.deadletters.letters import error_signature
from aztask.spark.events.statistics import RAN, plain

MOST_SIGNATURES: Final = 50
MOST_WORKERS: Final = 200
KEPT_SIGNATURES: Final = 10_000
"""Signatures that one executor keeps apart at a time."""

FAILED: Final = ("failed", "resubmitted")
LOST: Final = ("lease_lost", "settle_failed")

_COLUMNS: Final = ("task", "error_type", "error", "ts", "task_id")
_FOUND: Final = pa.schema(
    [
        ("task", pa.string()),
        ("signature", pa.string()),
        ("runs", pa.int64()),
        ("first", pa.float64()),
        ("last", pa.float64()),
        ("sample", pa.string()),
        ("task_id", pa.string()),
    ]
)
_FOUND_DDL: Final = (
    "task STRING, signature STRING, runs BIGINT, first DOUBLE, last DOUBLE, sample STRING,"
    " task_id STRING"
)


def signatures(events: DataFrame) -> list[dict[str, Any]]:
    """The most frequent errors of runs, those of retried ones too, the most frequent first.

    Each has task, signature, runs, first and last (seconds since 1970), and of the last one the
    text (sample) and task_id.
    """
    failed = events.where(F.col("event").isin(*FAILED)).where(F.col("error_type").isNotNull())
    parts = failed.select(*_COLUMNS).mapInArrow(_signed, _FOUND_DDL)
    return plain(
        parts.groupBy("task", "signature")
        .agg(
            F.sum("runs").alias("runs"),
            F.min("first").alias("first"),
            F.max("last").alias("last"),
            F.max_by("sample", "last").alias("sample"),
            F.max_by("task_id", "last").alias("task_id"),
        )
        .orderBy(F.desc("runs"), "task", "signature")
        .limit(MOST_SIGNATURES)
    )


def _signed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For ``mapInArrow``: the signatures of some rows, with how many there are of each."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for batch in batches:
        for row in batch.to_pylist():
            text = f"{row['error_type']}: {row['error'] or ''}".rstrip(": ")
            key = (row["task"], error_signature(text))
            seen = found.get(key)
            if seen is None:
                if len(found) >= KEPT_SIGNATURES:
                    yield _batch(found)
                    found = {}
                seen = found[key] = {"runs": 0, "first": row["ts"], "last": row["ts"]}
            seen["runs"] += 1
            seen["first"] = min(seen["first"], row["ts"])
            if row["ts"] >= seen["last"]:
                seen |= {"last": row["ts"], "sample": text, "task_id": row["task_id"]}
    yield _batch(found)


def _batch(found: dict[tuple[str, str], dict[str, Any]]) -> pa.RecordBatch:
    rows = [{"task": task, "signature": text, **row} for (task, text), row in found.items()]
    return pa.RecordBatch.from_pylist(rows, _FOUND)


def workers(events: DataFrame) -> list[dict[str, Any]]:
    """What each worker did, those with the most trouble first, at most `MOST_WORKERS`.

    Each has worker, runs, failed, retried, lost (leases, and settlements that failed), silence (the
    longest that ended with a lost lease, in seconds; null without one), untold (tasks that it
    started and of whose end it told nothing), run_p50, first and last (seconds since 1970).
    """
    told = events.where(F.col("worker") != "")
    ended = (*RAN, "cancelled", "expired", *LOST)
    rows = told.groupBy("worker").agg(
        _count(*RAN).alias("runs"),
        _count("failed").alias("failed"),
        _count("resubmitted").alias("retried"),
        _count(*LOST).alias("lost"),
        F.greatest(F.lit(0), _count("started") - _count(*ended)).alias("untold"),
        F.percentile_approx("duration_seconds", 0.5, 10_000).alias("run_p50"),
        F.min("ts").alias("first"),
        F.max("ts").alias("last"),
    )
    trouble = (F.desc("lost"), F.desc("untold"), F.desc("failed"), F.desc("retried"), "worker")
    found = plain(rows.orderBy(*trouble).limit(MOST_WORKERS))
    silent = _silences(told, [row["worker"] for row in found if row["lost"]])
    return [{**row, "silence": silent.get(row["worker"])} for row in found]


def _silences(events: DataFrame, names: Sequence[str]) -> dict[str, float]:
    """The longest silence of each of these workers that ended with a lost lease.

    Only their events are sorted: a log of many workers has few that lost any.
    """
    if not names:
        return {}
    own = Window.partitionBy("worker").orderBy("ts")
    before = F.lag("ts").over(own)
    gaps = events.where(F.col("worker").isin(list(names))).select(
        "worker", "event", (F.col("ts") - before).alias("gap")
    )
    lost = gaps.where(F.col("event").isin(*LOST)).groupBy("worker").agg(F.max("gap").alias("gap"))
    return {row["worker"]: row["gap"] for row in lost.collect()}


def _count(*kinds: str) -> Column:
    return F.sum(F.when(F.col("event").isin(*kinds), 1).otherwise(0))
