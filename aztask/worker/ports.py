"""What a worker stands on: its clock, its threads, its processes and its waits.

`aztask.worker.shell` has the real ones. The stepped ones of the tests have no thread, no process
and no sleep: they run the whole worker in one thread, on a clock that a test moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from aztask.app import App
from aztask.queues.base import Broker
from aztask.queues.delivery import Delivery
from aztask.queues.lease.keeper import LeaseKeeper, LeaseReports
from aztask.support.clock import Clock
from aztask.worker.lane import Lane, Work
from aztask.worker.mailbox import Mailbox
from aztask.worker.pool.link import Starter
from aztask.worker.stages import Source
from aztask.worker.upkeep.scheduling import Scheduling

# -- Intakes, and the worker as they see it --------------------------------------------------------
#
# Two implementations of each intake: the threads of `aztask.worker.intake`, and the stepped ones of
# the tests, which receive when they are told to.


@dataclass(frozen=True, slots=True)
class QueueSource:
    """How an intake receives from one queue.

    wait: the longest time that one receive takes when the queue is empty, in seconds.
    poll_ceiling: as `Broker.receiver` takes it.
    """

    queue: str
    wait: float
    poll_ceiling: float | None = None


class IntakeReports(Protocol):
    """What an intake asks and tells: `Intakes`. Called on the threads of the intake."""

    def lease(self, queue: str, /) -> float:
        """The lease to ask for now, in seconds; asked before each receive."""

    def take(self, source: Source, deliveries: Sequence[Delivery], asked_at: float, /) -> None:
        """Take new deliveries. asked_at: when the receive began, in UTC epoch seconds."""

    def refused(self, error: Exception, /) -> None:
        """End the worker with this error, which each receive would repeat."""

    def fell_quiet(self) -> None:
        """A queue that had messages is empty now, or cannot be received from."""


class AnyIntake(Protocol):
    """What both kinds of intake have in common."""

    queue: str

    @property
    def idle(self) -> bool:
        """Whether nothing was found, and nothing is held or received at this moment."""

    def start(self) -> None:
        """Start to receive as soon as there is room."""

    def allow(self, room: int, /) -> None:
        """Set how many more deliveries there is room for."""

    def stop(self) -> None:
        """Stop receiving; returns at once."""

    def join(self, timeout: float, /) -> object:
        """Wait `timeout` seconds for the threads."""

    def close(self) -> None:
        """Close the receivers, once `join` has returned."""


class PlainIntake(AnyIntake, Protocol):
    """Receives from a queue without sessions. live: whether the last receive found something."""

    live: bool

    def grant(self, change: int, /) -> None:
        """Change by `change` how many more deliveries there is room for."""


class SessionsIntake(AnyIntake, Protocol):
    """Receives from the sessions of a queue. A room below 0 gives sessions up."""

    @property
    def working(self) -> int:
        """How many sessions are served now."""

    def set_most(self, most: int, /) -> None:
        """Serve up to this many sessions at the same time from now on."""


# -- The shell -------------------------------------------------------------------------------------

Item = TypeVar("Item")


class Shell(Protocol):
    """Makes the parts of a worker that have threads, processes or waits."""

    clock: Clock

    def mailbox(self) -> Mailbox:
        """How other threads reach the worker's loop, and where that waits."""

    def keeper(self, broker: Broker, renew_at: float, reports: LeaseReports, /) -> LeaseKeeper:
        """What renews the leases. renew_at: the share of a lease after which it is renewed."""

    def lane(
        self, name: str, work: Work[Item], mailbox: Mailbox, /, *, threads: int, essential: str
    ) -> Lane[Item]:
        """What does a stage's work in batches; inline with no threads."""

    def intake(
        self, broker: Broker, source: QueueSource, intakes: IntakeReports, /, *, shares: bool
    ) -> PlainIntake:
        """What receives from a queue. shares: whether it shares the worker's room by weight."""

    def sessions(
        self,
        broker: Broker,
        source: QueueSource,
        intakes: IntakeReports,
        /,
        *,
        most: int,
        share: float,
    ) -> SessionsIntake:
        """What receives from a queue with sessions. most, share: see `SessionIntake`."""

    def starter(self, mailbox: Mailbox, /, *, foreground: bool = False) -> Starter:
        """What starts the pool processes of this worker. foreground: they get the terminal."""

    def scheduling(self, app: App, name: str, /) -> Scheduling:
        """What makes the occurrences of schedules. name: the worker's."""
