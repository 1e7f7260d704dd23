"""Gives deliveries back when the worker stops, or ends with an error."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aztask.worker.limiting.stage import LimitStage
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.work import WorkItem, names
from aztask.worker.pool.pool import Pool
from aztask.worker.stages import Stages

logger = logging.getLogger(__name__)


class GivingBack:
    """Only the supervisor's loop uses it."""

    def __init__(
        self,
        deliveries: Deliveries,
        pool: Pool,
        pipeline: Pipeline,
        gating: LimitStage,
        core: Stages,
        *,
        closes: bool,
    ) -> None:
        """closes: the app has lifespans."""
        self._deliveries = deliveries
        self._pool = pool
        self._pipeline = pipeline
        self._gating = gating
        self._core = core
        self._closes = closes

    def waiting(self) -> None:
        """Release all deliveries that wait in this process, and those that no slot has read."""
        waiting = self._deliveries.waiting() + self._gating.take_all()
        for process in self._pool.processes:
            waiting += process.take_back()
        self.these(waiting)

    def these(self, items: Sequence[WorkItem]) -> None:
        """Release deliveries that have not started."""
        if items:
            self._pipeline.release(items)
            self._core.ended(items)

    def running(self) -> None:
        """Kill the processes that still run tasks, and give these back; their starts do not count.

        A process that runs nothing goes on closing its lifespans. What has ended but could not be
        settled is left to its lease: the redelivery repeats the settlement from its record.
        """
        busy = [process for process in self._pool.processes if process.items]
        for process in busy:
            if self._closes:  # its tasks may have ended, and their answers not be read yet
                logger.warning(
                    "%s is killed before its lifespans or process hooks have closed: the worker "
                    "stops, and it has not reported the end of %s",
                    process,
                    names(list(process.items.values())),
                )
            process.kill("the worker stopped")
        for process in busy:
            process.wait()
        items = list(self._deliveries)
        if running := [item for item in items if item.decided is None]:
            logger.warning(
                "gave back %d running task(s), any worker runs them again: %s",
                len(running),
                names(running),
            )
        if ended := [item for item in items if item.decided is not None]:
            logger.warning(
                "%d ended task(s) could not be settled in time; their messages come back when "
                "their leases end: %s",
                len(ended),
                names(ended),
            )
        self._pipeline.release(running)
        self._ended(items)

    def begun(self, items: Sequence[WorkItem]) -> None:
        """After an error that ends the worker: started tasks count as started (see `abandon`)."""
        begun = [item for item in items if item.claimed is not None and not item.settled]
        self._pipeline.abandon(begun)
        self._pipeline.release([item for item in items if item not in begun])
        self._ended(items)

    def _ended(self, items: Sequence[WorkItem]) -> None:
        """Let the worker forget these.

        Of an end that is not recorded no event may tell: the task runs again, or another worker
        records that this run was lost.
        """
        for item in items:
            decided = item.decided
            if decided is None or decided.outcome is None or decided.recorded:
                continue
            if not item.settled or (item.at_most_once and item.claimed is not None):
                item.note("settle_failed", "the worker stopped before the outcome was recorded")
                item.superseded()
        self._core.ended(items)
