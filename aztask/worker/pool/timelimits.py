"""Time limits and lost leases: telling tasks to stop, and ending the processes that do not.

Rules
1. At the soft limit TimeLimitExceeded is raised in the task; at the hard limit its process is
   killed. Both count from the start that the process noted on its board.
2. A task whose lease cannot be renewed is told to stop before the deadline, and its process is
   killed when it does not: work stops before anybody else can get the message.
3. Killing a process for one task interrupts its siblings: they are given back, not failed.
"""

from __future__ import annotations

import logging

from aztask.config import Settings
from aztask.lease.keeper import LeaseKeeper
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.worker.options import WorkerOptions
from aztask.worker.pipeline.work import Job
from aztask.worker.pool.children import Pool, PoolProcess
from aztask.worker.upkeep.journal import Journal

logger = logging.getLogger(__name__)

STOP_GRACE = 1.0
MAX_LEASE_REACHED = "it ran for max_lease, the longest that it may be held"


class Limits:
    """Watches what runs."""

    def __init__(
        self,
        pool: Pool,
        keeper: LeaseKeeper,
        settings: Settings,
        options: WorkerOptions,
        journal: Journal,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._keeper = keeper
        self._settings = settings
        self._options = options
        self._journal = journal
        self._clock = clock

    def enforce(self, now: float) -> None:
        """Look at everything that runs."""
        for process in self._pool.processes:
            for job, at in process.running():
                if job.started_at is None:
                    self._started(job, at)
                self._check(process, job, now - at, now)

    def stop(self, job: Job, kind: str, text: str) -> None:
        """Tell the task to stop, and end its process when it does not within the grace."""
        if job.stop_reason:
            return
        job.stop_reason = text
        now = self._clock.monotonic()
        job.kill_at = now + STOP_GRACE
        logger.warning("task %s must stop: %s", job.key.task_id, text)
        for process in self._pool.processes:
            if job.number in process.jobs:
                process.tell(["interrupt", job.number, kind, text])

    def cancel(self, job: Job) -> None:
        """The task was cancelled: stop it.

        Crash window: a worker that dies from here on until the end is recorded leaves the mark of
        the cancellation; the redelivery finds it and is cancelled without a start.
        """
        job.cancelled = True
        self.stop(job, "cancel", "it was cancelled")
        hit("stopping")

    def limit_at(self, job: Job) -> float:
        """When renewing its lease ends: `max_lease` after the start of the run."""
        task = job.task
        longest = self._options.max_lease or (task.max_lease if task else None)
        started = job.started_at if job.started_at is not None else self._clock.monotonic()
        return started + (longest or self._settings.max_lease_seconds)

    def _started(self, job: Job, at: float) -> None:
        """First seen running: from now on `max_lease` counts, and the task's own lease holds."""
        job.started_at = at
        self._journal.started(job)
        if job.settled:
            return
        wanted = job.task.lease if job.task else None
        if wanted is not None and self._options.lease is None and wanted > job.lease.seconds:
            self._keeper.extend(job.lease, wanted, self.limit_at(job))
        else:
            self._keeper.limit(job.lease, self.limit_at(job))

    def _check(self, process: PoolProcess, job: Job, ran: float, now: float) -> None:
        task, message = job.task, job.message
        hard = (message.time_limit if message else None) or (task.time_limit if task else None)
        soft = (message.soft_time_limit if message else None) or (
            task.soft_time_limit if task else None
        )
        if job.kill_at is not None and now >= job.kill_at:
            process.kill(f"task {job.key.task_id} did not stop: {job.stop_reason}", job.number)
        elif hard is not None and ran >= hard:
            process.kill(f"the time limit of {hard:g} s passed", job.number)
        elif soft is not None and ran >= soft and not job.soft_told:
            job.soft_told = True
            process.tell(["interrupt", job.number, "limit", f"soft time limit of {soft:g} s"])
        elif not job.settled and now >= job.lease.stop_at:
            self.stop(job, "lease", "its lease was not renewed in time")
        elif not job.settled and now >= self.limit_at(job):
            self.stop(job, "lease", MAX_LEASE_REACHED)
