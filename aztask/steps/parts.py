"""Parts of a stream: what a task emits while it runs, as rows beside its recorded steps.

Rows of Azure Tables hold them, not append blobs: an append costs as much as 180 row requests, a
blob takes at most 50,000 of them, and the store of a result is there anyway.

Rows
* ``t:TAKE``: a take began. It says which take it continues, and after how many parts.
* ``p:TAKE:FIRST``: parts in the order of their numbers, the first of which has the number FIRST.
* ``m``: the mark of the newest run that ended in a wait: its take, and after how many parts; none
  once the task has continued with other arguments.

Rules
1. Each start of a run writes a take of its own, whose name is (generation, hop, delivery), the time
   of the start and a random text: a worker that was frozen writes where no reader looks. The last
   name in the order of characters counts. The time only decides between starts on one machine: a
   local queue counts a delivery that was given back, and the next one, under the same number.
2. A row of parts has its position as its key, so an append whose answer was lost doubles nothing.
3. A run that goes on after a wait continues the take of the mark: parts that it emits again have
   the numbers of those, and are not written.
4. With signing keys, each row is signed for its place (`aztask.steps.records`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgpack

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import AztaskError, BrokerUnavailable, CodecError, ResultDamaged
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.steps.records import SignedRows
from aztask.stores.layout import SqlLayout, TablesLayout
from aztask.stores.records.damage import Damaged
from aztask.stores.records.owners import is_other_broker
from aztask.stores.rows import Change, KeepsRows, Kind, Place, Row, RowStore, move_rows
from aztask.support import chance, clock

_PARTS: Final = (
    """
    CREATE TABLE parts (
        task TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, data BLOB NOT NULL,
        written_at REAL NOT NULL, PRIMARY KEY (task, key))
    WITHOUT ROWID;
    """,
)
_OWNED_PARTS: Final = (
    """
    CREATE TABLE owned_parts (
        broker TEXT NOT NULL, task TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL,
        data BLOB NOT NULL, written_at REAL NOT NULL, PRIMARY KEY (broker, task, key))
    WITHOUT ROWID;
    """,
)
PARTS: Final = Kind(
    {"data": bytes},
    SqlLayout(
        "owned_parts",
        "parts",
        "task",
        "key",
        written="written_at",
        steps={"parts": _PARTS, "owned_parts": _OWNED_PARTS},
    ),
    TablesLayout("P", "p"),
    long="data",
)

VERSION: Final = 1
PAGE: Final = 500
PURGED: Final = 10_000
_MARK: Final = "m"
_END: Final = "u"
"""Behind all keys of rows."""


class Knows(Protocol):
    """What a purge needs of the result store."""

    def get(self, task_id: str) -> object:
        """The latest run of the task; None if the store knows none."""
        ...


@dataclass(frozen=True, slots=True)
class Take:
    """The parts of one start.

    * `base`: the take that it continues, after `kept` parts of it.
    * `at`: when its first part was written, UTC epoch seconds.
    """

    name: str
    base: str = ""
    kept: int = 0
    at: float = 0.0

    @property
    def token(self) -> str:
        """Its short name, in the ids of its parts."""
        return self.name.rpartition(".")[2]


def place_of(generation: int, hop: int) -> str:
    """The beginning of the names of all takes of a hop; those of earlier hops come before it."""
    return f"{generation:08d}.{hop:08d}."


def take_of(message: TaskMessage, delivery_count: int) -> str:
    """A new name for the take of this delivery's run (rule 1)."""
    place = f"{place_of(message.generation, message.hop)}{delivery_count:08d}"
    return f"{place}.{int(1_000_000 * clock.wall()):013x}{chance.token()[:8]}"


@dataclass(slots=True)
class Found:
    """Rows of a stream: its takes in order, and by take the parts, each with its number."""

    takes: list[Take] = field(default_factory=list)
    parts: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)


class PartStore:
    """The streams in one result store. Any thread may call. Raises BrokerUnavailable."""

    def __init__(self, store: RowStore, owner: Owner, codec: Codec) -> None:
        """owner: whose tasks; streams belong to the broker. codec: signs, if it has keys."""
        self.owner = owner.of_broker
        self.remote = store.remote
        self._store = store
        self._rows = store.of(PARTS)
        self._signed = SignedRows(codec, "part")

    def append(
        self, task_id: str, take: Take, first: int, parts: Sequence[bytes], *, new: bool
    ) -> None:
        """Write parts behind the others of a take, in one request.

        * `first`: the number of the first one. `new`: the take has no row yet.
        """
        changes = [
            self._change(task_id, f"p:{take.name}:{first:010d}", [VERSION, first, list(parts)])
        ]
        if new:
            begun = [VERSION, take.base, take.kept, self._store.now()]
            changes.append(self._change(task_id, f"t:{take.name}", begun))
        # None: the rows are there, from a try whose answer was lost (rule 2).
        self._rows.together(changes)

    def begin(self, task_id: str, take: Take) -> None:
        """Begin a take that has no part yet. One request."""
        begun = [VERSION, take.base, take.kept, self._store.now()]
        self._rows.write(self._change(task_id, f"t:{take.name}", begun))

    def last_take(self, task_id: str) -> str:
        """The name of the newest take; "" if there is none. One request for each `PAGE` takes."""
        *_, last = ("", *(row.place.key for row in self._pages(task_id, "t:")))
        return last.removeprefix("t:")

    def mark(self, task_id: str, take: str, count: int) -> None:
        """Note that a run ended in a wait, after so many parts of a take. One request."""
        change = self._change(task_id, _MARK, [VERSION, take, count])
        self._rows.put(change.place, change.values or {})

    def marked(self, task_id: str) -> tuple[str, int]:
        """The take of the newest run that ended in a wait, and how many parts count; "" and 0
        if there is none. One request. Raises ResultDamaged.
        """
        (row,) = self._rows.get([Place(self.owner, task_id, _MARK)])
        if row is None:
            return "", 0
        try:
            take, count = self._opened(row)
            return str(take), int(count)
        except _DAMAGE as error:
            raise _damaged(task_id, error) from None

    def read(self, task_id: str, take: str = "", after: int = 0) -> Found:
        """The rows of a take behind a number, those of later takes, and the row of each take.

        One request for each `PAGE` rows. Raises ResultDamaged.
        """
        found = Found()
        for row in self._pages(task_id, f"p:{take}:{after + 1:010d}" if take else "p:"):
            kind, name, *_ = row.place.key.split(":")
            try:
                record = self._opened(row)
                if kind == "t":
                    base, kept, at = record
                    found.takes.append(Take(name, str(base), int(kept), float(at)))
                else:
                    first, values = record
                    some = found.parts.setdefault(name, [])
                    some += zip(range(first, first + len(values)), values, strict=True)
            except _DAMAGE as error:
                raise _damaged(task_id, error) from None
        return found

    def _pages(self, task_id: str, first: str) -> Iterator[Row]:
        while True:
            rows = self._rows.range(self.owner, task_id, first, _END, PAGE)
            yield from rows
            if len(rows) < PAGE:
                return
            first = f"{rows[-1].place.key}-"  # no key has a character below "-"

    def forget(self, task_id: str) -> int:
        """Delete the stream of a task; returns how many rows it had."""
        rows = list(self._pages(task_id, ""))
        return self._remove(rows)

    def purge(self, before: float, results: Knows) -> int:
        """Delete streams written before a time, of tasks that the store no longer knows.

        Returns how many rows, at most some thousand. Reads all rows of streams.
        """
        removed, known = 0, dict[str, bool]()
        old: list[Row] = []
        for row in self._rows.of_owner(self.owner, written_before=before):
            task_id = row.place.partition
            if task_id not in known:
                known[task_id] = _is_known(results, task_id)
            if not known[task_id]:
                old.append(row)
            if len(old) >= PAGE:
                removed, old = removed + self._remove(old), []
            if removed >= PURGED:
                break
        return removed + self._remove(old)

    def _remove(self, rows: Sequence[Row]) -> int:
        made = self._rows.write_all([Change(row.place, None, row) for row in rows])
        return sum(row is not None for row in made)

    def owners(self) -> set[Owner]:
        """Whose streams are in the store."""
        return self._rows.owners()

    def adopt(self, old: Owner) -> int:
        """Make the streams of another owner's broker ours; returns how many rows were found."""
        if not is_other_broker(self.owner, old):
            return 0
        return move_rows(self._store, self._rows, old.of_broker, self.owner)

    def _change(self, task_id: str, key: str, record: list[object]) -> Change:
        place = Place(self.owner, task_id, key)
        return Change(place, {"data": self._signed.closed(task_id, place, msgpack.packb(record))})

    def _opened(self, row: Row) -> list[Any]:
        record: list[Any] = msgpack.unpackb(self._signed.opened(row))
        if not isinstance(record, list) or record[:1] != [VERSION]:
            raise ValueError("a newer aztask may know it")
        return record[1:]


_DAMAGE: Final = (CodecError, Damaged, ValueError, TypeError, msgpack.UnpackException)


def _damaged(task_id: str, error: Exception) -> ResultDamaged:
    return ResultDamaged(
        f"a part of the stream of task {task_id} cannot be read ({error}); its other results are "
        "not affected"
    )


def _is_known(results: Knows, task_id: str) -> bool:
    try:
        return results.get(task_id) is not None
    except BrokerUnavailable:
        raise
    except AztaskError:  # another owner uses the id, or its row is damaged
        return True


def parts_of(results: object, codec: Codec) -> PartStore | None:
    """The streams in a result store; None if there is none, or if it keeps none."""
    if not isinstance(results, KeepsRows):
        return None
    return PartStore(results.rows, results.owner or NO_OWNER, codec)
