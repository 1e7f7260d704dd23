"""Stops runs whose lease ended without news from the worker, which may be stopped or frozen.

Rules
1. The worker acts first: it renews a lease, or interrupts the task before the deadline. The guard
   acts only when the last deadline that the worker sent has passed.
2. At that deadline LeaseLost is raised in the task. If it still runs `STOP_GRACE` later, the
   process ends. Code that holds the GIL for so long delays both: no other thread can run.
3. Packets that have arrived are handled before a deadline is judged. A task may have held the GIL
   for longer than its lease, while the worker renewed it.
4. Deadlines are on the clock that also runs during suspend, and a selector waits on one that does
   not. So no wait is longer than `LONGEST_WAIT`.
"""

from __future__ import annotations

import math
import selectors
import threading
from dataclasses import dataclass
from typing import Final

from aztask.context import TaskLease
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.worker.mailbox import make_bell

STOP_GRACE: Final = 1.0
"""Seconds between the interruption of a task and the end of its process."""

LONGEST_WAIT: Final = 1.0
EARLY_RENEWALS: Final = 1024

NO_DEADLINE: Final = 1e18
"""The deadline of a message that is settled already: its run has no lease to lose."""

NO_NEWS: Final = "the worker did not report a renewal of its lease before the deadline"


@dataclass(slots=True)
class GuardedRun:
    """A run and the deadline of its lease. ends_at: when the process ends, once it was told."""

    lease: TaskLease
    deadline: float
    ends_at: float | None = None


class LeaseGuard:
    """The leases of a process's runs. One thread calls `wait` and `overdue`, any thread the rest.

    * `control`: the descriptor of the socket that brings the worker's news.
    """

    def __init__(self, control: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._control = control
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[int, GuardedRun] = {}
        self._early: dict[int, float] = {}
        self._begun = False
        self._wakes_at = math.inf
        self._wake = make_bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def begin(self, number: int, lease: TaskLease, deadline: float) -> None:
        """Guard the run of delivery `number`. A renewal that overtook the delivery counts."""
        with self._lock:
            if (renewed := self._early.pop(number, None)) is not None:
                lease.renewed(renewed)
                deadline = renewed
            self._runs[number] = GuardedRun(lease, deadline)
            self._begun = True
            if deadline < self._wakes_at:
                self._wakes_at = deadline
                self._wake.ring()

    def end(self, number: int) -> None:
        """Stop guarding the run, which has ended."""
        with self._lock:
            self._runs.pop(number, None)

    def renewed(self, number: int, deadline: float) -> None:
        """Note the renewal of a lease, whose delivery may not have been read yet."""
        with self._lock:
            run = self._runs.get(number)
            if run is not None:
                run.deadline = deadline
                run.lease.renewed(deadline)
            else:
                self._early[number] = deadline
                if len(self._early) > EARLY_RENEWALS:  # most are of runs that have ended
                    del self._early[next(iter(self._early))]

    def lose(self, number: int, reason: str) -> None:
        """Note that the worker reports the lease as lost, and interrupts the task itself."""
        with self._lock:
            run = self._runs.get(number)
            if run is not None:
                run.ends_at = max(run.deadline, self._clock.monotonic()) + STOP_GRACE
                run.lease.lose(reason)

    def wait(self) -> float | None:
        """Wait for a packet, a deadline or a new run; None if a packet has arrived.

        Otherwise returns a time at which none had arrived, for `overdue`. It is read before the
        last look at the socket: if a task holds the GIL, this thread may sleep for long between
        any two of its steps.
        """
        now = self._clock.monotonic()
        with self._lock:
            self._wakes_at = self._next_at(now)
            pause = max(0.0, self._wakes_at - now)
        self._selector.select(None if pause == math.inf else pause)
        now = self._clock.monotonic()
        found = [key.fd for key, _ in self._selector.select(0)]
        if self._wake.fileno() in found:
            self._wake.quiet()
        return None if self._control in found else now

    def overdue(self, now: float) -> tuple[list[int], int | None]:
        """(runs to interrupt now, each once; a run because of which the process must end)."""
        interrupt, end = [], None
        with self._lock:
            for number, run in self._runs.items():
                if run.ends_at is not None:
                    end = number if now >= run.ends_at else end
                elif now >= run.deadline:
                    run.ends_at = now + STOP_GRACE
                    run.lease.lose(NO_NEWS)
                    interrupt.append(number)
        return interrupt, end

    def _next_at(self, now: float) -> float:
        """When to wake up. It stays awake for one more wait after the last run, because waking it
        for each of many short tasks would cost more than the tasks."""
        begun, self._begun = self._begun, False
        if not self._runs and not begun:
            return math.inf
        due = [run.deadline if run.ends_at is None else run.ends_at for run in self._runs.values()]
        return min([now + LONGEST_WAIT, *due])
