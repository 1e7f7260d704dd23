"""Damaged rows in the local result file: which ones, since when, and why.

Rules
1. A row in quarantine stays unchanged in its table, so that you can inspect it. This table has its
   number and the reason; as long as they are here, the row counts as damaged.
2. The number is deleted together with the row, whatever deletes it: SQLite gives the number to a
   later row.
"""

from __future__ import annotations

import logging
import sqlite3
from typing import Final

from aztask.engine import Database
from aztask.results.base import RunRecord
from aztask.results.damage import KEPT
from aztask.results.local.rows import COLUMNS, StoredRun, rows_of, run_of

logger = logging.getLogger(__name__)

_STEPS: Final = (
    """
    CREATE TABLE damaged_runs (id INTEGER PRIMARY KEY, at REAL NOT NULL, reason TEXT NOT NULL);
    CREATE TRIGGER damaged_run_gone AFTER DELETE ON runs
    BEGIN DELETE FROM damaged_runs WHERE id = OLD.id; END;
    """,
)
_NOTE: Final = "INSERT INTO damaged_runs VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
_LIST: Final = (
    f"SELECT {COLUMNS} FROM runs WHERE id IN "  # constants
    "(SELECT id FROM damaged_runs ORDER BY at DESC LIMIT ?) ORDER BY id DESC"
)
_PURGE: Final = "DELETE FROM runs WHERE id IN (SELECT id FROM damaged_runs WHERE at < ? LIMIT ?)"
PURGE_ROWS: Final = 2_000


class LocalQuarantine:
    """The damaged rows. Each call runs in the caller's transaction or read."""

    def __init__(self, database: Database) -> None:
        database.migrate("damaged_runs", _STEPS)

    def note(self, connection: sqlite3.Connection, run: StoredRun, reason: str, at: float) -> None:
        """Put a damaged row into quarantine, and log it the first time."""
        if connection.execute(_NOTE, (run.id, at, reason)).rowcount:
            key = run.record.key
            logger.error(KEPT, key.task_id, key.generation, key.hop, reason)

    def runs(self, connection: sqlite3.Connection, limit: int) -> list[RunRecord]:
        """The runs in quarantine, the newest first."""
        return [run_of(row).record for row in rows_of(connection, _LIST, (limit,))]

    def purge(self, connection: sqlite3.Connection, before: float) -> int:
        """Delete rows that were put into quarantine before that time; returns how many."""
        return connection.execute(_PURGE, (before, PURGE_ROWS)).rowcount
