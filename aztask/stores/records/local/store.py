"""The result store in a local SQLite file, shared by the processes of one machine.

If it shares the file with the local broker, outcomes and settlements are one transaction
(`aztask.queues.base.Transactional`). Rows are in the order of their first start, so the newest
runs are found, and the oldest purged, without another index.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import ForeignId
from aztask.message.message import COUNTER_LIMIT
from aztask.message.rowsignatures import RowSignatures
from aztask.queues.engine import Database, Waiter
from aztask.queues.engine.filesystem import file_bytes
from aztask.stores.local.rows import SqliteStore, rows_of
from aztask.stores.records.base import (
    Cancelled,
    Finish,
    Foreign,
    Outdated,
    Owned,
    OwnedElsewhere,
    ReadRuns,
    Recorded,
    RunKey,
    RunRecord,
    Start,
    StartAnswer,
    State,
    StoreSize,
    Unreadable,
    WorkerRecord,
    is_newer,
    other_task,
    same_starts,
)
from aztask.stores.records.controls import ControlStore
from aztask.stores.records.damage import Damaged, check_position
from aztask.stores.records.deadindex import DeadIndex
from aztask.stores.records.local.cancellations import LocalCancellations
from aztask.stores.records.local.quarantine import LocalQuarantine
from aztask.stores.records.local.rows import (
    COLUMNS,
    SIGNATURES,
    StoredRun,
    has_key,
    key_of,
    outcome_row,
    run_of,
    start_row,
    worker_of,
    worker_row,
)
from aztask.stores.records.local.runlines import LocalLines
from aztask.stores.records.local.runowners import OURS, LocalRunOwners
from aztask.stores.records.local.scan import values_of
from aztask.stores.records.local.schedules import LocalSchedules
from aztask.stores.records.local.workflows import LocalWorkflows
from aztask.stores.records.owners import foreign_id, is_foreign, is_other_broker, own_workers
from aztask.stores.records.rowsigning import RowSigner
from aztask.stores.records.schedules import ScheduleStore
from aztask.stores.records.uniques import UniqueStore
from aztask.stores.records.workflows import WorkflowStore
from aztask.support.clock import SYSTEM_CLOCK, Clock

_STEPS = (
    """
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY,
        task_id TEXT NOT NULL, generation INTEGER NOT NULL, hop INTEGER NOT NULL,
        task TEXT NOT NULL, queue TEXT NOT NULL, position, owner TEXT, worker TEXT NOT NULL,
        starts INTEGER NOT NULL, started_at REAL, state TEXT NOT NULL,
        settlement BLOB, value BLOB, error_type TEXT, error TEXT, traceback TEXT,
        ended_at REAL, duration REAL);
    CREATE UNIQUE INDEX runs_key ON runs (task_id, generation, hop);
    CREATE TABLE workers (name TEXT PRIMARY KEY, seen_at REAL NOT NULL, record BLOB NOT NULL)
    WITHOUT ROWID;
    """,
    "ALTER TABLE runs ADD COLUMN saved BLOB",
    """
    ALTER TABLE runs ADD COLUMN failures INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE runs ADD COLUMN snoozes INTEGER NOT NULL DEFAULT 0;
    """,
    # Rows of older releases count as due now: their own time is not known.
    """
    ALTER TABLE runs ADD COLUMN due_at REAL;
    UPDATE runs SET due_at = (julianday('now') - 2440587.5) * 86400.0
        WHERE ended_at IS NULL AND started_at IS NULL;
    """,
    "ALTER TABLE runs ADD COLUMN earlier BLOB",
    "ALTER TABLE runs ADD COLUMN note BLOB",
)

_START = """
    INSERT INTO runs (task_id, generation, hop, task, queue, position, owner, worker, starts,
                      started_at, broker, state)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?, 'started')
    ON CONFLICT DO NOTHING
"""
_TAKE_OVER = """
    UPDATE runs SET owner = ?, worker = ?, starts = starts + 1, started_at = ?, position = ?,
                    queue = ?, earlier = ?, state = 'started', settlement = NULL, error_type = NULL,
                    error = NULL, traceback = NULL, ended_at = NULL, duration = NULL,
                    signature = NULL, broker = coalesce(broker, ?)
    WHERE task_id = ? AND generation = ? AND hop = ?
"""
_RECORD = """
    UPDATE runs SET state = ?, settlement = ?, value = ?, error_type = ?, error = ?, traceback = ?,
                    ended_at = ?, duration = ?, signature = ?, broker = coalesce(broker, ?)
    WHERE task_id = ? AND generation = ? AND hop = ? AND owner = ? AND state = 'started'
"""
_COUNT = """
    UPDATE runs SET failures = failures + ?, snoozes = snoozes + ?, starts = 0
    WHERE task_id = ? AND generation = ? AND hop = ? AND owner = ? AND state = 'started'
"""
_BURY = """
    UPDATE runs SET state = ?, settlement = ?, value = ?, error_type = ?, error = ?, traceback = ?,
                    ended_at = ?, duration = ?, signature = ?, broker = coalesce(broker, ?),
                    owner = NULL
    WHERE task_id = ? AND generation = ? AND hop = ?
"""
_SAVE = """
    UPDATE runs SET saved = ?, saved_signature = ?
    WHERE task_id = ? AND generation = ? AND hop = ? AND owner = ? AND state = 'started'
"""
_DISOWN = """
    UPDATE runs SET owner = NULL, starts = starts - 1,
        state = CASE WHEN starts <= 1 AND failures + snoozes = 0 THEN 'pending' ELSE state END
    WHERE task_id = ? AND generation = ? AND hop = ? AND owner = ? AND state = 'started'
"""
_EXPECT = """
    INSERT INTO runs (task_id, generation, hop, task, queue, worker, starts, state, due_at, note,
                      broker)
    VALUES (?, ?, ?, ?, ?, '', 0, 'pending', ?, ?, ?)
    ON CONFLICT (task_id, generation, hop) DO UPDATE SET note = excluded.note
    WHERE excluded.note IS NOT NULL AND runs.note IS NULL
    AND coalesce(runs.broker, excluded.broker, '') = coalesce(excluded.broker, runs.broker, '')
"""
_OWN_IT = """
    UPDATE runs SET broker = ?
    WHERE task_id = ? AND generation = ? AND hop = ? AND broker IS NULL
"""
_FORGET = f"DELETE FROM runs WHERE task_id = :task AND {OURS}"
_KEY = "task_id = ? AND generation = ? AND hop = ?"
_LATEST = """
    ORDER BY broker IS NOT NULL AND broker <> :mine AND :mine <> '', generation DESC, hop DESC
    LIMIT 1
"""
"""The latest run of the store's owner; of another one only if there is none."""

_NEWEST = "WHERE (broker IS NULL OR broker = ? OR ? = '') ORDER BY id DESC LIMIT ?"
_NEWEST_IN = """
    WHERE state = ? AND (broker IS NULL OR broker = ? OR ? = '') ORDER BY id DESC LIMIT ?
"""
_IN_ORDER = f"""AND typeof(generation) = 'integer' AND generation BETWEEN 0 AND {COUNTER_LIMIT}
    AND typeof(hop) = 'integer' AND hop BETWEEN 0 AND {COUNTER_LIMIT}"""

FIRST_WAIT = 0.001
LONGEST_WAIT = 0.02
WORKER_FORGOTTEN_SECONDS = 86400.0


class LocalResults:
    """The local implementation of `aztask.stores.records.base.ResultStore`."""

    remote = False

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock = SYSTEM_CLOCK,
        owner: Owner = NO_OWNER,
        signatures: RowSignatures | None = None,
    ) -> None:
        """owner: whose rows it makes and acts on; NO_OWNER: those of everyone.

        signatures: of what it writes; None signs nothing.
        """
        self.owner = owner
        self._database = database
        self._clock = clock
        database.migrate("results", _STEPS)
        for component, name in SIGNATURES.items():
            database.migrate(component, (f"ALTER TABLE runs ADD COLUMN {name} BLOB",))
        self._mine = owner.broker or None
        self._cancellations = LocalCancellations(database, owner)
        self._run_owners = LocalRunOwners(database, clock, owner)
        self.rows = SqliteStore(database, clock)
        self._signer = RowSigner(signatures, owner, self.rows)
        self._quarantine = LocalQuarantine(database, self._signer, owner)
        self.dead_index = DeadIndex(self.rows, owner)
        self.workflows: WorkflowStore = LocalWorkflows(database, owner, self._signer)
        self.controls = ControlStore(self.rows, owner, signatures=signatures)
        self.schedules: ScheduleStore = LocalSchedules(database, clock, owner)
        self.uniques = UniqueStore(self.rows, owner)

    @property
    def transaction_key(self) -> str:
        """The file: equal keys can share a transaction, see `aztask.queues.base.Transactional`."""
        return self._database.key

    def transaction(self) -> AbstractContextManager[None]:
        """Run the block's calls by this thread as one transaction: all or nothing."""
        return self._joined()

    def start(self, starts: Sequence[Start]) -> list[StartAnswer]:
        """Try to own each run. New runs, the usual case, cost one statement for all."""
        rows = [start_row(each, self._mine) for each in starts]
        with self._database.transaction() as connection:
            cancelled = self._cancellations.any(connection)
            stored = connection.executemany(_START, rows).rowcount
            if stored == len(rows) and not cancelled:
                return [Owned(1)] * len(rows)
            return [self._answer(connection, each) for each in starts]

    def record(self, finishes: Sequence[Finish]) -> list[bool]:
        """Record outcomes, each by compare-and-set on the run's owner."""
        signer, mine = self._signer, self._mine
        rows = [
            (*outcome_row(each.key, each.outcome, signer), mine, *key_of(each.key), each.owner)
            for each in finishes
        ]
        again = [
            (outcome.state is State.RETRYING, outcome.state is State.SNOOZED, *row[-4:])
            for outcome, row in zip((each.outcome for each in finishes), rows, strict=True)
            if outcome.again
        ]
        with self._database.transaction() as connection:
            if again:
                connection.executemany(_COUNT, again)
            if connection.executemany(_RECORD, rows).rowcount == len(rows):
                return [True] * len(rows)
            return [self._stands(connection, each.key, each.owner) for each in finishes]

    def bury(self, runs: Sequence[RunRecord], read: ReadRuns = None) -> list[bool]:
        """Record the end of runs whose messages the broker dead-lettered."""
        with self._database.transaction() as connection:
            found = [self._run(connection, run.key) for run in runs]
            same = same_starts(runs, read, [None if run is None else run.record for run in found])
            return [ok and self._bury(connection, run) for ok, run in zip(same, runs, strict=True)]

    def _bury(self, connection: sqlite3.Connection, record: RunRecord) -> bool:
        run = self._run(connection, record.key)
        foreign = run is not None and is_foreign(self.owner, run.record.broker)
        if record.outcome is None or foreign or (run and (run.record.damage or run.ended)):
            return False
        key = key_of(record.key)
        connection.execute(_EXPECT, (*key, record.task, record.queue, record.due, None, self._mine))
        row = outcome_row(record.key, record.outcome, self._signer)
        connection.execute(_BURY, (*row, self._mine, *key))
        return True

    def save(self, key: RunKey, owner: str, state: bytes) -> bool:
        """Store a checkpoint, by compare-and-set on the run's owner."""
        state = self._signer.closed_saved(key, state)
        values = (state, self._signer.sign_saved(key, state), *key_of(key), owner)
        with self._database.transaction() as connection:
            return connection.execute(_SAVE, values).rowcount == 1

    def disown(self, runs: Sequence[tuple[RunKey, str]]) -> None:
        """Give runs back; their start is not counted."""
        with self._database.transaction() as connection:
            connection.executemany(_DISOWN, [(*key_of(key), owner) for key, owner in runs])

    def expect(self, runs: Iterable[RunRecord]) -> None:
        """Store runs that are sent but not started."""
        with self._database.transaction() as connection:
            now = self._clock.wall()
            rows = [
                (
                    *key_of(run.key),
                    run.task,
                    run.queue,
                    now if run.due is None else run.due,
                    run.note,
                    self._mine,
                )
                for run in runs
            ]
            connection.executemany(_EXPECT, rows)

    def get(self, task_id: str) -> RunRecord | None:
        """The task's latest run. A cancelled task that no worker has received is cancelled, too."""
        with self._database.read() as connection:
            return self._found(connection, task_id)

    def get_many(self, task_ids: Sequence[str]) -> list[RunRecord | ForeignId | None]:
        """What `get` returns or raises for each, from one state of the file."""
        found: list[RunRecord | ForeignId | None] = []
        with self._database.read() as connection:
            for task_id in task_ids:
                try:
                    found.append(self._found(connection, task_id))
                except ForeignId as error:
                    found.append(error)
        return found

    def _found(self, connection: sqlite3.Connection, task_id: str) -> RunRecord | None:
        """The latest run, or what a mark of `cancel` makes of it."""
        record = self._known(self._latest(connection, task_id), task_id)
        waits = record is None or record.state in _WAITING
        if waits and self._cancellations.has(connection, task_id):
            known = record or RunRecord(RunKey(task_id), "", "", State.PENDING)
            return replace(known, state=State.CANCELLED)
        return record

    def _known(self, record: RunRecord | None, task_id: str) -> RunRecord | None:
        """The record. Raises ForeignId if it belongs to another owner."""
        if record is not None and is_foreign(self.owner, record.broker):
            raise foreign_id("task", task_id, record.broker, self.owner)
        return record

    def _latest(self, connection: sqlite3.Connection, task_id: str) -> RunRecord | None:
        """The latest row; a row whose own key is damaged counts only if there is no other.

        A row of another owner is the latest only if there is no own one.
        """
        found: list[Any] = []
        for condition in ("", _IN_ORDER):
            sql = f"SELECT {COLUMNS} FROM runs WHERE task_id = :task {condition} {_LATEST}"
            values = {"task": task_id, "mine": self.owner.broker}
            found = rows_of(connection, sql, values) or found
            if not found or has_key(found[0]):
                break
        return run_of(found[0], self._signer).record if found else None

    def history(self, task_id: str) -> list[RunRecord]:
        """All runs of a task, oldest first."""
        found = self._select("WHERE task_id = ? ORDER BY generation, hop", task_id)
        own = [each for each in found if not is_foreign(self.owner, each.broker)]
        if found and not own:
            self._known(found[-1], task_id)
        return own

    def recent(
        self, *, state: State | None = None, limit: int = 100, everyone: bool = False
    ) -> list[RunRecord]:
        """The newest runs, newest first; UNREADABLE lists the quarantine."""
        mine = "" if everyone else self.owner.broker
        if state is State.UNREADABLE:
            with self._database.read() as connection:
                return self._quarantine.runs(connection, limit, mine)
        if state is None:
            return self._select(_NEWEST, mine, mine, limit)
        return self._select(_NEWEST_IN, state.value, mine, mine, limit)

    def lines(
        self,
        *,
        state: State | None = None,
        after: str = "",
        everyone: bool = False,
        many: bool = False,
    ) -> LocalLines:
        """A list of runs in bulk, window after window; see `ResultStore.lines`.

        many: makes no difference, as windows are of a fixed size.
        """
        mine = "" if everyone else self.owner.broker
        return LocalLines(self._database, self._signer, state, after, mine)

    def cancel(self, task_id: str, at: float, *, running: bool = False) -> bool:
        """Mark a task as cancelled, unless it has ended."""
        with self._database.transaction() as connection:
            record = self.get(task_id)
            if record is not None and record.state.final and not record.damage:
                return False
            self._cancellations.mark(connection, task_id, at, running=running)
            return True

    def uncancel(self, task_id: str) -> None:
        """Take back a task's mark of `cancel`."""
        with self._database.transaction() as connection:
            self._cancellations.drop(connection, task_id)

    def to_stop(self, task_ids: Sequence[str]) -> list[str]:
        """Those of these tasks whose runs should be stopped."""
        with self._database.read() as connection:
            return self._cancellations.to_stop(connection, task_ids)

    def forget(self, task_id: str) -> bool:
        """Delete everything about a task."""
        with self._database.transaction() as connection:
            self._cancellations.drop(connection, task_id)
            values = {"task": task_id, "mine": self.owner.broker}
            if connection.execute(_FORGET, values).rowcount:
                return True
            self._known(self._latest(connection, task_id), task_id)
            return False

    def wait_changed(self, version: int, timeout: float) -> int:
        """Read the file's change counter: at once after a write on this machine, else seldom."""
        give_up_at = time.monotonic() + timeout
        waiter = Waiter(self._database.watch, rest=FIRST_WAIT, blind=LONGEST_WAIT)
        now = self._database.changes()
        while now == version and (remaining := give_up_at - time.monotonic()) > 0:
            waiter.wait(remaining)
            now = self._database.changes()
        if now != version:
            waiter.found_change()
        return now

    def heartbeat(self, worker: WorkerRecord) -> None:
        """Store a worker's heartbeat; delete workers that have been silent for a day."""
        with self._database.transaction() as connection:
            connection.execute(
                "REPLACE INTO workers VALUES (?, ?, ?)", worker_row(worker, self.owner.broker)
            )
            silent = (worker.seen_at - WORKER_FORGOTTEN_SECONDS,)
            connection.execute("DELETE FROM workers WHERE seen_at < ?", silent)

    def workers(self, *, everyone: bool = False) -> list[WorkerRecord]:
        """The known workers, newest heartbeat first, damaged rows last."""
        with self._database.read() as connection:
            rows = rows_of(connection, "SELECT name, seen_at, record FROM workers", ())
        found = own_workers(self.owner, (worker_of(*row) for row in rows), everyone=everyone)
        return sorted(found, key=lambda worker: worker.seen_at, reverse=True)

    def purge(self, before: float) -> int:
        """Delete own runs that ended before that time, and cancellation marks of that age."""
        with self._database.transaction() as connection:
            self._cancellations.purge(connection, before, self._clock.wall())
            deleted = self._quarantine.purge(connection, before)
        return deleted + self._run_owners.purge(before)

    def owners(self) -> set[Owner]:
        """Whose runs and cancellations it holds."""
        with self._database.read() as connection:
            return self._run_owners.owners(connection) | self._cancellations.owners(connection)

    def adopt(self, old: Owner) -> int:
        """Make the runs and cancellations of another owner its own; returns how many."""
        if not is_other_broker(self.owner, old):
            return 0
        self._signer.adopt(old)
        with self._database.transaction() as connection:
            marks = self._cancellations.adopt(connection, old)
        return marks + self._run_owners.adopt(old)

    def unowned(self, before: float) -> int:
        """How many runs without an owner are older than a time."""
        return self._run_owners.unowned(before)

    def scan(self) -> Iterator[bytes]:
        """All values of the store that may refer to payloads."""
        return values_of(self._database)

    def size(self) -> StoreSize:
        """Count the runs, and measure the file."""
        with self._database.read() as connection:
            text = "SELECT COUNT(*), COUNT(*) - COUNT(ended_at) FROM runs"
            rows, unfinished = connection.execute(text).fetchone()
        return StoreSize(rows, unfinished, file_bytes=file_bytes(self._database.path))

    def close(self) -> None:
        """Does nothing: the database belongs to the code that opened it."""

    @contextmanager
    def _joined(self) -> Iterator[None]:
        with self._database.transaction():
            yield

    def _answer(self, connection: sqlite3.Connection, start: Start) -> StartAnswer:
        """Decide by the row, which our own start may just have made."""
        run = self._run(connection, start.key)
        assert run is not None  # noqa: S101  # the transaction has made it if it was missing
        if is_foreign(self.owner, run.record.broker):
            return Foreign(run.record.broker)
        if run.record.damage:
            return Unreadable(run.record.damage)
        task, queue = run.record.task, run.record.queue
        if (other := other_task(start, task, queue)) is not None:
            return other
        answer = self._started(connection, run, start)
        return other_task(start, task, queue, answer) or answer

    def _started(self, connection: sqlite3.Connection, run: StoredRun, start: Start) -> StartAnswer:
        """The answer for a row of the same task."""
        if run.ended is not None:
            if not run.record.broker:
                connection.execute(_OWN_IT, (self._mine, *key_of(start.key)))
            return Recorded(run.ended)
        starts = run.record.starts
        if run.owner != start.owner:
            if (other := self._take_over(connection, run, start)) is not None:
                return other
            starts += 1
        if self._cancellations.has(connection, start.key.task_id):
            return Cancelled(starts)
        sql = f"SELECT saved, saved_signature FROM runs WHERE {_KEY}"
        saved, signature = connection.execute(sql, key_of(start.key)).fetchone()
        saved = self._signer.believed_saved(start.key, saved, signature)
        return Owned(starts, saved, run.failures, run.snoozes)

    def _take_over(
        self, connection: sqlite3.Connection, run: StoredRun, start: Start
    ) -> OwnedElsewhere | Outdated | Unreadable | None:
        """Make the run ours; otherwise says why another copy or a newer delivery keeps it."""
        if run.owner is not None and run.position != start.position:
            return self._elsewhere(connection, run, start)
        if is_newer(run.owner, start.owner):
            return Outdated()
        values = (start.owner, start.worker, start.at, start.position, start.queue)
        record = self._signer.without_text(run.record)
        earlier = record.starts_before(owned=run.owner is not None).pack()
        connection.execute(_TAKE_OVER, (*values, earlier, self._mine, *key_of(start.key)))
        return None

    def _elsewhere(
        self, connection: sqlite3.Connection, run: StoredRun, start: Start
    ) -> OwnedElsewhere | Unreadable:
        """Another copy owns the run, unless the row's position cannot be one of any copy."""
        try:
            check_position(run.position, start.position)
        except Damaged as damage:
            self._quarantine.note(connection, run, damage.reason, self._clock.wall())
            return Unreadable(damage.reason)
        return OwnedElsewhere()

    def _run(self, connection: sqlite3.Connection, key: RunKey) -> StoredRun | None:
        """A run's row. An own one is put into quarantine if it is damaged, and taken out if its
        signature fits again; a program without keys leaves it there.
        """
        rows = rows_of(connection, f"SELECT {COLUMNS} FROM runs WHERE {_KEY}", key_of(key))
        if not rows:
            return None
        run = run_of(rows[0], self._signer)
        if not is_foreign(self.owner, run.record.broker):
            self._quarantine.judge(connection, run, self._clock.wall())
        return run

    def _stands(self, connection: sqlite3.Connection, key: RunKey, owner: str) -> bool:
        """True if the outcome that this owner recorded is stored."""
        run = self._run(connection, key)
        return run is not None and run.owner == owner

    def _select(self, where: str, *values: Any) -> list[RunRecord]:
        with self._database.read() as connection:
            rows = rows_of(connection, f"SELECT {COLUMNS} FROM runs {where}", values)  # constants
        return [run_of(row, self._signer).record for row in rows]


_WAITING = frozenset({State.PENDING, State.RETRYING, State.SNOOZED})
