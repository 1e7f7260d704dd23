"""What a worker does about paused queues and tasks, and about tasks whose circuit breaker is open.

Rules
1. A paused queue: the worker receives nothing from it, and releases once what it had prefetched.
2. A paused task: its deliveries are put off, for `FIRST_DELAY` at first and each time twice as
   long, but never longer than a quarter of the pause so far, nor than `LONGEST_DELAY`. So after
   `resume` a message waits at most a quarter as long as the task was paused. In a session the
   message waits under its lease, until the task is resumed.
3. A paused tenant, a key of a limit: `aztask.worker.limiting.gate` puts its deliveries off as those
   of a paused task, because it makes the keys.
4. Tasks that have started go on, and so does everything that is already claimed.
5. An open circuit breaker is a pause of its task, except for the delivery that probes it; see
   `aztask.worker.breaking`.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from aztask.limits.breakers import OpenBreaker
from aztask.limits.control import ControlState, Pause, Scope
from aztask.message.message import TaskMessage
from aztask.settlement import Release
from aztask.support.clock import Clock
from aztask.worker.breaking import Breaking
from aztask.worker.pipeline.putoffs import PutOffs
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.upkeep.controlwatch import ControlWatch

logger = logging.getLogger(__name__)

FIRST_DELAY: Final = 5.0
LONGEST_DELAY: Final = 600.0
AGE_SHARE: Final = 0.25
"""The part of a pause's age for which messages are put off at most.

A message is put off about 22 times in the first 10 minutes, 31 times in the first hour, and 6 times
an hour after that. Without this bound it would be 8 and 13 times, and a task that was paused for 10
minutes would come back up to 10 minutes after its resume.
"""

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
        changed: Callable[[ControlState], None],
    ) -> None:
        """claim: takes deliveries whose start rows are claimed at once. finish: takes decided ones.
        changed: called with each new state.

        `queues` has the paused queues. Raises ConfigurationError, see `Breaking`.
        """
        self._deliveries = runtime.deliveries
        self._journal = runtime.journal
        self._clock = runtime.clock
        self._put_offs = put_offs
        self._claim = claim
        self._finish = finish
        self._on_change = changed
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
            if paused:
                pause = state.pauses[Scope.TASK, task]
                delay = put_off_seconds(message_of(item), pause, self._clock)
                reason = f"{pause} is paused"
            elif self._breaking.asks(item):
                continue
            else:
                delay = self._breaking.delay(item, _spread(message_of(item), math.inf))
                reason = f"the circuit breaker of task {task} is open"
            (decided if self._put_offs.wait(item, delay, reason) else claims).append(item)
        self._finish(decided)
        self._claim(claims)
        return admitted

    def tenant(self, limit: str, key: str) -> Pause | None:
        """The pause of this key of a limit, if it is paused. Any thread may call."""
        return self._watch.state.tenant(limit, key)

    def _changed(self, former: ControlState, now: ControlState) -> None:
        self._on_change(now)
        if former.pauses == now.pauses:
            return
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


def longest_delay(times: int, age: float) -> float:
    """The longest delay of the next put-off, in seconds, see rule 2.

    times: how often the message was put off before. age: seconds since the pause began, by this
    machine's clock and that of the machine that paused; a wrong one costs put-offs or delays, and
    nothing else.
    """
    by_age = max(FIRST_DELAY, AGE_SHARE * age)
    return min(LONGEST_DELAY, by_age, FIRST_DELAY * 2.0 ** min(times, 16))


def put_off_seconds(message: TaskMessage, pause: Pause, clock: Clock) -> float:
    """How long to put a message off because of this pause."""
    return _spread(message, clock.wall() - pause.at)


def _spread(message: TaskMessage, age: float) -> float:
    longest = longest_delay(message.times_put_off, age)
    return longest * random.uniform(1.0 - SPREAD, 1.0)  # noqa: S311  # spreads load, no secret
