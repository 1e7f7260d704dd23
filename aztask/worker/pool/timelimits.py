"""Time limits and lost leases: interrupts tasks, and kills the processes of those that ignore it.

Rules
1. At the soft limit TimeLimitExceeded is raised in the task. At the hard limit its process is
   killed. Both count from the start that the process noted on its board.
2. A task whose lease cannot be renewed is interrupted before the deadline; if it does not stop, its
   process is killed. So its work stops before another worker can receive the message.
3. A run that reaches `max_lease` has failed, and its failure counts. It is interrupted, and killed
   if need be, so early that its outcome can be recorded under the lease that is left.
4. The pool solo has no time limits, since a person may stand at a breakpoint. `max_lease` holds.
5. Killing a process for one task interrupts the tasks beside it: they are given back, not failed.
"""

from __future__ import annotations

import logging

from aztask.support.failpoint import hit
from aztask.worker.options import SOLO
from aztask.worker.pipeline.work import Run, Stage, Stop, WorkItem, message_of
from aztask.worker.pool.leaseguard import STOP_GRACE
from aztask.worker.pool.pool import Pool, PoolProcess
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Aside

logger = logging.getLogger(__name__)

LONGEST_MAX_LEASE_MARGIN = 2.0
MAX_LEASE_MARGIN = 0.2
"""The share of max_lease that remains when a run is interrupted; half of it when it is killed."""


NEXT = {
    "cancel": "it is not retried",
    "max-lease": "this counts as a failure",
    "stopping": "then its message is given back",
}
"""What follows the interruption, by its kind."""


class TimeLimits:
    """Enforces the limits of running tasks; only the supervisor's loop uses it."""

    def __init__(self, runtime: WorkerRuntime, pool: Pool, aside: Aside) -> None:
        self._aside = aside
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
                try:
                    self._enforce(process, item, at, now)
                except Exception as error:  # noqa: BLE001  # the others are checked
                    self._aside.put_aside(item, error)

    def _enforce(self, process: PoolProcess, item: WorkItem, at: float, now: float) -> None:
        run = item.run
        if run is None or item.stage is not Stage.RUNNING:
            return
        if run.started_at is None:
            self._started(item, run, at)
        self._check(process, item, run, now - at, now)

    def stop(self, item: WorkItem, kind: str, text: str, grace: float = STOP_GRACE) -> None:
        """Interrupt the task; if it has not stopped after `grace`, its process is killed."""
        run = item.run
        if run is None or run.stop is not None:
            return
        failed, given_back = kind == "max-lease", kind == "stopping"
        run.stop = Stop(text, self._clock.monotonic() + grace, failed, given_back)
        logger.warning(
            "%s is interrupted, and killed in %.3g s if it continues; %s: %s",
            item.label,
            grace,
            NEXT.get(kind, "its message is redelivered"),
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

    def end(self, grace: float) -> float:
        """Have all running tasks clean up and end, because the worker stops.

        Each has `grace` seconds, or its own `stop_grace`. Returns when the last one is killed, on
        the clock of the deadlines. A task that is interrupted already keeps its time.
        """
        last = self._clock.monotonic()
        for item, _ in self._pool.running():
            own = item.task.stop_grace if item.task else None
            self.stop(item, "stopping", "the worker stops", grace if own is None else own)
            if item.stop is not None:
                last = max(last, item.stop.kill_at)
        return last

    def limit_at(self, item: WorkItem) -> float:
        """Until when its lease may be renewed: `max_lease` after the start of the run."""
        started = item.run.started_at if item.run is not None else None
        if started is None:
            started = self._clock.monotonic()
        return started + self._max_lease(item)

    def _max_lease(self, item: WorkItem) -> float:
        task = item.task
        longest = self._options.max_lease or (task.max_lease if task else None)
        return longest or self._settings.max_lease_seconds

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
        if self._options.pool == SOLO:  # a person may think at a breakpoint
            hard = soft = None
        if run.stop is not None and now >= run.stop.kill_at:
            process.kill(f"{item.label} did not stop: {run.stop.reason}", item.number)
        elif hard is not None and ran >= hard:
            process.kill(f"the time limit of {hard:g} s was exceeded", item.number)
        elif soft is not None and ran >= soft and not run.soft_limit_signalled:
            run.soft_limit_signalled = True
            process.tell(["interrupt", item.number, "limit", f"soft time limit of {soft:g} s"])
        elif not item.settled and run.stop is None:
            self._check_lease(item, now)

    def _check_lease(self, item: WorkItem, now: float) -> None:
        """Stop the task if its lease is about to end, because of `max_lease` or by accident."""
        lease, longest = item.lease, self._max_lease(item)
        margin = min(LONGEST_MAX_LEASE_MARGIN, MAX_LEASE_MARGIN * longest)
        ends_at = self.limit_at(item)
        # Where the service decides the duration of a renewal, one past the limit is not made.
        last = now >= lease.deadline - margin and self._keeper.ends_at_limit(lease)
        if now >= (min(ends_at, lease.deadline) if last else ends_at) - margin:
            text = f"it would hold its message for longer than max_lease, {longest:g} s"
            self.stop(item, "max-lease", text, grace=margin / 2)
        elif now >= lease.stop_at:
            self.stop(item, "lease", "its lease was not renewed in time")
