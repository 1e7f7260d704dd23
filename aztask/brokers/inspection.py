"""What a queue is like, as its service tells: facts for whoever compares them with what is needed.

Rules
1. Looking changes no message and settles none.
2. What could not be read is None, and `QueueFacts.unread` says why: nothing is guessed.
3. A right that is missing is an answer, not an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from aztask.errors import AztaskError
from aztask.support.finding import Finding


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """One queue's settings; None: the service has no such setting, or it could not be read.

    exists: None where that could not be told. lease_seconds: where the queue decides it.
    duplicate_window: seconds, 0 where detection is off. dead_letters: whether there is a place for
    them. active: whether it takes and gives messages. made_on_use: a missing one is no fault.
    """

    queue: str
    exists: bool | None = None
    unread: str = ""
    lease_seconds: float | None = None
    duplicate_window: float | None = None
    sessions: bool | None = None
    max_deliveries: int | None = None
    dead_letters: bool | None = None
    active: bool | None = None
    made_on_use: bool = False


@dataclass(frozen=True, slots=True)
class Right:
    """What was tried, in a word such as ``receive``. error: None where it is granted.

    known: False where it could not be tried without doing something.
    """

    name: str
    error: AztaskError | None = None
    known: bool = True


class Inspector(Protocol):
    """Looks at one broker's queues. Any thread may call."""

    def facts(self, queue: str) -> QueueFacts:
        """The queue's settings, in at most two requests.

        Raises BrokerUnavailable, InvalidQueueName.
        """
        ...

    def rights(self, queue: str) -> Sequence[Right]:
        """What may be done with the queue, tried without effect."""
        ...

    def clock_offset(self, queue: str) -> float | None:
        """Seconds that the service's clock is ahead of ours; None where it could not be learned."""
        ...

    def surroundings(self) -> Sequence[Finding]:
        """What holds for all queues: the tier, the file, the SDK."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A broker that can be looked at."""

    def inspector(self) -> Inspector:
        """Who looks at it."""
        ...
