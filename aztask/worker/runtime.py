"""What the parts of one worker share, as one value."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from aztask.app import App
from aztask.lease.keeper import LeaseKeeper
from aztask.lease.state import Lease
from aztask.support.clock import Clock
from aztask.support.masking import mask
from aztask.worker.mailbox import Mailbox
from aztask.worker.options import WorkerOptions, weights_of
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.upkeep.journal import Journal
from aztask.worker.upkeep.tasklog import TaskLog
from aztask.worker.upkeep.uploader import worker_sink

LANE_THREADS = 4


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """The supervisor makes one and hands it to each part.

    name: the worker's, unique among all workers. mailbox: how other threads reach the supervisor's
    loop. deliveries: all that the worker holds. journal: where they are reported.
    """

    name: str
    app: App
    options: WorkerOptions
    clock: Clock
    keeper: LeaseKeeper
    journal: Journal
    mailbox: Mailbox
    deliveries: Deliveries

    @classmethod
    def create(
        cls,
        app: App,
        options: WorkerOptions,
        clock: Clock,
        *,
        on_lost: Callable[[Lease], None],
        on_renewed: Callable[[Lease, float], None],
    ) -> WorkerRuntime:
        """Make the parts. Raises ConfigurationError if events cannot be written.

        on_lost, on_renewed: called in the supervisor's loop, with the lease; on_renewed also with
        the share of it that had passed.
        """
        # Masked: the name goes into events, rows and file names that other programs read.
        name = mask(options.name) or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        mailbox = Mailbox()
        keeper = LeaseKeeper(
            app.broker,
            clock=clock,
            renew_at=app.settings.renew_at,
            on_lost=lambda lease: mailbox.post(lambda: on_lost(lease)),
            on_renewed=lambda lease, age: mailbox.post(lambda: on_renewed(lease, age)),
            on_settleable=mailbox.wake,
        )
        journal = Journal(worker_sink(app, name), clock, TaskLog(clock, options.log_tasks))
        deliveries = Deliveries(name, clock, weights_of(app, options))
        return cls(name, app, options, clock, keeper, journal, mailbox, deliveries)

    @property
    def lane_threads(self) -> int:
        """Threads for a stage's lane: none where broker and result store are local files."""
        return LANE_THREADS if self.app.remote else 0
