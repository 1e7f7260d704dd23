"""Holders of unique tasks in the local result file. The store's clock is the machine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aztask.engine import Database
from aztask.results.local.rows import rows_of
from aztask.results.uniques import Holder
from aztask.support.clock import Clock

_STEPS: Final = (
    """
    CREATE TABLE uniques (
        key TEXT PRIMARY KEY, version INTEGER NOT NULL, due REAL NOT NULL, data BLOB NOT NULL)
    WITHOUT ROWID;
    CREATE INDEX uniques_due ON uniques (due);
    """,
)
_COLUMNS: Final = "SELECT key, data, due, version FROM uniques"
_INSERT: Final = """
    INSERT INTO uniques (key, version, due, data) VALUES (?, 1, ?, ?) ON CONFLICT DO NOTHING
"""
_REPLACE: Final = """
    UPDATE uniques SET data = ?, due = ?, version = version + 1 WHERE key = ? AND version = ?
"""


class LocalUniques:
    """The local implementation of `aztask.results.uniques.UniqueStore`.

    A released key keeps no row, so its next holder begins with version 1 again. The data of two
    holders differ, and a stale reader compares both.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        database.migrate("uniques", _STEPS)

    def now(self) -> float:
        """The time of this machine, UTC epoch seconds."""
        return self._clock.wall()

    def read(self, key: str) -> Holder | None:
        """The holder of a key; None if it is free."""
        with self._database.read() as connection:
            found = rows_of(connection, f"{_COLUMNS} WHERE key = ?", (key,))
        return _holder(found[0]) if found else None

    def write(self, key: str, data: bytes, due: float, before: Holder | None) -> Holder | None:
        """Make a holder, or replace the one that was read."""
        if before is None:
            made = self._database.change(_INSERT, (key, due, data))
            return Holder(key, data, due, "1") if made else None
        version = int(before.tag)
        sql = f"{_REPLACE} AND data = ?"
        made = self._database.change(sql, (data, due, key, version, before.data))
        return Holder(key, data, due, str(version + 1)) if made else None

    def release(self, holder: Holder) -> bool:
        """Free the key, if this is still its holder."""
        sql = "DELETE FROM uniques WHERE key = ? AND version = ? AND data = ?"
        return self._database.change(sql, (holder.key, int(holder.tag), holder.data)) > 0

    def due(self, before: float, limit: int) -> list[Holder]:
        """Holders that are due before a time."""
        sql = f"{_COLUMNS} WHERE due < ? ORDER BY due LIMIT ?"
        with self._database.read() as connection:
            return [_holder(row) for row in rows_of(connection, sql, (before, limit))]


def _holder(row: Sequence[Any]) -> Holder:
    key, data, due, version = row
    at = float(due) if isinstance(due, int | float) else 0.0
    return Holder(str(key), data if isinstance(data, bytes) else b"", at, str(version))
