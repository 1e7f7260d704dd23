"""Notes of at-most-once runs, so that a run whose worker died ends.

The message of such a run is removed before the task runs, and so no delivery comes that would find
the start row again. In Azure Tables, runs that have not ended are in no index either.

Rules
1. A worker notes a run before it removes the message, and deletes the note once the outcome is
   recorded. So every run that may have lost its message has a note.
2. A note names its worker and that worker's `incarnation`: a worker that is started again under
   the same name does not stand in for the one that died.
3. Notes belong to a broker, as runs do. A note that cannot be read is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True, slots=True)
class OnceRun:
    """A run whose message was removed, or is about to be.

    * `worker`, `incarnation`: who runs it (rule 2).
    * `at`: when it was noted, UTC epoch seconds. `lease`: of its delivery, in seconds.
    """

    key: RunKey
    task: str
    queue: str
    worker: str
    incarnation: str
    at: float
    lease: float

    def pack(self) -> bytes:
        """The note as the bytes of a row."""
        key = self.key
        rest = (self.task, self.queue, self.worker, self.incarnation, self.at, self.lease)
        packed: bytes = msgpack.packb(
            [VERSION, key.task_id, key.generation, key.hop, *rest], unicode_errors="surrogatepass"
        )
        return packed


def _read(row: Row) -> OnceRun | None:
    """The note in a row; None if it is damaged or of a newer release."""
    try:
        found = Columns(row.values).unpacked("data")
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

    def all(self) -> Iterator[OnceRun]:
        """Every note of the broker's workers, page by page."""
        for row in self._rows.of_owner(self.owner):
            if (run := _read(row)) is not None:
                yield run

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


def once_runs_of(results: object) -> OnceRuns | None:
    """The notes in a result store; None if there is no store, or if it keeps none."""
    if not isinstance(results, KeepsRows):
        return None
    return OnceRuns(results.rows, results.owner or NO_OWNER)
