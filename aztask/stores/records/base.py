"""The result store protocol: which delivery owns a run, and how the run ended.

Rules
1. A run's key is (task id, generation, hop). Its start row is owned by one lease; only the owner
   can record an outcome, once (compare-and-set). A worker that was frozen past its lease finds
   another owner when it thaws, and records nothing.
2. The record is the *settlement*: a redelivery of the message repeats exactly that.
3. A start row of the same message (same position) may be taken over: the message was delivered
   again, so the previous owner's lease is gone. A start row of another copy of the message may not:
   that copy is still in the broker, and only its delivery may run (`OwnedElsewhere`).
4. An outcome after which the same message comes again (`Outcome.again`) ends a start, not the run:
   the store counts it, shows its state and error, and lets the next delivery start again.
5. An unreachable store raises BrokerUnavailable: the caller keeps the delivery unsettled and tries
   again.
6. A damaged row raises nothing and harms no other row of the same call. A run whose row cannot be
   read is neither started nor recorded (`Unreadable`), because it may have ended already. `start`
   and `bury` put such a row into quarantine: it stays unchanged, is logged and listed under
   `State.UNREADABLE`, and is purged a retention time later. A replay of the task has another key,
   and so a row of its own.
7. A row belongs to the broker whose message made it (`aztask.address.owner`). A store acts on rows
   of its own owner only: the row of another one answers a start with `Foreign`, and an id that only
   others use raises ForeignId. A row without an owner is adopted by the first start or record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgpack

from aztask.errors import ForeignId
from aztask.message.message import plain_name
from aztask.queues.delivery import Position
from aztask.settlement import Decision, Resubmit
from aztask.support.parts import PartFailure

# -- Whose a start is ------------------------------------------------------------------------------
#
# The owner of a start row names its delivery, so that an older delivery takes no row from a newer.
#
# Rules
# 1. The delivery count is part of the owner's text. The broker raises it with each delivery of one
#    message and lowers it only when a delivery is released, which then no longer acts. So of two
#    deliveries that may still act, the newer has the higher count, on every broker.
# 2. Counts are compared for one message (position) only. A row of an earlier release has no count,
#    and is taken over as before.


_MARK = "#"


def owner_of(name: str, delivery_count: int) -> str:
    """The owner's text for a delivery. name: unique to the delivery's lease."""
    return f"{name}{_MARK}{delivery_count}"


def is_newer(owner: str | None, than: str) -> bool:
    """True if `owner` is of a newer delivery than the owner `than` of the same message."""
    if not owner:
        return False
    count, other = _count(owner), _count(than)
    return count is not None and other is not None and count > other


def _count(owner: str) -> int | None:
    digits = owner.rpartition(_MARK)[2] if _MARK in owner else ""
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 19 else None


# -- The earlier starts of a run -------------------------------------------------------------------
#
# Its row keeps them for `aztask explain`.
#
# Rules
# 1. A run's first start writes nothing here: most runs start once. Each later start notes the one
#    before it, in the same write.
# 2. A row keeps `KEPT_STARTS` of them and counts the others, so that it does not grow.


KEPT_STARTS: Final = 19
"""With the last start, which has columns of its own, a row knows 20."""
ERROR_CHARACTERS: Final = 100
GIVEN_BACK: Final = "given back"
"""The end of a start that did not happen: its delivery was released before the task ran."""


@dataclass(frozen=True, slots=True)
class EarlierStart:
    """A start of a run before the last one.

    * `at`: UTC epoch seconds.
    * `end`: the state that it ended with, `GIVEN_BACK`, or "" if no end was recorded: the worker
      died, or lost its lease.
    * `error`: of that end, cut.
    """

    at: float
    worker: str
    end: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class EarlierStarts:
    """The starts of a run before the last one, the oldest first.

    `dropped`: how many starts before `kept` are no longer in the row.
    """

    kept: tuple[EarlierStart, ...] = ()
    dropped: int = 0

    def plus(self, start: EarlierStart) -> EarlierStarts:
        """These starts and one more; the oldest of many is dropped."""
        kept = (*self.kept, replace(start, error=start.error[:ERROR_CHARACTERS]))
        return EarlierStarts(kept[-KEPT_STARTS:], self.dropped + max(0, len(kept) - KEPT_STARTS))

    def pack(self) -> bytes | None:
        """The starts as bytes, None if there are none; `Columns.starts` reads them."""
        if not self.kept:
            return None
        rows = [(each.at, each.worker, each.end, each.error) for each in self.kept]
        packed: bytes = msgpack.packb((self.dropped, rows), unicode_errors="surrogatepass")
        return packed


NO_STARTS: Final = EarlierStarts()


# -- Runs, and how they end ------------------------------------------------------------------------


class State(StrEnum):
    """The state of a task, in the words of `AsyncResult.state`."""

    PENDING = "pending"
    STARTED = "started"
    RETRYING = "retrying"
    SNOOZED = "snoozed"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    UNREADABLE = "unreadable"
    """The row is damaged. No row has this state: a store reports it (rule 6)."""

    @property
    def final(self) -> bool:
        """True if the task has ended; only a replay runs it again."""
        return self in _FINAL


NOTE_BYTES: Final = 60 * 1024
"""The longest `RunRecord.note`: a property of an Azure table holds 64 KiB."""

PARKED: Final = "(waiting)"
"""The `Outcome.error_type` of a run that waits inside its task. No error has this name. A release
that does not know it reads the outcome all the same, as that of a snoozed run."""

RENEWED: Final = "(continues)"
"""The same for a run whose task continues with other arguments: its next hop has them."""

LOST: Final = "lost"
"""The `Outcome.error_type` of an at-most-once run that ended with its worker: it has no dead
letter."""

WAITING: Final = "waiting"
"""The state that people see of such a run. Its row has the state SNOOZED, for that release."""

OVERDUE_SECONDS: Final = 86400.0
"""For so long after its time a task that waits counts as open, although nothing woke it."""

UNFINISHED_SECONDS: Final = 30 * 86400.0
"""How long after the retention a run that started and never ended is kept: it may be running."""

_FINAL = frozenset(
    {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED, State.UNREADABLE}
)


SILENT_SECONDS: Final = 15.0
"""Workers send a heartbeat every 5 s; a worker is silent after three missing heartbeats."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """The key of one run of one task."""

    task_id: str
    generation: int = 0
    hop: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """A request to own a run.

    * `owner`: unique to this delivery's lease; see `aztask.stores.records.base`.
    * `at`: UTC epoch seconds.
    """

    key: RunKey
    task: str
    queue: str
    position: Position
    owner: str
    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    * `value`: the encoded result.
    * `at`: UTC epoch seconds; `duration`: seconds.
    """

    state: State
    settlement: Decision
    value: bytes | None = None
    error_type: str = ""
    error: str = ""
    traceback: str = ""
    at: float = 0.0
    duration: float = 0.0

    @property
    def again(self) -> bool:
        """True if the same message comes again (a clone is another message, of the next hop)."""
        return not self.state.final and not isinstance(self.settlement, Resubmit)

    @property
    def error_text(self) -> str:
        """The error's type and message in one text; "" if there is none."""
        return f"{self.error_type}: {self.error}" if self.error_type or self.error else ""

    @property
    def parked(self) -> bool:
        """True if the task waits: its next hop, which the settlement sends, goes on."""
        return self._snoozed_as(PARKED)

    @property
    def renewed(self) -> bool:
        """True if the task continues with other arguments, in a new history of steps."""
        return self._snoozed_as(RENEWED)

    def _snoozed_as(self, kind: str) -> bool:
        """The text first, which is empty for most outcomes: a worker asks often."""
        return (
            self.error_type == kind
            and self.state is State.SNOOZED
            and isinstance(self.settlement, Resubmit)
        )


@dataclass(frozen=True, slots=True)
class Owned:
    """The answer to `Start`: the run is ours.

    * `starts`: how often it was started since its last outcome, this start included.
    * `saved`: the encoded checkpoint of an earlier start, if the store keeps checkpoints.
    * `failures`, `snoozes`: how often it ended with an outcome after which the message came again.
    """

    starts: int
    saved: bytes | None = None
    failures: int = 0
    snoozes: int = 0


@dataclass(frozen=True, slots=True)
class Recorded:
    """The answer to `Start`: the run has ended. Repeat its settlement, do not run it again."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class OwnedElsewhere:
    """The answer to `Start`: another copy of the message owns the run; this copy is superfluous."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """The answer to `Start`: a newer delivery of the message owns the run; do not act on this one.

    The lease of this one has ended, or is just ending: its worker was frozen.
    """


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The answer to `Start`: the run is ours, but the task was cancelled before it started."""

    starts: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The answer to `Start`: the row is damaged. Do not run it, it may have ended.

    `reason` says what is wrong, on one line.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """The answer to `Start`: the id belongs to another owner (rule 7). Do not run it.

    `broker` names the other owner.
    """

    broker: str


@dataclass(frozen=True, slots=True)
class OtherTask:
    """The answer to `Start`: the row is that of another task, or of a run in another queue.

    Do not run it, and do not complete its message either: a program that knows an id, and may send
    to any queue, could end the task of that id.
    """

    task: str
    queue: str


def other_task(
    start: Start, task: str, queue: str, answer: StartAnswer | None = None
) -> OtherTask | None:
    """Whether a row is that of another task; None if it is the start's own.

    A message may be forwarded to another queue, so the queue counts only where the message would be
    completed without a run.

    * `task`, `queue`: those of the row; "" if they are not known. A worker of an older release
      that owned the run of a continuation has noted its name on the wire.
    * `answer`: what the row alone would answer, if that is known yet.
    """
    moved = bool(queue) and queue != start.queue and isinstance(answer, Recorded | OwnedElsewhere)
    other = bool(task) and start.task not in (task, plain_name(task))
    return OtherTask(task, queue) if moved or other else None


StartAnswer: TypeAlias = (
    Owned | Recorded | OwnedElsewhere | Outdated | Cancelled | Unreadable | Foreign | OtherTask
)


@dataclass(frozen=True, slots=True)
class Finish:
    """An outcome that the run's owner wants to record."""

    key: RunKey
    owner: str
    outcome: Outcome


class StartRow(Protocol):
    """A run as a store read it: what tells one start of it from another."""

    @property
    def state(self) -> State:
        """Whether it has started, or how it ended."""
        ...

    @property
    def worker(self) -> str:
        """The name of the worker that started it last."""
        ...

    @property
    def started_at(self) -> float | None:
        """When it was started last, UTC epoch seconds."""
        ...


def same_start(read: StartRow | None, found: StartRow | None) -> bool:
    """Whether a run is as it was read: in the same start, or not started; None: missing."""
    if read is None or found is None:
        return read is found
    return (read.state, read.worker, read.started_at) == (
        found.state,
        found.worker,
        found.started_at,
    )


ReadRuns: TypeAlias = Sequence[StartRow | None] | None
"""Runs as they were read, None for one that was missing; None if that does not matter."""


def same_starts(runs: Sequence[object], read: ReadRuns, found: ReadRuns) -> list[bool]:
    """Whether each run is as it was read; True for all if that does not matter."""
    if read is None or found is None:
        return [True] * len(runs)
    return [same_start(*pair) for pair in zip(read, found, strict=True)]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run as the store has it.

    `damage` says what cannot be read, on one line; "" if all can. In the state UNREADABLE the row
    is damaged, and only the key is known. In another state only the value is damaged.

    `earlier`: its starts before the last one, as far as the row keeps them.

    `due` is only for `ResultStore.expect`: UTC epoch seconds from which the message can be
    received; None means now.

    `note` is what the sender stored with the first run of a task, at most `NOTE_BYTES`.

    `broker`: whose run it is (rule 7); "" if that is not known. A store fills it in.

    `unverified`: this program cannot verify its outcome: it has no signing keys, or the run is
    another owner's, and is not signed for that owner with a key that is configured here.
    """

    key: RunKey
    task: str
    queue: str
    state: State
    worker: str = ""
    starts: int = 0
    started_at: float | None = None
    outcome: Outcome | None = None
    damage: str = ""
    due: float | None = None
    earlier: EarlierStarts = NO_STARTS
    note: bytes | None = None
    broker: str = ""
    unverified: bool = False

    @property
    def due_again(self) -> float | None:
        """When the message of its next hop comes, UTC epoch seconds; None if there is none."""
        settlement = None if self.outcome is None else self.outcome.settlement
        return settlement.due if isinstance(settlement, Resubmit) else None

    def parked_at(self, now: float) -> bool:
        """True if the task waits inside its code: it is open, whatever its queue or age says."""
        outcome, due = self.outcome, self.due_again
        return (
            outcome is not None
            and outcome.parked
            and due is not None
            and now < due + OVERDUE_SECONDS
        )

    @property
    def shown_state(self) -> str:
        """The state for people: `WAITING` if the run waits inside its task."""
        waits = self.state is State.SNOOZED and self.outcome is not None and self.outcome.parked
        return WAITING if waits else self.state.value

    def starts_before(self, *, owned: bool) -> EarlierStarts:
        """The earlier starts of the next start: this run's, and its last one.

        * `owned`: False if the last start was given back.
        """
        if self.started_at is None:
            return self.earlier
        outcome, end, error = self.outcome, "" if owned else GIVEN_BACK, ""
        if outcome is not None:
            end, error = outcome.state.value, f"{outcome.error_type}: {outcome.error}".strip(": ")
        return self.earlier.plus(EarlierStart(self.started_at, self.worker, end, error))


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task that a worker is running.

    * `started_at`: UTC epoch seconds.
    * `retries`: failures before this run.
    * `progress`: its last checkpoint, encoded; None if it has none, or a long one.
    """

    task_id: str
    task: str
    queue: str
    started_at: float
    retries: int = 0
    progress: bytes | None = None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's last heartbeat. Times are UTC epoch seconds.

    * `running`: how many tasks it is running.
    * `leased`: deliveries under a lease, waiting ones included.
    * `tasks`: the running tasks, the longest first; a store may cut the end of a long list.
    * `failing`: its parts that fail, the oldest first; older releases report none.
    * `damage`: why the worker's row cannot be read, on one line; then only the name is known.
    * `broker`: whose messages it receives; "" if that is not known. A store fills it in.
    * `release`: what it runs (`aztask.version.release_of`); "" for older releases.
    """

    name: str
    started_at: float
    seen_at: float
    queues: tuple[str, ...]
    running: int
    finished: int
    stopped: bool = False
    leased: int = 0
    tasks: tuple[RunningTask, ...] = ()
    damage: str = ""
    broker: str = ""
    failing: tuple[PartFailure, ...] = ()
    release: str = ""

    def state_at(self, now: float) -> str:
        """``alive``, ``silent`` (no heartbeat for `SILENT_SECONDS`) or ``stopped``."""
        if self.stopped:
            return "stopped"
        return "alive" if now - self.seen_at <= SILENT_SECONDS else "silent"


NO_SUCH_PLACE: Final = "this page does not exist; go back to the first page of the list"
"""The error for a place of a list that is none (`ResultStore.lines`)."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """What a list knows of a run before its row is read. None: not known without the row.

    * `place`: the list goes on behind it, see `ResultStore.lines`.
    * `at`: when it ended, else when it started; UTC epoch seconds.
    * `error`: its type and message (`Outcome.error_text`); "" if it has none.
    * `duration`: None also for a run that has not ended.
    """

    place: str
    state: State
    at: float | None
    task_id: str | None = None
    task: str | None = None
    queue: str | None = None
    worker: str | None = None
    error: str | None = None
    duration: float | None = None


class RunLines(Protocol):
    """A list of runs that is read in bulk, the newest first. One thread may call."""

    @property
    def place(self) -> str:
        """Where the list goes on behind all lines that `more` has given; "" before the first."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the list has no more lines."""
        ...

    @property
    def requests(self) -> int:
        """Those that the list has asked of a service, with those that the next `more` would ask."""
        ...

    def more(self, seconds: float) -> Sequence[RunLine]:
        """The next lines: some hundred or thousand, perhaps none before the end.

        Raises BrokerUnavailable, also if they take longer than `seconds`. Then ask again.
        """
        ...

    def read(self, lines: Sequence[RunLine], seconds: float) -> list[RunRecord | None]:
        """The runs of lines that the last `more` has given, in order, perhaps without their values.

        None for a run that was deleted, or has gone on since. A list that knows how a run ended
        shows that, without its row. Raises as `more`.
        """
        ...


@runtime_checkable
class ResultStore(Protocol):
    """Stores which delivery owns each run, and the outcomes. Any thread may call."""

    @property
    def remote(self) -> bool:
        """True if calls wait for a network."""
        ...

    def start(self, starts: Sequence[Start]) -> list[StartAnswer]:
        """Try to own each run; the answers are in order."""
        ...

    def record(self, finishes: Sequence[Finish]) -> list[bool]:
        """Record each outcome; False if another delivery owns the run, or its row is damaged."""
        ...

    def bury(self, runs: Sequence[RunRecord], read: ReadRuns = None) -> list[bool]:
        """Record the outcome of runs that no worker ended: the broker dead-lettered their messages.

        False if the run had ended already, belongs to another owner, or its row cannot be read.
        read: each of them as it was read, None for one that was missing; then also False for one
        that has gone on since.
        Afterwards, the delivery that owned the run can no longer record anything.
        """
        ...

    def save(self, key: RunKey, owner: str, state: bytes) -> bool:
        """Keep a running task's encoded checkpoint, if the service cannot keep it in the message.

        False as in `record`.
        """
        ...

    def disown(self, runs: Sequence[tuple[RunKey, str]]) -> None:
        """Give back runs that did not happen: (key, owner); their start is not counted, either."""
        ...

    def expect(self, runs: Iterable[RunRecord]) -> None:
        """Store runs that are sent but not started, unless they are known already.

        A known run without a `note` gets that of the record: a fast worker may have started it.
        """
        ...

    def get(self, task_id: str) -> RunRecord | None:
        """The task's latest run; None if the task is unknown.

        Raises ForeignId if only other owners use this id, as `history`, `cancel` and `forget` do.
        """
        ...

    def get_many(self, task_ids: Sequence[str]) -> list[RunRecord | ForeignId | None]:
        """What `get` returns or raises for each of these tasks, in order.

        A store on a network may list whole ranges of ids, so ids that are sorted, and lie close to
        each other among all that it has, cost the least.
        """
        ...

    def history(self, task_id: str) -> list[RunRecord]:
        """All runs of a task, oldest first."""
        ...

    def recent(
        self, *, state: State | None = None, limit: int = 100, everyone: bool = False
    ) -> list[RunRecord]:
        """The newest runs, newest first, with damaged ones. UNREADABLE lists the quarantine.

        * `everyone`: with those of other owners; see `RunRecord.broker`.
        """
        ...

    def lines(
        self,
        *,
        state: State | None = None,
        after: str = "",
        everyone: bool = False,
        many: bool = False,
    ) -> RunLines:
        """A list of runs for a search, in bulk: what is known of each without reading its row.

        * `after`: `RunLine.place`; the list begins behind it.
        * `everyone`: as `recent`.
        * `many`: thousands of lines are wanted, and not only the first ones.

        Raises ConfigurationError for a place that is none, and CapabilityError as `recent` does.
        """
        ...

    def cancel(self, task_id: str, at: float, *, running: bool = False) -> bool:
        """Mark a task as cancelled; False if it has ended already.

        A task whose row cannot be read is marked, too: it may be running.

        * `running`: stop a run that has started; see `to_stop`.
        """
        ...

    def uncancel(self, task_id: str) -> None:
        """Take back a task's mark of `cancel`, if it has one: a later run of it may start."""
        ...

    def to_stop(self, task_ids: Sequence[str]) -> list[str]:
        """Those of these tasks whose runs should be stopped. Workers ask every few seconds."""
        ...

    def forget(self, task_id: str) -> bool:
        """Delete everything about a task; False if there was nothing."""
        ...

    def wait_changed(self, version: int, timeout: float) -> int:
        """Wait until something may have changed since `version`, at most `timeout` seconds.

        Returns the `version` for the next call (start with 0).
        """
        ...

    def heartbeat(self, worker: WorkerRecord) -> None:
        """Store a worker's heartbeat, replacing the one before."""
        ...

    def workers(self, *, everyone: bool = False) -> list[WorkerRecord]:
        """The known workers, newest heartbeat first, damaged rows last.

        * `everyone`: with those of other owners; see `WorkerRecord.broker`.
        """
        ...

    def purge(self, before: float) -> int:
        """Delete runs that ended, or were put into quarantine, before `before`; returns how many.

        Rows whose message is gone never end, so they are deleted too: runs that were sent but not
        started, once their message was due before `before`; and started ones `UNFINISHED_SECONDS`
        later. A message that comes after all is a new run.

        Rows of other owners stay. Rows without one, which no worker has adopted, are deleted
        `UNFINISHED_SECONDS` later than own ones: the retention of their owner is not known.

        * `before`: UTC epoch seconds.
        """
        ...

    def close(self) -> None:
        """Close the store's connections and files."""
        ...


@runtime_checkable
class Provisioned(Protocol):
    """A result store in a service, created once by someone with more permissions than its users."""

    def create(self) -> dict[str, bool]:
        """Create the missing parts; returns all parts, as a reader should see them.

        True for those that were missing.
        """
        ...

    def check(self) -> None:
        """Raise the error that a worker would get: missing, not permitted or unreachable."""
        ...


@runtime_checkable
class Scannable(Protocol):
    """A result store that shows its rows, of every kind, for `aztask.stores.payloads.holders`."""

    def scan(self) -> Iterator[bytes]:
        """The bytes of each row that may refer to arguments, checkpoints or results.

        Whatever a row is for, all its values are there, undecoded; a row may come in several
        parts, and other bytes may come, too. Reads the whole store. Raises BrokerUnavailable.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoreSize:
    """How much a result store holds.

    * `rows`: all rows of runs; `unfinished`: those of them that have not ended, None if unknown.
    * `file_bytes`: the size of its file, None if there is none.
    * `blobs`, `blob_bytes`: values in blobs of their own, None if there are none.
    * `complete`: False if the count was stopped because it took long: there are more.
    """

    rows: int
    unfinished: int | None = None
    file_bytes: int | None = None
    blobs: int | None = None
    blob_bytes: int | None = None
    complete: bool = True


@runtime_checkable
class Measurable(Protocol):
    """A result store that can say how much it holds."""

    def size(self) -> StoreSize:
        """Count what the store holds, for a few seconds at most."""
        ...
