"""The result store in Azure Tables, for workers and senders of many machines.

Rules
1. A run is one row, and every change of it is compare-and-set by ETag: who was frozen while
   somebody else took the run over changes nothing. On the usual path a run costs an insert at its
   start, an update and an insert into the index at its end; the ETag is remembered in between.
2. When the answer to a write is lost, the row is read: its owner and its outcome tell whether the
   write was carried out. A write that arrives late finds another ETag, or a row that is there.
3. The table and the container are made by `create` alone: ``aztask queues create`` calls it.
4. Nothing reads the whole table: newest runs and old ones are found by the index of ended runs.

A cancellation is a mark of its own, and each `start` looks for marks beside its inserts: at most
four requests more for a batch, one for a single run. Whoever starts a task after its cancellation
finds the mark.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from azure.core.credentials import TokenCredential

from aztask.address.addresses import TablesAddress
from aztask.errors import AztaskError, CapabilityError
from aztask.results.base import (
    Cancelled,
    Finish,
    Owned,
    RunKey,
    RunRecord,
    Start,
    StartAnswer,
    State,
    WorkerRecord,
)
from aztask.results.deadindex import DeadIndex
from aztask.results.tables.blobs import Blobs
from aztask.results.tables.client import TableRequests, TimeBudget
from aztask.results.tables.dead import TablesDeadIndex
from aztask.results.tables.index import ENDED, EndIndex
from aztask.results.tables.marks import CancellationMarks
from aztask.results.tables.names import (
    FIRST_RUN,
    LAST_RUN,
    WORKERS,
    is_row,
    is_run,
    partition_of,
    shard_of,
)
from aztask.results.tables.quarantine import Quarantine
from aztask.results.tables.rows import Run, pending, run_of, worker_entity, worker_of
from aztask.results.tables.runs import Runs
from aztask.support.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from azure.data.tables import TableEntity

logger = logging.getLogger(__name__)

TABLE: Final = "aztaskresults"
CONTAINER: Final = "aztask-results"
BATCH: Final = 256
RUNS_OF_A_TASK: Final = 100_000
FIRST_WAIT: Final = 0.05
LONGEST_WAIT: Final = 1.0
SWEEP_SECONDS: Final = 3600.0
WORKER_FORGOTTEN_SECONDS: Final = 86400.0
_WAITING: Final = frozenset({State.PENDING, State.RETRYING, State.SNOOZED})

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class TablesResults:
    """See the protocol, `aztask.results.base.ResultStore`. A forked child makes its own."""

    remote = True

    def __init__(
        self,
        address: TablesAddress,
        *,
        table: str = TABLE,
        container: str = CONTAINER,
        credential: TokenCredential | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Connects with the first call. Raises ConfigurationError without a credential."""
        self.address = address
        self._requests = TableRequests(address, table, credential)
        self._blobs = Blobs(address, container, clock, credential)
        self._quarantine = Quarantine(self._requests, clock)
        self._index = EndIndex(self._requests, self._blobs, self._quarantine, clock)
        self._runs = Runs(self._requests, self._blobs, self._index, self._quarantine)
        self._marks = CancellationMarks(self._requests)
        self._clock = clock
        self._sweep_at = self._forget_at = clock.monotonic()
        self.dead_index: DeadIndex = TablesDeadIndex(self._requests)

    def __repr__(self) -> str:
        return f"<TablesResults {self.address}>"

    # -- what an administrator does ----------------------------------------------------------

    def create(self) -> list[str]:
        """See `Provisioned.create`."""
        self._requests.create(TimeBudget())
        self._blobs.create(TimeBudget())
        return [self._requests.place, self._blobs.place]

    def check(self) -> None:
        """See `Provisioned.check`."""
        self._requests.read(TimeBudget(), WORKERS, "-")
        self._blobs.check(TimeBudget())

    # -- what workers and senders do ---------------------------------------------------------

    def start(self, starts: Sequence[Start]) -> list[StartAnswer]:
        """Try to own each run. New runs, the usual case, cost one insert each."""
        return [answer for batch in _batches(starts) for answer in self._start(batch)]

    def _start(self, starts: Sequence[Start]) -> list[StartAnswer]:
        call = TimeBudget()
        partitions = [partition_of(each.key.task_id) for each in starts]
        shards = sorted({shard_of(each) for each in partitions})
        work = [*(self._page_of_marks(shard) for shard in shards), *map(self._starting, starts)]
        found: list[Any] = self._requests.each(call, lambda call, what: what(call), work)
        answers: list[StartAnswer] = found[len(shards) :]
        pages = dict(zip(shards, found[: len(shards)], strict=True))
        marked = self._marks.among(call, partitions, pages)
        return [
            Cancelled(answer.starts)
            if isinstance(answer, Owned) and partition in marked
            else answer
            for answer, partition in zip(answers, partitions, strict=True)
        ]

    def _starting(self, start: Start) -> Callable[[TimeBudget], StartAnswer]:
        return lambda call: self._runs.start(call, start)

    def _page_of_marks(self, shard: int) -> Callable[[TimeBudget], set[str]]:
        return lambda call: self._marks.page(call, shard)

    def record(self, finishes: Sequence[Finish]) -> list[bool]:
        """Record outcomes, each by compare-and-set on the row as it was at the start."""
        return self._each(self._runs.record, finishes)

    def bury(self, runs: Sequence[RunRecord]) -> list[bool]:
        """Record the end of runs whose messages the broker dead-lettered."""
        return self._each(self._runs.bury, runs)

    def save(self, key: RunKey, owner: str, state: bytes) -> bool:
        """Keep a checkpoint, by compare-and-set."""
        return self._runs.save(TimeBudget(), key, owner, state)

    def disown(self, runs: Sequence[tuple[RunKey, str]]) -> None:
        """Give runs back; their start is not counted."""
        self._each(self._runs.disown, runs)

    def expect(self, runs: Iterable[RunRecord]) -> None:
        """Note runs that are sent and not started."""
        self._each(self._runs.expect, list(runs))

    def _each(
        self, work: Callable[[TimeBudget, Item], Answer], items: Sequence[Item]
    ) -> list[Answer]:
        call = self._requests.each
        return [answer for batch in _batches(items) for answer in call(TimeBudget(), work, batch)]

    # -- what is known of a task -------------------------------------------------------------

    def get(self, task_id: str) -> RunRecord | None:
        """The task's latest run. A cancelled task that no worker has met yet is cancelled too."""
        call = TimeBudget()
        records = self._records(call, task_id, 2)  # the latest run, and that it was expected
        record = records[0] if records else None
        waits = record is None or record.state in _WAITING
        if waits and self._marks.has(call, partition_of(task_id)):
            known = record or RunRecord(RunKey(task_id), "", "", State.PENDING)
            return replace(known, state=State.CANCELLED)
        return record

    def history(self, task_id: str) -> list[RunRecord]:
        """All runs of a task, oldest first."""
        return self._records(TimeBudget(), task_id, RUNS_OF_A_TASK)[::-1]

    def _records(self, call: TimeBudget, task_id: str, limit: int) -> list[RunRecord]:
        """Newest first, of up to `limit` rows."""
        partition = partition_of(task_id)
        values = {"task": partition, "first": FIRST_RUN, "last": LAST_RUN}
        text = "PartitionKey eq @task and RowKey ge @first and RowKey lt @last"
        records: dict[RunKey, RunRecord] = {}
        for entity in self._requests.query(call, text, values, limit):
            row = entity["RowKey"]
            if not is_row(row):
                continue
            if row.endswith("e"):
                record = pending(entity, partition, row)
            else:
                record = self._runs.whole(call, run_of(entity, partition, row))
            record = replace(record, key=replace(record.key, task_id=task_id))
            records[record.key] = record  # the run comes after the note that it is expected
        return list(records.values())

    def _rows(self, call: TimeBudget, task_id: str) -> list[dict[str, Any]]:
        partition = {"task": partition_of(task_id)}
        return self._requests.query(call, "PartitionKey eq @task", partition, RUNS_OF_A_TASK)

    def recent(self, *, state: State | None = None, limit: int = 100) -> list[RunRecord]:
        """The runs that ended last, the last one first, then those in quarantine.

        Runs that have not ended are in no index.
        """
        if state not in (None, State.UNREADABLE, *ENDED):
            raise CapabilityError(
                f"results in Azure Tables list runs that have ended, not those that are {state}; "
                "see aztask running for what runs, aztask queues for what waits, or ask by id"
            )
        call = TimeBudget()
        runs: list[Run] = []
        if state is not State.UNREADABLE:
            runs += self._index.newest(call, ENDED if state is None else (state,), limit)
        if state in (None, State.UNREADABLE):
            runs += self._quarantine.runs(call, limit)
        once = {(run.key, run.place): run for run in runs}
        return self._requests.each(call, self._runs.whole, once.values())

    def cancel(self, task_id: str, at: float, *, running: bool = False) -> bool:
        """Mark a task as cancelled, unless it has ended."""
        record = self.get(task_id)
        if record is not None and record.state.final and not record.damage:
            return False
        self._marks.put(task_id, at, running=running)
        return True

    def to_stop(self, task_ids: Sequence[str]) -> list[str]:
        """Those whose runs are to be stopped: a query for each shard."""
        return self._marks.to_stop(task_ids)

    def forget(self, task_id: str) -> bool:
        """Delete what is known of a task: of each run the index row, the row, its blobs.

        If the process dies in between, forget it again; purges find the rest, but for a row whose
        index row is gone.
        """
        call = TimeBudget()
        partition = partition_of(task_id)
        self._marks.drop(call, partition)
        entities = self._rows(call, task_id)
        for entity in entities:
            row = entity["RowKey"]
            run = run_of(entity, partition, row) if is_run(partition, row) else None
            if run is not None and run.damage:
                self._quarantine.forget(call, run)
            elif run is not None and run.ended:
                self._index.forget(call, run)
            self._requests.delete(call, partition, row)
            if run is not None:
                self._blobs.delete(run.body_blob, run.saved_blob)
        return bool(entities)

    def wait_changed(self, seen: int, timeout: float) -> int:
        """Wait: nothing tells of changes. 50 ms at first, later up to a second."""
        pause = min(FIRST_WAIT * 1.5 ** min(seen, 20), LONGEST_WAIT)
        time.sleep(max(0.0, min(pause, timeout)))
        return seen + 1

    # -- workers -----------------------------------------------------------------------------

    def heartbeat(self, worker: WorkerRecord) -> None:
        """Note that a worker lives; once an hour forget those that have been silent for a day."""
        self._requests.put(TimeBudget(), worker_entity(worker))
        if self._clock.monotonic() >= self._forget_at:
            self._forget_at = self._clock.monotonic() + SWEEP_SECONDS
            call = TimeBudget()
            for entity in self._worker_rows(call):
                if _seen_at(entity) < worker.seen_at - WORKER_FORGOTTEN_SECONDS:
                    self._requests.delete(call, WORKERS, entity["RowKey"])

    def workers(self) -> list[WorkerRecord]:
        """The workers that are known, newest sign of life first, damaged rows last."""
        found = [worker_of(entity) for entity in self._worker_rows(TimeBudget())]
        return sorted(found, key=lambda worker: worker.seen_at, reverse=True)

    def _worker_rows(self, call: TimeBudget) -> list[dict[str, Any]]:
        workers = {"workers": WORKERS}
        return self._requests.query(call, "PartitionKey eq @workers", workers, RUNS_OF_A_TASK)

    def purge(self, before: float) -> int:
        """Delete what ended before that time, for some seconds; the next call goes on.

        Once an hour also damaged rows, and blobs of that age which no row names.
        """
        self._marks.purge(before)
        deleted = self._index.purge(before)
        if self._clock.monotonic() >= self._sweep_at:
            self._sweep_at = self._clock.monotonic() + SWEEP_SECONDS
            deleted += self._quarantine.purge(before)
            try:
                self._index.sweep(before)
            except AztaskError as error:
                logger.warning("old blobs could not be looked for: %s", error)
        return deleted

    def close(self) -> None:
        """Close idle connections."""
        self._requests.close()
        self._blobs.close()


def _batches(items: Sequence[Item]) -> Iterable[Sequence[Item]]:
    """Each has the time of one call."""
    return (items[first : first + BATCH] for first in range(0, len(items), BATCH))


def _seen_at(worker: dict[str, Any]) -> float:
    """When the worker's row was last written; for a damaged one the service knows."""
    found = worker_of(worker)
    if not found.damage:
        return found.seen_at
    written = cast("TableEntity", worker).metadata["timestamp"]
    return 0.0 if written is None else written.timestamp()
