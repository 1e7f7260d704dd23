"""Between the intakes and the claims: deliveries that wait for the gate, or for their slot."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from aztask.worker.lane import Lane
from aztask.worker.limiting.gate import Gate
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.work import Stage, WorkItem
from aztask.worker.runtime import WorkerRuntime

SEND_AHEAD: Final = 0.015
"""Seconds before its slot at which a delivery is sent to a pool process, which waits for the rest.
"""


class Gating:
    """Only the supervisor's loop calls it; `on` is False if no task has limits."""

    def __init__(
        self, runtime: WorkerRuntime, pipeline: Pipeline, done: Callable[[Sequence[WorkItem]], None]
    ) -> None:
        """done: takes the deliveries that have passed the gate, were put off, or have to try again.

        Raises ConfigurationError, see `Gate`.
        """
        self._gate = Gate(runtime.app, pipeline.put_offs, pipeline.floods, runtime.clock)
        self.on = self._gate.on
        self._clock = runtime.clock
        self._ready = runtime.deliveries.ready
        self._timed: list[tuple[float, int, WorkItem]] = []
        threads = 1 if self.on and runtime.lane_threads else 0
        self._lane: Lane[WorkItem] = Lane(
            "limits", self._gate.admit, done, runtime.mailbox, threads=threads
        )

    @property
    def held(self) -> int:
        """How many deliveries are in the gate or wait for their slots."""
        return len(self._lane) + len(self._timed)

    @property
    def next_at(self) -> float:
        """When the next delivery is to be sent, on the clock of the deadlines."""
        return self._timed[0][0] if self._timed else math.inf

    @property
    def waiting(self) -> bool:
        """Whether the gate has something left for the next turn."""
        return self._lane.waiting

    def sort(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """Take the deliveries that need slots; returns the others."""
        if not self.on:
            return list(items)
        free: list[WorkItem] = []
        limited: list[WorkItem] = []
        for item in items:
            (limited if self._gate.applies(item) else free).append(item)
        if limited:
            self._lane.submit(limited)
        return free

    def take_far(self, opened: deque[WorkItem]) -> None:
        """Take those that will be put off anyhow: they need no room in the pool."""
        far = [item for item in opened if self._gate.applies(item) and self._gate.is_far(item)]
        if far:
            taken = set(far)
            left = [item for item in opened if item not in taken]
            opened.clear()
            opened.extend(left)
            self._lane.submit(far)

    def turn(self) -> None:
        """Work on what is queued, if the result store is a local file."""
        self._lane.turn()

    def late(self, items: Sequence[WorkItem]) -> None:
        """Let deliveries that missed their slots claim others; they stay claimed."""
        for item in items:
            item.window = None
        self._lane.submit(items)

    def claimed(self, item: WorkItem) -> None:
        """Take a claimed delivery. The message of a pointer has not passed the gate yet."""
        if self.on and self._gate.applies(item):
            self._lane.submit([item])
        else:
            self.time(item)

    def time(self, item: WorkItem) -> None:
        """Let a claimed delivery be sent to the pool: now, or when its slot comes."""
        window = item.window
        if window is not None and window.timed:
            send_at = window.opens - SEND_AHEAD
            if send_at > self._clock.monotonic():
                heapq.heappush(self._timed, (send_at, item.number, item))
                return
        self._ready.append(item)

    def due(self) -> list[WorkItem]:
        """Take out the deliveries whose slots come now, in their order."""
        now, items = self._clock.monotonic(), []
        while self._timed and self._timed[0][0] <= now:
            item = heapq.heappop(self._timed)[2]
            if item.stage is Stage.READY:  # its lease may have ended
                items.append(item)
        return items

    def take_all(self) -> list[WorkItem]:
        """Take out everything that waits for its slot."""
        items = [item for _, _, item in self._timed if item.stage is Stage.READY]
        self._timed.clear()
        return items

    def stop(self) -> None:
        """Finish what is in the gate, and end its thread."""
        self._lane.stop()
