"""Values for dead letters: one of them, groups of them, and a selection."""

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
    """One dead letter, as far as it can be read.

    * `at`: when it was enqueued, UTC epoch seconds.
    * `message`: None if the envelope is not a task message; `problem` then says why.
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
        """The task id; without one the message id; without either ``@POSITION``."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All ids by which a selection may name it."""
        names = (self.message.id if self.message else "", self.envelope.message_id)
        return (*(name for name in names if name), f"@{self.position}")

    @property
    def task(self) -> str | None:
        """The task's name; None if it cannot be read."""
        return self.message.task if self.message else None

    @property
    def signature(self) -> str:
        """The error without its variable parts; see `aztask.deadletters.signature`."""
        return error_signature(self.description or self.problem)

    @property
    def resubmit_count(self) -> int | None:
        """How often it failed before; None if that cannot be read."""
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
    """A selection of dead letters: those that meet every given condition.

    * `ids`: task ids; message ids and ``@POSITION`` for those without a task id.
    * `task`: the task's name.
    * `reason`: the dead-letter reason.
    * `signature`: as in `DeadLetterView.signature`.
    * `positions`: the positions, if the selection was made elsewhere.
    * `everything`: must be True if no condition is given, so that an empty selection never means
      all.

    Raises ConfigurationError.
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
                else "everything and a condition exclude each other; remove one of them"
            )

    def matches(self, letter: DeadLetterView) -> bool:
        """True if `letter` meets every condition."""
        return (
            (not self.ids or not self.ids.isdisjoint(letter.names))
            and (self.task is None or letter.task == self.task)
            and (self.reason is None or letter.reason == self.reason)
            and (self.signature is None or letter.signature == self.signature)
            and (self.positions is None or letter.position in self.positions)
        )

    def only_positions(self) -> Positions | None:
        """The positions, if they are the only condition, so that no search is needed; else None."""
        texts = (self.task, self.reason, self.signature)
        alone = not self.ids and all(text is None for text in texts)
        return self.positions if alone else None
