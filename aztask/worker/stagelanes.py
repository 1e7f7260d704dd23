"""The lanes of the claim and of the settlement, and what each does with a batch.

Tasks of workflows have a finish lane of their own, so that they delay no other task.

The bits of a group's members are in rows that many workers change. Waiting for a turn there must
not hold up the settlements of unrelated tasks. The lane has one thread: what ends while it works
becomes its next batch, so that a worker's own ends never compete for a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aztask.worker.lane import Lane, Work
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.work import WorkItem
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Stages, failed_try


class Claiming(Work[WorkItem]):
    """The work of the claim lane."""

    def __init__(self, pipeline: Pipeline, core: Stages) -> None:
        self._pipeline = pipeline
        self._core = core

    def work(self, batch: Sequence[WorkItem]) -> None:
        """Own the start rows of these deliveries."""
        self._pipeline.claim(batch)

    def done(self, batch: Sequence[WorkItem]) -> None:
        """Hand them back, claimed or not."""
        self._core.claimed(batch)

    def failed(self, batch: Sequence[WorkItem]) -> None:
        """The next try comes after a longer pause."""
        failed_try(batch)


class Finishing(Claiming):
    """The work of the finish lanes."""

    def work(self, batch: Sequence[WorkItem]) -> None:
        """Record the outcomes, then settle the messages."""
        self._pipeline.finish(batch)

    def done(self, batch: Sequence[WorkItem]) -> None:
        """Hand them back, settled or not."""
        self._core.finished(batch)


class FinishLanes:
    """Like a `Lane`, for items with an outcome. Where lanes work inline, there is only one."""

    def __init__(self, runtime: WorkerRuntime, work: Work[WorkItem]) -> None:
        self._runtime = runtime
        self._work = work
        self._threads = runtime.lane_threads
        self._plain = runtime.lane("finish", work, threads=self._threads, essential="finish")
        self._workflows: Lane[WorkItem] | None = None

    @property
    def waiting(self) -> bool:
        """Whether something is left for the next turn."""
        return self._plain.waiting

    def submit(self, items: Iterable[WorkItem]) -> None:
        """Queue these items, each on its lane."""
        if not self._threads:
            self._plain.submit(items)
            return
        given = list(items)
        joined = [item for item in given if item.place is not None]
        if joined:
            if self._workflows is None:
                self._workflows = self._runtime.lane("workflows", self._work, threads=1)
            self._workflows.submit(joined)
            given = [item for item in given if item.place is None]
        if given:
            self._plain.submit(given)

    def turn(self) -> None:
        """Work on everything that is queued, if the lanes work inline."""
        self._plain.turn()

    def stop(self) -> None:
        """Finish what is queued and end the threads."""
        self._plain.stop()
        if self._workflows is not None:
            self._workflows.stop()
