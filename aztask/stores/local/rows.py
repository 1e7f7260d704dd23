"""The port of rows over a SQLite file; see `aztask.stores.rows`.

A removed row leaves nothing. The version of a new row begins with the time in microseconds, so that
it is not that of a former one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.queues.engine import Database
from aztask.stores.rows import Change, Kind, Place, Row, StoreTime, Values
from aztask.support.clock import Clock

# -- Reading rows without trusting them ------------------------------------------------------------
#
# A text of SQLite may be no text.


def rows_of(
    connection: sqlite3.Connection, sql: str, values: Sequence[object] | Mapping[str, object]
) -> list[Any]:
    """All rows of a query. Text that is not UTF-8 is returned as bytes, and so counts as damaged.

    During the call no other thread may use the connection.
    """
    try:
        return connection.execute(sql, values).fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
    usual = connection.text_factory
    connection.text_factory = _text_or_bytes
    try:
        return connection.execute(sql, values).fetchall()
    finally:
        connection.text_factory = usual


def _text_or_bytes(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


# -- The statements for one table of a kind, built from the names of its layout and nothing else.
#
# `SqlLayout` and `Kind` refuse every name that is no identifier; data always travels as a
# parameter.


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements; ``ADDRESS`` are the values of owner, partition and key, as far as they exist.

    * `get`: ADDRESS. Gives the columns and the version.
    * `range`: ADDRESS without the key, first, last, limit. Gives partition and key, then as `get`.
      `short`: without the values of the long column.
    * `due`: owner, before, limit. Gives partition and key.
    * `of_owner`: owner, length of the prefix, prefix, written before, partition and key (or number)
      to begin after, limit. Gives the same as `range`.
    * `owners`: gives broker and app, or anything if the table has rows without an owner.
    * `insert`: ADDRESS, perhaps version and time, columns. `insert_alone`: and ADDRESS without the
      owner.
    * `replace`: columns, perhaps the time, ADDRESS, version, perhaps the guard.
    * `delete`: ADDRESS (without the key, in a kind with numbers), version, perhaps the guard.
      `drop`: ADDRESS.
    * `merge`: for each column whether it is given, and its value; perhaps the time; ADDRESS.
    """

    get: str
    range: str
    short: str
    due: str
    of_owner: str
    owners: str
    insert: str
    insert_alone: str
    replace: str
    delete: str
    drop: str
    merge: str

    @staticmethod
    @cache
    def of(kind: Kind, *, owned: bool) -> Statements:
        """The statements for rows with an owner, or without."""
        layout = kind.sql
        table = layout.owned if owned else layout.unowned
        owner = (("broker", "app") if layout.app else ("broker",)) if owned else ()
        at = [each for each in (layout.partition, layout.key) if each]
        address, columns = [*owner, *at], ", ".join(kind.columns)
        short = ", ".join("NULL" if each == kind.long else each for each in kind.columns)
        version = layout.version or _EMPTY
        scope = "".join(f"{each} = ? AND " for each in owner)
        here = " AND ".join(f"{each} = ?" for each in address)
        beside = " AND ".join(f"{each} = ?" for each in at)
        place = f"{layout.partition or _EMPTY} AS partition, {layout.key or _EMPTY} AS row_key"
        key, partition = kind.number or layout.key or _EMPTY, layout.partition or layout.key
        order = ", ".join([partition, kind.number] if kind.number else at)
        stamp = [layout.written] if layout.written else []
        # The key of a row with a number may be damaged, so that no text finds it.
        known = f"{scope}{partition} = ?" if kind.number else here
        current = f"{known} AND {version} = ?" + (
            f" AND {layout.guard} = ?" if layout.guard else ""
        )
        made = [layout.version] if layout.version and not kind.number else []
        new = [*address, *made, *stamp, *kind.columns]
        into = f"INSERT INTO {table} ({', '.join(new)})"
        marks = ", ".join("?" * len(new))
        stamped = "".join(f", {each} = ?" for each in stamp)
        assigned = ", ".join(f"{each} = ?" for each in kind.columns)
        kept = ", ".join(f"{each} = CASE WHEN ? THEN ? ELSE {each} END" for each in kind.columns)
        within = f"{scope}{layout.partition} = ?" if layout.partition else f"{scope}true"
        ranged = f"AND {key} >= ? AND {key} < ? ORDER BY {order} LIMIT ?"
        raised = f"{version} = {version} + 1, " if made else ""
        return Statements(
            f"SELECT {columns}, {version} FROM {table} WHERE {here}",
            f"SELECT {place}, {columns}, {version} FROM {table} WHERE {within} {ranged}",
            f"SELECT {place}, {short}, {version} FROM {table} WHERE {within} {ranged}",
            f"SELECT {place} FROM {table} WHERE {scope}{kind.due} < ? ORDER BY {kind.due} LIMIT ?",
            f"SELECT {place}, {columns}, {version} FROM {table} WHERE {scope}"
            f"substr({partition}, 1, ?) = ? AND {layout.written or 0} < ? "
            f"AND ({layout.partition or _EMPTY}, {key}) > (?, ?) ORDER BY {order} LIMIT ?",
            f"SELECT DISTINCT {', '.join(owner)} FROM {table}"
            if owned
            else f"SELECT 1 FROM {table} LIMIT 1",
            f"{into} VALUES ({marks}) ON CONFLICT DO NOTHING",
            f"{into} SELECT {marks} WHERE NOT EXISTS "
            f"(SELECT 1 FROM {layout.unowned} WHERE {beside}) ON CONFLICT DO NOTHING",
            f"UPDATE {table} SET {raised}{assigned}{stamped} WHERE {current}",
            f"DELETE FROM {table} WHERE {current}",
            f"DELETE FROM {table} WHERE {here}",
            f"UPDATE {table} SET {raised}{kept}{stamped} WHERE {here}",
        )


_EMPTY = "''"


_LAST: Final = "\U0010ffff"
"""Behind all keys: no text has more than this character's code."""
_PAGE: Final = 1000


class SqliteStore:
    """The implementation of `aztask.stores.rows.RowStore` in a file.

    The store's clock is the machine's: all processes that share the file run on one machine.
    """

    remote = False

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self.clock = clock

    def of(self, kind: Kind) -> SqliteRows:
        """The rows of one kind, whose tables are made."""
        return SqliteRows(self.database, self.clock, kind)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The block is one transaction of the file."""
        with self.database.transaction():
            yield

    def now(self) -> float:
        """The time of this machine, UTC epoch seconds."""
        return self.clock.wall()

    def time(self) -> StoreTime:
        """The clock of this machine."""
        at, now = self.clock.wall(), self.clock.monotonic()
        return StoreTime(at, now, now)


class SqliteRows:
    """The rows of one kind in a file."""

    def __init__(self, database: Database, clock: Clock, kind: Kind) -> None:
        self._database = database
        self._clock = clock
        self._kind = kind
        self._layout = kind.sql
        self._columns = tuple(kind.columns)
        # The parts of a place that have columns: its partition, its key, or both.
        self._named = slice(1 if kind.sql.partition else 2, 3 if kind.sql.key else 2)
        self._versioned = bool(kind.sql.version) and not kind.number
        # A number is greater than every text, so a range of numbers begins with one.
        self._least = "0" if kind.number else ""
        self._flags = {name for name, known in kind.columns.items() if known is bool}
        self._owned = Statements.of(kind, owned=True)
        self._unowned = Statements.of(kind, owned=False)
        for component, steps in kind.sql.steps.items():
            database.migrate(component, steps)

    # -- reading -----------------------------------------------------------------------------

    def get(self, places: Sequence[Place]) -> list[Row | None]:
        """The rows at these places: own ones, else those without an owner (`Kind.inherits`)."""
        with self._database.read() as connection:
            return [self._get(connection, place) for place in places]

    def _get(self, connection: sqlite3.Connection, place: Place) -> Row | None:
        statements, address = self._at(place)
        found = rows_of(connection, statements.get, address)
        if not found and self._kind.inherits and place.owner.known:
            place = place._replace(owner=NO_OWNER)
            statements, address = self._at(place)
            found = rows_of(connection, statements.get, address)
        return self._row(place, found[0]) if found else None

    def range(
        self,
        owner: Owner,
        partition: str,
        first: str = "",
        last: str = "",
        limit: int = 1000,
        *,
        short: bool = False,
    ) -> list[Row]:
        """Rows of one partition in the order of their keys or numbers."""
        statements, address = self._at(Place(owner, partition))
        scope = address[:-1] if self._layout.key else address
        values = (*scope, first or self._least, last or _LAST, limit)
        sql = statements.short if short else statements.range
        with self._database.read() as connection:
            found = rows_of(connection, sql, values)
        return [self._read(owner, row) for row in found]

    def due(self, owner: Owner, before: float, limit: int) -> list[Place]:
        """Places of rows that are due, by an index."""
        sql = self._statements(owner).due
        with self._database.read() as connection:
            found = rows_of(connection, sql, (*self._scope(owner), before, limit))
        return [self._place(owner, row) for row in found]

    def of_owner(
        self, owner: Owner, prefix: str = "", written_before: float | None = None
    ) -> Iterable[Row]:
        """All rows of an owner, page by page."""
        last: tuple[Any, ...] = ("", "")
        sql = self._statements(owner).of_owner
        before = float("inf") if written_before is None else written_before
        while True:
            values = (*self._scope(owner), len(prefix), prefix, before, *last, _PAGE)
            with self._database.read() as connection:
                found = rows_of(connection, sql, values)
            yield from (self._read(owner, row) for row in found)
            if len(found) < _PAGE:
                return
            last = (found[-1][0], found[-1][-1]) if self._kind.number else found[-1][:2]

    def may_be_unowned(self) -> bool:
        """True if rows without an owner exist."""
        with self._database.read() as connection:
            return bool(rows_of(connection, self._unowned.owners, ()))

    def owners(self) -> set[Owner]:
        """Whose rows are in the file."""
        with self._database.read() as connection:
            found = {Owner(*row) for row in rows_of(connection, self._owned.owners, ())}
        return found | {NO_OWNER} if self.may_be_unowned() else found

    # -- changes -----------------------------------------------------------------------------

    def write(self, change: Change) -> Row | None:
        """Make, replace or delete one row: one statement."""
        row, sql, values = self._prepared(change)
        return row if self._database.change(sql, values) else None

    def write_all(self, changes: Sequence[Change]) -> list[Row | None]:
        """Make each change, in one transaction; a single one needs none of its own."""
        if len(changes) == 1:
            return [self.write(changes[0])]
        prepared = [self._prepared(each) for each in changes]
        with self._database.transaction() as connection:
            return [
                row if connection.execute(sql, values).rowcount else None
                for row, sql, values in prepared
            ]

    def together(self, changes: Sequence[Change]) -> list[Row] | None:
        """Make all changes or none. The transaction around them goes on in either case."""
        self._kind.check_together(changes)
        prepared = [self._prepared(each) for each in changes]
        with self._database.transaction() as connection:
            connection.execute("SAVEPOINT rows_together")
            made = all(connection.execute(sql, values).rowcount for _, sql, values in prepared)
            if not made:
                connection.execute("ROLLBACK TO rows_together")
            connection.execute("RELEASE rows_together")
        return [row for row, _, _ in prepared] if made else None

    def put(self, place: Place, values: Values) -> None:
        """Write a row, whatever is there, in one transaction."""
        self._kind.check(place, values)
        statements, address = self._at(place)
        with self._database.transaction() as connection:
            connection.execute(statements.drop, address)
            connection.execute(statements.insert, self._new(address, self._version(), values))

    def remove(self, places: Sequence[Place]) -> None:
        """Delete the rows at these places, in one transaction."""
        with self._database.transaction() as connection:
            for place in places:
                statements, address = self._at(place)
                connection.execute(statements.drop, address)

    def merge(self, place: Place, values: Values) -> bool:
        """Set these values and keep the others."""
        self._kind.check(place, values)
        statements, address = self._at(place)
        given = [part for name in self._columns for part in (name in values, values.get(name))]
        return self._database.change(statements.merge, (*given, *self._stamp(), *address)) > 0

    def _prepared(self, change: Change) -> tuple[Row, str, tuple[Any, ...]]:
        """(the row after the change, its statement, the values of that)."""
        place, values, before, beside = change
        statements, address = self._at(place)
        if before is not None:
            known = (*(address[:-1] if self._kind.number else address), int(before.tag))
            if self._layout.guard:
                known = (*known, before.values[self._layout.guard])
            if values is None:
                return before, statements.delete, known
            self._kind.check(place, values)
            row = Row(place, values, str(int(before.tag) + 1))
            return row, statements.replace, (*self._listed(values), *self._stamp(), *known)
        if values is None:
            raise ValueError("a row that is deleted was read before")
        self._kind.check(place, values)
        version = self._version()
        new = self._new(address, version, values)
        row = Row(place, values, str(version) if self._versioned else "")
        if self._kind.inherits and place.owner.known and not beside:
            at = address[1 + self._layout.app :]
            return row, statements.insert_alone, (*new, *at)
        return row, statements.insert, new

    def _version(self) -> int:
        return int(self._clock.wall() * 1e6)

    def _stamp(self) -> tuple[float, ...]:
        return (self._clock.wall(),) if self._layout.written else ()

    def _listed(self, values: Values) -> tuple[Any, ...]:
        return tuple([values.get(name) for name in self._columns])

    def _new(self, address: tuple[Any, ...], version: int, values: Values) -> tuple[Any, ...]:
        made = (version,) if self._versioned else ()
        return (*address, *made, *self._stamp(), *self._listed(values))

    # -- places ------------------------------------------------------------------------------

    def _statements(self, owner: Owner) -> Statements:
        return self._owned if owner.known else self._unowned

    def _scope(self, owner: Owner) -> tuple[Any, ...]:
        if not owner.known:
            return ()
        return (owner.broker, owner.app) if self._layout.app else (owner.broker,)

    def _at(self, place: Place) -> tuple[Statements, tuple[Any, ...]]:
        """The statements of a place's table, and the values of its address."""
        owner = place.owner
        named: tuple[Any, ...] = place[self._named]  # type: ignore[assignment]  # it is a slice
        if not owner.broker:
            return self._unowned, named
        if self._layout.app:
            return self._owned, (owner.broker, owner.app, *named)
        return self._owned, (owner.broker, *named)

    def _place(self, owner: Owner, found: Sequence[Any]) -> Place:
        """The place in the first two columns of a row."""
        return Place(owner, str(found[0]), str(found[1]))

    def _read(self, owner: Owner, found: Sequence[Any]) -> Row:
        return self._row(self._place(owner, found), found[2:])

    def _row(self, place: Place, found: Sequence[Any]) -> Row:
        values = dict(zip(self._columns, found, strict=False))
        for name in self._flags:
            if values[name] in (0, 1):
                values[name] = bool(values[name])
        return Row(place, values, str(found[-1]))
