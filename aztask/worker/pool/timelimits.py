"""Time limits and lost leases: interrupts tasks, and kills the processes of those that ignore it.

Rules
1. At the soft limit TimeLimitExceeded is raised in the task. At the hard limit its process is
   killed. Both count from the start that the process noted on its board.
2. A task whose lease cannot be renewed is interrupted before the deadline; if it does not stop, its
   process is killed. So its work stops before another worker can receive the message.
3. Killing a process for one task interrupts the tasks beside it: they are given back, not failed.
"""

from __future__ import annotations

import logging

from aztask.support.failpoint import hit
from aztask.worker.pipeline.work import Run, Stop, WorkItem, message_of
from aztask.worker.pool.children import Pool, PoolProcess
from aztask.worker.pool.leaseguard import STOP_GRACE
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

MAX_LEASE_REACHED = "it ran for max_lease, the longest time that its message may be held"


class TimeLimits:
    """Enforces the limits of running tasks; only the supervisor's loop uses it."""

    def __init__(self, runtime: WorkerRuntime, pool: Pool) -> None:
        self._pool = pool
        self._keeper = runtime.keeper
        self._settings = runtime.app.settings
        self._options = runtime.options
        self._journal = runtime.journal
        self._clock = runtime.clock

    def enforce(self, now: float) -> None:
        """Check every running task. now: on the clock of the deadlines."""
        for process in self._pool.processes:
            for item, at in process.running():
                run = item.run
                if run is None:
                    continue
                if run.started_at is None:
                    self._started(item, run, at)
                self._check(process, item, run, now - at, now)

    def stop(self, item: WorkItem, kind: str, text: str) -> None:
        """Interrupt the task; if it has not stopped after `STOP_GRACE`, its process is killed."""
        run = item.run
        if run is None or run.stop is not None:
            return
        run.stop = Stop(text, self._clock.monotonic() + STOP_GRACE)
        logger.warning(
            "%s is interrupted, and killed in %g s if it continues; %s: %s",
            item.label,
            STOP_GRACE,
            "it is not retried" if kind == "cancel" else "its message is redelivered",
            text,
        )
        for process in self._pool.processes:
            if item.number in process.items:
                process.tell(["interrupt", item.number, kind, text])

    def cancel(self, item: WorkItem) -> None:
        """Stop a task that was cancelled.

        Crash window: if the worker dies before the end is recorded, the mark of the cancellation
        remains; the redelivery finds it and is cancelled without a start.
        """
        if item.run is not None:
            item.run.cancelled = True
        self.stop(item, "cancel", "it was cancelled")
        hit("stopping")

    def limit_at(self, item: WorkItem) -> float:
        """Until when its lease may be renewed: `max_lease` after the start of the run."""
        task = item.task
        longest = self._options.max_lease or (task.max_lease if task else None)
        started = item.run.started_at if item.run is not None else None
        if started is None:
            started = self._clock.monotonic()
        return started + (longest or self._settings.max_lease_seconds)

    def _started(self, item: WorkItem, run: Run, at: float) -> None:
        """The task has started: `max_lease` counts from now, and the task's own lease applies."""
        run.started_at = at
        self._journal.started(item)
        if item.settled:
            return
        lease = item.task.lease if item.task else None
        if lease is not None and self._options.lease is None and lease > item.lease.seconds:
            self._keeper.extend(item.lease, lease, self.limit_at(item))
        else:
            self._keeper.limit(item.lease, self.limit_at(item))

    def _check(
        self, process: PoolProcess, item: WorkItem, run: Run, ran: float, now: float
    ) -> None:
        task, message = item.task, message_of(item)
        hard = message.time_limit or (task.time_limit if task else None)
        soft = message.soft_time_limit or (task.soft_time_limit if task else None)
        if run.stop is not None and now >= run.stop.kill_at:
            process.kill(f"{item.label} did not stop: {run.stop.reason}", item.number)
        elif hard is not None and ran >= hard:
            process.kill(f"the time limit of {hard:g} s was exceeded", item.number)
        elif soft is not None and ran >= soft and not run.soft_limit_signalled:
            run.soft_limit_signalled = True
            process.tell(["interrupt", item.number, "limit", f"soft time limit of {soft:g} s"])
        elif not item.settled and now >= item.lease.stop_at:
            self.stop(item, "lease", "its lease was not renewed in time")
        elif not item.settled and now >= self.limit_at(item):
            self.stop(item, "lease", MAX_LEASE_REACHED)
