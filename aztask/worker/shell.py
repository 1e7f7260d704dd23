"""The real shells of a worker: threads, child processes, and a loop that waits in the kernel."""

from __future__ import annotations

import threading
from typing import TypeVar

from aztask.app import App
from aztask.queues.base import Broker
from aztask.queues.lease.keeper import LeaseKeeper, LeaseReports
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.worker.intake.queueintake import Intake
from aztask.worker.intake.sessions import SessionIntake
from aztask.worker.lane import Lane, Work, lane_of
from aztask.worker.mailbox import EventMailbox, Mailbox, SocketBell
from aztask.worker.platform import CAN_SIGNAL_THREADS, is_portable
from aztask.worker.pool.forking import ForkedStarter, ForkServerHandle, first_server
from aztask.worker.pool.link import Starter
from aztask.worker.pool.portablelink import PortableStarter
from aztask.worker.ports import IntakeReports, QueueSource
from aztask.worker.upkeep.scheduling import Scheduling

Item = TypeVar("Item")


class ThreadShell:
    """Makes the parts of a worker that have threads, processes or waits; see `Shell`."""

    def __init__(
        self, *, clock: Clock = SYSTEM_CLOCK, server: ForkServerHandle | None = None
    ) -> None:
        """server: the fork server, if one was made before the app was imported."""
        self.clock = clock
        self._server = server

    def close(self) -> None:
        """End the fork server, if the worker has not."""
        if self._server is not None:
            self._server.close()

    def mailbox(self) -> Mailbox:
        """Waits in the kernel, for other threads and for the pool's sockets."""
        return EventMailbox()

    def keeper(self, broker: Broker, renew_at: float, reports: LeaseReports) -> LeaseKeeper:
        """Renews on threads of its own."""
        return LeaseKeeper(broker, clock=self.clock, renew_at=renew_at, reports=reports)

    def lane(
        self, name: str, work: Work[Item], mailbox: Mailbox, *, threads: int, essential: str
    ) -> Lane[Item]:
        """Works on so many threads of its own, or in the supervisor's turn."""
        return lane_of(name, work, mailbox, threads=threads, essential=essential)

    def intake(
        self, broker: Broker, source: QueueSource, intakes: IntakeReports, *, shares: bool
    ) -> Intake:
        """Receives on threads of its own."""
        return Intake(broker, source, intakes, shares=shares, clock=self.clock)

    def sessions(
        self,
        broker: Broker,
        source: QueueSource,
        intakes: IntakeReports,
        *,
        most: int,
        share: float,
    ) -> SessionIntake:
        """Receives on a thread for each session."""
        return SessionIntake(broker, source, intakes, most=most, share=share, clock=self.clock)

    def starter(self, mailbox: Mailbox, *, foreground: bool = False) -> Starter:
        """Forks pool processes off a fork server; one that gets the terminal is a child of ours."""
        return PortableStarter() if foreground else ForkedStarter(mailbox, self._server)

    def scheduling(self, app: App, name: str) -> Scheduling:
        """Makes occurrences on a thread of its own."""
        return Scheduling(app, name)


class PortableShell(ThreadShell):
    """The shell of systems other than Linux: see `aztask.worker.platform`."""

    def mailbox(self) -> Mailbox:
        """Waits in the kernel, for other threads, for the pool's sockets and for signals."""
        bell = SocketBell()
        if not CAN_SIGNAL_THREADS and threading.current_thread() is threading.main_thread():
            bell.hear_signals()
        return EventMailbox(bell)

    def starter(self, mailbox: Mailbox, *, foreground: bool = False) -> Starter:
        """Starts a new interpreter for each pool process."""
        return PortableStarter()


def first_shell() -> ThreadShell:
    """The shell of this system, made at the start of a command, before the app is imported."""
    return PortableShell() if is_portable() else ThreadShell(server=first_server())


def later_shell() -> ThreadShell:
    """As `first_shell`, in a process that may have threads: a fork server starts when needed."""
    return PortableShell() if is_portable() else ThreadShell()
