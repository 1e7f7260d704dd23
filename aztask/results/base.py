"""The result store protocol: who runs what, and how it ended.

Rules
1. A run is keyed (task id, generation, hop). Its start row is owned by one lease; an outcome is
   recorded only by the owner, once (compare-and-set). Who was frozen past its lease and thaws finds
   another owner and records nothing.
2. What is recorded is the *settlement*: a redelivery of the message repeats exactly that.
3. A start row of the same message (same position) may be taken over: the message came again, so
   the former owner's lease is gone. A start row of another copy of the message may not: that copy
   is still in the broker, and it alone is responsible (`OwnedElsewhere`).
4. An outcome after which the same message comes again (`Outcome.again`) ends a start, not the run:
   the store counts it, shows its state and error, and lets the next delivery start again.
5. A store that cannot be reached raises BrokerUnavailable: the caller keeps the delivery unsettled
   and tries again.
6. A damaged row raises nothing and harms no other row of the same call. A run whose row cannot be
   read is neither started nor recorded (`Unreadable`): it may have ended, and only the row knew.
   `start` and `bury` put such a row into quarantine: it stays as it is, is logged and listed under
   `State.UNREADABLE`, and is purged a retention time later. A replay of the task has another key,
   and so a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

from aztask.brokers.delivery import Position
from aztask.settlement import Decision, Resubmit


class State(StrEnum):
    """What is known of a task, in words that `AsyncResult.state` shows."""

    PENDING = "pending"
    STARTED = "started"
    RETRYING = "retrying"
    SNOOZED = "snoozed"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    UNREADABLE = "unreadable"
    """Its row is damaged. No row says so: a store finds it out (rule 6)."""

    @property
    def final(self) -> bool:
        """Whether nothing more will happen (short of a replay)."""
        return self in _FINAL


_FINAL = frozenset(
    {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED, State.UNREADABLE}
)


@dataclass(frozen=True, slots=True)
class RunKey:
    """One run of one task."""

    task_id: str
    generation: int = 0
    hop: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """A wish to own a run. owner: unique to this delivery's lease. at: UTC epoch seconds."""

    key: RunKey
    task: str
    queue: str
    position: Position
    owner: str
    worker: str
    at: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. value: the encoded result. at: UTC epoch seconds; duration: seconds."""

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
        """Whether the same message comes again (a clone is another message, of the next hop)."""
        return not self.state.final and not isinstance(self.settlement, Resubmit)


@dataclass(frozen=True, slots=True)
class Owned:
    """The run is ours. starts: how often it was started since its last outcome, this included.

    saved: the encoded checkpoint of an earlier start, where the store keeps checkpoints. failures,
    snoozes: how often it ended with an outcome after which the same message came again.
    """

    starts: int
    saved: bytes | None = None
    failures: int = 0
    snoozes: int = 0


@dataclass(frozen=True, slots=True)
class Recorded:
    """The run ended before; repeat its settlement, do not run it again."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class OwnedElsewhere:
    """Another copy of the message owns the run; this copy is superfluous."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The run is ours, but the task was cancelled before it started."""

    starts: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The run's row is damaged: it may have ended, so do not run it. reason: what is wrong, on one
    line.
    """

    reason: str


StartAnswer: TypeAlias = Owned | Recorded | OwnedElsewhere | Cancelled | Unreadable


@dataclass(frozen=True, slots=True)
class Finish:
    """An outcome to be recorded by its owner."""

    key: RunKey
    owner: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run as the store knows it.

    damage: what cannot be read, on one line; "" where all can. With the state UNREADABLE it is the
    row, and the other fields are empty, but for the key. With another state it is the value.
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


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task that a worker runs. started_at: UTC epoch seconds. retries: failures before."""

    task_id: str
    task: str
    queue: str
    started_at: float
    retries: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as it last told of itself. Times are UTC epoch seconds.

    running: how many tasks run. leased: deliveries under a lease, those included that wait. tasks:
    what runs, the longest first; a store may leave out the end of a long list. damage: why the
    worker's row cannot be read, on one line; then only the name is known.
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


@runtime_checkable
class ResultStore(Protocol):
    """Where runs are owned and outcomes recorded. Any thread may call."""

    @property
    def remote(self) -> bool:
        """Whether calls wait for a network."""
        ...

    def start(self, starts: Sequence[Start]) -> list[StartAnswer]:
        """Try to own each run, in order."""
        ...

    def record(self, finishes: Sequence[Finish]) -> list[bool]:
        """Record each outcome; False where the run is owned by somebody else by now, or its row
        does not say by whom.
        """
        ...

    def bury(self, runs: Sequence[RunRecord]) -> list[bool]:
        """Record runs, with their outcomes, that no worker ended: the broker dead-lettered their
        messages. False where the run had ended already, or its row cannot be read. Whoever owned
        it records nothing any more.
        """
        ...

    def save(self, key: RunKey, owner: str, state: bytes) -> bool:
        """Keep a running task's encoded checkpoint, for services that cannot keep it in the
        message; False as in `record`.
        """
        ...

    def disown(self, runs: Sequence[tuple[RunKey, str]]) -> None:
        """Give runs back that did not count: (key, owner); their start is not counted either."""
        ...

    def expect(self, runs: Iterable[RunRecord]) -> None:
        """Note runs that are sent and not started, unless they are known already."""
        ...

    def get(self, task_id: str) -> RunRecord | None:
        """The task's latest run, None when nothing is known of it."""
        ...

    def history(self, task_id: str) -> list[RunRecord]:
        """All runs of a task, oldest first."""
        ...

    def recent(self, *, state: State | None = None, limit: int = 100) -> list[RunRecord]:
        """The newest runs, newest first; damaged ones too. UNREADABLE: those in quarantine."""
        ...

    def cancel(self, task_id: str, at: float, *, running: bool = False) -> bool:
        """Mark a task as cancelled; False when it has ended already. A task whose row cannot be
        read is marked: it may be running.

        running: a run that has started is to be stopped; see `to_stop`.
        """
        ...

    def to_stop(self, task_ids: Sequence[str]) -> list[str]:
        """Those of these tasks whose runs are to be stopped. Workers ask every few seconds."""
        ...

    def forget(self, task_id: str) -> bool:
        """Delete what is known of a task; False when nothing was."""
        ...

    def wait_changed(self, seen: int, timeout: float) -> int:
        """Wait until something may have changed since `seen`, at most `timeout` seconds.

        Returns what to pass as `seen` next time (start with 0).
        """
        ...

    def heartbeat(self, worker: WorkerRecord) -> None:
        """Note that a worker lives."""
        ...

    def workers(self) -> list[WorkerRecord]:
        """The workers that are known, newest sign of life first, damaged rows last."""
        ...

    def purge(self, before: float) -> int:
        """Delete what ended, or was put into quarantine, before that time (UTC epoch seconds); how
        many runs were deleted.
        """
        ...

    def close(self) -> None:
        """Let go of connections and files."""
        ...


@runtime_checkable
class Provisioned(Protocol):
    """A result store in a service, made once by somebody with more rights than its users need."""

    def create(self) -> list[str]:
        """Make what is missing of it; what is there now, as a reader is told."""
        ...

    def check(self) -> None:
        """Raise what a worker or a sender would meet: it is missing, refused or away."""
        ...
