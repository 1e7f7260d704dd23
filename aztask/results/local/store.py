"""The result store in a local SQLite file, shared by the processes of one machine.

If it shares the file with the local broker, outcomes and settlements are one transaction
(`aztask.brokers.base.Transactional`). Rows are in the order of their first start, so the newest
runs are found, and the oldest purged, without another index.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from aztask.engine import Database, Waiter
from aztask.engine.filesystem import file_bytes
from aztask.message.message import COUNTER_LIMIT
from aztask.results.base import (
    UNFINISHED_SECONDS,
    Cancelled,
    Finish,
    Owned,
    OwnedElsewhere,
    Recorded,
    RunKey,
    RunRecord,
    Start,
    StartAnswer,
    State,
    StoreSize,
    Unreadable,
    WorkerRecord,
)
from aztask.results.controls import ControlStore
from aztask.results.damage import Damaged, check_position
from aztask.results.deadindex import DeadIndex
from aztask.results.local.cancellations import LocalCancellations
from aztask.results.local.controls import LocalControls
from aztask.results.local.deadindex import LocalDeadIndex
from aztask.results.local.quarantine import LocalQuarantine
from aztask.results.local.rows import (
    COLUMNS,
    StoredRun,
    has_key,
    key_of,
    outcome_row,
    rows_of,
    run_of,
    start_row,
    worker_of,
    worker_row,
)
from aztask.results.local.schedules import LocalSchedules
from aztask.results.local.uniques import LocalUniques
from aztask.results.local.workflows import KEPT, LocalWorkflows
from aztask.results.schedules import ScheduleStore
from aztask.results.uniques import UniqueStore
from aztask.results.workflows import WorkflowStore
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
                      started_at, state)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, ?, 'started')
    ON CONFLICT DO NOTHING
"""
_TAKE_OVER = """
    UPDATE runs SET owner = ?, worker = ?, starts = starts + 1, started_at = ?, position = ?,
                    queue = ?, earlier = ?, state = 'started', settlement = NULL, error_type = NULL,
                    error = NULL, traceback = NULL, ended_at = NULL, duration = NULL
    WHERE task_id = ? AND generation = ? AND hop = ?
"""
_RECORD = """
    UPDATE runs SET state = ?, settlement = ?, value = ?, error_type = ?, error = ?, traceback = ?,
                    ended_at = ?, duration = ?
    WHERE task_id = ? AND generation = ? AND hop = ? AND owner = ? AND state = 'started'
"""
_COUNT = """
    UPDATE runs SET failures = failures + ?, snoozes = snoozes + ?, starts = 0
    WHERE task_id = ? AND generation = ? AND hop = ? AND owner = ? AND state = 'started'
"""
_BURY = """
    UPDATE runs SET state = ?, settlement = ?, value = ?, error_type = ?, error = ?, traceback = ?,
                    ended_at = ?, duration = ?, owner = NULL
    WHERE task_id = ? AND generation = ? AND hop = ?
"""
_SAVE = """
    UPDATE runs SET saved = ?
    WHERE task_id = ? AND generation = ? AND hop = ? AND owner = ? AND state = 'started'
"""
_DISOWN = """
    UPDATE runs SET owner = NULL, starts = starts - 1,
        state = CASE WHEN starts <= 1 AND failures + snoozes = 0 THEN 'pending' ELSE state END
    WHERE task_id = ? AND generation = ? AND hop = ? AND owner = ? AND state = 'started'
"""
_EXPECT = """
    INSERT INTO runs (task_id, generation, hop, task, queue, worker, starts, state, due_at, note)
    VALUES (?, ?, ?, ?, ?, '', 0, 'pending', ?, ?)
    ON CONFLICT (task_id, generation, hop) DO UPDATE SET note = excluded.note
    WHERE excluded.note IS NOT NULL AND runs.note IS NULL
"""
_WINDOW_END = """
    SELECT MAX(id), COUNT(ended_at)
    FROM (SELECT id, ended_at FROM runs WHERE id > ? ORDER BY id LIMIT ?)
"""
_PURGE = f"""
    DELETE FROM runs
    WHERE id > ? AND id <= ? AND id NOT IN (SELECT id FROM damaged_runs) AND CASE
        WHEN ended_at IS NOT NULL THEN ended_at < ?
        WHEN state = 'pending' THEN coalesce(due_at, started_at) < ?
        ELSE started_at < ? END
    {KEPT}
"""
_OLD_ONES = "SELECT EXISTS (SELECT 1 FROM runs WHERE id > ? AND id <= ? AND ended_at < ?)"
_KEY = "task_id = ? AND generation = ? AND hop = ?"
_LATEST = "ORDER BY generation DESC, hop DESC LIMIT 1"
_IN_ORDER = f"""AND typeof(generation) = 'integer' AND generation BETWEEN 0 AND {COUNTER_LIMIT}
    AND typeof(hop) = 'integer' AND hop BETWEEN 0 AND {COUNTER_LIMIT}"""

PURGE_WINDOW = 2_000
FIRST_WAIT = 0.001
LONGEST_WAIT = 0.02
WORKER_FORGOTTEN_SECONDS = 86400.0


class LocalResults:
    """The local implementation of `aztask.results.base.ResultStore`."""

    remote = False

    def __init__(self, database: Database, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._database = database
        self._clock = clock
        database.migrate("results", _STEPS)
        self._cancellations = LocalCancellations(database)
        self._quarantine = LocalQuarantine(database)
        self.dead_index: DeadIndex = LocalDeadIndex(database)
        self.workflows: WorkflowStore = LocalWorkflows(database)
        self.controls: ControlStore = LocalControls(database, clock)
        self.schedules: ScheduleStore = LocalSchedules(database, clock)
        self.uniques: UniqueStore = LocalUniques(database, clock)

    @property
    def transaction_key(self) -> str:
        """The file: equal keys can share a transaction, see `aztask.brokers.base.Transactional`."""
        return self._database.key

    def transaction(self) -> AbstractContextManager[None]:
        """Run the block's calls by this thread as one transaction: all or nothing."""
        return self._joined()

    def start(self, starts: Sequence[Start]) -> list[StartAnswer]:
        """Try to own each run. New runs, the usual case, cost one statement for all."""
        rows = [start_row(each) for each in starts]
        with self._database.transaction() as connection:
            cancelled = self._cancellations.any(connection)
            stored = connection.executemany(_START, rows).rowcount
            if stored == len(rows) and not cancelled:
                return [Owned(1)] * len(rows)
            return [self._answer(connection, each) for each in starts]

    def record(self, finishes: Sequence[Finish]) -> list[bool]:
        """Record outcomes, each by compare-and-set on the run's owner."""
        rows = [(*outcome_row(each.outcome), *key_of(each.key), each.owner) for each in finishes]
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

    def bury(self, runs: Sequence[RunRecord]) -> list[bool]:
        """Record the end of runs whose messages the broker dead-lettered."""
        with self._database.transaction() as connection:
            return [self._bury(connection, run) for run in runs]

    def _bury(self, connection: sqlite3.Connection, record: RunRecord) -> bool:
        run = self._run(connection, record.key)
        if record.outcome is None or (run is not None and (run.record.damage or run.ended)):
            return False
        key = key_of(record.key)
        connection.execute(_EXPECT, (*key, record.task, record.queue, record.due, None))
        connection.execute(_BURY, (*outcome_row(record.outcome), *key))
        return True

    def save(self, key: RunKey, owner: str, state: bytes) -> bool:
        """Store a checkpoint, by compare-and-set on the run's owner."""
        with self._database.transaction() as connection:
            return connection.execute(_SAVE, (state, *key_of(key), owner)).rowcount == 1

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
                )
                for run in runs
            ]
            connection.executemany(_EXPECT, rows)

    def get(self, task_id: str) -> RunRecord | None:
        """The task's latest run. A cancelled task that no worker has received is cancelled, too."""
        with self._database.read() as connection:
            record = self._latest(connection, task_id)
            mark = self._cancellations.has(connection, task_id)
        if mark and (record is None or record.state in _WAITING):
            known = record or RunRecord(RunKey(task_id), "", "", State.PENDING)
            return replace(known, state=State.CANCELLED)
        return record

    @staticmethod
    def _latest(connection: sqlite3.Connection, task_id: str) -> RunRecord | None:
        """The latest row; a row whose own key is damaged counts only if there is no other."""
        found: list[Any] = []
        for condition in ("", _IN_ORDER):
            sql = f"SELECT {COLUMNS} FROM runs WHERE task_id = ? {condition} {_LATEST}"  # constants
            found = rows_of(connection, sql, (task_id,)) or found
            if not found or has_key(found[0]):
                break
        return run_of(found[0]).record if found else None

    def history(self, task_id: str) -> list[RunRecord]:
        """All runs of a task, oldest first."""
        return self._select("WHERE task_id = ? ORDER BY generation, hop", task_id)

    def recent(self, *, state: State | None = None, limit: int = 100) -> list[RunRecord]:
        """The newest runs, newest first; UNREADABLE lists the quarantine."""
        if state is None:
            return self._select("ORDER BY id DESC LIMIT ?", limit)
        if state is State.UNREADABLE:
            with self._database.read() as connection:
                return self._quarantine.runs(connection, limit)
        return self._select("WHERE state = ? ORDER BY id DESC LIMIT ?", state.value, limit)

    def cancel(self, task_id: str, at: float, *, running: bool = False) -> bool:
        """Mark a task as cancelled, unless it has ended."""
        with self._database.transaction() as connection:
            record = self.get(task_id)
            if record is not None and record.state.final and not record.damage:
                return False
            self._cancellations.mark(connection, task_id, at, running=running)
            return True

    def to_stop(self, task_ids: Sequence[str]) -> list[str]:
        """Those of these tasks whose runs should be stopped."""
        with self._database.read() as connection:
            return self._cancellations.to_stop(connection, task_ids)

    def forget(self, task_id: str) -> bool:
        """Delete everything about a task."""
        with self._database.transaction() as connection:
            self._cancellations.drop(connection, task_id)
            cursor = connection.execute("DELETE FROM runs WHERE task_id = ?", (task_id,))
            return cursor.rowcount > 0

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
            connection.execute("REPLACE INTO workers VALUES (?, ?, ?)", worker_row(worker))
            connection.execute(
                "DELETE FROM workers WHERE seen_at < ?",
                (worker.seen_at - WORKER_FORGOTTEN_SECONDS,),
            )

    def workers(self) -> list[WorkerRecord]:
        """The known workers, newest heartbeat first, damaged rows last."""
        with self._database.read() as connection:
            rows = rows_of(connection, "SELECT name, seen_at, record FROM workers", ())
        found = [worker_of(*row) for row in rows]
        return sorted(found, key=lambda worker: worker.seen_at, reverse=True)

    def purge(self, before: float) -> int:
        """Delete runs that ended before that time, and cancellation marks of that age.

        It goes through windows of rows in the order of their first starts, up to the first window
        in which runs ended, but none of them long ago: this neither scans the whole table nor holds
        the write lock for long. Rows that wait for their messages do not end the search.
        """
        with self._database.transaction() as connection:
            self._cancellations.purge(connection, before, self._clock.wall())
            deleted = self._quarantine.purge(connection, before)
        last = 0
        times = (before, before, before - UNFINISHED_SECONDS)
        while True:
            with self._database.transaction() as connection:
                end, ended = connection.execute(_WINDOW_END, (last, PURGE_WINDOW)).fetchone()
                if end is None:
                    return deleted
                gone = connection.execute(_PURGE, (last, end, *times)).rowcount
                (old,) = connection.execute(_OLD_ONES, (last, end, before)).fetchone()
            if ended and not gone and not old:
                return deleted
            last, deleted = end, deleted + gone

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
        if run.record.damage:
            return Unreadable(run.record.damage)
        if run.ended is not None:
            return Recorded(run.ended)
        starts = run.record.starts
        if run.owner != start.owner:
            if run.owner is not None and run.position != start.position:
                return self._elsewhere(connection, run, start)
            starts += 1
            values = (start.owner, start.worker, start.at, start.position, start.queue)
            earlier = run.record.starts_before(owned=run.owner is not None).pack()
            connection.execute(_TAKE_OVER, (*values, earlier, *key_of(start.key)))
        if self._cancellations.has(connection, start.key.task_id):
            return Cancelled(starts)
        sql = f"SELECT saved FROM runs WHERE {_KEY}"
        (saved,) = connection.execute(sql, key_of(start.key)).fetchone()
        return Owned(starts, saved, run.failures, run.snoozes)

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
        """A run's row. A damaged one is put into quarantine."""
        rows = rows_of(connection, f"SELECT {COLUMNS} FROM runs WHERE {_KEY}", key_of(key))
        if not rows:
            return None
        run = run_of(rows[0])
        if run.record.damage:
            self._quarantine.note(connection, run, run.record.damage, self._clock.wall())
        return run

    def _stands(self, connection: sqlite3.Connection, key: RunKey, owner: str) -> bool:
        """True if the outcome that this owner recorded is stored."""
        run = self._run(connection, key)
        return run is not None and run.owner == owner

    def _select(self, where: str, *values: Any) -> list[RunRecord]:
        with self._database.read() as connection:
            rows = rows_of(connection, f"SELECT {COLUMNS} FROM runs {where}", values)  # constants
        return [run_of(row).record for row in rows]


_WAITING = frozenset({State.PENDING, State.RETRYING, State.SNOOZED})
