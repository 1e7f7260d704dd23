"""A worker's heartbeat out of the columns of any store, each of them checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aztask.results.base import WorkerRecord
from aztask.results.damage import Columns, Damaged
from aztask.results.runningtasks import NOTHING_RUNS, unpack_running

FINISHED_LIMIT: Final = 2**63
"""A worker may finish more tasks than one task has runs."""


def read_worker(values: Mapping[str, Any]) -> WorkerRecord:
    """The heartbeat in these fields; older releases omit the last ones. Raises Damaged."""
    columns = Columns(values)
    tasks = columns.data("tasks")
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
    )


def damaged_worker(name: object, damage: Damaged) -> WorkerRecord:
    """The record of a worker whose row cannot be read: its name and the damage."""
    known = name if isinstance(name, str) else "?"
    return WorkerRecord(known, 0.0, 0.0, (), 0, 0, damage=damage.reason)
