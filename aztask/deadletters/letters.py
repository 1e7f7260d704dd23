"""One dead letter as far as it can be read, groups of them, and which of them are meant."""

from __future__ import annotations

from dataclasses import dataclass

from aztask.brokers.base import Position
from aztask.deadletters.positions import Positions
from aztask.deadletters.signature import error_signature
from aztask.errors import ConfigurationError
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage


@dataclass(frozen=True, slots=True)
class DeadLetterView:
    """One dead letter as far as it can be read.

    at: when it was enqueued, UTC epoch seconds. message: None where the envelope is not a task
    message; `problem` then says why.
    """

    queue: str
    position: Position
    envelope: Envelope
    reason: str
    description: str
    at: float
    delivery_count: int
    message: TaskMessage | None
    problem: str = ""

    @property
    def id(self) -> str:
        """The task id; else the message id; else ``@POSITION``."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that a selection may call it."""
        names = (self.message.id if self.message else "", self.envelope.message_id)
        return (*(name for name in names if name), f"@{self.position}")

    @property
    def task(self) -> str | None:
        """The task's name, None where it cannot be read."""
        return self.message.task if self.message else None

    @property
    def signature(self) -> str:
        """What its error has in common with others; see `aztask.deadletters.signature`."""
        return error_signature(self.description or self.problem)

    @property
    def resubmit_count(self) -> int | None:
        """How often it failed before, None where that cannot be read."""
        return self.message.resubmit_count if self.message else None


@dataclass(frozen=True, slots=True)
class Group:
    """Dead letters of one task, one reason and one error signature."""

    task: str | None
    reason: str
    signature: str
    count: int
    first_at: float
    last_at: float


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters: those that meet every condition given.

    ids: task ids; message ids and ``@POSITION`` name those that have no task id. task: the task's
    name. reason: the dead-letter reason. signature: what `DeadLetterView.signature` says.
    positions: where they lie, for a choice that was made elsewhere. everything: needed where no
    condition is given, so that an empty selection cannot mean all. Raises ConfigurationError.
    """

    ids: frozenset[str] = frozenset()
    task: str | None = None
    reason: str | None = None
    everything: bool = False
    signature: str | None = None
    positions: Positions | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", frozenset(self.ids))
        texts = (self.task, self.reason, self.signature, self.positions)
        narrowed = bool(self.ids) or any(text is not None for text in texts)
        if self.everything == narrowed:
            raise ConfigurationError(
                "select dead letters by id, task, reason or signature, or else all of them"
                if not narrowed
                else "everything and a condition exclude each other; leave one out"
            )

    def matches(self, letter: DeadLetterView) -> bool:
        """Whether `letter` meets every condition."""
        return (
            (not self.ids or not self.ids.isdisjoint(letter.names))
            and (self.task is None or letter.task == self.task)
            and (self.reason is None or letter.reason == self.reason)
            and (self.signature is None or letter.signature == self.signature)
            and (self.positions is None or letter.position in self.positions)
        )

    def only_positions(self) -> Positions | None:
        """The positions, where nothing else is asked for: then nobody need look for them."""
        texts = (self.task, self.reason, self.signature)
        alone = not self.ids and all(text is None for text in texts)
        return self.positions if alone else None
