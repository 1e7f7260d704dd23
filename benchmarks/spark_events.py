"""Makes synthetic events for the pipeline's benchmarks, as compacted hours or as lines.

    python benchmarks/spark_events.py DIRECTORY --events 5000000 [--lines]

The log covers 24 hours, 5 queues and 40 tasks. Each invocation has four events (enqueued,
received, started, an outcome). Durations are log-normal, with another median for each task. Some
runs fail, are retried, lose their lease or fail to settle. The same seed gives the same events.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from aztask.spark.events.compactfiles import ORIGIN_KEY, CompactedOrigin
from aztask.spark.events.lines import ARROW, EVENT_COLUMNS
from aztask.stores.events.event import Event, quote, to_line

HOURS = 24
BEGIN = 1_790_000_000 // 86400 * 86400
QUEUES = 5
TASKS = 40
PIECE = 250_000
"""Invocations made at a time: a million events."""


def events(number: int, *, seed: int = 7) -> Iterator[tuple[int, pa.Table]]:
    """Yield (hour, some events of that hour), about `number` events in total."""
    random = np.random.default_rng(seed)
    per_hour = number // HOURS
    serial = 0
    for hour in range(HOURS):
        left = per_hour + (number % HOURS if hour == HOURS - 1 else 0)
        while left > 0:
            tasks = min(PIECE, -(-left // 4))
            yield hour, _piece(random, hour, serial, tasks).slice(0, left)
            serial += tasks
            left -= 4 * tasks


def _piece(random: np.random.Generator, hour: int, serial: int, tasks: int) -> pa.Table:
    """Four events of each of `tasks` invocations, sorted by time."""
    numbers = np.arange(serial, serial + tasks)
    task = random.integers(0, TASKS, tasks)
    due = BEGIN + hour * 3600 + np.sort(random.random(tasks)) * 3500
    wait = random.exponential(0.4, tasks)
    run = np.exp(random.normal(np.log(0.02) + task * 0.12, 0.7))
    fate = random.choice(
        ["succeeded", "resubmitted", "failed", "snoozed", "lease_lost", "settle_failed"],
        tasks,
        p=[0.955, 0.025, 0.008, 0.007, 0.003, 0.002],
    )
    lease = np.full(tasks, 60.0)
    parts = [
        _part(numbers, task, "enqueued", due, 0),
        _part(numbers, task, "received", due + wait * 0.9, 1),
        _part(numbers, task, "started", due + wait, 2, wait_seconds=wait, lease_seconds=lease),
        _part(
            numbers,
            task,
            fate,
            due + wait + run,
            3,
            duration_seconds=np.where(np.isin(fate, ("lease_lost", "settle_failed")), np.nan, run),
            lease_seconds=lease,
            margin_seconds=np.where(fate == "lease_lost", np.nan, lease - run % lease),
            held_seconds=run + wait * 0.1,
            renewals=(run // 42).astype("int64"),
            error_type=np.where(fate == "succeeded", None, "OSError"),
        ),
    ]
    table = pa.concat_tables(parts)
    return table.take(pa.array(np.argsort(table.column("ts").to_numpy(), kind="stable")))


def _part(
    numbers: np.ndarray, task: np.ndarray, kind: str | np.ndarray, ts: np.ndarray, step: int, **more
) -> pa.Table:
    """The events of one kind for some invocations."""
    rows = len(numbers)
    text = numbers.astype("U12")
    names = np.array([f"shop.task_{number:02d}" for number in range(TASKS)])
    queues = np.array([f"queue-{number % QUEUES}" for number in range(TASKS)])
    known = {
        "id": np.char.add(f"{step}f3a9c0d11-", text),
        "event": np.full(rows, kind) if isinstance(kind, str) else kind,
        "ts": ts,
        "task_id": np.char.add("0b7c1e52-9f1d-4a7e-8c3b-", text),
        "task": names[task],
        "queue": queues[task],
        "worker": np.full(rows, "worker-1"),
        "delivery_count": np.ones(rows, "int64"),
        "resubmit_count": np.zeros(rows, "int64"),
        **more,
    }
    columns = [
        pa.array(known[field.name], field.type, from_pandas=True)
        if field.name in known
        else pa.nulls(rows, field.type)
        for field in ARROW
    ]
    return pa.table(columns, schema=ARROW)


def write_compacted(directory: Path, number: int) -> int:
    """Write compacted hours of about `number` events; returns their bytes."""
    size = 0
    for place, (hour, table) in enumerate(events(number)):
        path = directory / _folder(hour) / f"compacted-{place:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, ARROW, compression="zstd") as writer:
            writer.write_table(table)
            writer.add_key_value_metadata({ORIGIN_KEY.decode(): CompactedOrigin().to_json()})
        size += path.stat().st_size
    return size


def write_lines(directory: Path, number: int) -> int:
    """Write about `number` events as closed files of lines; returns their bytes."""
    size = 0
    for place, (hour, table) in enumerate(events(number)):
        path = directory / _folder(hour) / f"worker-1-{place:05d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="ascii") as stream:
            for row in table.select(list(EVENT_COLUMNS)).to_pylist():
                event = Event(**row)
                stream.write(to_line(event, event.id, event.ts, quote(event.worker)))
        size += path.stat().st_size
    return size


def _folder(hour: int) -> str:
    return datetime.fromtimestamp(BEGIN + hour * 3600, UTC).strftime("date=%Y-%m-%d/hour=%H")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--lines", action="store_true", help="lines instead of Parquet")
    options = parser.parse_args()
    began = time.monotonic()
    write = write_lines if options.lines else write_compacted
    size = write(options.directory, options.events)
    seconds = time.monotonic() - began
    print(f"{options.events:,} events, {size / 1e6:,.0f} MB, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
