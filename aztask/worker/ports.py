"""What a worker stands on: its clock, its threads, its processes and its waits.

`aztask.worker.shell` has the real ones. The stepped ones of the tests have no thread, no process
and no sleep: they run the whole worker in one thread, on a clock that a test moves.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from aztask.app import App
from aztask.queues.base import Broker
from aztask.queues.lease.keeper import LeaseKeeper, LeaseReports
from aztask.support.clock import Clock
from aztask.worker.intake.ports import IntakeReports, PlainIntake, QueueSource, SessionsIntake
from aztask.worker.lane import Lane, Work
from aztask.worker.mailbox import Mailbox
from aztask.worker.pool.link import Starter
from aztask.worker.upkeep.scheduling import Scheduling

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
