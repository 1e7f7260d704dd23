"""Schedules in the local result file: heads and occurrences.

The store's clock is the machine's: all processes that share the file run on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aztask.engine import Database
from aztask.results.local.rows import rows_of
from aztask.results.schedules import Head, Kept, Occurrence
from aztask.support.clock import Clock

_STEPS: Final = (
    """
    CREATE TABLE schedules (
        schedule TEXT PRIMARY KEY, version INTEGER NOT NULL, data BLOB NOT NULL)
    WITHOUT ROWID;
    CREATE TABLE occurrences (
        schedule TEXT NOT NULL, key TEXT NOT NULL, open INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (schedule, key))
    WITHOUT ROWID;
    CREATE INDEX occurrences_open ON occurrences (schedule, key) WHERE open;
    """,
)
_HEADS: Final = "SELECT schedule, data, version FROM schedules"
_HEAD: Final = f"{_HEADS} WHERE schedule = ?"
_OPEN: Final = "SELECT key, data, open FROM occurrences WHERE schedule = ? AND open ORDER BY key"
_NEWEST: Final = """
    SELECT key, data, open FROM occurrences WHERE schedule = ? AND key <= ?
    ORDER BY key DESC LIMIT ?
"""
_INSERT_HEAD: Final = """
    INSERT INTO schedules (schedule, version, data) VALUES (?, 1, ?) ON CONFLICT DO NOTHING
"""
_REPLACE_HEAD: Final = """
    UPDATE schedules SET data = ?, version = version + 1 WHERE schedule = ? AND version = ?
"""
_MAKE: Final = """
    INSERT INTO occurrences (schedule, key, open, data) VALUES (?, ?, ?, ?)
    ON CONFLICT DO NOTHING
"""
_CHANGE: Final = "UPDATE occurrences SET open = ?, data = ? WHERE schedule = ? AND key = ?"
_PRUNE: Final = """
    DELETE FROM occurrences WHERE schedule = ? AND NOT open AND key < coalesce((
        SELECT key FROM occurrences WHERE schedule = ? ORDER BY key DESC LIMIT 1 OFFSET ?), '')
"""
_LAST_KEY: Final = "~"


class LocalSchedules:
    """The local implementation of `aztask.results.schedules.ScheduleStore`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        database.migrate("schedules", _STEPS)

    def now(self) -> float:
        """The time of this machine, UTC epoch seconds."""
        return self._clock.wall()

    def any(self) -> bool:
        """True if there is a schedule."""
        with self._database.read() as connection:
            return connection.execute("SELECT 1 FROM schedules LIMIT 1").fetchone() is not None

    def overview(self) -> list[Kept]:
        """All schedules, each with its open occurrences."""
        with self._database.transaction() as connection:
            heads = rows_of(connection, _HEADS, ())
            return [
                Kept(_head(row), _occurrences(rows_of(connection, _OPEN, (row[0],))))
                for row in heads
            ]

    def read(self, schedule: str) -> Kept | None:
        """One schedule with its open occurrences."""
        with self._database.transaction() as connection:
            found = rows_of(connection, _HEAD, (schedule,))
            if not found:
                return None
            return Kept(_head(found[0]), _occurrences(rows_of(connection, _OPEN, (schedule,))))

    def newest(self, schedule: str, limit: int, until: str = "") -> list[Occurrence]:
        """The newest occurrences, the newest first."""
        with self._database.read() as connection:
            rows = rows_of(connection, _NEWEST, (schedule, until or _LAST_KEY, limit))
        return list(_occurrences(rows))

    def commit(
        self,
        schedule: str,
        data: bytes,
        tag: str | None,
        made: Sequence[Occurrence] = (),
        changed: Sequence[Occurrence] = (),
    ) -> str | None:
        """Replace the head, make occurrences and change others, in one transaction."""
        with self._database.transaction() as connection:
            if tag is None:
                stored = connection.execute(_INSERT_HEAD, (schedule, data)).rowcount
            else:
                stored = connection.execute(_REPLACE_HEAD, (data, schedule, int(tag))).rowcount
            if not stored:
                return None
            connection.executemany(
                _MAKE, [(schedule, each.key, each.open, each.data) for each in made]
            )
            connection.executemany(
                _CHANGE, [(each.open, each.data, schedule, each.key) for each in changed]
            )
            return str(int(tag or 0) + 1)

    def close_occurrence(self, schedule: str, key: str, data: bytes) -> bool:
        """Close an occurrence, with new data."""
        return self._database.change(_CHANGE, (False, data, schedule, key)) > 0

    def prune(self, schedule: str, keep: int) -> int:
        """Delete closed occurrences behind the newest."""
        return self._database.change(_PRUNE, (schedule, schedule, keep - 1))

    def delete(self, schedule: str) -> bool:
        """Delete a schedule with its occurrences, in one transaction."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM occurrences WHERE schedule = ?", (schedule,))
            found = connection.execute("DELETE FROM schedules WHERE schedule = ?", (schedule,))
            return found.rowcount > 0


def _head(row: Sequence[Any]) -> Head:
    schedule, data, version = row
    return Head(str(schedule), _bytes(data), str(version))


def _occurrences(rows: Sequence[Sequence[Any]]) -> tuple[Occurrence, ...]:
    return tuple(Occurrence(str(key), _bytes(data), bool(state)) for key, data, state in rows)


def _bytes(data: object) -> bytes:
    """The data; SQLite stores any value in any column, and wrong ones count as damaged."""
    return data if isinstance(data, bytes) else b""
