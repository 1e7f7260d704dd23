"""Schedules in the local result file: heads and occurrences, and whose they are.

The plain place is the tables ``schedules`` and ``occurrences``, which releases before 0.2 know;
``schedule_owners`` says who owns a head there. The places apart (`aztask.stores.records.schedules`)
are tables of the same shape. They are a component of their own, so that an older release still
opens the file.

The store's clock is the machine's: all processes that share the file run on one machine.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.queues.engine import Database
from aztask.stores.local.rows import rows_of
from aztask.stores.records.schedules import ClaimRow, Head, KeptSchedule, Occurrence, move_schedule
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
_OWNER_STEPS: Final = (
    # In the places apart, the column schedule has the owner's mark and a space before the name.
    """
    CREATE TABLE schedule_owners (
        schedule TEXT PRIMARY KEY, broker TEXT NOT NULL, app TEXT NOT NULL)
    WITHOUT ROWID;
    CREATE TABLE apart_schedules (
        schedule TEXT PRIMARY KEY, version INTEGER NOT NULL, data BLOB NOT NULL,
        broker TEXT NOT NULL, app TEXT NOT NULL)
    WITHOUT ROWID;
    CREATE TABLE apart_occurrences (
        schedule TEXT NOT NULL, key TEXT NOT NULL, open INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (schedule, key))
    WITHOUT ROWID;
    CREATE INDEX apart_occurrences_open ON apart_occurrences (schedule, key) WHERE open;
    CREATE TABLE schedule_claims (
        mark TEXT NOT NULL, schedule TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL,
        data BLOB NOT NULL, PRIMARY KEY (mark, schedule, key))
    WITHOUT ROWID;
    """,
)
_PLAIN_HEADS: Final = """
    SELECT schedules.schedule, data, version, broker, app
    FROM schedules LEFT JOIN schedule_owners ON schedule_owners.schedule = schedules.schedule
"""
_PLAIN_HEAD: Final = f"{_PLAIN_HEADS} WHERE schedules.schedule = ?"
_APART_HEADS: Final = "SELECT schedule, data, version, broker, app FROM apart_schedules"
_APART_HEAD: Final = f"{_APART_HEADS} WHERE schedule = ?"
_OWNER: Final = "SELECT broker, app FROM schedule_owners WHERE schedule = ?"
_OWN: Final = "REPLACE INTO schedule_owners (schedule, broker, app) VALUES (?, ?, ?)"
_INSERT_APART: Final = """
    INSERT INTO apart_schedules (schedule, version, data, broker, app) VALUES (?, 1, ?, ?, ?)
    ON CONFLICT DO NOTHING
"""
_INSERT_PLAIN: Final = """
    INSERT INTO schedules (schedule, version, data) VALUES (?, 1, ?) ON CONFLICT DO NOTHING
"""
_TOUCH: Final = "UPDATE schedules SET version = version + 1 WHERE schedule = ?"
_CLAIMS: Final = "SELECT key, data, version FROM schedule_claims WHERE mark = ? AND schedule = ?"
_NEW_CLAIM: Final = """
    INSERT INTO schedule_claims (mark, schedule, key, version, data) VALUES (?, ?, ?, 1, ?)
    ON CONFLICT DO NOTHING
"""
_RENEW_CLAIM: Final = """
    UPDATE schedule_claims SET data = ?, version = version + 1
    WHERE mark = ? AND schedule = ? AND key = ? AND version = ?
"""
_DROP_CLAIM: Final = """
    DELETE FROM schedule_claims WHERE mark = ? AND schedule = ? AND key = ? AND version = ?
"""
_ANY: Final = """
    SELECT EXISTS (SELECT 1 FROM schedules) OR EXISTS (SELECT 1 FROM apart_schedules)
"""
_LAST_KEY: Final = "~"


@dataclass(frozen=True)
class _Statements:
    """The statements of one of the two pairs of tables, which have the same shape."""

    open: str
    newest: str
    replace_head: str
    make: str
    change: str
    prune: str
    drop_occurrences: str
    drop_head: str


def _statements(head_table: str, row_table: str) -> _Statements:
    return _Statements(
        f"SELECT key, data, open FROM {row_table} WHERE schedule = ? AND open ORDER BY key",
        f"SELECT key, data, open FROM {row_table} WHERE schedule = ? AND key <= ? "
        "ORDER BY key DESC LIMIT ?",
        f"UPDATE {head_table} SET data = ?, version = version + 1 "
        "WHERE schedule = ? AND version = ?",
        f"INSERT INTO {row_table} (schedule, key, open, data) VALUES (?, ?, ?, ?) "
        "ON CONFLICT DO NOTHING",
        f"UPDATE {row_table} SET open = ?, data = ? WHERE schedule = ? AND key = ?",
        f"DELETE FROM {row_table} WHERE schedule = ? AND NOT open AND key < coalesce(("
        f"SELECT key FROM {row_table} WHERE schedule = ? ORDER BY key DESC LIMIT 1 OFFSET ?), '')",
        f"DELETE FROM {row_table} WHERE schedule = ?",
        f"DELETE FROM {head_table} WHERE schedule = ?",
    )


_IN_PLAIN: Final = _statements("schedules", "occurrences")
_IN_APART: Final = _statements("apart_schedules", "apart_occurrences")


@dataclass(frozen=True)
class _Place:
    """Where a schedule of one name is, or would be made. `key`: its value of schedule."""

    sql: _Statements
    key: str

    @property
    def sign(self) -> str:
        """The first character of tags: a head that moved has no tag of before."""
        return "a" if self.sql is _IN_APART else "p"


class LocalSchedules:
    """The local implementation of `aztask.stores.records.schedules.ScheduleStore`."""

    def __init__(self, database: Database, clock: Clock, owner: Owner = NO_OWNER) -> None:
        self.owner = owner
        self._database = database
        self._clock = clock
        self._mark = owner.mark
        database.migrate("schedules", _STEPS)
        database.migrate("schedule_owners", _OWNER_STEPS)

    def of(self, owner: Owner) -> LocalSchedules:
        """The same store for another owner."""
        return LocalSchedules(self._database, self._clock, owner)

    def now(self) -> float:
        """The time of this machine, UTC epoch seconds."""
        return self._clock.wall()

    def any(self) -> bool:
        """True if there is a schedule of any owner."""
        with self._database.read() as connection:
            return bool(connection.execute(_ANY).fetchone()[0])

    # -- places ------------------------------------------------------------------------------

    def _apart(self, schedule: str) -> _Place:
        return _Place(_IN_APART, f"{self._mark} {schedule}")

    def _place(self, connection: sqlite3.Connection, schedule: str) -> _Place | None:
        """Where this owner's schedule is, or would be; None if others have its only place."""
        apart = self._apart(schedule)
        if self._mark and rows_of(connection, _APART_HEAD, (apart.key,)):
            return apart
        held = rows_of(connection, _OWNER, (schedule,))
        if not held or Owner(*held[0]) == self.owner:
            return _Place(_IN_PLAIN, schedule)
        return apart if self._mark else None

    def _all(self, connection: sqlite3.Connection) -> Iterator[KeptSchedule]:
        """All schedules of all owners."""
        for row in rows_of(connection, _PLAIN_HEADS, ()):
            yield _kept(connection, row, _Place(_IN_PLAIN, str(row[0])))
        for row in rows_of(connection, _APART_HEADS, ()):
            yield _kept(connection, row, _Place(_IN_APART, str(row[0])))

    # -- reading -----------------------------------------------------------------------------

    def overview(self, *, everyone: bool = False) -> list[KeptSchedule]:
        """The owner's schedules and those without an owner."""
        with self._database.transaction() as connection:
            return [
                each
                for each in self._all(connection)
                if everyone or each.owner in (self.owner, NO_OWNER)
            ]

    def read(self, schedule: str) -> KeptSchedule | None:
        """The owner's schedule of that name, else one without an owner."""
        with self._database.transaction() as connection:
            place = self._place(connection, schedule)
            if place is None:
                return None
            heads = _APART_HEAD if place.sql is _IN_APART else _PLAIN_HEAD
            found = rows_of(connection, heads, (place.key,))
            return _kept(connection, found[0], place) if found else None

    def newest(self, schedule: str, limit: int, until: str = "") -> list[Occurrence]:
        """The newest occurrences, the newest first."""
        with self._database.transaction() as connection:
            place = self._place(connection, schedule)
            if place is None:
                return []
            values = (place.key, until or _LAST_KEY, limit)
            return list(_occurrences(rows_of(connection, place.sql.newest, values)))

    # -- changes -----------------------------------------------------------------------------

    def commit(
        self,
        schedule: str,
        data: bytes,
        tag: str | None,
        made: Sequence[Occurrence] = (),
        changed: Sequence[Occurrence] = (),
        *,
        apart: bool = False,
    ) -> str | None:
        """Replace the head, make occurrences and change others, in one transaction."""
        with self._database.transaction() as connection:
            place = self._apart(schedule) if apart else self._place(connection, schedule)
            if place is None or (tag is not None and tag[:1] != place.sign):
                return None
            if tag is None:
                stored = self._insert(connection, place, data)
            else:
                values = (data, place.key, int(tag[1:]))
                stored = connection.execute(place.sql.replace_head, values).rowcount
            if not stored:
                return None
            if place.sql is _IN_PLAIN and self._mark:
                # Its owner is this one, or it had none: then this adopts it.
                connection.execute(_OWN, (schedule, self.owner.broker, self.owner.app))
            connection.executemany(
                place.sql.make, [(place.key, each.key, each.open, each.data) for each in made]
            )
            connection.executemany(
                place.sql.change, [(each.open, each.data, place.key, each.key) for each in changed]
            )
            return f"{place.sign}{int(tag[1:] if tag else 0) + 1}"

    def _insert(self, connection: sqlite3.Connection, place: _Place, data: bytes) -> int:
        if place.sql is _IN_PLAIN:
            return connection.execute(_INSERT_PLAIN, (place.key, data)).rowcount
        owner = (self.owner.broker, self.owner.app)
        return connection.execute(_INSERT_APART, (place.key, data, *owner)).rowcount

    def close_occurrence(self, schedule: str, key: str, data: bytes) -> bool:
        """Close an occurrence, with new data."""
        with self._database.transaction() as connection:
            place = self._place(connection, schedule)
            if place is None:
                return False
            values = (False, data, place.key, key)
            return connection.execute(place.sql.change, values).rowcount > 0

    def claim(self, schedule: str, claim: ClaimRow) -> bool:
        """Make or renew a claim, compare-and-set on its version."""
        if not claim.tag:
            values: tuple[Any, ...] = (self._mark, schedule, claim.key, claim.data)
            return self._database.change(_NEW_CLAIM, values) > 0
        values = (claim.data, self._mark, schedule, claim.key, int(claim.tag))
        return self._database.change(_RENEW_CLAIM, values) > 0

    def unclaim(self, schedule: str, claim: ClaimRow) -> bool:
        """Delete a claim that was not renewed since it was read."""
        values = (self._mark, schedule, claim.key, int(claim.tag))
        return self._database.change(_DROP_CLAIM, values) > 0

    def prune(self, schedule: str, keep: int) -> int:
        """Delete closed occurrences behind the newest."""
        with self._database.transaction() as connection:
            place = self._place(connection, schedule)
            if place is None:
                return 0
            values = (place.key, place.key, keep - 1)
            return connection.execute(place.sql.prune, values).rowcount

    def delete(self, schedule: str) -> bool:
        """Delete a schedule with its occurrences, in one transaction."""
        with self._database.transaction() as connection:
            place = self._place(connection, schedule)
            if place is None:
                return False
            connection.execute(place.sql.drop_occurrences, (place.key,))
            found = connection.execute(place.sql.drop_head, (place.key,)).rowcount > 0
            connection.execute(
                "DELETE FROM schedule_claims WHERE mark = ? AND schedule = ?",
                (self._mark, schedule),
            )
            if place.sql is _IN_PLAIN:
                connection.execute("DELETE FROM schedule_owners WHERE schedule = ?", (schedule,))
            return found

    # -- owners ------------------------------------------------------------------------------

    def owners(self) -> set[Owner]:
        """Whose schedules the file has."""
        with self._database.transaction() as connection:
            return {each.owner for each in self._all(connection)} - {NO_OWNER}

    def adopt(self, old: Owner) -> int:
        """Give the schedules of another owner to this one, each in one transaction."""
        if old == self.owner or not self._mark:
            return 0
        theirs = self.of(old)
        found = [each for each in theirs.overview() if each.owner == old]
        return sum(self._adopt(theirs, each) for each in found)

    def _adopt(self, theirs: LocalSchedules, kept: KeptSchedule) -> bool:
        name = kept.head.schedule
        with self._database.transaction() as connection:
            own = rows_of(connection, _APART_HEAD, (self._apart(name).key,))
            if own or kept.mark:
                return move_schedule(theirs, self, name)
            # A writer who still takes itself for the owner finds another tag.
            touched = connection.execute(_TOUCH, (name,)).rowcount > 0
            connection.execute(_OWN, (name, self.owner.broker, self.owner.app))
            return touched


def _kept(connection: sqlite3.Connection, row: Sequence[Any], place: _Place) -> KeptSchedule:
    """The schedule whose head is this row of its place."""
    key, data, version, broker, app = row
    owner = Owner(broker, app) if isinstance(broker, str) and isinstance(app, str) else NO_OWNER
    apart = place.sql is _IN_APART
    name = str(key).partition(" ")[2] if apart else str(key)
    claims = rows_of(connection, _CLAIMS, (owner.mark, name))
    return KeptSchedule(
        Head(name, _bytes(data), f"{place.sign}{version}"),
        _occurrences(rows_of(connection, place.sql.open, (key,))),
        owner,
        owner.mark if apart else "",
        tuple(ClaimRow(str(claim), _bytes(data), str(at)) for claim, data, at in claims),
    )


def _occurrences(rows: Sequence[Sequence[Any]]) -> tuple[Occurrence, ...]:
    return tuple(Occurrence(str(key), _bytes(data), bool(state)) for key, data, state in rows)


def _bytes(data: object) -> bytes:
    """The data; SQLite stores any value in any column, and wrong ones count as damaged."""
    return data if isinstance(data, bytes) else b""
