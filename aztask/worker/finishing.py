"""The finish lanes: tasks of workflows have one of their own, so that they delay no other task.

The bits of a group's members are in rows that many workers change. Waiting for a turn there must
not hold up the settlements of unrelated tasks. The lane has one thread: what ends while it works
becomes its next batch, so that a worker's own ends never compete for a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aztask.worker.lane import Lane
from aztask.worker.pipeline.work import WorkItem


class FinishLanes:
    """Like a `Lane`, for items with an outcome. Where lanes work inline, there is only one."""

    def __init__(self, make: Callable[[str, int], Lane[WorkItem]], threads: int) -> None:
        """make: makes a lane of that name and number of threads. threads: 0 for inline."""
        self._make = make
        self._threads = threads
        self._plain = make("finish", threads)
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
                self._workflows = self._make("workflows", 1)
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
