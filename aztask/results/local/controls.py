"""Control entries in the local result file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from aztask.engine import Database
from aztask.results.controls import Entry, EntryChange, StoreTime
from aztask.support.clock import Clock

_STEPS: Final = (
    """
    CREATE TABLE controls (
        name TEXT PRIMARY KEY, version INTEGER NOT NULL, data BLOB NOT NULL,
        written_at REAL NOT NULL)
    WITHOUT ROWID;
    """,
)
_READ: Final = "SELECT data, version FROM controls WHERE name = ?"
_INSERT: Final = "INSERT INTO controls VALUES (?, 1, ?, ?) ON CONFLICT DO NOTHING"
_REPLACE: Final = """
    UPDATE controls SET data = ?, version = version + 1, written_at = ?
    WHERE name = ? AND version = ?
"""
_PURGE: Final = "DELETE FROM controls WHERE substr(name, 1, ?) = ? AND written_at < ?"


class LocalControls:
    """The local implementation of `aztask.results.controls.ControlStore`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        database.migrate("controls", _STEPS)

    def read(self, names: Sequence[str]) -> list[Entry | None]:
        """The entries with these names; None for missing ones."""
        with self._database.read() as connection:
            return [_read(connection, name) for name in names]

    def write(self, changes: Sequence[EntryChange]) -> list[str | None]:
        """Make each change whose tag is the current one; returns the new tags."""
        now = self._clock.wall()
        with self._database.transaction() as connection:
            return [_write(connection, each, now) for each in changes]

    def time(self) -> StoreTime:
        """This machine's clock: all processes that use the file share it."""
        at, now = self._clock.wall(), self._clock.monotonic()
        return StoreTime(at, now, now)

    def purge(self, prefix: str, before: float) -> int:
        """Delete entries that were last written before `before`."""
        with self._database.transaction() as connection:
            return connection.execute(_PURGE, (len(prefix), prefix, before)).rowcount


def _read(connection: sqlite3.Connection, name: str) -> Entry | None:
    found = connection.execute(_READ, (name,)).fetchone()
    if found is None:
        return None
    data, version = found
    return Entry(data if isinstance(data, bytes) else b"", str(version))


def _write(connection: sqlite3.Connection, change: EntryChange, now: float) -> str | None:
    if change.tag is None:
        made = connection.execute(_INSERT, (change.name, change.data, now)).rowcount
        return "1" if made else None
    version = int(change.tag)
    values = (change.data, now, change.name, version)
    return str(version + 1) if connection.execute(_REPLACE, values).rowcount else None
