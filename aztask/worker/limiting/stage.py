"""Between the intakes and the claims: deliveries that wait for the gate, or for their slot."""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from aztask.errors import BrokerError
from aztask.limits.control import ControlState
from aztask.worker.lane import Work
from aztask.worker.limiting.slots import Parking, Slots
from aztask.worker.pausing import Pausing
from aztask.worker.pipeline.deliveries import Opened
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.work import Stage, WorkItem
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Stages, each, failed_try

logger = logging.getLogger(__name__)

SEND_AHEAD: Final = 0.015
"""Seconds before its slot at which a delivery is sent to a pool process, which waits for the rest.
"""

MAINTAIN_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 1.0


class LimitStage(Work[WorkItem | None]):
    """Only the supervisor's loop calls it; `on` is False if no task has limits."""

    def __init__(
        self, runtime: WorkerRuntime, pipeline: Pipeline, pauses: Pausing, core: Stages
    ) -> None:
        """Raises ConfigurationError, see `Slots`.

        core: takes the deliveries that have passed the gate, were put off, or have to try again.
        """
        self._parking = Parking()
        self._gate = Slots(runtime, pipeline.put_offs, pipeline.floods, pauses, self._parking)
        self._core = core
        self._app_name = runtime.app.name
        self.on = self._gate.on
        self._clock, self._journal = runtime.clock, runtime.journal
        self._ready = runtime.deliveries.ready
        self._timed: list[tuple[float, int, WorkItem]] = []
        self._holding: dict[str, dict[WorkItem, None]] = {}
        self._renewed: list[str] = []
        self._maintain_at = self._look_at = 0.0
        threads = 1 if self.on and runtime.lane_threads else 0
        essential = "limits" if self.on else ""
        self._lane = runtime.lane("limits", self, threads=threads, essential=essential)

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

    @property
    def parked(self) -> int:
        """How many deliveries wait in hand for a permit; they take no room of others."""
        return len(self._parking)

    def obey(self, former: ControlState, now: ControlState) -> None:
        """Use the numbers that operators gave limits, and report what is new to this worker.

        A reset of before its start, which is kept for a while, changes nothing.
        """
        if former.limits == now.limits:
            return
        self._gate.obey(now)
        for key, change in now.limits.items():
            before = former.limits.get(key)
            new = change != before and (change.numbers or (before is not None and before.numbers))
            if key[0] == self._app_name and new:
                what = f"{change} has {change.numbers or 'the numbers of its declaration again'}"
                what = f"{what}, by {change.by}" if change.by else what
                logger.info("%s", what)
                self._journal.adjusted(what)

    def sort(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """Take the deliveries that need slots; returns the others."""
        if not self.on:
            return list(items)
        free: list[WorkItem] = []
        limited: list[WorkItem] = []
        each(items, lambda it: (limited if self._gate.applies(it) else free).append(it), self._core)
        if limited:
            self._lane.submit(limited)
        return free

    def take_far(self, opened: Opened) -> None:
        """Take those that will be put off anyhow: they need no room in the pool."""
        # By task first: this is done at every turn, and thousands may be opened.
        tasks = self._gate.far_tasks()
        far = [item for item in opened if self._gate.is_far(item, tasks)] if tasks else []
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
            self._gate.missed(item)
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
        return items + self._parking.clear()

    def tick(self, now: float) -> None:
        """Renew permits, and let the oldest of those that wait ask again.

        now: on the clock of the deadlines.
        """
        if not self.on:
            return
        if now >= self._maintain_at:
            self._maintain_at = now + MAINTAIN_SECONDS
            self._lane.submit([None])
        if now >= self._look_at and len(self._parking):
            self._look_at = now + LOOK_SECONDS
            each(self._parking.too_long(now), self._put_off, self._core)
            self._lane.submit(self._parking.oldest())

    def ended(self, item: WorkItem) -> None:
        """Free the permits of a delivery that no longer runs, and correct what it used of rates."""
        if item.weighed:
            self._gate.ended(item)
        for entry in item.permits:
            self._gate.permits.free(entry)
            self._holding.get(entry, {}).pop(item, None)
            if (waiting := self._parking.next(entry)) is not None:
                self._lane.submit([waiting])
            elif not self._holding.get(entry):
                self._holding.pop(entry, None)
        item.permits, item.permits_until = (), math.inf

    def work(self, items: Sequence[WorkItem | None]) -> None:
        """Carry out what the lane was given; None stands for the maintenance of permits."""
        if None in items:
            self._renewed += self._gate.maintain()
        self._gate.admit([item for item in items if item is not None])

    def done(self, items: Sequence[WorkItem | None]) -> None:
        """Note who holds which permits, tell running tasks of renewals, and pass the items on."""
        renewed, self._renewed = self._renewed, []
        for entry in renewed:
            for holder in self._holding.get(entry, ()):
                holder.permits_until = min(map(self._gate.permits.deadline, holder.permits))
                if holder.stage is Stage.RUNNING:
                    deadline = min(holder.delivery.deadline, holder.permits_until)
                    self._core.tell(holder, ["renewed", holder.number, deadline])
        passed: list[WorkItem] = []

        def sort(item: WorkItem) -> None:
            if self._passes(item):
                passed.append(item)

        each((item for item in items if item is not None), sort, self._core)
        self._core.admitted(passed)

    def failed(self, items: Sequence[WorkItem | None]) -> None:
        """Count the try of those that are in the gate."""
        failed_try(items)

    def _passes(self, item: WorkItem) -> bool:
        """Whether an item goes on; otherwise it waits in hand for a permit."""
        if item.stage is Stage.ENDED or item.decided is not None:
            self.ended(item)
            return item.stage is not Stage.ENDED
        for entry in item.permits:
            self._holding.setdefault(entry, {})[item] = None
            if (waiting := self._parking.next(entry)) is not None:  # there may be more permits
                self._lane.submit([waiting])
            self._gate.permits.waits(entry, self._parking.ticket(entry))
        if item.parked is None:
            return True
        if (other := self._park(item)) is not None:
            self._put_off(other)
        return False

    def _park(self, item: WorkItem) -> WorkItem | None:
        """Let it wait in hand; returns the delivery that has to go for it, if there are many."""
        younger = self._parking.add(item, self._clock.monotonic())
        assert item.parked is not None  # noqa: S101  # the caller has checked that
        self._gate.permits.waits(item.parked.entry, self._parking.ticket(item.parked.entry))
        return younger

    def _put_off(self, item: WorkItem) -> None:
        parked, item.parked, item.parked_at = item.parked, None, None
        if parked is None:
            return
        self._gate.permits.waits(parked.entry, self._parking.ticket(parked.entry))
        try:
            self._gate.put_off_parked(item, parked)
        except BrokerError:  # it is claimed, and its row cannot be given back now
            item.tries += 1
        self._core.admitted([item])

    def stop(self) -> None:
        """Give the permits back, finish what is in the gate, and end its thread."""
        self._lane.stop()
        if self.on:
            with suppress(BrokerError):  # then starts count as much as they were claimed for
                self._gate.settle()
            with suppress(BrokerError):  # they are free when their lease ends
                self._gate.permits.release_all()
