"""What a worker obeys: paused queues and tasks, open circuit breakers, another concurrency.

Rules
1. A paused queue: the worker receives nothing from it, and releases once what it had prefetched.
2. A paused task: its deliveries are put off, for `FIRST_DELAY` at first and each time twice as
   long, but never longer than a quarter of the pause so far, nor than `LONGEST_DELAY`. So after
   `resume` a message waits at most a quarter as long as the task was paused. In a session the
   message waits under its lease, until the task is resumed.
3. A paused tenant, a key of a limit: `aztask.worker.limiting.slots` puts its deliveries off as
   those of a paused task, because it makes the keys.
4. Tasks that have started go on, and so does everything that is already claimed.
5. An open circuit breaker is a pause of its task, except for the delivery that probes it; see
   `aztask.worker.breaking`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from aztask.limits.breakers import OpenBreaker
from aztask.limits.control import ControlState, Pause, Scope, scale_of
from aztask.message.message import TaskMessage
from aztask.settlement import Release
from aztask.support import chance
from aztask.support.clock import Clock
from aztask.worker.breaking import Breaking
from aztask.worker.intake.allintakes import Intakes
from aztask.worker.options import SOLO
from aztask.worker.pipeline.redelivery import PutOffs
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.worker.pool.pool import Pool
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Stages, each
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
        watch: ControlWatch,
        breaking: Breaking,
        core: Stages,
    ) -> None:
        """watch, breaking: know what is paused, and which breakers are open.

        `queues` has the paused queues.
        """
        self._deliveries = runtime.deliveries
        self._journal = runtime.journal
        self._clock = runtime.clock
        self._put_offs = put_offs
        self._watch = watch
        self._breaking = breaking
        self._core = core
        self.queues: frozenset[str] = frozenset()

    @property
    def known(self) -> bool:
        """Whether it is known what is paused; until then nothing is received."""
        return self._watch.known and self._breaking.known

    @property
    def active(self) -> bool:
        """Whether deliveries have to go through `admit`."""
        return self._watch.active or self._breaking.active

    def admit(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """The deliveries that may run; the others are released, put off, or wait for a probe."""
        admitted: list[WorkItem] = []
        claims: list[WorkItem] = []
        decided: list[WorkItem] = []

        def sort(item: WorkItem) -> None:
            found = self._place(item, admitted, claims, decided)
            if found is not None:
                found.append(item)

        each(items, sort, self._core)
        self._core.finish(decided)
        self._core.claim(claims)
        return admitted

    def _place(
        self,
        item: WorkItem,
        admitted: list[WorkItem],
        claims: list[WorkItem],
        decided: list[WorkItem],
    ) -> list[WorkItem] | None:
        """The list to which the delivery belongs; None if it waits for a probe."""
        state, task = self._watch.state, message_of(item).task
        if state.queue_paused(item.queue):
            item.decide(Release())
            return decided
        paused = state.task_paused(task)
        if (not paused and self._breaking.admits(item)) or self._put_offs.expired(item):
            return admitted
        if paused:
            pause = state.pauses[Scope.TASK, task]
            delay = put_off_seconds(message_of(item), pause, self._clock)
            reason = f"{pause} is paused"
        elif self._breaking.asks(item):
            return None
        else:
            delay = self._breaking.delay(item, _spread(message_of(item), math.inf))
            reason = f"the circuit breaker of task {task} is open"
        return decided if self._put_offs.wait(item, delay, reason) else claims

    def tenant(self, limit: str, key: str) -> Pause | None:
        """The pause of this key of a limit, if it is paused. Any thread may call."""
        return self._watch.state.tenant(limit, key)

    def control_changed(self, former: ControlState, now: ControlState) -> None:
        """Obey other pauses, and report what has changed."""
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

    def breakers_changed(self, changes: Sequence[tuple[OpenBreaker, str]]) -> None:
        """Obey circuit breakers that have opened or closed, and report them."""
        for row, what in changes:
            self._report(Pause(Scope.TASK, row.task, row.at, row.by), what)
        self._admit_again()

    def reconsidered(self, item: WorkItem) -> None:
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
    return longest * chance.uniform(1.0 - SPREAD, 1.0)


# -- scaling ---------------------------------------------------------------------------------
#
# Obeys ``aztask control scale``: changes how many tasks this worker runs at the same time.


class Scaling:
    """Only the supervisor's loop calls it."""

    def __init__(self, runtime: WorkerRuntime, pool: Pool, intakes: Intakes) -> None:
        self._name = runtime.name
        self._options = runtime.options
        self._journal = runtime.journal
        self._pool = pool
        self._intakes = intakes
        self.claims_ahead = 0
        self._ahead = bool(runtime.lane_threads)
        self._note()

    def obey(self, state: ControlState) -> None:
        """Run as many tasks as the state says, else as many as the command line says."""
        found = scale_of(state.scales.values(), self._name, self._options.queues)
        size = self._options.concurrency if found is None else found.size
        if size == self._pool.capacity or self._options.pool == SOLO:
            return
        what = f"concurrency is {size} now, and was {self._pool.capacity}"
        if found is not None and found.by:
            what = f"{what}, by {found.by}"
        logger.info("%s", what)
        self._journal.adjusted(what)
        self._pool.scale(size)
        self._intakes.scale(size)
        self._note()

    def _note(self) -> None:
        """A claim across a network takes time: the next ones are sent while the pool is busy."""
        self.claims_ahead = self._pool.capacity if self._ahead else 0
