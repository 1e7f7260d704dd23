"""What a worker does about paused queues and tasks, and about tasks whose circuit breaker is open.

Rules
1. A paused queue: the worker receives nothing from it, and releases once what it had prefetched.
2. A paused task: its deliveries are put off, for `FIRST_DELAY` at first and each time twice as
   long, up to `LONGEST_DELAY`. In a session the message waits under its lease, until the task is
   resumed.
3. Tasks that have started go on, and so does everything that is already claimed.
4. An open circuit breaker is a pause of its task, except for the delivery that probes it; see
   `aztask.worker.breaking`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from aztask.limits.breakers import OpenBreaker
from aztask.limits.control import ControlState, Pause, Scope
from aztask.settlement import Release
from aztask.worker.breaking import Breaking
from aztask.worker.pipeline.putoffs import PutOffs
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.upkeep.controlwatch import ControlWatch

logger = logging.getLogger(__name__)

FIRST_DELAY: Final = 5.0
LONGEST_DELAY: Final = 600.0
SPREAD: Final = 0.2
"""The share by which delays differ at random, so that not all messages come back together."""


class Pausing:
    """Sorts deliveries by what is paused; only the supervisor's loop calls it."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        put_offs: PutOffs,
        *,
        claim: Callable[[Iterable[WorkItem]], None],
        finish: Callable[[Iterable[WorkItem]], None],
    ) -> None:
        """claim: takes deliveries whose start rows are claimed at once. finish: takes decided ones.

        `queues` has the paused queues. Raises ConfigurationError, see `Breaking`.
        """
        self._deliveries = runtime.deliveries
        self._journal = runtime.journal
        self._clock = runtime.clock
        self._put_offs = put_offs
        self._claim = claim
        self._finish = finish
        self._watch = ControlWatch(runtime, self._changed)
        self._breaking = Breaking(runtime, self._breakers_changed, self._back)
        self.queues: frozenset[str] = frozenset()

    @property
    def known(self) -> bool:
        """Whether it is known what is paused; until then nothing is received."""
        return self._watch.known and self._breaking.known

    @property
    def active(self) -> bool:
        """Whether deliveries have to go through `admit`."""
        return self._watch.active or self._breaking.active

    def tick(self, now: float) -> None:
        """Read what is paused, if that is due. now: on the clock of the deadlines."""
        self._watch.tick(now)
        self._breaking.tick(now)

    def stop(self) -> None:
        """End the threads that read."""
        self._watch.stop()
        self._breaking.stop()

    def admit(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """The deliveries that may run; the others are released, put off, or wait for a probe."""
        admitted: list[WorkItem] = []
        claims: list[WorkItem] = []
        decided: list[WorkItem] = []
        state = self._watch.state
        for item in items:
            task = message_of(item).task
            if state.queue_paused(item.queue):
                item.decide(Release())
                decided.append(item)
                continue
            paused = state.task_paused(task)
            if (not paused and self._breaking.admits(item)) or self._put_offs.expired(item):
                admitted.append(item)
                continue
            delay, reason = _delay(item), f"task {task} is paused"
            if not paused:
                if self._breaking.asks(item):
                    continue
                delay = self._breaking.delay(item, delay)
                reason = f"the circuit breaker of task {task} is open"
            (decided if self._put_offs.wait(item, delay, reason) else claims).append(item)
        self._finish(decided)
        self._claim(claims)
        return admitted

    def _changed(self, former: ControlState, now: ControlState) -> None:
        self.queues = now.queues
        for pause in now.listed():
            if (pause.scope, pause.name) not in former.pauses:
                self._report(pause, f"paused by {pause.by}" if pause.by else "paused")
        for pause in former.listed():
            if (pause.scope, pause.name) not in now.pauses:
                self._report(pause, "resumed")
        self._admit_again()

    def _breakers_changed(self, changes: Sequence[tuple[OpenBreaker, str]]) -> None:
        for row, what in changes:
            self._report(Pause(Scope.TASK, row.task, row.at, row.by), what)
        self._admit_again()

    def _back(self, item: WorkItem) -> None:
        """Take a delivery that waited for the answer about a probe."""
        if item.stage is Stage.RECEIVED:  # else its lease was lost
            self._deliveries.opened.extend(self.admit([item]))

    def _admit_again(self) -> None:
        """Sort what waits for its claim by what is paused now."""
        opened = self._deliveries.opened
        waiting = list(opened)
        opened.clear()
        opened.extend(self.admit(waiting))
        self._deliveries.hurry(self._clock.monotonic())

    def _report(self, pause: Pause, what: str) -> None:
        logger.info("%s is %s", pause, what)
        self._journal.control_changed(pause, what)


def _delay(item: WorkItem) -> float:
    longest = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(message_of(item).times_put_off, 16))
    return longest * random.uniform(1.0 - SPREAD, 1.0)  # noqa: S311  # spreads load, no secret
