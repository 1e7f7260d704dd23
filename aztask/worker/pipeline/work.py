"""One delivery in the worker: its stages, and what is known at each of them.

::

    RECEIVED --claim--> READY --send--> RUNNING --decide--> DECIDED --end--> ENDED
        |                 ^---take back----'                  ^  |
        '-----------------decide------------------------------'  '-hold-> HELD --due--> DECIDED

Rules
1. Every change of stage is a row of `TRANSITIONS`; a missing row is a bug of ours and raises.
   Any stage may end, and ending twice changes nothing: several threads may notice a lost lease.
2. The result of a stage is one frozen part: `Opened`, `Claimed`, `Decided`. A part is None until
   its stage is done, so no field is valid only at some times.
3. `Run` is the only part that changes: it describes the running task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from aztask.celery.embedded.launch import Embedded
from aztask.hooks import KilledRun, Listeners, Receiving, Settling
from aztask.limits.slots import Slot
from aztask.message.message import MESSAGE_FIELDS, TaskMessage
from aztask.queues.base import Receiver
from aztask.queues.delivery import Delivery
from aztask.queues.lease.state import Lease
from aztask.settlement import Abandon, Complete, Decision, Lapse, Release, Resubmit
from aztask.steps.waits import Wait
from aztask.stores.records.base import Outcome, RunKey, owner_of
from aztask.support.clock import Clock
from aztask.task import Task
from aztask.workflows.inputs import Input
from aztask.workflows.place import NodePlace

NAMED = 3  # deliveries that one log line names

_fields_of = attrgetter(*MESSAGE_FIELDS)


class HeldSession(Protocol):
    """Holds the session of an item; see `aztask.worker.intake.sessions`."""

    def held(self) -> None:
        """The delivery waits for its retry, under its lease."""

    def ended(self, item: WorkItem) -> None:
        """The delivery has ended, with whatever outcome."""


class Stage(Enum):
    """The stages of a delivery.

    DECIDED: its settlement is known, and its outcome if it ran; both may still have to be recorded
    and carried out. HELD: it waits for its retry under its lease, without a slot.
    """

    RECEIVED = "received"
    READY = "ready"
    RUNNING = "running"
    DECIDED = "decided"
    HELD = "held"
    ENDED = "ended"


class Step(Enum):
    """The events that change a delivery's stage."""

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
    """The message as read. task: None if this app has no task of its name."""

    message: TaskMessage
    task: Task[..., Any] | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """The run is ours. starts: how often it was started since its last outcome, this one too."""

    starts: int


@dataclass(frozen=True, slots=True)
class Decided:
    """How the delivery ends.

    * settlement: what to carry out.
    * outcome: what to record before, or what was found recorded; None if the task did not run.
    * clone: what a resubmission sends, if it does not follow from the outcome.
    * recorded: the store has the outcome. repeated: it had it before this delivery, or has another
      one of this run, so this one is not reported.
    * refused: it is a dead letter because the first decision could not be recorded or carried out.
    * put_off: why the run may not start yet; "" for every other settlement.
    """

    settlement: Decision
    outcome: Outcome | None = None
    clone: TaskMessage | None = None
    recorded: bool = False
    repeated: bool = False
    refused: bool = False
    put_off: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a running task was interrupted.

    * kill_at: on the clock of the deadlines.
    * failed: the run has failed; otherwise its lease is lost, or it was cancelled.
    * given_back: its message is given back and the run does not count, because the worker stops.
    """

    reason: str
    kill_at: float
    failed: bool = False
    given_back: bool = False


@dataclass(slots=True)
class Run:
    """A running task as the worker sees it. Times are on the clock of the deadlines.

    * started_at: None until the pool process has noted the start.
    * duration: seconds, once it has ended.
    * start_reported: the event of its start is written.
    * soft_limit_signalled: the task was interrupted at its soft limit.
    * cancelled: it was cancelled while it ran.
    """

    started_at: float | None = None
    duration: float = 0.0
    start_reported: bool = False
    soft_limit_signalled: bool = False
    cancelled: bool = False
    stop: Stop | None = None


@dataclass(frozen=True, slots=True)
class PutOff:
    """A run may not start yet. delay: seconds until it is looked at again. reason: for events.

    slots: those for which it waits, as `aztask.limits.slots` writes them. unknown_since: when a
    worker first met the task's name, if it is unknown here.
    """

    delay: float
    reason: str
    slots: str = ""
    unknown_since: float | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """When a delivery may start, as its slots allow it: from `opens` until `closes`.

    Both are on the clock of the deadlines.
    """

    opens: float
    closes: float

    @property
    def timed(self) -> bool:
        """Whether it matters when the delivery starts."""
        return self.closes != math.inf


ALWAYS: Final = Window(-math.inf, math.inf)
"""No limit applies."""


@dataclass(frozen=True, slots=True)
class AwaitsPermit:
    """It waits for a permit of `entry`. ticket: since when, in the store's UTC epoch seconds."""

    entry: str
    ticket: float
    reason: str


@dataclass(frozen=True, slots=True)
class Weighed:
    """A slot of a limit with a cost. claimed: for this delivery; the message does not carry it."""

    slot: Slot
    claimed: bool


class Waits(NamedTuple):
    """What the run that has ended waits for. since: UTC epoch seconds."""

    since: float
    waits: tuple[Wait, ...]


@dataclass(slots=True, eq=False)
class WorkItem:
    """A delivery under its lease, with the results of its stages so far.

    * number: unique in this worker.
    * owner: the name under which it owns its start row; `number_owner` completes it.
    * received_at, held_until: on the clock of the deadlines.
    * settled: nothing is left to settle.
    * tries: failed tries of the current stage in a row.
    * pointer: the pointer on whose behalf a deferred message is held.
    * session: the slot that holds its session.
    * place: its place in a workflow, if it belongs to one. input: the value that it takes there.
    * embedded: what a Celery message embeds, to be sent when it ends.
    * dropped: its workflow was cancelled. refusal: (reason, text) why it cannot run.
    * unique: the key that it holds as a member of a workflow. instead: the outcome that it gets
      instead of a run, see `WorkflowKeys`.
    * waits: it may not start yet; set until that is decided, see `putoffs`.
    * window: when it may start; None if it has no limits, or has not passed the gate.
    * permits: the entries of the permits that it holds; permits_until: their deadline.
    * weighed: its slots of limits with a cost, by the limits' names; spent: what its run says it
      has used of them.
    * parked: it waits in hand for a permit; parked_at: since when, on the clock of the deadlines.
    * waits_for: of a run that has just parked. timer: its number, if it is sent already.
    """

    number: int
    delivery: Delivery
    receiver: Receiver
    lease: Lease
    queue: str
    received_at: float
    owner: str
    session: HeldSession | None = None
    numbered: bool = False
    stage: Stage = Stage.RECEIVED
    opened: Opened | None = None
    claimed: Claimed | None = None
    run: Run | None = None
    decided: Decided | None = None
    settled: bool = False
    held_until: float = 0.0
    pointer: Pointer | None = None
    tries: int = 0
    place: NodePlace | None = None
    input: Input | None = None
    embedded: Embedded | None = None
    dropped: bool = False
    refusal: tuple[str, str] | None = None
    unique: str = ""
    instead: Outcome | None = None
    waits: PutOff | None = None
    window: Window | None = None
    permits: tuple[str, ...] = ()
    permits_until: float = math.inf
    weighed: Mapping[str, Weighed] = field(default_factory=dict)
    spent: dict[str, int] = field(default_factory=dict)
    parked: AwaitsPermit | None = None
    parked_at: float | None = None
    waits_for: Waits | None = None
    timer: int = 0
    notes: list[tuple[str, str]] = field(default_factory=list)

    def change(self, step: Step) -> None:
        """Move to the stage that the table names. RuntimeError if there is none: a bug of ours."""
        after = TRANSITIONS.get((self.stage, step))
        if after is None:
            raise RuntimeError(f"a delivery that is {self.stage.value} cannot {step.value}")
        self.stage = after

    # -- steps -------------------------------------------------------------------------------

    def open(self, message: TaskMessage, task: Task[..., Any] | None) -> None:
        """Note the message as read, and the task that it calls. Raises DecodeError."""
        self.opened = Opened(message, task)
        if message.node is not None and message.workflow is not None:
            self.place = NodePlace.read(message.node)

    def number_owner(self) -> None:
        """Make the delivery's count part of the owner, once: before the start row is claimed."""
        if not self.numbered:
            self.owner, self.numbered = owner_of(self.owner, self.delivery.delivery_count), True

    def claim(self, starts: int) -> None:
        """Note that the run is ours; whether it is ready to run is decided later."""
        self.claimed = Claimed(starts)

    def sent(self) -> None:
        """Note that it is in a pool process's socket: it runs as soon as that is read."""
        self.change(Step.SEND)
        self.run = Run()

    def taken_back(self) -> None:
        """Note that the pool process has not read it, and will not."""
        self.change(Step.TAKE_BACK)
        self.run = None

    def decide(self, settlement: Decision, outcome: Outcome | None = None, **more: Any) -> None:
        """Note how it ends. more: further fields of `Decided`."""
        self.change(Step.DECIDE)
        self.decided = Decided(settlement, outcome, **more)

    def recorded(self) -> None:
        """Note that the store has the outcome."""
        if self.decided is not None:
            self.decided = replace(self.decided, recorded=True)

    @property
    def at_most_once(self) -> bool:
        """Whether its message is completed before its task starts."""
        return self.task is not None and self.task.delivery == "at-most-once"

    def superseded(self) -> None:
        """Note that the store has another outcome, or will have: this one is not reported."""
        if self.decided is not None:
            self.decided = replace(self.decided, repeated=True)

    def hurry(self) -> None:
        """Let its clone be due at once: what it waits for is there already."""
        decided = self.decided
        if decided is not None and isinstance(decided.settlement, Resubmit):
            now = replace(decided.settlement, delay=0.0, due=0.0)
            self.decided = replace(decided, settlement=now)

    def hold(self, until: float) -> None:
        """Let it wait for its retry until `until`, without a slot; its outcome is durable."""
        self.change(Step.HOLD)
        self.held_until = until

    def rest(self) -> None:
        """Note that its outcome is reported. When it is due, it is redelivered.

        A delivery that was put off did not run, so it is released, which does not count.
        """
        put_off = self.decided is not None and self.decided.put_off
        self.decided = Decided(Release() if put_off else Abandon())

    def due(self) -> None:
        """Note that its time to wait has passed."""
        self.change(Step.DUE)

    def end(self) -> None:
        """Note that it has ended, with whatever outcome."""
        self.change(Step.END)

    def note(self, kind: str, text: str) -> None:
        """Keep something for the events; any thread may call.

        Only the first note of each kind counts: a lease is lost once, although several stages may
        notice it.
        """
        if all(kind != known for known, _ in self.notes):
            self.notes.append((kind, text))

    def rewrite(self, **changes: Any) -> None:
        """Change fields of the message for the rest of this delivery."""
        opened = self.opened
        if opened is not None:
            self.opened = replace(opened, message=replace(opened.message, **changes))

    # -- what is known -----------------------------------------------------------------------

    @property
    def task(self) -> Task[..., Any] | None:
        """The task that it calls; None if it is not read yet or this app has no such task."""
        return self.opened.task if self.opened is not None else None

    @property
    def settlement(self) -> Decision:
        """The settlement to carry out.

        Before the decision it is Complete, since at-most-once messages are completed before they
        run.
        """
        return self.decided.settlement if self.decided is not None else Complete()

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None before that is decided, and if it did not run."""
        return self.decided.outcome if self.decided is not None else None

    @property
    def duration(self) -> float:
        """Seconds that the task ran; 0.0 if it did not."""
        return self.run.duration if self.run is not None else 0.0

    @property
    def stop(self) -> Stop | None:
        """Why its task was interrupted, if it was."""
        return self.run.stop if self.run is not None else None

    @property
    def leases(self) -> list[Lease]:
        """The leases that are held for it and not settled."""
        if self.pointer is None:
            return [] if self.settled else [self.lease]
        return [self.lease, self.pointer.lease]

    @property
    def in_order(self) -> bool:
        """Whether it must keep its place in a session."""
        return self.session is not None and (self.opened is None or self.opened.message.ordered)

    @property
    def waits_in_queue(self) -> bool:
        """Whether its run did not start: it was put off, or released."""
        decided = self.decided
        return decided is not None and (
            bool(decided.put_off) or isinstance(decided.settlement, Release)
        )

    @property
    def left_to_lapse(self) -> bool:
        """Whether its settlement is to let the lease expire."""
        return self.decided is not None and isinstance(self.decided.settlement, Lapse)

    @property
    def label(self) -> str:
        """Its name in log lines: task and id, or its position if it cannot be read."""
        if self.opened is None:
            return f"message {self.delivery.position} on queue {self.queue}"
        message = self.opened.message
        return f"task {message.task} {message.id}"

    @property
    def key(self) -> RunKey:
        """The key under which its outcome is recorded."""
        return RunKey(*message_of(self).key)

    def message_fields(self) -> tuple[Any, ...]:
        """The message as plain values, in the order of its fields."""
        return _fields_of(message_of(self))


@dataclass(frozen=True, slots=True)
class Pointer:
    """A received pointer: the message that calls for a deferred one."""

    delivery: Delivery
    lease: Lease


def names(items: Sequence[WorkItem]) -> str:
    """The first `NAMED` deliveries for a log line, and the number of the others."""
    if not items:
        return "no task"
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(item.label for item in items[:NAMED]) + more


def message_of(item: WorkItem) -> TaskMessage:
    """The message of a delivery that could be read. RuntimeError otherwise: a bug of ours."""
    if item.opened is None:
        raise RuntimeError("a delivery that could not be read has no message")
    return item.opened.message


# -- What hooks for telemetry are told -------------------------------------------------------------
#
# Each function is called only if a hook is there. A hook may change one thing: the trace context of
# messages that came without one. Nothing that a hook raises reaches the worker.


def report_received(
    listeners: Listeners[Receiving],
    queue: str,
    items: Sequence[WorkItem],
    asked_at: float,
    received_at: float,
) -> None:
    """Report one batch. asked_at, received_at: UTC epoch seconds."""
    readable = [item for item in items if item.opened is not None]
    receiving = Receiving(
        queue,
        [message_of(item) for item in readable],
        [item.delivery for item in readable],
        len(items),
        asked_at,
        received_at,
    )
    listeners.notify(receiving)
    for index, traceparent in receiving.traceparents.items():
        readable[index].rewrite(traceparent=traceparent)


def settling_of(items: Sequence[WorkItem]) -> Settling:
    """The settlements of one receiver's items, as the hook takes them."""
    return Settling(
        items[0].queue,
        [item.opened.message if item.opened is not None else None for item in items],
        [item.delivery for item in items],
        [item.settlement for item in items],
    )


def report_killed(
    listeners: Listeners[KilledRun], item: WorkItem, error_type: str, error: str, clock: Clock
) -> None:
    """Report a run whose process ended before it could answer.

    A process that ends within a moment leaves no start time; then the run has no duration.
    """
    now = clock.wall()
    listeners.notify(
        KilledRun(message_of(item), item.delivery, now - item.duration, now, error_type, error)
    )
