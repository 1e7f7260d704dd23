"""What the parts of one worker share, as one value."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from aztask.app import App
from aztask.limits.holders import holder_of
from aztask.limits.storeclock import StoreClock
from aztask.queues.lease.keeper import LeaseKeeper, LeaseReports
from aztask.queues.lease.state import Lease
from aztask.stores.records.controls import controls_of
from aztask.stores.rows import KeepsRows
from aztask.support import chance
from aztask.support.clock import Clock
from aztask.support.display import mask
from aztask.worker.lane import Lane, Work
from aztask.worker.mailbox import Mailbox
from aztask.worker.options import WorkerOptions, weights_of
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.ports import Shell
from aztask.worker.stages import Stages
from aztask.worker.upkeep.journal import Journal, TaskLog
from aztask.worker.upkeep.recording import Recorder
from aztask.worker.upkeep.uploader import worker_sink

LANE_THREADS = 4

Item = TypeVar("Item")


class PostedReports(LeaseReports):
    """Passes a lease keeper's reports on to the supervisor's loop."""

    def __init__(self, mailbox: Mailbox, core: Stages) -> None:
        self._mailbox = mailbox
        self._core = core

    def lost(self, lease: Lease) -> None:
        """Have the loop stop the task that runs under it."""
        self._mailbox.post(lambda: self._core.lease_lost(lease))

    def renewed(self, lease: Lease, age: float) -> None:
        """Have the loop pass the new deadline on."""
        self._mailbox.post(lambda: self._core.lease_renewed(lease, age))

    def settleable(self) -> None:
        """The loop tries again what it could not settle."""
        self._mailbox.wake()


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """The core makes one and hands it to each part.

    name: the worker's, unique among all workers. shell: what makes threads and processes. mailbox:
    how other threads reach the supervisor's loop. deliveries: all that the worker holds. journal:
    where they are reported. clock: corrected by store_clock, that of a remote result store.
    incarnation: tells it from a worker that had its name before.
    """

    name: str
    app: App
    options: WorkerOptions
    shell: Shell
    keeper: LeaseKeeper
    journal: Journal
    mailbox: Mailbox
    deliveries: Deliveries
    clock: Clock
    store_clock: StoreClock | None = None
    incarnation: str = field(default_factory=partial(chance.token, 4))

    @classmethod
    def create(cls, app: App, options: WorkerOptions, shell: Shell, core: Stages) -> WorkerRuntime:
        """Make the parts. Raises ConfigurationError if events cannot be written.

        core: gets the reports of lost and renewed leases.
        """
        # Masked: the name goes into events, rows and file names that other programs read.
        name = mask(options.name) or f"{socket.gethostname()}-{os.getpid()}-{chance.token(3)}"
        clock, mailbox, shared = shell.clock, shell.mailbox(), None
        controls = controls_of(app.results)
        if controls is not None and app.results is not None and app.results.remote:
            shared = StoreClock(controls, clock)
            clock = shared.corrected()
        keeper = shell.keeper(app.broker, app.settings.renew_at, PostedReports(mailbox, core))
        log, counts = TaskLog(clock, options.log_tasks), isinstance(app.results, KeepsRows)
        recorder = Recorder(clock) if counts else None
        journal = Journal(worker_sink(app, name), clock, log, recorder)
        deliveries = Deliveries(name, clock, weights_of(app, options))
        return cls(name, app, options, shell, keeper, journal, mailbox, deliveries, clock, shared)

    @property
    def holder(self) -> str:
        """Under which name it holds what only one worker may: another one may have its name."""
        return holder_of(self.name, self.incarnation)

    @property
    def lane_threads(self) -> int:
        """Threads for a stage's lane: none where broker and result store are local files."""
        return LANE_THREADS if self.app.remote else 0

    def lane(self, name: str, work: Work[Item], *, threads: int, essential: str = "") -> Lane[Item]:
        """A lane for this work. essential: as `Part` takes it."""
        return self.shell.lane(name, work, self.mailbox, threads=threads, essential=essential)
