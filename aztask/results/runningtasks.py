"""The tasks that a worker is running, as bytes that fit into a row of any store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgpack

from aztask.results.base import RunningTask
from aztask.results.damage import Columns, Damaged, unpacked

MOST_BYTES: Final = 60_000
"""A property of a table holds 64 KiB (the service's documentation, "Understanding the Table service
data model")."""

NOTHING_RUNS: Final = b"\x90"
"""An empty list, for workers of older versions, which do not report their tasks."""

_FIELDS: Final = ("task_id", "task", "queue", "started_at", "retries")


def pack_running(tasks: Sequence[RunningTask]) -> bytes:
    """Pack as many tasks as fit, from the front."""
    while True:
        rows = [(t.task_id, t.task, t.queue, t.started_at, t.retries) for t in tasks]
        packed: bytes = msgpack.packb(rows, unicode_errors="surrogatepass")
        if len(packed) <= MOST_BYTES:
            return packed
        tasks = tasks[: len(tasks) // 2]


def unpack_running(packed: bytes) -> tuple[RunningTask, ...]:
    """Unpack the tasks. Raises Damaged. A newer release may add fields at the end of each."""
    rows = unpacked(packed, "list of tasks")
    if not isinstance(rows, list):
        raise Damaged("its list of tasks is no list")
    return tuple(_task_of(row) for row in rows)


def _task_of(row: object) -> RunningTask:
    if not isinstance(row, list) or len(row) < len(_FIELDS):
        raise Damaged("its list of tasks holds something else")
    columns = Columns(dict(zip(_FIELDS, row, strict=False)))
    return RunningTask(
        columns.text("task_id"),
        columns.text("task"),
        columns.text("queue"),
        columns.time("started_at"),
        columns.count("retries"),
    )
