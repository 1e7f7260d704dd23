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

from aztask.support.failpoint import hit
from aztask.worker.pipeline.work import Run, Stop, WorkItem, message_of
from aztask.worker.pool.children import Pool, PoolProcess
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

STOP_GRACE = 1.0
MAX_LEASE_REACHED = "it ran for max_lease, the longest that it may be held"


class TimeLimits:
    """Watches what runs."""

    def __init__(self, runtime: WorkerRuntime, pool: Pool) -> None:
        self._pool = pool
        self._keeper = runtime.keeper
        self._settings = runtime.app.settings
        self._options = runtime.options
        self._journal = runtime.journal
        self._clock = runtime.clock

    def enforce(self, now: float) -> None:
        """Look at everything that runs."""
        for process in self._pool.processes:
            for item, at in process.running():
                run = item.run
                if run is None:
                    continue
                if run.started_at is None:
                    self._started(item, run, at)
                self._check(process, item, run, now - at, now)

    def stop(self, item: WorkItem, kind: str, text: str) -> None:
        """Tell the task to stop, and end its process when it does not within the grace."""
        run = item.run
        if run is None or run.stop is not None:
            return
        run.stop = Stop(text, self._clock.monotonic() + STOP_GRACE)
        logger.warning("task %s must stop: %s", item.key.task_id, text)
        for process in self._pool.processes:
            if item.number in process.items:
                process.tell(["interrupt", item.number, kind, text])

    def cancel(self, item: WorkItem) -> None:
        """The task was cancelled: stop it.

        Crash window: a worker that dies from here on until the end is recorded leaves the mark of
        the cancellation; the redelivery finds it and is cancelled without a start.
        """
        if item.run is not None:
            item.run.cancelled = True
        self.stop(item, "cancel", "it was cancelled")
        hit("stopping")

    def limit_at(self, item: WorkItem) -> float:
        """When renewing its lease ends: `max_lease` after the start of the run."""
        task = item.task
        longest = self._options.max_lease or (task.max_lease if task else None)
        started = item.run.started_at if item.run is not None else None
        if started is None:
            started = self._clock.monotonic()
        return started + (longest or self._settings.max_lease_seconds)

    def _started(self, item: WorkItem, run: Run, at: float) -> None:
        """First seen running: from now on `max_lease` counts, and the task's own lease holds."""
        run.started_at = at
        self._journal.started(item)
        if item.settled:
            return
        wanted = item.task.lease if item.task else None
        if wanted is not None and self._options.lease is None and wanted > item.lease.seconds:
            self._keeper.extend(item.lease, wanted, self.limit_at(item))
        else:
            self._keeper.limit(item.lease, self.limit_at(item))

    def _check(
        self, process: PoolProcess, item: WorkItem, run: Run, ran: float, now: float
    ) -> None:
        task, message = item.task, message_of(item)
        hard = message.time_limit or (task.time_limit if task else None)
        soft = message.soft_time_limit or (task.soft_time_limit if task else None)
        if run.stop is not None and now >= run.stop.kill_at:
            process.kill(f"task {item.key.task_id} did not stop: {run.stop.reason}", item.number)
        elif hard is not None and ran >= hard:
            process.kill(f"the time limit of {hard:g} s passed", item.number)
        elif soft is not None and ran >= soft and not run.soft_told:
            run.soft_told = True
            process.tell(["interrupt", item.number, "limit", f"soft time limit of {soft:g} s"])
        elif not item.settled and now >= item.lease.stop_at:
            self.stop(item, "lease", "its lease was not renewed in time")
        elif not item.settled and now >= self.limit_at(item):
            self.stop(item, "lease", MAX_LEASE_REACHED)
