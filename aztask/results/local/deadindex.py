"""The index of dead letters in the local result file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from aztask.brokers.local.payload import payload_of
from aztask.engine import Database
from aztask.errors import EncodeError
from aztask.message.envelope import Envelope
from aztask.results.deadindex import IndexedDeadLetter, read_note
from aztask.results.local.rows import rows_of

_STEPS: Final = (
    """
    CREATE TABLE dead_index (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        queue TEXT NOT NULL, key TEXT NOT NULL, envelope BLOB NOT NULL, reason TEXT NOT NULL,
        description TEXT NOT NULL, at REAL NOT NULL, delivery_count INTEGER NOT NULL);
    CREATE UNIQUE INDEX dead_index_key ON dead_index (queue, key);
    """,
)
_NOTE: Final = """
    INSERT INTO dead_index (queue, key, envelope, reason, description, at, delivery_count)
    VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""
_FIELDS: Final = ("key", "envelope", "reason", "description", "at", "delivery_count")
_PAGE: Final = f"""
    SELECT number, {", ".join(_FIELDS)} FROM dead_index
    WHERE queue = ? AND number > ? ORDER BY number LIMIT ?
"""
_OLD: Final = """
    SELECT number, key FROM dead_index
    WHERE queue = ? AND (at < ? OR typeof(at) NOT IN ('real', 'integer'))
"""
_DROP: Final = "DELETE FROM dead_index WHERE queue = ? AND key = ?"


class LocalDeadIndex:
    """The local implementation of `aztask.results.deadindex.DeadIndex`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.migrate("dead_index", _STEPS)

    def note(self, letters: Sequence[IndexedDeadLetter]) -> None:
        """Store these notes; an existing note of the same key stays as it is."""
        rows = [
            (
                each.queue,
                each.key,
                payload_of_dead(each.envelope),
                each.reason,
                each.description,
                each.at,
                each.delivery_count,
            )
            for each in letters
        ]
        with self._database.transaction() as connection:
            connection.executemany(_NOTE, rows)

    def page(self, queue: str, after: int, limit: int) -> list[IndexedDeadLetter]:
        """Up to `limit` notes of the queue after the number `after`, in order."""
        with self._database.read() as connection:
            rows = rows_of(connection, _PAGE, (queue, after, limit))
        return [
            read_note(queue, number, dict(zip(_FIELDS, fields, strict=True)))
            for number, *fields in rows
        ]

    def drop(self, queue: str, keys: Collection[str]) -> None:
        """Delete the notes with these keys."""
        with self._database.transaction() as connection:
            connection.executemany(_DROP, [(queue, key) for key in keys])

    def keep_only(self, queue: str, keys: Collection[str], before: float) -> int:
        """Delete notes made before `before` whose keys are not among `keys`; returns how many."""
        with self._database.transaction() as connection:
            found = rows_of(connection, _OLD, (queue, before))
            gone = [(number,) for number, key in found if key not in keys]
            connection.executemany("DELETE FROM dead_index WHERE number = ?", gone)
        return len(gone)


def payload_of_dead(envelope: Envelope) -> bytes:
    """The envelope as bytes; headers of other programs that cannot be written are dropped."""
    try:
        return payload_of(envelope)
    except EncodeError:
        return payload_of(replace(envelope, headers={}, properties={}))
