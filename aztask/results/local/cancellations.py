"""Marks of cancelled tasks in the local result file."""

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
    """The marks of cancelled tasks. Each call runs in the caller's transaction or read."""

    def __init__(self, database: Database) -> None:
        database.migrate("cancellations", _STEPS)

    def any(self, connection: sqlite3.Connection) -> bool:
        """True if any task is marked; usually none is, which saves a query for each."""
        return bool(connection.execute("SELECT 1 FROM cancellations LIMIT 1").fetchone())

    def has(self, connection: sqlite3.Connection, task_id: str) -> bool:
        """True if this task is marked."""
        found = connection.execute("SELECT 1 FROM cancellations WHERE task_id = ?", (task_id,))
        return found.fetchone() is not None

    def mark(
        self, connection: sqlite3.Connection, task_id: str, at: float, *, running: bool
    ) -> None:
        """Mark a task; with `running`, its run should be stopped, too."""
        connection.execute(_MARK, (task_id, at, running))

    def to_stop(self, connection: sqlite3.Connection, task_ids: Sequence[str]) -> list[str]:
        """Those of these tasks whose runs should be stopped."""
        marked = connection.execute("SELECT 1 FROM cancellations WHERE running LIMIT 1")
        if marked.fetchone() is None:
            return []
        text = "SELECT 1 FROM cancellations WHERE task_id = ? AND running"
        return [each for each in task_ids if connection.execute(text, (each,)).fetchone()]

    def drop(self, connection: sqlite3.Connection, task_id: str) -> None:
        """Delete the task's mark, if it has one."""
        connection.execute("DELETE FROM cancellations WHERE task_id = ?", (task_id,))

    def purge(self, connection: sqlite3.Connection, before: float, now: float) -> None:
        """Delete marks older than `before`.

        A mark with a damaged time stays valid, and gets the time `now`; otherwise it would never
        end.
        """
        connection.execute(_DATE, (now,))
        connection.execute("DELETE FROM cancellations WHERE at < ?", (before,))
