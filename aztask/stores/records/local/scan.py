"""Reads every value of every table of the result store, whatever the table is for.

All columns are read, so a new one is never forgotten; a new table must be added to `TABLES`, or
``tests/unit/stores/payloads/test_holders.py`` fails. The names are constants, because no statement
is built from what a file holds (``tests/unit/test_sql.py``).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Final

from aztask.queues.engine.database import Database

TABLES: Final = (
    "runs",
    "damaged_runs",
    "workers",
    "cancellations",
    "owned_cancellations",
    "controls",
    "owned_controls",
    "dead_index",
    "owned_dead_index",
    "dead_index_read",
    "schedules",
    "occurrences",
    "apart_schedules",
    "apart_occurrences",
    "schedule_owners",
    "schedule_claims",
    "uniques",
    "owned_uniques",
    "steps",
    "owned_steps",
    "parts",
    "owned_parts",
    "waits",
    "owned_waits",
    "operations",
    "owned_operations",
    "once_runs",
    "owned_once_runs",
    "history",
    "owned_history",
    "workflows",
    "workflow_documents",
)
NEEDLES: Final = (b":args/", b":saved/", b":results/")
"""What the references to these payloads contain. Those of `App.put` live by their own time."""

_EXISTING: Final = "SELECT name FROM sqlite_master WHERE type = 'table'"


def values_of(database: Database) -> Iterator[bytes]:
    """The values with references to payloads, of one table after the other.

    Raises BrokerUnavailable.
    """
    with database.read() as connection:
        existing = {name for (name,) in connection.execute(_EXISTING)}
    for table in TABLES:
        if table in existing:
            with database.read() as connection:
                found = list(_values(connection.execute(f"SELECT * FROM {table}")))
            yield from found


def _values(rows: sqlite3.Cursor) -> Iterator[bytes]:
    for row in rows:
        for value in row:
            if isinstance(value, str):
                data = value.encode("utf-8", "replace")
            elif isinstance(value, bytes):
                data = value
            else:
                continue
            if any(needle in data for needle in NEEDLES):
                yield data
