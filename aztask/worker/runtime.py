"""What the parts of one worker share, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from aztask.app import App
from aztask.lease.keeper import LeaseKeeper
from aztask.support.clock import Clock
from aztask.worker.mailbox import Mailbox
from aztask.worker.options import WorkerOptions
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.upkeep.journal import Journal

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

    @property
    def lane_threads(self) -> int:
        """Threads for a stage's lane: none where broker and result store are local files."""
        return LANE_THREADS if self.app.remote else 0
