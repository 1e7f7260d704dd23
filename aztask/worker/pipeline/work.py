"""One delivery's life in the worker, as one value that the stages pass on."""

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
from aztask.settlement import Decision, Lapse
from aztask.task import Task
from aztask.worker.pipeline.pointer import Pointer

_fields_of = attrgetter(*MESSAGE_FIELDS)


class SessionSlot(Protocol):
    """What holds a job's session; see `aztask.worker.intake.sessions`."""

    def held(self) -> None:
        """The delivery waits for its retry, under its lease."""

    def over(self, job: Job) -> None:
        """The delivery is done with."""


class Stage(Enum):
    """How far a delivery has come."""

    RECEIVED = "received"
    READY = "ready"
    SENT = "sent"
    FINISHING = "finishing"
    HELD = "held"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Job:
    """A delivery under its lease, and all that was decided about it so far.

    number: unique in this worker. owner: what the start row is owned by. received_at, started_at,
    kill_at, held_until: on the clock of the deadlines. outcome: to be recorded, or found recorded.
    settlement: to be carried out. clone: what a resubmission sends. recorded: the store has the
    outcome; repeated: it had it before this delivery. settled: nothing is left to settle.
    held_until: when a held one is abandoned. pointer: on whose behalf a deferred one is held.
    cancelled: it was, while it ran. failures: tries in a row of the present stage that failed.
    refused: it is dead-lettered because its outcome cannot be recorded or settled. session: what
    holds the session that it came from.
    """

    number: int
    delivery: Delivery
    receiver: Receiver
    lease: Lease
    queue: str
    received_at: float
    owner: str
    stage: Stage = Stage.RECEIVED
    message: TaskMessage | None = None
    task: Task[..., Any] | None = None
    owned: bool = False
    starts: int = 0
    started_at: float | None = None
    start_told: bool = False
    duration: float = 0.0
    stop_reason: str = ""
    cancelled: bool = False
    soft_told: bool = False
    kill_at: float | None = None
    saved: bytes | None = None
    outcome: Outcome | None = None
    recorded: bool = False
    repeated: bool = False
    settlement: Decision | None = None
    clone: TaskMessage | None = None
    settled: bool = False
    held_until: float | None = None
    pointer: Pointer | None = None
    failures: int = 0
    refused: bool = False
    session: SessionSlot | None = None
    notes: list[tuple[str, str]] = field(default_factory=list)

    def note(self, kind: str, text: str) -> None:
        """Remember something for the events: the stage that saw it may run on any thread.

        Of each kind the first: a lease is lost once, although several stages may notice.
        """
        if all(kind != known for known, _ in self.notes):
            self.notes.append((kind, text))

    def own(self, starts: int, saved: bytes | None) -> None:
        """The run is ours, started for the `starts`-th time.

        saved: the checkpoint that the result store kept; None: the message's own counts.
        """
        self.owned, self.starts = True, starts
        if saved is not None and self.message is not None:
            self.saved = saved
            self.message = replace(self.message, saved=saved)

    def message_fields(self) -> tuple[Any, ...]:
        """The message as plain values, in the order of its fields."""
        return _fields_of(self.message)

    @property
    def leases(self) -> list[Lease]:
        """What is held for it and not settled."""
        if self.pointer is None:
            return [] if self.settled else [self.lease]
        return [self.lease, self.pointer.lease]

    @property
    def in_order(self) -> bool:
        """Whether it must keep its place in a session."""
        return self.session is not None and (self.message is None or self.message.ordered)

    @property
    def left_to_lapse(self) -> bool:
        """Whether it was decided to let its lease end by itself."""
        return isinstance(self.settlement, Lapse)

    @property
    def key(self) -> RunKey:
        """What its outcome is recorded under."""
        if self.message is None:
            raise RuntimeError("a delivery that could not be read has no key")
        return RunKey(*self.message.key)


def message_of(job: Job) -> TaskMessage:
    """The message of a delivery that could be read."""
    if job.message is None:
        raise RuntimeError("a delivery that could not be read does not get this far")
    return job.message
