"""Notes of at-most-once runs, so that a run whose worker died ends.

The message of such a run is removed before the task runs, and so no delivery comes that would find
the start row again. In Azure Tables, runs that have not ended are in no index either.

Rules
1. A worker notes a run before it removes the message, and deletes the note once the outcome is
   recorded. So every run that may have lost its message has a note.
2. A note names its worker and that worker's `incarnation`: another worker under the same name, a
   later or a simultaneous one, does not stand in for it. So each incarnation has a heartbeat here.
   Notes of a release that writes none say so by their length (`OnceRun.beats`), and the row of
   their worker counts.
3. Notes belong to a broker, as runs do. A note that cannot be read is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import msgpack

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.layout import SqlLayout, TablesLayout
from aztask.stores.records.base import RunKey
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.owners import is_other_broker
from aztask.stores.rows import TOGETHER, Change, KeepsRows, Kind, Place, Row, RowStore, move_rows

_STEPS: Final = (
    """
    CREATE TABLE once_runs (
        worker TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (worker, key))
    WITHOUT ROWID;
    """,
)
_OWNED_STEPS: Final = (
    """
    CREATE TABLE owned_once_runs (
        broker TEXT NOT NULL, worker TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL,
        data BLOB NOT NULL, PRIMARY KEY (broker, worker, key))
    WITHOUT ROWID;
    """,
)
# A partition for each worker: the notes of one claim are one transaction.
ONCE_RUNS: Final = Kind(
    {"data": bytes},
    SqlLayout(
        "owned_once_runs",
        "once_runs",
        "worker",
        "key",
        steps={"once_runs": _STEPS, "owned_once_runs": _OWNED_STEPS},
    ),
    TablesLayout("N", "n"),
)
VERSION: Final = 1
_FIELDS: Final = (
    "task_id", "generation", "hop", "task", "queue", "worker", "incarnation", "at", "lease",
)  # fmt: skip
_BEAT_FIELDS: Final = ("worker", "incarnation", "at")
_BEAT: Final = "beat"
"""Where a note has its version, which releases without heartbeats skip as unknown."""


Life: TypeAlias = tuple[str, str]
"""A worker's name and incarnation."""


@dataclass(frozen=True, slots=True)
class OnceRun:
    """A run whose message was removed, or is about to be.

    * `worker`, `incarnation`: who runs it (rule 2).
    * `at`: when it was noted, UTC epoch seconds. `lease`: of its delivery, in seconds.
    * `beats`: whether its worker writes heartbeats here.
    """

    key: RunKey
    task: str
    queue: str
    worker: str
    incarnation: str
    at: float
    lease: float
    beats: bool = True

    @property
    def life(self) -> Life:
        """The worker's name and incarnation."""
        return self.worker, self.incarnation

    def pack(self) -> bytes:
        """The note as the bytes of a row."""
        key, who = self.key, self.life
        rest = (self.task, self.queue, *who, self.at, self.lease, self.beats)
        packed: bytes = msgpack.packb(
            [VERSION, key.task_id, key.generation, key.hop, *rest], unicode_errors="surrogatepass"
        )
        return packed


class OnceBeat(NamedTuple):
    """A heartbeat of a worker that may have notes. `at`: by its clock; only changes count."""

    life: Life
    at: float

    def pack(self) -> bytes:
        """The heartbeat as the bytes of a row."""
        packed: bytes = msgpack.packb([_BEAT, *self.life, self.at], unicode_errors="surrogatepass")
        return packed


@dataclass(frozen=True, slots=True)
class Noted:
    """All notes of a broker, and the last heartbeat of each incarnation that has written one."""

    runs: list[OnceRun] = field(default_factory=list)
    beats: dict[Life, OnceBeat] = field(default_factory=dict)


def _read(row: Row) -> OnceRun | OnceBeat | None:
    """The note or the heartbeat in a row; None if it is damaged or of a newer release."""
    try:
        found = Columns(row.values).unpacked("data")
        if isinstance(found, list) and found[:1] == [_BEAT] and len(found) > len(_BEAT_FIELDS):
            columns = Columns(dict(zip(_BEAT_FIELDS, found[1:], strict=False)))
            life = columns.text("worker"), columns.text("incarnation")
            return OnceBeat(life, columns.time("at"))
        if not isinstance(found, list) or found[:1] != [VERSION] or len(found) <= len(_FIELDS):
            return None
        columns = Columns(dict(zip(_FIELDS, found[1:], strict=False)))
        return OnceRun(
            RunKey(columns.text("task_id"), columns.count("generation"), columns.count("hop")),
            columns.text("task"),
            columns.text("queue"),
            columns.text("worker"),
            columns.text("incarnation"),
            columns.time("at"),
            columns.time("lease"),
            found[len(_FIELDS) + 1 :][:1] == [True],
        )
    except Damaged:
        return None


class OnceRuns:
    """The notes of one broker. Any thread may call. All methods raise BrokerUnavailable."""

    def __init__(self, store: RowStore, owner: Owner) -> None:
        self.owner = owner.of_broker
        self._store = store
        self._rows = store.of(ONCE_RUNS)

    def note(self, runs: Sequence[OnceRun]) -> None:
        """Store notes of one worker, the usual case in one transaction. Repeatable."""
        for first in range(0, len(runs), TOGETHER):
            some = runs[first : first + TOGETHER]
            values = {self._place(run): {"data": run.pack()} for run in some}
            if self._rows.together([Change(*each) for each in values.items()]) is None:
                for place, value in values.items():  # one is there already: a repeated claim
                    self._rows.put(place, value)

    def drop(self, runs: Sequence[OnceRun]) -> None:
        """Delete notes, those that are missing too."""
        self._rows.remove([self._place(run) for run in runs])

    def drop_unchanged(self, run: OnceRun) -> None:
        """Delete a note unless another one was stored in its place after it was read."""
        self._delete(self._place(run), run)

    def beat(self, beat: OnceBeat) -> None:
        """Store the heartbeat of an incarnation, in place of the one before."""
        self._rows.put(self._place_of(beat.life), {"data": beat.pack()})

    def drop_beat(self, beat: OnceBeat) -> None:
        """Delete the heartbeat of an incarnation, unless it has written another one since."""
        self._delete(self._place_of(beat.life), beat)

    def remove_beat(self, life: Life) -> None:
        """Delete the heartbeat of an incarnation that ends, if there is one."""
        self._rows.remove([self._place_of(life)])

    def read(self) -> Noted:
        """Everything that the broker's workers have noted."""
        noted = Noted()
        for row in self._rows.of_owner(self.owner):
            found = _read(row)
            if isinstance(found, OnceBeat):
                noted.beats[found.life] = found
            elif found is not None:
                noted.runs.append(found)
        return noted

    def all(self) -> Iterator[OnceRun]:
        """Every note of the broker's workers."""
        yield from self.read().runs

    def owners(self) -> set[Owner]:
        """Whose notes are in the store."""
        return self._rows.owners()

    def adopt(self, old: Owner) -> int:
        """Make the notes of another owner's broker ours; returns how many were found."""
        if not is_other_broker(self.owner, old):
            return 0
        return move_rows(self._store, self._rows, old.of_broker, self.owner)

    def _place(self, run: OnceRun) -> Place:
        key = run.key
        return Place(self.owner, run.worker, f"{key.generation}:{key.hop}:{key.task_id}")

    def _place_of(self, life: Life) -> Place:
        worker, incarnation = life
        return Place(self.owner, worker, f"{_BEAT}:{incarnation}")

    def _delete(self, place: Place, read: OnceRun | OnceBeat) -> None:
        (row,) = self._rows.get([place])
        if row is not None and _read(row) == read:
            self._rows.write(Change(place, None, row))


def once_runs_of(results: object) -> OnceRuns | None:
    """The notes in a result store; None if there is no store, or if it keeps none."""
    if not isinstance(results, KeepsRows):
        return None
    return OnceRuns(results.rows, results.owner or NO_OWNER)
