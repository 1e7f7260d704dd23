"""The rows of tasks that wait inside their code: how each is woken, and the signals sent to it.

Rules
1. A task's rows are neighbours: one for the parked run, and one for each signal that no wait has
   taken yet. One request reads them all.
2. The parked run's row holds the message of its next hop, signed as stored
   (`aztask.message.signatures`, rule 5): who wakes the task sends that, under an id of its own. The
   row is written after the run's outcome. So where it is, the hop before it has ended for good.
3. Each row has a time from which housekeeping looks at it: soon for a signal whose sender may have
   died, and after its wake-up for a run.
4. Signals of one name are taken in the order of the store's clock. With signing keys, a signal is
   signed for its task and its row (`aztask.steps.records`); one that is refused is dropped.
5. A row of a newer release stays as it is: a worker of that release acts on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import CodecError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.steps.records import SignedRows, digest_of
from aztask.stores.layout import Shards, SqlLayout, shard_of
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.owners import is_other_broker
from aztask.stores.rows import Change, KeepsRows, Kind, Place, Row, RowStore, Values, move_rows
from aztask.support import chance

_STEPS: Final = (
    """
    CREATE TABLE waits (
        task TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, due REAL NOT NULL,
        data BLOB NOT NULL, PRIMARY KEY (task, key))
    WITHOUT ROWID;
    CREATE INDEX waits_due ON waits (due);
    """,
)
_OWNED_STEPS: Final = (
    """
    CREATE TABLE owned_waits (
        broker TEXT NOT NULL, task TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL,
        due REAL NOT NULL, data BLOB NOT NULL, PRIMARY KEY (broker, task, key))
    WITHOUT ROWID;
    CREATE INDEX owned_waits_due ON owned_waits (broker, due);
    """,
)


@dataclass(frozen=True, slots=True)
class _ByTask(Shards):
    """A shard for each task: the keys of its rows begin with the name of its partition."""

    def partition(self, owner: Owner, partition: str, key: str) -> str:
        return f"{self.beginning(owner)}{shard_of(key.partition(':')[0])}"

    def partitions(self, owner: Owner, partition: str) -> Iterable[str]:
        if partition:
            return (self.partition(owner, "", partition),)
        return Shards.partitions(self, owner, partition)


WAITS: Final = Kind(
    {"due": float, "data": bytes},
    SqlLayout(
        "owned_waits",
        "waits",
        "task",
        "key",
        steps={"waits": _STEPS, "owned_waits": _OWNED_STEPS},
    ),
    _ByTask("W", "w", "k-", "key"),
    due="due",
    long="data",
)

VERSION: Final = 1
SIGNAL_BYTES: Final = 16 * 1024
MOST_SIGNALS: Final = 1_000
"""Signals of one name that may wait for a task."""
MOST_ROWS: Final = 20_000

UNSENT_SECONDS: Final = 3.0
"""After so long housekeeping wakes the task of a signal: its sender has died, or may not send."""
LATE_SECONDS: Final = 60.0
"""A run that is not awake so long after its time is sent its wake-up again. A worker that looks at
a task keeps the other workers from it for so long."""
CHILD_SECONDS: Final = 3600.0
"""The longest pause between two looks at a task that waits for another one, whose end wakes it."""
QUEUED_PAGE: Final = 10
"""So many signals of a name are read at once: usually the first one is taken."""
REPEATED_SECONDS: Final = 600.0
"""For so long after a signal its row may come again, from a request whose answer was lost: longer
than a call of a store goes on."""
KEPT_SECONDS: Final = 86400.0
"""Between two looks at a signal for which no wait has asked yet."""

SLEEPS: Final = "sleep"
SIGNALS: Final = "signal"
CHILD: Final = "call"


class Wait(NamedTuple):
    """What a run waits for.

    * `kind`: `SLEEPS`, `SIGNALS` or `CHILD`. `names`: of the signals, or the id of the child.
    * `until`: UTC epoch seconds.
    """

    kind: str
    names: tuple[str, ...]
    until: float

    def __str__(self) -> str:
        if self.kind == CHILD:
            return f"task {', '.join(self.names)}"
        return f"signal {' or '.join(self.names)}" if self.kind == SIGNALS else "a time"


@dataclass(frozen=True, slots=True)
class ParkedRun:
    """A run that waits.

    * `queue`, `task`: where its message goes, and the task's name.
    * `generation`, `hop`: of the hop that wakes it. `since`, `due`: UTC epoch seconds.
    * `waits`: what it waits for. `payload`: the message of that hop, see rule 2.
    * `timer`: the number of that message in the service, if only this cancels it; 0 else.
    """

    id: str
    task: str
    queue: str
    generation: int
    hop: int
    since: float
    due: float
    waits: tuple[Wait, ...]
    payload: bytes
    row: Row | None = None
    timer: int = 0

    def pack(self) -> bytes:
        """The run as bytes; `_parked` reads them."""
        place = (self.id, self.task, self.queue, self.generation, self.hop)
        waits = [list(each) for each in self.waits]
        more = [self.since, self.due, waits, self.payload]
        if self.timer:  # the release before takes no further value
            more.append(self.timer)
        packed: bytes = msgpack.packb([VERSION, *place, *more])
        return packed

    def waits_for(self, name: str) -> bool:
        """True if a signal of this name wakes it."""
        return name in self.signals

    @property
    def timer_id(self) -> str:
        """The message id of its timer, without an id key."""
        message = TaskMessage(self.id, self.task, "", b"", generation=self.generation, hop=self.hop)
        return message.message_id

    @property
    def signals(self) -> list[str]:
        """The names of the signals that wake it."""
        return [name for wait in self.waits if wait.kind == SIGNALS for name in wait.names]

    @property
    def children(self) -> list[str]:
        """The ids of the tasks whose ends wake it."""
        return [name for wait in self.waits if wait.kind == CHILD for name in wait.names]


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal that no wait has taken. `value`: encoded. `at`: UTC epoch seconds."""

    name: str
    value: bytes
    at: float
    row: Row

    @property
    def key(self) -> str:
        """What names it among all signals of its task."""
        return self.row.place.key


def sent_at(key: str) -> float:
    """When the signal of this key was sent, UTC epoch seconds; 0 for what is no such key."""
    try:
        return float(key.rpartition(":")[2].partition("-")[0])
    except ValueError:
        return 0.0


def may_come_again(key: str, now: float) -> bool:
    """Whether the row of a signal that was taken may be stored again. key: of the signal."""
    return sent_at(key) > now - REPEATED_SECONDS


class TaskWaits(NamedTuple):
    """The rows of one task.

    `signals`: the oldest first. `dropped`: rows that nothing may read. `newer`: see rule 5.
    """

    parked: ParkedRun | None
    signals: list[Signal]
    dropped: list[Row]
    newer: list[Row]


class _OfNewerRelease(Damaged):
    """A row that a newer release has written (rule 5)."""


class WaitStore:
    """The waiting tasks of one result store, and their signals. Any thread may call."""

    def __init__(self, store: RowStore, owner: Owner, codec: Codec) -> None:
        """owner: whose tasks. codec: signs, if it has keys."""
        self.owner = owner.of_broker
        self._store = store
        self._rows = store.of(WAITS)
        self._signed = SignedRows(codec, "signal", keys_name_tasks=True)
        self._last = 0.0

    def now(self) -> float:
        """The store's time, UTC epoch seconds."""
        return self._store.now()

    def read(self, task_id: str) -> TaskWaits:
        """The rows of a task: one request. Damaged and forged ones are dropped."""
        group = digest_of(task_id)
        rows = self._rows.range(self.owner, group, f"{group}:", f"{group};", MOST_ROWS)
        return self._sorted(rows, task_id)

    def _sorted(self, rows: Iterable[Row], task_id: str) -> TaskWaits:
        found = TaskWaits(None, [], [], [])
        for row in rows:
            try:
                if row.place.key.endswith(":p"):
                    found = found._replace(parked=_parked(row, task_id))
                else:
                    found.signals.append(self._signal(row, task_id))
            except _OfNewerRelease:
                found.newer.append(row)
            except (CodecError, Damaged):
                found.dropped.append(row)
        found.signals.sort(key=lambda each: (each.at, each.key))
        return found

    # -- runs --------------------------------------------------------------------------------

    def parked(self, task_id: str) -> ParkedRun | None:
        """The run of a task that waits, without its signals: one request. None if none waits."""
        (row,) = self._rows.get([self._place(task_id, "p")])
        return None if row is None else self._sorted([row], task_id).parked

    def park(self, run: ParkedRun, due: float) -> bool:
        """Write the row of a run that waits; False if that of a later hop is there.

        * `due`: when housekeeping looks at it.
        """
        place = self._place(run.id, "p")
        change = Change(place, {"due": due, "data": run.pack()})
        if run.hop == 1 and self._rows.write(change) is not None:
            return True
        while True:
            (row,) = self._rows.get([place])
            if row is not None:
                try:
                    known = _parked(row, run.id)
                    if (known.generation, known.hop) > (run.generation, run.hop):
                        return False
                except Damaged:
                    pass
            if self._rows.write(change._replace(before=row)) is not None:
                return True

    def look_again(self, row: Row, due: float) -> Row | None:
        """Let housekeeping look at a row at another time; None if it is not as it was read."""
        return self._rows.write(Change(row.place, {**row.values, "due": due}, row))

    # -- signals -----------------------------------------------------------------------------

    def add_all(self, task_ids: Sequence[str], name: str, value: bytes) -> list[Signal | None]:
        """Store a signal for each task: one request for each. None: its task has taken it."""
        at = self._last = max(self.now(), self._last + 1e-6)
        key = f"s:{digest_of(name)}:{at:017.6f}-{chance.below(2**32):08x}"
        changes = list[Change]()
        for task_id in task_ids:
            place = self._place(task_id, key)
            data: bytes = msgpack.packb([VERSION, task_id, name, at, value])
            values = {"due": at + UNSENT_SECONDS, "data": self._signed.closed(task_id, place, data)}
            changes.append(Change(place, values))
        made = self._rows.write_all(changes)
        # No other row has this key: one that was there is of a request whose answer was lost.
        there = [change.place for change, row in zip(changes, made, strict=True) if row is None]
        found = iter(self._rows.get(there) if there else ())
        rows = [next(found) if row is None else row for row in made]
        return [None if row is None else Signal(name, value, at, row) for row in rows]

    def before(self, task_id: str, signal: Signal) -> int:
        """How many older signals of its name are stored, at most `MOST_SIGNALS`.

        One request, without their values.
        """
        first = self._named(task_id, signal.name)
        place = signal.row.place
        found = self._rows.range(
            self.owner, place.partition, first, place.key, MOST_SIGNALS, short=True
        )
        return len(found)

    def beside(self, task_id: str, signal: Signal) -> tuple[ParkedRun | None, int]:
        """The run that waits, and how many older signals of this name are stored (`before`).

        Usually one request: the run and its signals are neighbours, and most tasks have few.
        """
        place = signal.row.place
        first = self._place(task_id, "p").key
        rows = self._rows.range(self.owner, place.partition, first, place.key, QUEUED_PAGE)
        run = self._sorted(rows[:1], task_id).parked
        if len(rows) == QUEUED_PAGE:
            return run, self.before(task_id, signal)
        named = self._named(task_id, signal.name)
        return run, sum(row.place.key.startswith(named) for row in rows)

    def oldest(
        self, task_id: str, name: str, taken: Collection[str]
    ) -> tuple[Signal | None, list[Row]]:
        """The oldest signal of a name, and the rows before it that go: usually one request.

        * `taken`: the keys of signals whose waits are recorded. Their rows go, as those do that
          nothing may read.
        """
        group, first = digest_of(task_id), self._named(task_id, name)
        last, gone = f"{first[:-1]};", list[Row]()
        while True:
            rows = self._rows.range(self.owner, group, first, last, QUEUED_PAGE)
            found = self._sorted(rows, task_id)
            gone += found.dropped
            for signal in found.signals:
                if signal.name == name and signal.key not in taken:
                    return signal, gone
                gone.append(signal.row)
            if len(rows) < QUEUED_PAGE:
                return None, gone
            first = f"{rows[-1].place.key}-"  # the least key behind it

    def _signal(self, row: Row, task_id: str) -> Signal:
        values = _values_of(self._signed.opened(row), task_id, 3)
        columns = Columns(dict(zip(("name", "at", "value"), values, strict=False)))
        return Signal(columns.text("name"), columns.data("value") or b"", columns.time("at"), row)

    # -- all ---------------------------------------------------------------------------------

    def remove(self, rows: Sequence[Row]) -> None:
        """Delete rows that did not change since they were read."""
        self._rows.write_all([Change(row.place, None, row) for row in rows])

    def due(self, limit: int) -> list[Row]:
        """Rows at which housekeeping is to look now."""
        places = self._rows.due(self.owner, self.now(), limit)
        return [row for row in self._rows.get(places) if row is not None] if places else []

    def task_of(self, row: Row) -> str | None:
        """The task to which a row belongs; None for one that cannot be read."""
        try:
            data = row.values["data"]
            if not row.place.key.endswith(":p"):
                data = self._signed.opened(row)
            found = Columns({"row": data}).unpacked("row")
        except (CodecError, Damaged):
            return None
        if not isinstance(found, list) or len(found) < 2 or not isinstance(found[1], str):
            return None
        # A row that was copied to another task's place belongs to none.
        return found[1] if row.place.key.startswith(f"{digest_of(found[1])}:") else None

    def is_newer(self, row: Row) -> bool:
        """True if a newer release has written the row (rule 5)."""
        return bool(self._sorted([row], "").newer)

    def runs(self, limit: int = 1_000) -> list[ParkedRun]:
        """Runs that wait, in no order."""
        found: list[ParkedRun] = []
        for row in self._rows.of_owner(self.owner):
            task_id = self.task_of(row) if row.place.key.endswith(":p") else None
            if task_id is not None and (run := self._sorted([row], task_id).parked) is not None:
                found.append(run)
            if len(found) >= limit:
                break
        return found

    def queues(self, limit: int) -> Iterator[str]:
        """The queue of each run that waits, of at most so many."""
        return (run.queue for run in self.runs(limit))

    def any(self) -> bool:
        """True if a task waits, or a signal does."""
        return bool(self._rows.due(self.owner, float("inf"), 1))

    def owners(self) -> set[Owner]:
        """Whose tasks are in the store."""
        return self._rows.owners()

    def adopt(self, old: Owner) -> int:
        """Make the waiting tasks of another owner's broker ours; returns how many rows it had."""
        if not is_other_broker(self.owner, old):
            return 0
        return move_rows(self._store, self._rows, old.of_broker, self.owner, _without_timer)

    def _named(self, task_id: str, name: str) -> str:
        """How the keys of the signals of one name begin."""
        return f"{digest_of(task_id)}:s:{digest_of(name)}:"

    def _place(self, task_id: str, key: str) -> Place:
        group = digest_of(task_id)
        return Place(self.owner, group, f"{group}:{key}")


def _without_timer(row: Row, place: Place) -> Values:
    """A parked run without the number of its timer, for another broker.

    There the number is that of no message, or of any other one, which must not be cancelled.
    """
    data = row.values["data"]
    if not row.place.key.endswith(":p"):
        return row.values
    try:
        found = Columns({"row": data}).unpacked("row")
    except Damaged:
        return row.values
    if not isinstance(found, list) or found[:1] != [VERSION] or len(found) <= _TIMER:
        return row.values
    later = found[_TIMER + 1 :]  # values of a later release
    kept = [*found[:_TIMER], 0, *later] if later else found[:_TIMER]
    return {**row.values, "data": msgpack.packb(kept)}


def _values_of(data: object, task_id: str, count: int) -> list[Any]:
    """The values of a row behind its version and its task: so many, and those of later releases.

    Raises Damaged.
    """
    found = Columns({"row": data}).unpacked("row")
    if isinstance(found, list) and _is_newer(found):
        raise _OfNewerRelease("a newer aztask knows the row of a waiting task")
    if not isinstance(found, list) or found[:2] != [VERSION, task_id] or len(found) < count + 2:
        raise Damaged("the row of a waiting task is wrong")
    return found[2:]


_TIMER: Final = 10
"""Where the number of a timer stands in the row of a parked run, behind its version."""


def _is_newer(found: list[Any]) -> bool:
    return bool(found) and isinstance(found[0], int) and found[0] > VERSION


def _parked(row: Row, task_id: str) -> ParkedRun:
    """The run in a row. Raises Damaged."""
    found = _values_of(row.values["data"], task_id, 8)
    names = ("task", "queue", "generation", "hop", "since", "due")
    columns = Columns(dict(zip(names, found[:6], strict=True)))
    waits, payload, timer = *found[6:8], found[8] if len(found) > 8 else 0
    if not isinstance(payload, bytes) or not isinstance(waits, list):
        raise Damaged("the row of a waiting task has no message")
    if not isinstance(timer, int):
        raise Damaged("the number of a waiting task's timer is wrong")
    return ParkedRun(
        task_id,
        columns.text("task"),
        columns.text("queue"),
        columns.count("generation"),
        columns.count("hop"),
        columns.time("since"),
        columns.time("due"),
        tuple(wait_from(each) for each in waits),
        payload,
        row,
        timer,
    )


def wait_from(found: object) -> Wait:
    """A wait from its parts, as msgpack gives them. Raises Damaged."""
    parts = list(found) if isinstance(found, list | tuple) else []
    if len(parts) != 3 or not isinstance(parts[1], list | tuple):
        raise Damaged("what the task waits for is wrong")
    columns = Columns({"kind": parts[0], "until": parts[2]})
    return Wait(columns.text("kind"), tuple(map(str, parts[1])), columns.time("until"))


def waits_of(results: object, codec: Codec) -> WaitStore | None:
    """The waiting tasks in a result store; None if there is none, or if it keeps none."""
    if not isinstance(results, KeepsRows):
        return None
    return WaitStore(results.rows, results.owner or NO_OWNER, codec)
