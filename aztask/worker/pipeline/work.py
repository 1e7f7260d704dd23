"""One delivery's life in the worker: its stages, and what is known at each of them.

::

    RECEIVED --claim--> READY --send--> RUNNING --decide--> DECIDED --end--> ENDED
        |                 ^---take back----'                  ^  |
        '-----------------decide------------------------------'  '-hold-> HELD --due--> DECIDED

Rules
1. Every change of stage is a row of `TRANSITIONS`; a missing row is our own mistake and raises.
   Any stage may end, and ending twice changes nothing: several threads may notice a lost lease.
2. What a stage finds out is one frozen part: `Opened`, `Claimed`, `Decided`. A part that is None
   has not been found out, so no field is valid only now and then.
3. `Run` is the only part that changes: it is what the worker sees of a running task.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import Any, Protocol

from aztask.brokers.base import Receiver
from aztask.brokers.delivery import Delivery
from aztask.lease.state import Lease
from aztask.message.message import MESSAGE_FIELDS, TaskMessage
from aztask.results.base import Outcome, RunKey
from aztask.settlement import Abandon, Complete, Decision, Lapse
from aztask.task import Task

_fields_of = attrgetter(*MESSAGE_FIELDS)


class SessionSlot(Protocol):
    """What holds an item's session; see `aztask.worker.intake.sessions`."""

    def held(self) -> None:
        """The delivery waits for its retry, under its lease."""

    def over(self, item: WorkItem) -> None:
        """The delivery is done with."""


class Stage(Enum):
    """How far a delivery has come.

    DECIDED: its settlement is known, and its outcome where it ran; both may have to be recorded and
    carried out still. HELD: it waits for its retry beside the slots, under its lease.
    """

    RECEIVED = "received"
    READY = "ready"
    RUNNING = "running"
    DECIDED = "decided"
    HELD = "held"
    ENDED = "ended"


class Step(Enum):
    """What can happen to a delivery."""

    CLAIM = "claim"
    SEND = "send"
    TAKE_BACK = "take back"
    DECIDE = "decide"
    HOLD = "hold"
    DUE = "due"
    END = "end"


_S, _E = Stage, Step

TRANSITIONS: dict[tuple[Stage, Step], Stage] = {
    (_S.RECEIVED, _E.CLAIM): _S.READY,
    (_S.RECEIVED, _E.DECIDE): _S.DECIDED,
    (_S.RECEIVED, _E.END): _S.ENDED,
    (_S.READY, _E.SEND): _S.RUNNING,
    (_S.READY, _E.DECIDE): _S.DECIDED,
    (_S.READY, _E.END): _S.ENDED,
    (_S.RUNNING, _E.TAKE_BACK): _S.READY,
    (_S.RUNNING, _E.DECIDE): _S.DECIDED,
    (_S.RUNNING, _E.END): _S.ENDED,
    # a decision that cannot be carried out is replaced by another one
    (_S.DECIDED, _E.DECIDE): _S.DECIDED,
    (_S.DECIDED, _E.HOLD): _S.HELD,
    (_S.DECIDED, _E.END): _S.ENDED,
    (_S.HELD, _E.DUE): _S.DECIDED,
    (_S.HELD, _E.DECIDE): _S.DECIDED,
    (_S.HELD, _E.END): _S.ENDED,
    (_S.ENDED, _E.END): _S.ENDED,
}


@dataclass(frozen=True, slots=True)
class Opened:
    """What the message says. task: None where this app does not know its name."""

    message: TaskMessage
    task: Task[..., Any] | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """The run is ours. starts: how often it was started since its last outcome, this included."""

    starts: int


@dataclass(frozen=True, slots=True)
class Decided:
    """How the delivery ends.

    settlement: to be carried out. outcome: to be recorded before, or found recorded; None where
    there is none. clone: what a resubmission sends, where it does not follow from the outcome.
    recorded: the store has the outcome; repeated: it had it before this delivery. refused: it is a
    dead letter because the first decision could not be recorded or carried out.
    """

    settlement: Decision
    outcome: Outcome | None = None
    clone: TaskMessage | None = None
    recorded: bool = False
    repeated: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a running task was told to stop. kill_at: on the clock of the deadlines."""

    reason: str
    kill_at: float


@dataclass(slots=True)
class Run:
    """What the worker sees of a running task. Times are on the clock of the deadlines.

    started_at: None until the pool process has noted it. duration: seconds, once it has ended.
    told: the event of its start is written. soft_told: its soft limit was signalled. cancelled: it
    was cancelled while it ran.
    """

    started_at: float | None = None
    duration: float = 0.0
    told: bool = False
    soft_told: bool = False
    cancelled: bool = False
    stop: Stop | None = None


@dataclass(slots=True, eq=False)
class WorkItem:
    """A delivery under its lease, and all that was found out about it so far.

    number: unique in this worker. owner: what the start row is owned by. received_at, held_until:
    on the clock of the deadlines. settled: nothing is left to settle. tries: tries of the present
    stage that failed in a row. pointer: on whose behalf a deferred message is held. session: what
    holds the session that it came from.
    """

    number: int
    delivery: Delivery
    receiver: Receiver
    lease: Lease
    queue: str
    received_at: float
    owner: str
    session: SessionSlot | None = None
    stage: Stage = Stage.RECEIVED
    opened: Opened | None = None
    claimed: Claimed | None = None
    run: Run | None = None
    decided: Decided | None = None
    settled: bool = False
    held_until: float = 0.0
    pointer: Pointer | None = None
    tries: int = 0
    notes: list[tuple[str, str]] = field(default_factory=list)

    def change(self, step: Step) -> None:
        """Move to the stage that the table names. Raises RuntimeError on our mistakes."""
        after = TRANSITIONS.get((self.stage, step))
        if after is None:
            raise RuntimeError(f"a delivery that is {self.stage.value} cannot {step.value}")
        self.stage = after

    # -- steps -------------------------------------------------------------------------------

    def open(self, message: TaskMessage, task: Task[..., Any] | None) -> None:
        """The message was read."""
        self.opened = Opened(message, task)

    def claim(self, starts: int) -> None:
        """The run is ours; whether it is to run is another question."""
        self.claimed = Claimed(starts)

    def sent(self) -> None:
        """It is in a pool process's socket: it runs as soon as that process reads it."""
        self.change(Step.SEND)
        self.run = Run()

    def taken_back(self) -> None:
        """The pool process has not read it, and will not."""
        self.change(Step.TAKE_BACK)
        self.run = None

    def decide(self, settlement: Decision, outcome: Outcome | None = None, **more: Any) -> None:
        """How it ends is known. more: further fields of `Decided`."""
        self.change(Step.DECIDE)
        self.decided = Decided(settlement, outcome, **more)

    def recorded(self) -> None:
        """The store has the outcome."""
        if self.decided is not None:
            self.decided = replace(self.decided, recorded=True)

    def hold(self, until: float) -> None:
        """Its outcome is durable, and it waits for its retry beside the slots."""
        self.change(Step.HOLD)
        self.held_until = until

    def rest(self) -> None:
        """Its outcome has been told. When it is due it is abandoned, and comes again at once."""
        self.decided = Decided(Abandon())

    def due(self) -> None:
        """It has waited long enough."""
        self.change(Step.DUE)

    def end(self) -> None:
        """It is done with, however it ended."""
        self.change(Step.END)

    def note(self, kind: str, text: str) -> None:
        """Remember something for the events: the stage that saw it may run on any thread.

        Of each kind the first: a lease is lost once, although several stages may notice.
        """
        if all(kind != known for known, _ in self.notes):
            self.notes.append((kind, text))

    def rewrite(self, **changes: Any) -> None:
        """Change fields of the message, as this delivery goes on to use it."""
        opened = self.opened
        if opened is not None:
            self.opened = replace(opened, message=replace(opened.message, **changes))

    # -- what is known -----------------------------------------------------------------------

    @property
    def task(self) -> Task[..., Any] | None:
        """The task that it calls, where this app knows it."""
        return self.opened.task if self.opened is not None else None

    @property
    def settlement(self) -> Decision:
        """What is carried out. Before it is decided: what is delivered at most once is completed
        before it runs.
        """
        return self.decided.settlement if self.decided is not None else Complete()

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended, as far as that is decided."""
        return self.decided.outcome if self.decided is not None else None

    @property
    def duration(self) -> float:
        """Seconds that the task ran; 0.0 where it did not."""
        return self.run.duration if self.run is not None else 0.0

    @property
    def stop(self) -> Stop | None:
        """Why its task was told to stop."""
        return self.run.stop if self.run is not None else None

    @property
    def leases(self) -> list[Lease]:
        """What is held for it and not settled."""
        if self.pointer is None:
            return [] if self.settled else [self.lease]
        return [self.lease, self.pointer.lease]

    @property
    def in_order(self) -> bool:
        """Whether it must keep its place in a session."""
        return self.session is not None and (self.opened is None or self.opened.message.ordered)

    @property
    def left_to_lapse(self) -> bool:
        """Whether it was decided to let its lease end by itself."""
        return self.decided is not None and isinstance(self.decided.settlement, Lapse)

    @property
    def key(self) -> RunKey:
        """What its outcome is recorded under."""
        return RunKey(*message_of(self).key)

    def message_fields(self) -> tuple[Any, ...]:
        """The message as plain values, in the order of its fields."""
        return _fields_of(message_of(self))


@dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer that was received: the message that called for a deferred one."""

    delivery: Delivery
    lease: Lease


def message_of(item: WorkItem) -> TaskMessage:
    """The message of a delivery that could be read."""
    if item.opened is None:
        raise RuntimeError("a delivery that could not be read does not get this far")
    return item.opened.message
