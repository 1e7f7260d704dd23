"""Facts about a queue, as its service reports them; `aztask doctor` and workers check them.

Rules
1. An inspection changes no message and settles none.
2. A setting that could not be read is None, and `QueueFacts.unread` says why. Nothing is guessed.
3. A missing permission is an answer, not an error.
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

    exists: None if unknown.
    unread: why settings could not be read; "" if they could.
    lease_seconds: set if the queue decides how long a lease lasts.
    duplicate_window: seconds; 0 if duplicate detection is off.
    dead_letters: whether dead letters can be stored.
    active: whether the queue accepts and delivers messages.
    made_on_use: the queue is created when it is first used, so a missing one is no problem.
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
    """A permission, named by one word such as ``receive``. error: None if it is granted.

    known: False if the permission could not be checked without using it.
    """

    name: str
    error: AztaskError | None = None
    known: bool = True


class Inspector(Protocol):
    """Inspects one broker's queues. Any thread may call."""

    def facts(self, queue: str) -> QueueFacts:
        """The queue's settings, in at most two requests.

        Raises BrokerUnavailable, InvalidQueueName.
        """
        ...

    def rights(self, queue: str) -> Sequence[Right]:
        """Which permissions we have on the queue, checked without changing anything."""
        ...

    def clock_offset(self, queue: str) -> float | None:
        """Seconds that the service's clock is ahead of ours; None if unknown."""
        ...

    def surroundings(self) -> Sequence[Finding]:
        """Findings that concern all queues: the tier, the file, the SDK."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A broker whose queues can be inspected."""

    def inspector(self) -> Inspector:
        """The inspector of this broker's queues."""
        ...
