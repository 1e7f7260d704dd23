"""Marks of cancellation in the file of results."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from aztask.engine import Database

_STEPS: Final = (
    """
    CREATE TABLE IF NOT EXISTS cancellations (task_id TEXT PRIMARY KEY, at REAL NOT NULL)
    WITHOUT ROWID
    """,
    "ALTER TABLE cancellations ADD COLUMN running INTEGER NOT NULL DEFAULT 0",
)
_MARK: Final = """
    INSERT INTO cancellations (task_id, at, running) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET at = excluded.at, running = max(running, excluded.running)
"""
_DATE: Final = "UPDATE cancellations SET at = ? WHERE typeof(at) NOT IN ('real', 'integer')"


class LocalCancellations:
    """What was cancelled. Every call is part of the caller's transaction, or read."""

    def __init__(self, database: Database) -> None:
        database.migrate("cancellations", _STEPS)

    def any(self, connection: sqlite3.Connection) -> bool:
        """Whether there is any mark: usually there is none."""
        return bool(connection.execute("SELECT 1 FROM cancellations LIMIT 1").fetchone())

    def has(self, connection: sqlite3.Connection, task_id: str) -> bool:
        """Whether this task is marked."""
        found = connection.execute("SELECT 1 FROM cancellations WHERE task_id = ?", (task_id,))
        return found.fetchone() is not None

    def mark(
        self, connection: sqlite3.Connection, task_id: str, at: float, *, running: bool
    ) -> None:
        """Mark a task; running: its run is to be stopped too."""
        connection.execute(_MARK, (task_id, at, running))

    def to_stop(self, connection: sqlite3.Connection, task_ids: Sequence[str]) -> list[str]:
        """Those of these whose runs are to be stopped."""
        marked = connection.execute("SELECT 1 FROM cancellations WHERE running LIMIT 1")
        if marked.fetchone() is None:
            return []
        text = "SELECT 1 FROM cancellations WHERE task_id = ? AND running"
        return [each for each in task_ids if connection.execute(text, (each,)).fetchone()]

    def drop(self, connection: sqlite3.Connection, task_id: str) -> None:
        """Forget a task's mark."""
        connection.execute("DELETE FROM cancellations WHERE task_id = ?", (task_id,))

    def purge(self, connection: sqlite3.Connection, before: float, now: float) -> None:
        """Forget marks that are as old. One whose time is damaged still holds, and is as old as
        `now`: otherwise it would stay for ever.
        """
        connection.execute(_DATE, (now,))
        connection.execute("DELETE FROM cancellations WHERE at < ?", (before,))
