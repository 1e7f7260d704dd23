"""What a worker does when the lease keeper reports that a lease was renewed or lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from aztask.lease.state import Lease
from aztask.worker.pipeline.work import Stage, WorkItem
from aztask.worker.pool.dispatcher import PoolDispatcher
from aztask.worker.pool.timelimits import TimeLimits
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


class LeaseNews:
    """Passes the keeper's reports on to the tasks; only the supervisor's loop calls it."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        limits: TimeLimits,
        dispatcher: PoolDispatcher,
        over: Callable[[Sequence[WorkItem]], None],
    ) -> None:
        """over: ends deliveries, whatever their outcome."""
        self._deliveries = runtime.deliveries
        self._journal = runtime.journal
        self._limits = limits
        self._dispatcher = dispatcher
        self._over = over

    def renewed(self, lease: Lease, age: float) -> None:
        """Tell the pool process the new deadline. age: the share of the lease that had passed."""
        item = self._deliveries.of(lease)
        if item is not None:
            self._journal.renewed(item, age)
            deadline = min(lease.deadline, item.permits_until)
            self._dispatcher.tell(item, ["renewed", item.number, deadline])

    def lost(self, lease: Lease) -> None:
        """The broker or the clock says that the lease has ended: stop the task, settle nothing."""
        item = self._deliveries.of(lease)
        if item is not None and item.stage is Stage.RUNNING:
            self._limits.stop(item, "lease", lease.lost_reason)
        elif item is not None and item.stage is Stage.HELD:
            item.note("lease_lost", lease.lost_reason)
            self._over([item])
        elif item is not None:
            logger.info(
                "%s: the lease was lost before the task started, it will be redelivered: %s",
                item.label,
                lease.lost_reason,
            )
