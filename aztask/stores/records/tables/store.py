"""The result store in Azure Tables, for workers and senders of many machines.

Rules
1. A run is one row, and every change of it is compare-and-set by ETag: a worker that was frozen
   while another one took over the run changes nothing. Usually a run costs an insert at its start,
   and an update and an insert into the index at its end; the ETag is remembered in between.
2. If the answer to a write is lost, the row is read: its owner and its outcome show whether the
   write was carried out. A write that arrives late finds another ETag, or an existing row.
3. Only `create` makes the table and the container: ``aztask queues create`` calls it.
4. No call reads the whole table: newest and old runs are found by the index of ended runs. Rows
   that never end are in no index: once an hour, a sweep reads on for some seconds.

A cancellation is a row of its own, and each `start` reads these marks in parallel to its inserts:
at most four more requests for a batch, one for a single run. A start after the cancellation finds
the mark.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from azure.core.credentials import TokenCredential

from aztask.address.addresses import TablesAddress
from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import AztaskError, CapabilityError, ForeignId
from aztask.message.rowsignatures import RowSignatures
from aztask.stores.layout import shard_of
from aztask.stores.records.base import (
    Cancelled,
    Finish,
    Owned,
    ReadRuns,
    RunKey,
    RunRecord,
    Start,
    StartAnswer,
    State,
    StoreSize,
    WorkerRecord,
)
from aztask.stores.records.controls import ControlStore
from aztask.stores.records.deadindex import DeadIndex
from aztask.stores.records.owners import foreign_id, is_foreign, is_other_broker, own_workers
from aztask.stores.records.rowsigning import RowSigner
from aztask.stores.records.schedules import ScheduleStore
from aztask.stores.records.tables.blobs import Blobs
from aztask.stores.records.tables.index import ENDED, EndIndex
from aztask.stores.records.tables.leftovers import COUNT_SECONDS, Leftovers
from aztask.stores.records.tables.marks import CancellationMarks
from aztask.stores.records.tables.names import (
    FIRST_RUN,
    LAST_RUN,
    WORKERS,
    is_row,
    is_run,
    partition_of,
)
from aztask.stores.records.tables.quarantine import Quarantine
from aztask.stores.records.tables.rows import (
    RunRow,
    broker_in,
    pending,
    run_of,
    worker_entity,
    worker_of,
)
from aztask.stores.records.tables.runlines import BusyRanges, IndexLines, ListedOwners
from aztask.stores.records.tables.runs import RunOwners, Runs
from aztask.stores.records.tables.schedules import TablesSchedules
from aztask.stores.records.tables.workflows import TablesWorkflows
from aztask.stores.records.uniques import UniqueStore
from aztask.stores.records.workflows import WorkflowStore
from aztask.stores.tables.client import Entity, TableRequests, TimeBudget
from aztask.stores.tables.errors import RowNotFound
from aztask.stores.tables.store import TablesStore
from aztask.support.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from azure.data.tables import TableEntity

# -- Reads every row of the table, whatever it is for, with the long values of workflows' documents.
#
# A new kind of row is never forgotten, because every partition is read. The long values of runs are
# not fetched: they are values, and a reference to one that is stored apart is always short.

_ALL: Final = "PartitionKey ge ''"
_RUNS: Final = "t-"
_NUMBER: Final = re.compile(r"([0-9]+)")


def values_of(requests: TableRequests, blobs: Blobs) -> Iterator[bytes]:
    """The values of each row, one request for a thousand rows. Raises BrokerUnavailable."""
    after: Any = None
    while True:
        rows, after = requests.page(TimeBudget(), _ALL, {}, None, after)
        for row in rows:
            yield _joined(row)
            blob = row.get("body_blob")
            if isinstance(blob, str) and not row["PartitionKey"].startswith(_RUNS):
                try:
                    yield blobs.load(TimeBudget(), None, blob) or b""
                except RowNotFound:
                    continue  # it was replaced: what the new one adds is young
        if after is None:
            return


def _joined(row: Mapping[str, Any]) -> bytes:
    """The values of a row, one behind the other: a long one is in several numbered properties."""
    data = [
        value.encode("utf-8", "replace") if isinstance(value, str) else bytes(value)
        for _, value in sorted(row.items(), key=lambda item: _numbered(item[0]))
        if isinstance(value, str | bytes)
    ]
    return b"".join(data)


def _numbered(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``part10`` behind ``part9``."""
    return [
        (int(each), "") if each.isdigit() else (-1, each) for each in _NUMBER.split(name) if each
    ]


logger = logging.getLogger(__name__)

TABLE: Final = "aztaskresults"
CONTAINER: Final = "aztask-results"
BATCH: Final = 256
RUNS_OF_A_TASK: Final = 100_000
FIRST_WAIT: Final = 0.05
LONGEST_WAIT: Final = 1.0
SWEEP_SECONDS: Final = 3600.0
WORKER_FORGOTTEN_SECONDS: Final = 86400.0
LISTED_SHARE: Final = 8
"""A page of a range is worth it if at least one task in so many of it is asked for."""
_BETWEEN: Final = (
    "PartitionKey ge @first and PartitionKey le @end and RowKey ge @low and RowKey lt @high"
)
_WAITING: Final = frozenset({State.PENDING, State.RETRYING, State.SNOOZED})


def _waits(found: RunRecord | ForeignId | None) -> bool:
    """Whether a mark of `cancel` ends the task, as no worker has begun with it."""
    return found is None or (isinstance(found, RunRecord) and found.state in _WAITING)


def _cancelled(found: RunRecord | ForeignId | None, task_id: str) -> RunRecord:
    known = found if isinstance(found, RunRecord) else None
    known = known or RunRecord(RunKey(task_id), "", "", State.PENDING)
    return replace(known, state=State.CANCELLED)


Item = TypeVar("Item")
Answer = TypeVar("Answer")


class TablesResults:
    """Implements `aztask.stores.records.base.ResultStore`. A forked child makes its own."""

    remote = True

    def __init__(
        self,
        address: TablesAddress,
        *,
        table: str = TABLE,
        container: str = CONTAINER,
        credential: TokenCredential | None = None,
        clock: Clock = SYSTEM_CLOCK,
        owner: Owner = NO_OWNER,
        signatures: RowSignatures | None = None,
    ) -> None:
        """Connects at the first call. Raises ConfigurationError without a credential.

        owner: whose rows it makes and acts on; NO_OWNER: those of everyone.
        signatures: of what it writes; None signs nothing.
        """
        self.owner = owner
        self.address = address
        self._requests = TableRequests(address, table, credential)
        self._blobs = Blobs(address, container, clock, credential)
        self.rows = TablesStore(self._requests, clock)
        self._signer = RowSigner(signatures, owner, self.rows)
        self._quarantine = Quarantine(self._requests, clock, owner, self._signer)
        self._owners = RunOwners(self._requests, owner)
        workflows = TablesWorkflows(self._requests, self._blobs, owner, self._signer)
        self._index = EndIndex(self._requests, self._blobs, self._quarantine, workflows, owner)
        self._runs = Runs(
            self._requests, self._blobs, self._index, self._quarantine, clock, owner, self._signer
        )
        self._listed_owners = ListedOwners(self._requests, self._owners, self._index.mine)
        self._busy = BusyRanges()
        self._leftovers = Leftovers(self._requests, self._blobs, workflows, clock, owner)
        self._marks = CancellationMarks(self._requests, owner)
        self._clock = clock
        self._sweep_at = self._forget_at = clock.monotonic()
        self.dead_index = DeadIndex(self.rows, owner)
        self.workflows: WorkflowStore = workflows
        self.controls = ControlStore(self.rows, owner, signatures=signatures)
        times = self.rows.service_clock
        self.schedules: ScheduleStore = TablesSchedules(self._requests, clock, owner, times)
        self.uniques = UniqueStore(self.rows, owner)

    def __repr__(self) -> str:
        return f"<TablesResults {self.address}>"

    # -- for administrators ------------------------------------------------------------------

    def create(self) -> dict[str, bool]:
        """Create the table and the container, see `Provisioned.create`."""
        parts = (self._requests, self._blobs)
        return {part.place: part.create(TimeBudget()) for part in parts}

    def check(self) -> None:
        """Check that both can be used, see `Provisioned.check`."""
        self._requests.read(TimeBudget(), WORKERS, "-")
        self._blobs.check(TimeBudget())

    # -- for workers and senders -------------------------------------------------------------

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

    def bury(self, runs: Sequence[RunRecord], read: ReadRuns = None) -> list[bool]:
        """Record the end of runs whose messages the broker dead-lettered."""
        if read is None:
            return self._each(self._runs.bury, runs)
        return self._each(self._runs.bury_as_read, list(zip(runs, read, strict=True)))

    def save(self, key: RunKey, owner: str, state: bytes) -> bool:
        """Store a checkpoint, by compare-and-set on the row."""
        return self._runs.save(TimeBudget(), key, owner, state)

    def disown(self, runs: Sequence[tuple[RunKey, str]]) -> None:
        """Give runs back; their start is not counted."""
        self._each(self._runs.disown, runs)

    def expect(self, runs: Iterable[RunRecord]) -> None:
        """Store runs that are sent but not started."""
        self._each(self._runs.expect, list(runs))

    def _each(
        self, work: Callable[[TimeBudget, Item], Answer], items: Sequence[Item]
    ) -> list[Answer]:
        call = self._requests.each
        return [answer for batch in _batches(items) for answer in call(TimeBudget(), work, batch)]

    # -- one task's runs ---------------------------------------------------------------------

    def get(self, task_id: str) -> RunRecord | None:
        """The task's latest run. A cancelled task that no worker has received is cancelled, too."""
        call = TimeBudget()
        records = self._records(call, task_id, 2)  # the latest run, and its row from the send
        if any(is_foreign(self.owner, each.broker) for each in records):
            records = self._own(self._records(call, task_id, RUNS_OF_A_TASK), task_id)
        record = records[0] if records else None
        if _waits(record) and self._marks.has(call, partition_of(task_id)):
            return _cancelled(record, task_id)
        return record

    def get_many(self, task_ids: Sequence[str]) -> list[RunRecord | ForeignId | None]:
        """What `get` returns or raises for each; see `_listed` for when ranges are listed."""
        found: dict[str, RunRecord | ForeignId | None] = {}
        names = {partition_of(each): each for each in task_ids}
        listed, others = self._listed(sorted(names))
        for name, rows in listed.items():
            found[names[name]] = self._latest_of(names[name], rows)
        for name in self._marked([name for name in listed if _waits(found[names[name]])]):
            found[names[name]] = _cancelled(found[names[name]], names[name])
        todo = [names[name] for name in others]
        found.update(zip(todo, self._each(self._got, todo), strict=True))
        return [found[each] for each in task_ids]

    def _listed(self, names: Sequence[str]) -> tuple[dict[str, list[Entity]], list[str]]:
        """(the rows of the tasks whose ranges were listed, the partitions left to be asked for).

        names: partitions, sorted. A page of a range has all rows of up to a thousand tasks, for the
        price of about eight requests for one task each [Azurite lists tasks 6 to 9 times as fast].
        So ranges are listed while one task in `LISTED_SHARE` of a page is asked for; the first page
        that has fewer is the last.
        """
        listed: dict[str, list[Entity]] = {}
        at = 0
        while len(names) - at > LISTED_SHARE:
            values = {"first": names[at], "end": names[-1], "low": FIRST_RUN, "high": LAST_RUN}
            rows, more = self._requests.page(TimeBudget(), _BETWEEN, values, None)
            there: dict[str, list[Entity]] = {}
            for row in rows:
                there.setdefault(row["PartitionKey"], []).append(row)
            end = len(names)
            if more is not None:  # the rows of the last task may go on in the next page
                end = bisect_left(names, rows[-1]["PartitionKey"], at) if rows else at
            listed.update((name, there.get(name, [])) for name in names[at:end])
            asked, at = end - at, end
            if asked == 0 or asked * LISTED_SHARE < len(there):
                break
        return listed, list(names[at:])

    def history(self, task_id: str) -> list[RunRecord]:
        """All runs of a task, oldest first."""
        return self._own(self._records(TimeBudget(), task_id, RUNS_OF_A_TASK), task_id)[::-1]

    def _own(self, records: Sequence[RunRecord], task_id: str) -> list[RunRecord]:
        """Those that do not belong to another owner. Raises ForeignId if all do."""
        own = [each for each in records if not is_foreign(self.owner, each.broker)]
        if records and not own:
            raise foreign_id("task", task_id, records[0].broker, self.owner)
        return own

    def _latest_of(self, task_id: str, rows: Iterable[Entity]) -> RunRecord | ForeignId | None:
        """The latest run in all rows of a task."""
        try:
            own = self._own(self._records_in(TimeBudget(), task_id, rows), task_id)
        except ForeignId as error:
            return error
        return own[0] if own else None

    def _marked(self, partitions: Sequence[str]) -> set[str]:
        """Those of these tasks that are cancelled."""
        call, shards = TimeBudget(), sorted(set(map(shard_of, partitions)))
        pages = dict(zip(shards, self._requests.each(call, self._marks.page, shards), strict=True))
        return self._marks.among(call, partitions, pages).intersection(partitions)

    def _got(self, call: TimeBudget, task_id: str) -> RunRecord | ForeignId | None:
        try:
            return self.get(task_id)
        except ForeignId as error:
            return error

    def _records(self, call: TimeBudget, task_id: str, limit: int) -> list[RunRecord]:
        """The task's runs from up to `limit` rows, newest first."""
        values = {"task": partition_of(task_id), "first": FIRST_RUN, "last": LAST_RUN}
        text = "PartitionKey eq @task and RowKey ge @first and RowKey lt @last"
        return self._records_in(call, task_id, self._requests.query(call, text, values, limit))

    def _records_in(
        self, call: TimeBudget, task_id: str, rows: Iterable[Entity]
    ) -> list[RunRecord]:
        """The runs in rows of a task, newest first."""
        partition = partition_of(task_id)
        records: dict[RunKey, RunRecord] = {}
        for entity in rows:
            row = entity["RowKey"]
            if not is_row(row):
                continue
            if row.endswith("e"):
                record = pending(entity, partition, row)
            else:
                record = self._runs.complete(call, run_of(entity, partition, row))
            key = replace(record.key, task_id=task_id)
            sent = records.get(key)  # the row from the send comes first; the run replaces it here
            note = record.note if sent is None or sent.broker != record.broker else sent.note
            records[key] = replace(record, key=key, note=note)
        return list(records.values())

    def _rows(self, call: TimeBudget, task_id: str) -> list[dict[str, Any]]:
        partition = {"task": partition_of(task_id)}
        return self._requests.query(call, "PartitionKey eq @task", partition, RUNS_OF_A_TASK)

    def recent(
        self, *, state: State | None = None, limit: int = 100, everyone: bool = False
    ) -> list[RunRecord]:
        """The runs that ended last, newest first, then those in quarantine.

        Runs that have not ended are in no index.
        """
        if state is not State.UNREADABLE:
            _check_listed(state)
        call = TimeBudget()
        runs: list[RunRow] = []
        if state is not State.UNREADABLE:
            brokers = [each.broker for each in self._owners.known(call)] if everyone else []
            runs += self._index.newest(call, ENDED if state is None else (state,), limit, brokers)
        if state in (None, State.UNREADABLE):
            found = self._quarantine.runs(call, limit)
            runs += [run for run in found if everyone or not is_foreign(self.owner, run.broker)]
        once = {(run.key, run.place): run for run in runs}
        return self._requests.each(call, self._runs.complete, once.values())

    def lines(
        self,
        *,
        state: State | None = None,
        after: str = "",
        everyone: bool = False,
        many: bool = False,
    ) -> IndexLines:
        """A list of ended runs in bulk, from the index; see `ResultStore.lines`."""
        _check_listed(state)
        states = ENDED if state is None else (state,)
        parts = self._requests, self._index, self._runs, self._listed_owners, self._busy
        return IndexLines(*parts, states, after, everyone=everyone, many=many)

    def cancel(self, task_id: str, at: float, *, running: bool = False) -> bool:
        """Mark a task as cancelled, unless it has ended."""
        record = self.get(task_id)
        if record is not None and record.state.final and not record.damage:
            return False
        self._marks.put(task_id, at, running=running)
        return True

    def uncancel(self, task_id: str) -> None:
        """Take back a task's mark of `cancel`: a request for each place where it may be."""
        self._marks.drop(TimeBudget(), partition_of(task_id))

    def to_stop(self, task_ids: Sequence[str]) -> list[str]:
        """Those of these tasks whose runs should be stopped: a query for each shard."""
        return self._marks.to_stop(task_ids)

    def forget(self, task_id: str) -> bool:
        """Delete everything about a task: for each run the index row, the row, its blobs.

        If the process dies in between, call it again. Purges find the rest, except for a row whose
        index row is gone.
        """
        call = TimeBudget()
        partition = partition_of(task_id)
        self._marks.drop(call, partition)
        found = self._rows(call, task_id)
        entities = [each for each in found if not is_foreign(self.owner, broker_in(each))]
        if found and not entities:
            raise foreign_id("task", task_id, broker_in(found[0]), self.owner)
        for entity in entities:
            row = entity["RowKey"]
            run = run_of(entity, partition, row) if is_run(partition, row) else None
            if run is not None and (run.damage or run.in_quarantine):
                self._quarantine.forget(call, run)
            if run is not None and run.ended:
                self._index.forget(call, run)
            self._requests.delete(call, partition, row)
            if run is not None:
                self._blobs.delete(run.body_blob, run.saved_blob)
        return bool(entities)

    def wait_changed(self, version: int, timeout: float) -> int:
        """Only wait, as the service reports no changes: 50 ms at first, later up to a second."""
        pause = min(FIRST_WAIT * 1.5 ** min(version, 20), LONGEST_WAIT)
        self._clock.sleep(max(0.0, min(pause, timeout)))
        return version + 1

    # -- workers -----------------------------------------------------------------------------

    def heartbeat(self, worker: WorkerRecord) -> None:
        """Store a worker's heartbeat; once an hour delete workers that were silent for a day."""
        self._requests.put(TimeBudget(), worker_entity(worker, self.owner.broker))
        self._owners.register()
        if self._clock.monotonic() >= self._forget_at:
            self._forget_at = self._clock.monotonic() + SWEEP_SECONDS
            call = TimeBudget()
            for entity in self._worker_rows(call):
                if _seen_at(entity) < worker.seen_at - WORKER_FORGOTTEN_SECONDS:
                    self._requests.delete(call, WORKERS, entity["RowKey"])

    def workers(self, *, everyone: bool = False) -> list[WorkerRecord]:
        """The known workers, newest heartbeat first, damaged rows last."""
        rows = self._worker_rows(TimeBudget())
        found = own_workers(self.owner, map(worker_of, rows), everyone=everyone)
        return sorted(found, key=lambda worker: worker.seen_at, reverse=True)

    def _worker_rows(self, call: TimeBudget) -> list[dict[str, Any]]:
        workers = {"workers": WORKERS}
        return self._requests.query(call, "PartitionKey eq @workers", workers, RUNS_OF_A_TASK)

    def purge(self, before: float) -> int:
        """Delete own runs that ended before that time, for some seconds; the next call continues.

        Once an hour it also deletes damaged rows, and begins a sweep for blobs of that age that no
        row names and for rows that never end; the next calls continue it.
        """
        self._marks.purge(before)
        deleted = self._index.purge(before)
        if self._clock.monotonic() >= self._sweep_at:
            self._sweep_at = self._clock.monotonic() + SWEEP_SECONDS
            deleted += self._quarantine.purge(before)
            try:
                swept, complete = self._leftovers.sweep(before)
            except AztaskError as error:
                logger.warning(
                    "old rows and blobs could not be listed, the next purge tries again: %s", error
                )
            else:
                deleted += swept
                if not complete:
                    self._sweep_at = self._clock.monotonic()
        return deleted

    def owners(self) -> set[Owner]:
        """Whose runs it holds: those whose workers have sent a heartbeat."""
        return self._owners.known(TimeBudget())

    def adopt(self, old: Owner) -> int:
        """Make the runs and cancellations of another owner its own; returns how many."""
        if not is_other_broker(self.owner, old):
            return 0
        self._signer.adopt(old)
        moved = self._owners.adopt_rows(old)
        call = TimeBudget()
        self._index.adopt(call, old)
        self._quarantine.adopt(call, old)
        moved += self._marks.adopt(old)
        self._owners.forget(old)
        return moved

    def unowned(self, before: float) -> int:
        """How many ended runs without an owner are older than a time; at most some thousand."""
        return self._index.unowned(TimeBudget(), before)

    def scan(self) -> Iterator[bytes]:
        """The values of all rows, see `values_of`."""
        return values_of(self._requests, self._blobs)

    def size(self) -> StoreSize:
        """Count the rows of runs and the blobs, each for a few seconds at most."""
        rows, all_rows = self._leftovers.count_rows()
        blobs, blob_bytes, all_blobs = self._blobs.measure(COUNT_SECONDS)
        return StoreSize(rows, blobs=blobs, blob_bytes=blob_bytes, complete=all_rows and all_blobs)

    def close(self) -> None:
        """Close idle connections to both services."""
        self._requests.close()
        self._blobs.close()


def _check_listed(state: State | None) -> None:
    """Raise CapabilityError for a state whose runs are in no index."""
    if state not in (None, *ENDED):
        raise CapabilityError(
            f"results in Azure Tables list only ended runs, not those that are {state}; use "
            "aztask running, aztask queues, or ask for a task by its id"
        )


def _batches(items: Sequence[Item]) -> Iterable[Sequence[Item]]:
    """Split the items so that each batch fits into the time of one call."""
    return (items[first : first + BATCH] for first in range(0, len(items), BATCH))


def _seen_at(worker: dict[str, Any]) -> float:
    """When the worker's row was last written; for a damaged row, the service's own time."""
    found = worker_of(worker)
    if not found.damage:
        return found.seen_at
    written = cast("TableEntity", worker).metadata["timestamp"]
    return 0.0 if written is None else written.timestamp()
