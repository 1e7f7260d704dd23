"""Marks of cancelled tasks in the local result file.

A mark belongs to its owner. One without an owner, which an older release or a program without a
broker has written, is obeyed by each worker that receives the task.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.queues.engine import Database

_STEPS: Final = (
    """
    CREATE TABLE IF NOT EXISTS cancellations (task_id TEXT PRIMARY KEY, at REAL NOT NULL)
    WITHOUT ROWID
    """,
    "ALTER TABLE cancellations ADD COLUMN running INTEGER NOT NULL DEFAULT 0",
)
# A table of its own: an older release would obey the mark of any owner, and a key of both parts
# cannot be added to the table that it knows.
_OWNED_STEPS: Final = (
    """
    CREATE TABLE owned_cancellations (
        broker TEXT NOT NULL, task_id TEXT NOT NULL, at REAL NOT NULL, running INTEGER NOT NULL,
        PRIMARY KEY (broker, task_id)) WITHOUT ROWID
    """,
)
_MARK: Final = """
    INSERT INTO cancellations (task_id, at, running) VALUES (:task, :at, :running)
    ON CONFLICT DO UPDATE SET at = excluded.at, running = max(running, excluded.running)
"""
_MARK_OWNED: Final = """
    INSERT INTO owned_cancellations (broker, task_id, at, running)
    VALUES (:mine, :task, :at, :running)
    ON CONFLICT DO UPDATE SET at = excluded.at, running = max(running, excluded.running)
"""
# Both tables in one statement: `any` runs once for each batch of starts.
_ANY: Final = """
    SELECT 1 FROM cancellations UNION ALL
    SELECT 1 FROM owned_cancellations WHERE broker = :mine LIMIT 1
"""
_HAS: Final = """
    SELECT running AND 1 FROM cancellations WHERE task_id = :task UNION ALL
    SELECT running AND 1 FROM owned_cancellations WHERE broker = :mine AND task_id = :task
"""
_ANY_RUNNING: Final = """
    SELECT 1 FROM cancellations WHERE running UNION ALL
    SELECT 1 FROM owned_cancellations WHERE broker = :mine AND running LIMIT 1
"""
_DROP: Final = (
    "DELETE FROM cancellations WHERE task_id = :task",
    "DELETE FROM owned_cancellations WHERE broker = :mine AND task_id = :task",
)
_PURGE: Final = (
    "UPDATE cancellations SET at = :now WHERE typeof(at) NOT IN ('real', 'integer')",
    "DELETE FROM cancellations WHERE at < :before",
    """
    UPDATE owned_cancellations SET at = :now
    WHERE broker = :mine AND typeof(at) NOT IN ('real', 'integer')
    """,
    "DELETE FROM owned_cancellations WHERE broker = :mine AND at < :before",
)
_ADOPT: Final = """
    INSERT INTO owned_cancellations (broker, task_id, at, running)
    SELECT :mine, task_id, at, running FROM owned_cancellations WHERE broker = :old
    ON CONFLICT DO NOTHING
"""


class LocalCancellations:
    """The marks of cancelled tasks. Each call runs in the caller's transaction or read."""

    def __init__(self, database: Database, owner: Owner = NO_OWNER) -> None:
        """owner: whose marks it makes, obeys and deletes."""
        self._mine = owner.broker
        database.migrate("cancellations", _STEPS)
        database.migrate("owned_cancellations", _OWNED_STEPS)

    def any(self, connection: sqlite3.Connection) -> bool:
        """True if any task is marked; usually none is, which saves a query for each."""
        return bool(connection.execute(_ANY, {"mine": self._mine}).fetchone())

    def has(self, connection: sqlite3.Connection, task_id: str) -> bool:
        """True if this task is marked."""
        return bool(self._marks(connection, task_id))

    def mark(
        self, connection: sqlite3.Connection, task_id: str, at: float, *, running: bool
    ) -> None:
        """Mark a task; with `running`, its run should be stopped, too."""
        values = {"mine": self._mine, "task": task_id, "at": at, "running": running}
        connection.execute(_MARK_OWNED if self._mine else _MARK, values)

    def to_stop(self, connection: sqlite3.Connection, task_ids: Sequence[str]) -> list[str]:
        """Those of these tasks whose runs should be stopped."""
        if connection.execute(_ANY_RUNNING, {"mine": self._mine}).fetchone() is None:
            return []
        return [each for each in task_ids if any(run for (run,) in self._marks(connection, each))]

    def _marks(self, connection: sqlite3.Connection, task_id: str) -> list[tuple[int]]:
        return connection.execute(_HAS, {"mine": self._mine, "task": task_id}).fetchall()

    def drop(self, connection: sqlite3.Connection, task_id: str) -> None:
        """Delete the task's mark, if it has one."""
        for sql in _DROP:
            connection.execute(sql, {"mine": self._mine, "task": task_id})

    def purge(self, connection: sqlite3.Connection, before: float, now: float) -> None:
        """Delete marks older than `before`.

        A mark with a damaged time stays valid, and gets the time `now`; otherwise it would never
        end.
        """
        for sql in _PURGE:
            connection.execute(sql, {"mine": self._mine, "before": before, "now": now})

    def owners(self, connection: sqlite3.Connection) -> set[Owner]:
        """The owners of these marks; one for each broker."""
        found = connection.execute("SELECT DISTINCT broker FROM owned_cancellations").fetchall()
        return {Owner(broker) for (broker,) in found if isinstance(broker, str)}

    def adopt(self, connection: sqlite3.Connection, old: Owner) -> int:
        """Make the marks of `old` its own, in the caller's transaction."""
        connection.execute(_ADOPT, {"mine": self._mine, "old": old.broker})
        gone = "DELETE FROM owned_cancellations WHERE broker = ?"
        return connection.execute(gone, (old.broker,)).rowcount
