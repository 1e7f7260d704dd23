"""The rows of runs: which delivery owns each, and how it ended. All changes are compare-and-set.

A change is decided from the current row: `RowUpdate` is the answer, and the row to write, if any.
If the row's ETag changed in between, or the answer to the write was lost, the row is read and the
decision is made again. So each decision below also covers the case that an earlier try took effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from aztask.address.owner import NO_OWNER, Owner
from aztask.message.message import changed
from aztask.stores.records.base import (
    Finish,
    Foreign,
    Outcome,
    Outdated,
    Owned,
    OwnedElsewhere,
    Recorded,
    RunKey,
    RunRecord,
    Start,
    StartAnswer,
    StartRow,
    State,
    Unreadable,
    is_newer,
    other_task,
    same_start,
)
from aztask.stores.records.damage import Damaged, check_position
from aztask.stores.records.owners import is_foreign
from aztask.stores.records.rowsigning import NO_SIGNER, RowSigner, pack_body
from aztask.stores.records.tables.blobs import Blobs, missing
from aztask.stores.records.tables.index import EndIndex
from aztask.stores.records.tables.names import is_row, partition_of, row_of
from aztask.stores.records.tables.quarantine import Quarantine
from aztask.stores.records.tables.rows import (
    RunRow,
    believed,
    broker_in,
    entity_of,
    expected,
    new_run,
    run_of,
)
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.stores.tables.errors import OutcomeUnknown, RowNotFound
from aztask.support.clock import Clock
from aztask.support.failpoint import hit

# -- runowners -------------------------------------------------------------------------------
#
# The owners of runs in the table: who has workers here, and moving rows to another owner.
#
# Partition ``owners`` has a row for each, named by its mark. A run's owner is in its row, and no
# index leads from an owner to runs that have not ended: so workers register, once in each process.


PARTITION: Final = "owners"
PAGE: Final = 1000
_RUNS_OF: Final = "PartitionKey ge 't-' and PartitionKey lt 't.' and broker eq @old"


class RunOwners:
    """The owners of one table. Any thread may call."""

    def __init__(self, requests: TableRequests, owner: Owner) -> None:
        self._requests = requests
        self._mine = owner.of_broker
        self._registered = not owner.known

    def register(self) -> None:
        """List this owner; one request in the life of a process."""
        if not self._registered:
            self._requests.ensure(TimeBudget(), {**_place(self._mine), "broker": self._mine.broker})
            self._registered = True

    def known(self, call: TimeBudget) -> set[Owner]:
        """The owners that are listed, and this one if it is."""
        rows = self._requests.query(call, "PartitionKey eq @owners", {"owners": PARTITION}, PAGE)
        return {Owner(broker) for row in rows if (broker := broker_in(row))}

    def forget(self, old: Owner) -> None:
        """No longer list an owner whose rows were moved; a worker of it lists it again."""
        place = _place(old.of_broker)
        self._requests.delete(TimeBudget(), place["PartitionKey"], place["RowKey"])

    def adopt_rows(self, old: Owner) -> int:
        """Set the owner of each row of `old`. Reads all rows of runs; if it dies, repeat it."""
        moved, after = 0, None
        while True:
            rows, after = self._requests.page(
                TimeBudget(), _RUNS_OF, {"old": old.broker}, ("PartitionKey", "RowKey"), after
            )
            self._requests.each(TimeBudget(), self._set, rows)
            moved += sum(is_row(row["RowKey"]) for row in rows)
            if after is None:
                return moved

    def _set(self, call: TimeBudget, row: dict[str, Any]) -> None:
        place = {name: row[name] for name in ("PartitionKey", "RowKey")}
        self._requests.add(call, {**place, "broker": self._mine.broker})


def _place(owner: Owner) -> dict[str, Any]:
    return {"PartitionKey": PARTITION, "RowKey": owner.mark}


# -- runs ------------------------------------------------------------------------------------


TRIES: Final = 10
REMEMBERED: Final = 10_000

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RowUpdate(Generic[Answer]):
    """A decision about a row: the answer, and the row to write first (None for no write)."""

    answer: Answer
    row: RunRow | None = None


@dataclass(frozen=True, slots=True)
class ChangedRow(Generic[Answer]):
    """The answer, the row as it is now, and as it was before the write."""

    answer: Answer
    row: RunRow | None
    before: RunRow | None = None


class Runs:
    """The runs of one store. Any thread may call."""

    def __init__(
        self,
        requests: TableRequests,
        blobs: Blobs,
        index: EndIndex,
        quarantine: Quarantine,
        clock: Clock,
        owner: Owner = NO_OWNER,
        signer: RowSigner = NO_SIGNER,
    ) -> None:
        """owner: whose rows it makes and changes."""
        self._signer = signer
        self._owner = owner
        self._requests = requests
        self._blobs = blobs
        self._index = index
        self._quarantine = quarantine
        self._clock = clock
        self._known: OrderedDict[tuple[RunKey, str], RunRow] = OrderedDict()
        self._lock = Lock()

    def start(self, call: TimeBudget, start: Start) -> StartAnswer:
        """Insert the row; if it exists, decide from it.

        Crash window: a process that dies here leaves a row whose owner is gone, like one that dies
        while the task runs; the redelivery takes it over.
        """

        def decide(run: RunRow | None) -> RowUpdate[StartAnswer]:
            if run is None:
                return RowUpdate(Owned(1), self._owned(new_run(start)))
            if run.damage or is_foreign(self._owner, run.broker):
                return RowUpdate(self._refused(run))
            if (other := other_task(start, run.task, run.queue)) is not None:
                return RowUpdate(other)
            update = self._started(run, start)
            other = other_task(start, run.task, run.queue, update.answer)
            return update if other is None else RowUpdate(other)

        done = self._change(call, start.key, None, decide)
        if done.row is None:
            return done.answer
        if isinstance(done.answer, Unreadable):
            self._quarantine.note(call, done.row, done.answer.reason)
        if isinstance(done.answer, Recorded):
            # The worker that recorded it may have died before it wrote the index row.
            try:
                known = self._outcome(call, done.row)
            except Damaged as damage:
                self._quarantine.note(call, done.row, damage.reason)
                return Unreadable(damage.reason)
            self._index.note(call, done.row)
            return Recorded(known or done.answer.outcome)
        if not isinstance(done.answer, Owned):
            return done.answer
        self._remember(done.row)
        if done.before is not None and done.before.body_blob != done.row.body_blob:
            self._blobs.delete(done.before.body_blob)
        return replace(done.answer, saved=self._saved(call, done.row))

    def _started(self, run: RunRow, start: Start) -> RowUpdate[StartAnswer]:
        """The answer for a row of the same task."""
        outcome = run.outcome(None)
        if outcome is not None and not outcome.again:
            marked = run.in_quarantine and not self._signer
            own = changed(self._owned(run), in_quarantine=marked)  # writing it takes the mark away
            return RowUpdate(Recorded(outcome), None if own == run else own)
        counted = Owned(run.starts, None, run.failures, run.snoozes)
        if run.owner == start.owner:
            return RowUpdate(counted)
        if run.owner and (other := _owned_by_another(run, start)) is not None:
            return RowUpdate(other)
        taken = self._owned(run.started(start))
        return RowUpdate(replace(counted, starts=run.starts + 1), taken)

    def record(self, call: TimeBudget, finish: Finish) -> bool:
        """Write the blob, the row and the index row, in this order.

        If the process dies after the first, a purge finds the blob. After the second, the message
        is not settled, and its redelivery completes the index.
        """
        current = self._take(finish.key, finish.owner) or self.read(call, finish.key)
        if current is None:
            return False
        outcome = self._signer.closed(finish.key, finish.outcome)
        packed = pack_body(outcome)
        signature = self._signer.sign_outcome(finish.key, outcome, packed)
        body, blob = self._blobs.place_of(call, finish.key, packed)

        def decide(run: RunRow | None) -> RowUpdate[bool]:
            if run is None or run.owner != finish.owner:
                return RowUpdate(False)
            if run.state is not State.STARTED:
                return RowUpdate(True)  # recorded before: that outcome stays
            ended = run.finished(outcome, body, blob, signature)
            return RowUpdate(True, self._owned(ended))

        done = self._change(call, finish.key, current, decide)
        if blob and (done.row is None or done.row.body_blob != blob):
            self._blobs.delete(blob)
        hit("unindexed")
        if done.answer and done.row is not None and done.row.ended:
            self._index.note(call, done.row)
            if done.before is not None and done.before is not done.row:
                self._blobs.delete(done.before.saved_blob)
        return done.answer

    def bury(
        self, call: TimeBudget, record: RunRecord, read: Sequence[StartRow | None] = ()
    ) -> bool:
        """Write the index row first: once the row says how the run ended, no call returns to it.

        If the process dies in between, the index names a run that the next call ends; lists show
        it as ended already. read: with one, only if the run is as it was read.
        """
        outcome = record.outcome
        current = self.read(call, record.key)
        if outcome is None or (current is not None and current.ended):
            return False
        if current is not None and is_foreign(self._owner, current.broker):
            return False
        if current is not None and current.damage:
            self._quarantine.note(call, current, current.damage)
            return False
        if read and not same_start(read[0], current):
            return False
        closed = self._signer.closed(record.key, outcome)
        packed = pack_body(closed)
        signature = self._signer.sign_outcome(record.key, closed, packed)
        body, blob = self._blobs.place_of(call, record.key, packed)

        def buried(run: RunRow | None) -> RunRow:
            base = run or RunRow(record.key, record.task, record.queue)
            ended = base.finished(closed, body, blob, signature)
            return self._owned(changed(ended, owner=""))

        def decide(run: RunRow | None) -> RowUpdate[bool]:
            if run is not None and (run.damage or is_foreign(self._owner, run.broker)):
                return RowUpdate(False)
            if run is None or not run.ended:
                same = not read or same_start(read[0], run)
                return RowUpdate(same, buried(run) if same else None)
            # it had not ended when we first read it: our own write, if its answer was lost
            return RowUpdate(not run.owner and (run.ended_at, run.body_blob) == (outcome.at, blob))

        self._index.note(call, buried(current))
        done = self._change(call, record.key, current, decide)
        if blob and (done.row is None or done.row.body_blob != blob):
            self._blobs.delete(blob)
        return done.answer

    def bury_as_read(self, call: TimeBudget, pair: tuple[RunRecord, StartRow | None]) -> bool:
        """As `bury`, unless the run has gone on since it was read."""
        record, read = pair
        return self.bury(call, record, [read])

    def save(self, call: TimeBudget, key: RunKey, owner: str, state: bytes) -> bool:
        """Store a checkpoint.

        If the process dies before the row is written, the previous checkpoint stays, and a purge
        finds the blob of the new one.
        """
        current = self._take(key, owner) or self.read(call, key)
        if current is None:
            return False
        state = self._signer.closed_saved(key, state)
        data, blob = self._blobs.place_of(call, key, state)
        signature = self._signer.sign_saved(key, state)

        def decide(run: RunRow | None) -> RowUpdate[bool]:
            if run is None or run.owner != owner or run.state is not State.STARTED:
                return RowUpdate(False)
            if (run.saved, run.saved_blob) == (data, blob):
                return RowUpdate(True)
            saved = changed(run, saved=data, saved_blob=blob, saved_signature=signature)
            return RowUpdate(True, saved)

        done = self._change(call, key, current, decide)
        if not done.answer:
            self._blobs.delete(blob)
        elif done.row is not None:
            self._remember(done.row)
            if current.saved_blob != blob:
                self._blobs.delete(current.saved_blob)
        return done.answer

    def disown(self, call: TimeBudget, which: tuple[RunKey, str]) -> None:
        """Give a run back; its start is not counted."""
        key, owner = which

        def decide(run: RunRow | None) -> RowUpdate[None]:
            if run is None or run.owner != owner or run.state is not State.STARTED:
                return RowUpdate(None)
            fresh = run.starts <= 1 and not run.failures and not run.snoozes
            state = State.PENDING if fresh else run.state
            given_back = changed(run, owner="", starts=run.starts - 1, state=state)
            return RowUpdate(None, given_back)

        current = self._take(key, owner) or self.read(call, key)
        if current is not None:
            self._change(call, key, current, decide)

    def expect(self, call: TimeBudget, record: RunRecord) -> None:
        """Note that a run is sent, in a row of its own, so that a start need not read it."""
        self._requests.ensure(call, expected(record, self._clock.wall(), self._owner.broker))

    def read(self, call: TimeBudget, key: RunKey) -> RunRow | None:
        """The run's row. A damaged one has no owner and has not ended."""
        partition, row = partition_of(key.task_id), row_of(key)
        entity = self._requests.read(call, partition, row)
        if entity is None:
            return None
        return believed(changed(run_of(entity, partition, row), key=key), self._signer)

    def complete(self, call: TimeBudget, run: RunRow) -> RunRecord:
        """The run with its value, and with what is wrong with it or its value."""
        run = believed(run, self._signer)
        if run.damage:
            return run.record(None)
        try:
            record = run.record(self._body(call, run))
            if record.outcome is None:
                return record
            return replace(record, outcome=self._signer.opened(run.key, record.outcome))
        except Damaged as damage:
            return run.record(None, damage.reason)
        except RowNotFound:
            pass
        now = self.read(call, run.key)  # a new outcome may have replaced this one, and its blob
        if now is None or now.body_blob == run.body_blob:
            return run.record(None, missing(run.body_blob))
        return self.complete(call, now)

    def copied(self, run: RunRow) -> RunRecord:
        """A run from its copy in the index, without its value. Raises Damaged."""
        succeeded = run.state is State.SUCCEEDED
        run = believed(run, self._signer, valued=not succeeded)
        if run.damage:
            raise Damaged(run.damage)
        record = run.record(run.body)
        assert record.outcome is not None  # noqa: S101  # only ended runs are in the index
        return replace(record, outcome=self._signer.opened(run.key, record.outcome))

    def _body(self, call: TimeBudget, run: RunRow) -> bytes | None:
        """The long parts of its outcome. Raises Damaged, and RowNotFound for a missing blob."""
        body = self._blobs.load(call, run.body, run.body_blob)
        if run.body_blob:
            self._signer.check_body(body, run.signature)
        return body

    # -- inside ------------------------------------------------------------------------------

    def _refused(self, run: RunRow) -> Foreign | Unreadable:
        """The answer for a row of another owner, or a damaged one."""
        foreign = is_foreign(self._owner, run.broker)
        return Foreign(run.broker) if foreign else Unreadable(run.damage)

    def _owned(self, run: RunRow) -> RunRow:
        """The row with its owner; one that has none gets this one (rule 7 of the protocol)."""
        return run if run.broker else changed(run, broker=self._owner.broker)

    def _change(
        self,
        call: TimeBudget,
        key: RunKey,
        run: RunRow | None,
        decide: Callable[[RunRow | None], RowUpdate[Answer]],
    ) -> ChangedRow[Answer]:
        """Decide and write until no other writer comes in between.

        * `run`: the row as last read, None if it did not exist.
        """
        for _ in range(TRIES):
            step = decide(run)
            if step.row is None:
                return ChangedRow(step.answer, run, run)
            entity = entity_of(step.row)
            try:
                if run is None:
                    tag = self._requests.insert(call, entity)
                else:
                    tag = self._requests.replace(call, entity, run.tag)
            except OutcomeUnknown:
                tag = None
            if tag is not None:
                return ChangedRow(step.answer, changed(step.row, tag=tag), run)
            run = self.read(call, key)
        raise call.unavailable(f"the row of task {key.task_id}")

    def _outcome(self, call: TimeBudget, run: RunRow) -> Outcome | None:
        """The complete outcome; None if its blob is missing or damaged, so that the row must do.

        Raises Damaged for a blob that another program has changed.
        """
        try:
            body = self._body(call, run)
        except RowNotFound:
            return None
        try:
            outcome = run.outcome(body)
        except Damaged:
            return None
        return None if outcome is None else self._signer.opened(run.key, outcome)

    def _saved(self, call: TimeBudget, run: RunRow) -> bytes | None:
        try:
            saved = self._blobs.load(call, run.saved, run.saved_blob)
        except RowNotFound:
            return None  # the blob was deleted: the task begins anew
        return self._signer.believed_saved(run.key, saved, run.saved_signature)

    def _remember(self, run: RunRow) -> None:
        """Keep the row for its end, unless that would keep a checkpoint in memory."""
        if run.saved is None:
            with self._lock:
                self._known[run.key, run.owner] = run
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)

    def _take(self, key: RunKey, owner: str) -> RunRow | None:
        with self._lock:
            return self._known.pop((key, owner), None)


def _owned_by_another(run: RunRow, start: Start) -> OwnedElsewhere | Outdated | Unreadable | None:
    """Another copy or a newer delivery owns the run; None if this delivery takes it over.

    A position that cannot be one of any copy makes the row unreadable.
    """
    if run.position == start.position:
        return Outdated() if is_newer(run.owner, start.owner) else None
    try:
        check_position(run.position, start.position)
    except Damaged as damage:
        return Unreadable(damage.reason)
    return OwnedElsewhere()
