"""The index of ended runs: one row for each, so that no call reads the whole table.

Partitions are named by owner, shard, state and hour: each owner purges its own, and need not read
the runs for that. Rows without an owner are in partitions ``i-...``. The hours, and the
milliseconds in the row keys, count down: one range of keys gives the newest rows first, and another
one all rows older than a time. A row names its run and the blob of its value, says what a search
asks for (`SUMMARY`), and has a copy of what a list shows (`COPY`): a thousand of them come in one
answer, where a thousand runs are as many requests.

Rules
1. The index row is written after the outcome, by the call that records it. If the process dies in
   between, the message is not settled yet: its redelivery finds the outcome and writes the row.
2. An index row may outlive its run, or name a run that ended otherwise: a process may die in a
   purge or a burial, and a task id may be used again after its retention. So the run's own row
   decides. A purge deletes the index row last: if it dies in between, the next purge continues
   there.
3. A run whose row is damaged cannot decide: a listing shows it as damaged, and a purge puts it into
   quarantine. An index row that is damaged itself names no run; a purge deletes it.
4. A summary is a hint. A search passes by a run whose summary does not fit, and reads the rows of
   the others. It has only what is known: rows of older releases have none, an error that is
   long, encrypted or in a blob is not in it, and a search reads their runs, too.
5. A copy is what was recorded as the run ended, with the signature of its outcome. Lists of runs
   show it without asking the run's own row, so they show the leftovers of rule 2, too. One that is
   missing, damaged, or of another place than its own, does not count: then the run is read.
6. Runs without an owner are purged `UNFINISHED_SECONDS` later than own ones, by any owner. If one
   of them is adopted, its old index row names a run that is listed elsewhere (rule 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain, product
from typing import Any, Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.message.encryption import is_encrypted
from aztask.stores.layout import SHARDS, shard_of
from aztask.stores.records.base import UNFINISHED_SECONDS, RunKey, State
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.tables.blobs import Blobs
from aztask.stores.records.tables.leftovers import Keeping, KnownWorkflows
from aztask.stores.records.tables.names import is_blob_of, is_run, partition_of, row_of
from aztask.stores.records.tables.quarantine import Quarantine
from aztask.stores.records.tables.rows import DAMAGE, RunRow, copy_of, plain, run_of
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.stores.tables.errors import RowConflict
from aztask.support import chance
from aztask.support.clock import monotonic

ENDED: Final = (
    State.SUCCEEDED,
    State.FAILED,
    State.CANCELLED,
    State.EXPIRED,
    State.RETRYING,
    State.SNOOZED,
)
"""States in which a run may have ended; after the last two a clone goes on."""

PURGE_SECONDS: Final = 4.0
"""Seconds for one call: a worker's heartbeats wait until it ends."""

PURGE_PAGE: Final = 200
ADOPT_PAGE: Final = 200
ENDING: Final = (
    "broker",
    "key",
    "state",
    "starts",
    "failures",
    "snoozes",
    "duration",
    "ended_at",
    "settlement",
    DAMAGE,
)
"""The properties that say how a run ended, without its value."""

_HOURS: Final = 10**7
_MILLISECONDS: Final = 10**14
END: Final = "~"
"""Behind all partitions and rows that begin like those before it."""
NAMES: Final = ("PartitionKey", "RowKey", "partition", "row")
_SELECT: Final = (*NAMES, "blob")
SUMMARY: Final = ("task", "queue", "worker", "error", "duration")
"""The properties that say what a search asks for, see rule 4."""
COPY: Final = "copy"
"""The property with the copy of the run, see rule 5."""
LONGEST_ERROR: Final = 500
"""A longer error is not in the index: each of these characters is read again by each search."""
UNOWNED: Final = "i-"
"""The beginning of all partitions with rows that have no owner."""
UNOWNED_PURGE_SECONDS: Final = 3600.0
"""Seconds between two purges of rows without an owner, after one that found no more."""

_Range = tuple[str, int, State]
"""The broker that the runs belong to ("" for none), a shard and a state."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One row of the index. `damage`: why it names no run; then the three fields before are empty.

    `copy`: see `COPY`; None if there is none, or it was not asked for.
    """

    partition: str
    row: str
    run_partition: str = ""
    run_row: str = ""
    blob: str = ""
    damage: str = ""
    copy: bytes | None = None

    def shows(self, run: RunRow) -> bool:
        """Whether it is the row of a run that ended so."""
        return _place_of(run) == (self.partition, self.row)


def entity_of(run: RunRow) -> dict[str, Any]:
    """The index row of an ended run."""
    partition, row = _place_of(run)
    copy = copy_of(run)
    return {
        "PartitionKey": partition,
        "RowKey": row,
        "partition": partition_of(run.key.task_id),
        "row": row_of(run.key),
        "blob": run.body_blob,
        **_summary_of(run),
        **({} if copy is None else {COPY: copy}),
    }


def _place_of(run: RunRow) -> tuple[str, str]:
    """The partition and the row key of a run's index row."""
    partition, row = partition_of(run.key.task_id), row_of(run.key)
    at = run.ended_at or 0.0
    digest = sha256(f"{partition}!{row}".encode()).hexdigest()[:24]
    start = start_of(run.broker, shard_of(partition), run.state)
    return f"{start}{hours(at)}", f"{count_down(at)}-{digest}"


def _summary_of(run: RunRow) -> dict[str, Any]:
    """What a search asks for (rule 4)."""
    found: dict[str, Any] = {
        "task": plain(run.task),
        "queue": plain(run.queue),
        "worker": plain(run.worker),
        "duration": float(run.duration),
    }
    error = _error_of(run)
    return found if error is None else {**found, "error": plain(error)}


def _error_of(run: RunRow) -> str | None:
    """Its error's type and message; None if they do not belong into the index."""
    if run.state is State.SUCCEEDED:
        return ""  # unpacking its value would tell nothing
    if run.body_blob:
        return None
    try:
        outcome = run.outcome(run.body)
    except Damaged:
        return None
    if outcome is None or (is_encrypted(outcome.value) and outcome.error_type):
        return None
    text = outcome.error_text
    return text if len(text) <= LONGEST_ERROR else None


def _prefix(broker: str) -> str:
    """The beginning of the partitions of an owner; an older release sees only those without one."""
    return f"im-{Owner(broker).mark}-" if broker else UNOWNED


def start_of(broker: str, shard: int, state: State) -> str:
    """The beginning of the partitions of an owner's shard with the runs of a state."""
    return f"{_prefix(broker)}{shard}-{state.value}-"


class EndIndex:
    """The index of ended runs in one table."""

    def __init__(
        self,
        requests: TableRequests,
        blobs: Blobs,
        quarantine: Quarantine,
        workflows: KnownWorkflows,
        owner: Owner = NO_OWNER,
    ) -> None:
        """owner: whose runs it purges."""
        self._workflows = workflows
        self.mine = owner.broker
        self._unowned_at = 0.0
        self._after: dict[_Range, IndexEntry] = {}
        self._requests = requests
        self._blobs = blobs
        self._quarantine = quarantine

    def note(self, call: TimeBudget, run: RunRow) -> None:
        """Write the run's index row, unless it exists."""
        self._requests.ensure(call, entity_of(run))

    def forget(self, call: TimeBudget, run: RunRow) -> None:
        """Delete the run's index row, if it exists."""
        self._requests.delete(call, *_place_of(run))

    def newest(
        self, call: TimeBudget, states: Iterable[State], limit: int, brokers: Iterable[str]
    ) -> list[RunRow]:
        """The runs that ended last in one of these states, the newest first.

        * `brokers`: whose runs; "" for those without an owner.

        Runs whose row is damaged by now are included.
        """

        def page(call: TimeBudget, start: str) -> list[dict[str, Any]]:
            return self._requests.query(
                call,
                "PartitionKey ge @first and PartitionKey lt @end",
                {"first": start, "end": start + END},
                limit,
                _SELECT,
            )

        parts = product(sorted({self.mine, "", *brokers}), range(SHARDS), states)
        starts = [start_of(*each) for each in parts]
        found = chain.from_iterable(self._requests.each(call, page, starts))
        entries = sorted(map(entry_of, found), key=lambda entry: entry.row)[:limit]
        return [run for run in self._requests.each(call, self.read, entries) if run is not None]

    def purge(self, before: float) -> int:
        """Delete runs that ended before that time, as many as the time for one call allows.

        Ranges are taken in random order, so that several workers seldom work on the same one. If
        they do, a run that another worker deleted is not counted.

        Runs of workflows that exist are kept. The next call continues behind them. Runs without an
        owner are looked for once an hour (rule 6).
        """
        deleted = 0
        call, keeping = TimeBudget(), Keeping(self._workflows)
        ranges = list(product([self.mine], range(SHARDS), ENDED))
        chance.shuffle(ranges)
        until = monotonic() + PURGE_SECONDS
        if self.mine and monotonic() >= self._unowned_at:
            ranges += product([""], range(SHARDS), ENDED)  # last: own ones matter more
            self._unowned_at = monotonic() + UNOWNED_PURGE_SECONDS
        while ranges and monotonic() < until:
            pages = self._requests.each(
                call, lambda call, which: self._old(call, which, before), ranges
            )
            for which, entries in zip(ranges, pages, strict=True):
                deleted += sum(
                    self._requests.each(
                        call, lambda call, entry: self._clear(call, entry, keeping), entries
                    )
                )
                self._after.pop(which, None)
                if len(entries) == PURGE_PAGE:
                    self._after[which] = entries[-1]
                if monotonic() >= until:
                    self._unowned_at = 0.0
                    return deleted
            ranges = [which for which in ranges if which in self._after]
        return deleted

    def unowned(self, call: TimeBudget, before: float) -> int:
        """How many rows without an owner ended before a time, to the hour; a page of each range."""
        ranges = product([""], range(SHARDS), ENDED)
        count = partial(self._count, before=before)
        return sum(self._requests.each(call, count, ranges))

    def _count(self, call: TimeBudget, which: _Range, before: float) -> int:
        start = start_of(*which)
        rows = self._requests.query(
            call,
            "PartitionKey gt @hour and PartitionKey lt @end",
            {"hour": start + hours(before), "end": start + END},
            PURGE_PAGE,
            ("RowKey",),
        )
        return len(rows)

    def adopt(self, call: TimeBudget, old: Owner) -> None:
        """Move the index rows of `old`: write the new row, then delete the old one.

        If the process dies in between, a run is listed twice; the old row names no run of its owner
        (rule 2), and the next call deletes it.
        """
        first = _prefix(old.broker)
        while rows := self._requests.query(
            call,
            "PartitionKey ge @first and PartitionKey lt @end",
            {"first": first, "end": first + END},
            ADOPT_PAGE,
        ):
            call = TimeBudget()
            self._requests.each(call, partial(self._move, first=first), rows)

    def _move(self, call: TimeBudget, row: dict[str, Any], first: str) -> None:
        place = _prefix(self.mine) + row["PartitionKey"].removeprefix(first)
        names: dict[str, Any] = {
            name: row[name] for name in ("partition", "row", "blob", *SUMMARY) if name in row
        }
        self._requests.ensure(call, {"PartitionKey": place, "RowKey": row["RowKey"], **names})
        self._requests.delete(call, row["PartitionKey"], row["RowKey"])

    def read(
        self, call: TimeBudget, entry: IndexEntry, select: Sequence[str] | None = None
    ) -> RunRow | None:
        """The run, if it ended as the entry says (rule 2), or if its row is damaged; else None."""
        if entry.damage:
            name = f"{entry.partition}/{entry.row}"
            return RunRow(RunKey(name), "", "", state=State.UNREADABLE, damage=entry.damage)
        entity = self._requests.read(call, entry.run_partition, entry.run_row, select)
        if entity is None:
            return None
        run = run_of(entity, entry.run_partition, entry.run_row)
        if run.damage:
            return run
        if run.ended_at is None:
            return None
        return run if entry.shows(run) else None

    def _old(self, call: TimeBudget, which: _Range, before: float) -> list[IndexEntry]:
        start = start_of(*which)
        if which[0] != self.mine:
            before -= UNFINISHED_SECONDS
        hour, instant = start + hours(before), count_down(before) + END
        if (after := self._after.get(which)) is not None:
            hour, instant = max((hour, instant), (after.partition, after.row))
        # Two separate ranges: joined by "or" they would make the service read the whole table.
        rows = self._requests.query(
            call,
            "PartitionKey eq @hour and RowKey gt @instant",
            {"hour": hour, "instant": instant},
            PURGE_PAGE,
            _SELECT,
        )
        if len(rows) < PURGE_PAGE:
            rows += self._requests.query(
                call,
                "PartitionKey gt @hour and PartitionKey lt @end",
                {"hour": hour, "end": start + END},
                PURGE_PAGE - len(rows),
                _SELECT,
            )
        return [entry_of(row) for row in rows]

    def _clear(self, call: TimeBudget, entry: IndexEntry, keeping: Keeping) -> bool:
        """Delete a run, its note from the send, its blob, and last its index row."""
        there = False
        run = None if entry.damage else self.read(call, entry, ENDING)
        if run is not None and run.damage:
            self._quarantine.note(call, run, run.damage)
        elif run is not None and keeping.keeps(call, run.key.task_id):
            return False
        else:
            if run is not None:
                try:
                    there = self._requests.delete(call, entry.run_partition, entry.run_row, run.tag)
                except RowConflict:
                    return False  # the next purge tries again
                self._requests.delete(call, entry.run_partition, f"{entry.run_row[:-1]}e")
            self._blobs.delete(entry.blob)
        self._requests.delete(call, entry.partition, entry.row)
        return there


def entry_of(entity: dict[str, Any]) -> IndexEntry:
    """A row of the index, damaged or not."""
    columns = Columns(entity)
    place = entity["PartitionKey"], entity["RowKey"]
    try:
        partition, row = columns.text("partition"), columns.text("row")
        blob = columns.text("blob", missing="")
    except Damaged as damage:
        return IndexEntry(*place, damage=damage.reason)
    if not is_run(partition, row) or not is_blob_of(blob, partition, row):
        return IndexEntry(*place, damage="this row of the index of ended runs names no run")
    copy = entity.get(COPY)
    return IndexEntry(*place, partition, row, blob, copy=copy if isinstance(copy, bytes) else None)


def hours(at: float) -> str:
    """The hour of a time as text that counts down, as `count_down`."""
    return f"{_HOURS - _bounded(at // 3600, _HOURS):07d}"


def time_of(row: str) -> float:
    """When the run of an index row ended, to the millisecond: in its hour or a later one."""
    return (_MILLISECONDS - int(row[:14])) / 1000


def count_down(at: float) -> str:
    """The milliseconds of a time as text that counts down: later times sort first."""
    return f"{_MILLISECONDS - _bounded(at * 1000, _MILLISECONDS):014d}"


def _bounded(number: float, limit: int) -> int:
    return int(max(1.0, min(number, limit - 1.0)))
