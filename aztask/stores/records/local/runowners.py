"""Whose the rows of runs in the local result file are: the column, purging own rows, moving them.

The column ``broker`` is a component of its own, so that an older release still opens the file: it
knows its own columns only, and makes rows without an owner.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from aztask.address.owner import Owner
from aztask.queues.engine import Database
from aztask.stores.records.base import UNFINISHED_SECONDS
from aztask.stores.records.local.workflows import KEPT
from aztask.support.clock import Clock

_STEPS: Final = ("ALTER TABLE runs ADD COLUMN broker TEXT",)

OURS: Final = "(runs.broker IS NULL OR runs.broker = :mine OR :mine = '')"
"""The condition for rows that a store may change: own ones, and those without an owner."""

PURGED: Final = "(runs.broker IS NULL OR runs.broker = :mine)"
"""The condition for rows that a purge may delete: a store without an owner deletes only those."""

_OWN: Final = "(broker = :mine OR (broker IS NULL AND :mine = ''))"
# The last number of the next rows, and whether own rows are among them, and own ones that ended.
# EXISTS stops at the first of them, mostly the first row at all, where a count reads all rows.
_WINDOW: Final = f"""
    WITH part (last) AS MATERIALIZED (
        SELECT coalesce(
            (SELECT id FROM runs WHERE id > :last ORDER BY id LIMIT 1 OFFSET :window - 1),
            (SELECT MAX(id) FROM runs WHERE id > :last)))
    SELECT
        part.last,
        EXISTS (SELECT 1 FROM runs WHERE id > :last AND id <= part.last AND {_OWN}),
        EXISTS (
            SELECT 1 FROM runs
            WHERE id > :last AND id <= part.last AND ended_at IS NOT NULL AND {_OWN})
    FROM part
"""
_PURGE: Final = f"""
    DELETE FROM runs
    WHERE id > :last AND id <= :end AND id NOT IN (SELECT id FROM damaged_runs) AND {PURGED}
    AND CASE
        WHEN ended_at IS NOT NULL THEN ended_at
        WHEN state = 'pending' THEN coalesce(due_at, started_at)
        ELSE started_at + {UNFINISHED_SECONDS} END
      < CASE WHEN runs.broker IS NULL THEN :unowned ELSE :before END
    {KEPT}
"""
_OLD_ONES: Final = f"""
    SELECT EXISTS (
        SELECT 1 FROM runs WHERE id > :last AND id <= :end AND {_OWN} AND ended_at < :before)
"""
_UNOWNED: Final = """
    SELECT COUNT(*) FROM runs
    WHERE broker IS NULL AND coalesce(ended_at, started_at, due_at) < ?
"""
_ADOPT: Final = "UPDATE runs SET broker = ? WHERE id > ? AND id <= ? AND broker = ?"

PURGE_WINDOW: Final = 2_000
SKIP_SECONDS: Final = 3600.0
"""For so long a purge skips the oldest rows if it found none of its own among them."""


class LocalRunOwners:
    """The rows of runs of one owner, and those without an owner."""

    def __init__(self, database: Database, clock: Clock, owner: Owner) -> None:
        self._database = database
        self._clock = clock
        self._mine = owner.broker
        self._skipped = 0
        self._skip_until = clock.monotonic() + SKIP_SECONDS
        database.migrate("run_owners", _STEPS)

    def purge(self, before: float) -> int:
        """Delete runs of this owner that ended before that time; returns how many.

        It goes through windows of rows in the order of their first starts, up to the first window
        in which own runs ended, but none of them long ago: this neither scans the whole table nor
        holds the write lock for long. Rows that wait for their messages do not end the search.
        """
        if self._clock.monotonic() >= self._skip_until:
            self._skip_until = self._clock.monotonic() + SKIP_SECONDS
            self._skipped = 0  # rows without an owner among them may be old enough by now
        # The retention of a row's owner is not known if the owner is not.
        unowned = before - UNFINISHED_SECONDS if self._mine else before
        values = {"mine": self._mine, "before": before, "unowned": unowned, "window": PURGE_WINDOW}
        last, deleted = self._skipped, 0
        while True:
            with self._database.transaction() as connection:
                values["last"] = last
                end, own, ended = connection.execute(_WINDOW, values).fetchone()
                if end is None:
                    return deleted
                values["end"] = end
                gone = connection.execute(_PURGE, values).rowcount
                (old,) = connection.execute(_OLD_ONES, values).fetchone()
            if ended and not gone and not old:
                return deleted
            if not own and last == self._skipped:
                self._skipped = end
            last, deleted = end, deleted + gone

    def owners(self, connection: sqlite3.Connection) -> set[Owner]:
        """The brokers that the rows belong to. It reads all rows."""
        found = connection.execute("SELECT DISTINCT broker FROM runs").fetchall()
        return {Owner(broker) for (broker,) in found if broker and isinstance(broker, str)}

    def unowned(self, before: float) -> int:
        """How many rows without an owner are older than a time."""
        with self._database.read() as connection:
            (count,) = connection.execute(_UNOWNED, (before,)).fetchone()
        return int(count)

    def adopt(self, old: Owner) -> int:
        """Make the rows of `old` its own, a window at a time, so that workers go on."""
        last, moved = 0, 0
        while True:
            with self._database.transaction() as connection:
                values = {"mine": self._mine, "last": last, "window": PURGE_WINDOW}
                (end, *_) = connection.execute(_WINDOW, values).fetchone()
                if end is None:
                    return moved
                row = (self._mine, last, end, old.broker)
                moved += connection.execute(_ADOPT, row).rowcount
            last = end
