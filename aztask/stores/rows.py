"""The port of the result store's rows: what SQLite and Azure Tables do for every kind of record.

A row has a place (its owner, a partition, and a key in it), values by column, and a tag that names
this version of it. A `Kind` says which columns its rows have, and where each store keeps them.

Rules
1. A change is compare-and-set: it names the row that was read, or None for a row that must not
   exist yet. A conflict changes nothing, and is an answer, not an error.
2. Several changes of one partition are made together or not at all (`Rows.together`). Changes of
   several partitions are not one transaction; each succeeds or fails alone (`Rows.write_all`).
3. If an answer is lost, the store asks again until it knows. It recognises its own write by its
   values: two writers never write equal values to one place, for example because of a random value.
4. An unreachable store raises BrokerUnavailable; the change may have been made.
5. Over SQLite, a call is part of this thread's transaction on the same file, if there is one: so an
   outcome, what follows it and the settlement are one commit. Over Tables, each call stands alone.
6. What a store cannot keep raises EncodeError before anything is changed: a number that is not a
   number, a text that is no Unicode, and what does not fit.
7. Rows belong to an owner (`aztask.address.owner`). Those of `NO_OWNER` were written before rows
   had owners. In a kind that `Kind.inherits`, such a row stands in for an own one that does not
   exist: nothing is made beside it, and it is changed where it is, so that the release before sees
   that.
8. What another program wrote is returned as it is: the reader checks it
   (`aztask.stores.records.damage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from aztask.address.owner import Owner
from aztask.errors import BrokerUnavailable, EncodeError
from aztask.stores.layout import SqlLayout, TablesLayout
from aztask.support import chance, clock

Value: TypeAlias = str | bytes | float | int | bool | None
Values: TypeAlias = Mapping[str, Any]
"""Values by column: a `Value`, or what another program wrote."""

TOGETHER: Final = 98
"""The most changes of one `Rows.together`: a transaction of Azure Tables has 100 rows."""

TOGETHER_DUE: Final = 33
"""The same for a kind with due times, whose changes may cost three rows each."""

_INT: Final = 2**31


class Place(NamedTuple):
    """Where a row is. Over Tables, a kind may spread one partition over several (`Shards`)."""

    owner: Owner
    partition: str
    key: str = ""


class Row(NamedTuple):
    """A row as it was read or written. `tag`: names this version of it."""

    place: Place
    values: Values
    tag: str


class Change(NamedTuple):
    """A new version of a row.

    * `values`: None deletes it.
    * `before`: the row that was read; None for one that must not exist.
    * `beside`: make it even if there is one without an owner (rule 7).
    """

    place: Place
    values: Values | None
    before: Row | None = None
    beside: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of record, and where its rows are. Each is a constant, equal to itself alone.

    * `columns`: the type of each value. A whole number has 32 bits.
    * `due`: the column with the time at which `Rows.due` finds a row, if the kind has one.
    * `inherits`: see rule 7.
    * `long`: a column of bytes that may be longer than one property of a table.
    * `number`: a column with a number that the store gives to each new row, if the kind has one:
      rows of a partition are in the order in which they were made, and not in that of their keys.
      Such rows are made one by one and deleted, never changed.
    """

    columns: Mapping[str, type]
    sql: SqlLayout
    tables: TablesLayout
    due: str = ""
    inherits: bool = False
    long: str = ""
    number: str = ""

    def __post_init__(self) -> None:
        if not all(name.isidentifier() and name.isascii() for name in self.columns):
            raise ValueError(f"{self.columns} has a name that is no identifier")

    def check(self, place: Place, values: Values) -> None:
        """Raise EncodeError for what no store can keep."""
        if not (place[1].isascii() and place[2].isascii()):
            _check_text("partition", place.partition)
            _check_text("key", place.key)
        for name, value in values.items():
            if isinstance(value, bytes):
                continue
            if isinstance(value, str):
                _check_text(name, value)
            elif isinstance(value, float):
                if value != value:  # noqa: PLR0124  # not a number
                    raise EncodeError(f"{name} is not a number, and cannot be stored")
            elif isinstance(value, int) and not -_INT <= value < _INT:
                raise EncodeError(f"{name} is {value}, and a stored number has 32 bits")

    def check_together(self, changes: Sequence[Change]) -> None:
        """Raise ValueError for changes that are no transaction of every store."""
        places = {change.place for change in changes}
        if len({(place.owner, place.partition) for place in places}) > 1:
            raise ValueError("rows that change together are in one partition")
        if len(places) < len(changes):
            raise ValueError("of rows that change together, each has one change")
        if len(changes) > (TOGETHER_DUE if self.due else TOGETHER):
            raise ValueError(f"{len(changes)} rows are too many for one transaction")


def _check_text(name: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise EncodeError(f"{name} is not a Unicode text, and cannot be stored") from None


class Rows(Protocol):
    """The rows of one kind. Any thread may call."""

    def get(self, places: Sequence[Place]) -> list[Row | None]:
        """The rows at these places, of any partitions, in order; None for missing ones."""
        ...

    def write(self, change: Change) -> Row | None:
        """Make, replace or delete one row. Returns it, a deleted one as it was before.

        None if `Change.before` is not the current version. The number of a new row is known when it
        is read.
        """
        ...

    def write_all(self, changes: Sequence[Change]) -> list[Row | None]:
        """Make each change, of any partitions; each succeeds or fails alone, as in `write`."""
        ...

    def together(self, changes: Sequence[Change]) -> list[Row] | None:
        """Make changes of one partition, all or none; None as in `write`, and then none is made.

        In a kind that is spread over shards, only rows of one shard can change together.
        """
        ...

    def put(self, place: Place, values: Values) -> None:
        """Write a row, whatever is there. Not for kinds with due times or numbers."""
        ...

    def remove(self, places: Sequence[Place]) -> None:
        """Delete the rows at these places, whatever is there. Not for kinds with due times."""
        ...

    def merge(self, place: Place, values: Values) -> bool:
        """Set these values and keep the others, whatever other writers do.

        False if there is no such row, or if it would become too large. A write under an older tag
        fails afterwards. Not for the column of due times.
        """
        ...

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
        """Rows of one partition from the key `first` to before `last` (""; to the end), in order.

        Keys are in the order of their characters if they consist of letters, digits, ``.``, ``:``
        and ``-`` and are not longer than 250. In a kind with shards, there is no such order. In one
        with numbers, they are what `number_key` gives.

        * `short`: without the values of the column `Kind.long`.
        """
        ...

    def due(self, owner: Owner, before: float, limit: int) -> list[Place]:
        """Places of rows that are due before a time, the first due first. Read them with `get`."""
        ...

    def of_owner(
        self, owner: Owner, prefix: str = "", written_before: float | None = None
    ) -> Iterable[Row]:
        """All rows of an owner, whose partitions begin with `prefix`, page by page.

        * `written_before`: only those not written since. For kinds that note it.
        """
        ...

    def may_be_unowned(self) -> bool:
        """True if rows without an owner may exist: usually no request, and at most a minute old."""
        ...

    def owners(self) -> set[Owner]:
        """Whose rows are in the store; with `NO_OWNER` if some have no owner."""
        ...


@dataclass(frozen=True, slots=True)
class StoreTime:
    """The store's clock at one moment. `at`: UTC epoch seconds.

    It was read between `earliest` and `latest`, on the clock of the deadlines.
    """

    at: float
    earliest: float
    latest: float


class RowStore(Protocol):
    """A store of rows of all kinds."""

    @property
    def remote(self) -> bool:
        """True if a call waits for a network."""
        ...

    def of(self, kind: Kind) -> Rows:
        """The rows of one kind; over SQLite, its tables are made."""
        ...

    def joined(self) -> AbstractContextManager[None]:
        """A block whose calls are one transaction where the store can do that (rule 5)."""
        ...

    def now(self) -> float:
        """The store's time, UTC epoch seconds: at most a second late, never early."""
        ...

    def time(self) -> StoreTime:
        """Read the store's clock, which all processes share, exactly."""
        ...


@runtime_checkable
class KeepsRows(Protocol):
    """A result store on the port of rows."""

    owner: Owner
    rows: RowStore


# -- changing --------------------------------------------------------------------------------
#
# The one loop of compare-and-set: read, decide, write, and again if another writer was faster.


TRIES: Final = 20
_FIRST_PAUSE: Final = 0.002
_DOUBLED: Final = 5
_LONGEST_PAUSE: Final = 0.5

Read = TypeVar("Read")
Data = TypeVar("Data")
Result = TypeVar("Result")
Data_co = TypeVar("Data_co", covariant=True)
Result_co = TypeVar("Result_co", covariant=True)
Data_contra = TypeVar("Data_contra", contravariant=True)


class Cell(Protocol[Read, Data_contra]):
    """One value with versions, such as a row or a document."""

    def read(self) -> Read:
        """The version that is current now; `write` compares it."""
        ...

    def write(self, data: Data_contra, before: Read) -> bool:
        """Replace the version that was read; False if that is not the current one."""
        ...


@dataclass(frozen=True, slots=True)
class New(Generic[Data_co, Result_co]):
    """A decision: write this data. `result`: what `change` returns then."""

    data: Data_co
    result: Result_co


@dataclass(frozen=True, slots=True)
class Kept(Generic[Result_co]):
    """A decision: write nothing. `result`: what `change` returns."""

    result: Result_co


def change(
    cell: Cell[Read, Data],
    decide: Callable[[Read], New[Data, Result] | Kept[Result]],
    what: str,
    *,
    tries: int = TRIES,
) -> Result:
    """Change a cell until no other write comes between; returns the result of the last decision.

    * `decide`: gives the decision for the version that was read. It may be called several times, so
      it does nothing else that lasts.
    * `what`: names the cell in the error.

    Writers that meet twice pause, so that one of them goes first: for some milliseconds, or as
    slow as the store is, because a pause that is short beside a try does not part them. (The first
    write may have been made without a look, as for a new row.) Raises BrokerUnavailable if others
    come first at every try, and what the cell raises.
    """
    own = clock.current()
    for attempt in range(tries):
        began = own.monotonic()
        before = cell.read()
        decided = decide(before)
        if isinstance(decided, Kept) or cell.write(decided.data, before):
            return decided.result
        if attempt:
            least = max(_FIRST_PAUSE, own.monotonic() - began)
            longest = min(least * 2 ** min(attempt - 1, _DOUBLED), _LONGEST_PAUSE)
            own.sleep(chance.uniform(0.0, longest))  # spreads the writers
    raise BrokerUnavailable(f"other processes keep changing {what}; try again")


# -- owning ----------------------------------------------------------------------------------
#
# Moving rows from one owner to another.


PASSES: Final = 10
"""How often rows that change in the meantime are looked for again."""

WINDOW: Final = 500
"""Rows that are moved in one transaction, where the store has them: workers go on in between."""


def _as_they_are(row: Row, place: Place) -> Values:
    return row.values


def move_rows(
    store: RowStore,
    rows: Rows,
    old: Owner,
    new: Owner,
    values: Callable[[Row, Place], Values] = _as_they_are,
) -> int:
    """Make all rows of an owner those of another one; returns how many were found.

    * `values`: of a row at its new place.

    A row that the new owner has already stays, and the other one is deleted. Crash window: where
    the store has no transaction, both exist; the next call deletes the old one. If the process dies
    between two windows, the next call goes on.
    """
    moved = passes = 0
    while passes < PASSES:
        before = moved
        with store.joined():
            found = list(islice(rows.of_owner(old), WINDOW))
            if not found:
                return moved
            for row in found:
                place = row.place._replace(owner=new)
                made = rows.write(Change(place, values(row, place), beside=True))
                if made is None and rows.get([place]) == [None]:
                    break
                moved += rows.write(Change(row.place, None, row)) is not None
        passes = 0 if moved > before else passes + 1
    raise BrokerUnavailable(f"the rows of {old} keep changing; try again")
