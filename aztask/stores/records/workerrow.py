"""A worker's heartbeat in the columns of any store, and the tasks it is running as bytes.

Each column is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgpack

from aztask.stores.records.base import RunningTask, WorkerRecord
from aztask.stores.records.damage import Columns, Damaged, unpacked
from aztask.support.parts import PartFailure

MOST_BYTES: Final = 60_000
"""A property of a table holds 64 KiB (the service's documentation, "Understanding the Table service
data model")."""

PROGRESS: Final = "progress"
"""What a checkpoint in a heartbeat is, if it is encrypted (`aztask.message.encryption`)."""

NOTHING_RUNS: Final = b"\x90"
"""An empty list, for workers of older versions, which do not report their tasks."""

_FIELDS: Final = ("task_id", "task", "queue", "started_at", "retries", "progress")
_OLD_FIELDS: Final = len(_FIELDS) - 1
"""Workers of older versions do not report the progress of their tasks."""

MOST_FAILING: Final = 50
"""Failing parts in one heartbeat, the oldest first."""

_FAILING_FIELDS: Final = ("part", "since", "reason")

FINISHED_LIMIT: Final = 2**63
"""A worker may finish more tasks than one task has runs."""


def read_worker(values: Mapping[str, Any]) -> WorkerRecord:
    """The heartbeat in these fields; older releases omit the last ones. Raises Damaged."""
    columns = Columns(values)
    tasks, failing = columns.data("tasks"), columns.data("failing")
    return WorkerRecord(
        columns.text("name"),
        columns.time("started_at"),
        columns.time("seen_at"),
        columns.texts("queues"),
        columns.count("running"),
        columns.count("finished", most=FINISHED_LIMIT),
        columns.flag("stopped"),
        columns.count("leased", missing=0),
        unpack_running(NOTHING_RUNS if tasks is None else tasks),
        broker=columns.text("broker", missing=""),
        failing=() if failing is None else unpack_failing(failing),
        release=columns.text("release", missing=""),
    )


def damaged_worker(name: object, damage: Damaged) -> WorkerRecord:
    """The record of a worker whose row cannot be read: its name and the damage."""
    known = name if isinstance(name, str) else "?"
    return WorkerRecord(known, 0.0, 0.0, (), 0, 0, damage=damage.reason)


def pack_running(tasks: Sequence[RunningTask]) -> bytes:
    """Pack as many tasks as fit, from the front; if not all fit, without their progress."""
    while True:
        rows = [(t.task_id, t.task, t.queue, t.started_at, t.retries, t.progress) for t in tasks]
        packed: bytes = msgpack.packb(rows, unicode_errors="surrogatepass")
        if len(packed) <= MOST_BYTES:
            return packed
        if any(task.progress for task in tasks):
            tasks = [replace(task, progress=None) for task in tasks]
        else:
            tasks = tasks[: len(tasks) // 2]


def unpack_running(packed: bytes) -> tuple[RunningTask, ...]:
    """Unpack the tasks. Raises Damaged. A newer release may add fields at the end of each."""
    rows = unpacked(packed, "list of tasks")
    if not isinstance(rows, list):
        raise Damaged("its list of tasks is no list")
    return tuple(_task_of(row) for row in rows)


def pack_failing(failing: Sequence[PartFailure]) -> bytes:
    """Pack the first `MOST_FAILING` parts that fail."""
    rows = [(each.part[:200], each.since, each.reason) for each in failing[:MOST_FAILING]]
    packed: bytes = msgpack.packb(rows, unicode_errors="surrogatepass")
    return packed


def unpack_failing(packed: bytes) -> tuple[PartFailure, ...]:
    """Unpack the parts that fail. Raises Damaged. A newer release may add fields to each."""
    rows = unpacked(packed, "list of parts")
    if not isinstance(rows, list):
        raise Damaged("its list of parts is no list")
    found = []
    for row in rows:
        if not isinstance(row, list) or len(row) < len(_FAILING_FIELDS):
            raise Damaged("its list of parts holds something else")
        columns = Columns(dict(zip(_FAILING_FIELDS, row, strict=False)))
        found.append(
            PartFailure(columns.text("part"), columns.time("since"), columns.text("reason"))
        )
    return tuple(found)


def _task_of(row: object) -> RunningTask:
    if not isinstance(row, list) or len(row) < _OLD_FIELDS:
        raise Damaged("its list of tasks holds something else")
    columns = Columns(dict(zip(_FIELDS, row, strict=False)))
    return RunningTask(
        columns.text("task_id"),
        columns.text("task"),
        columns.text("queue"),
        columns.time("started_at"),
        columns.count("retries"),
        columns.data("progress"),
    )
