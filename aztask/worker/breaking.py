"""What a worker does about circuit breakers: it counts failures, opens, probes and closes them.

Rules
1. Each worker counts its own runs. What is open is a row in the result store, so it holds for all
   workers, which read it every two seconds.
2. While a breaker is open, deliveries of its task are put off. When it may be probed, the first
   delivery waits in hand until the worker has asked the store for the probe; one worker gets it.
3. The probe is a delivery that runs like any other. Its end closes the breaker, or makes the pause
   longer; without an outcome that counts, the probe is given back.
4. Without a task that has a breaker, there is no thread and no request.

Crash window: if the worker dies with the probe, or cannot report its end, the probe's lease ends
after `PROBE_SECONDS`, and another delivery becomes the probe.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from aztask.breaker import CircuitBreaker
from aztask.errors import AztaskError, ConfigurationError
from aztask.limits.breakers import PROBE_SECONDS, Breakers, Open, OpenBreaker
from aztask.limits.storeclock import StoreClock
from aztask.stores.records.base import State
from aztask.stores.records.controls import controls_of
from aztask.support import chance
from aztask.worker.lane import Lane, Work
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Stages
from aztask.worker.upkeep.controlwatch import READ_SECONDS, REPEATED_SECONDS

# -- How many of a task's last runs failed, in one worker. Nothing here does I/O.
#
# Memory stays the same however many runs there are: the window is divided into `PARTS`, each with
# two counts. So a run leaves the count up to a tenth of the window late.

PARTS: Final = 10


class FailureWindow:
    """The runs of the last `seconds`. Times are on the clock of the deadlines."""

    def __init__(self, seconds: float) -> None:
        self._part = seconds / PARTS
        self._parts: deque[tuple[int, int, int]] = deque()  # number of the part, runs, failures

    def add(self, now: float, *, failed: bool) -> None:
        """Count a run that ended now."""
        number = int(now // self._part)
        runs = failures = 0
        if self._parts and self._parts[-1][0] == number:
            _, runs, failures = self._parts.pop()
        self._parts.append((number, runs + 1, failures + failed))
        while self._parts[0][0] < number - PARTS:
            self._parts.popleft()

    def counts(self, now: float) -> tuple[int, int]:
        """How many runs the window has, and how many of them failed."""
        oldest = int(now // self._part) - PARTS
        parts = [part for part in self._parts if part[0] >= oldest]
        return sum(part[1] for part in parts), sum(part[2] for part in parts)


logger = logging.getLogger(__name__)

SPREAD: Final = 0.2
"""The share by which delays differ at random, so that not all messages come back together."""


@dataclass(slots=True)
class _Job:
    """A call for the thread that asks the store.

    * `call`: gets the store's time, returns what is open then.
    * `then`: called in the supervisor's loop afterwards.
    * `rows`: what is open; None if the store could not be asked.
    * `ahead`: what is to be added to a time of the store for the clock of the deadlines.
    """

    call: Callable[[float], Open]
    then: Callable[[], None] | None = None
    rows: Open | None = None
    ahead: float = 0.0


@dataclass(slots=True)
class _Known:
    """An open breaker as this worker knows it; the times are on the clock of the deadlines."""

    row: OpenBreaker
    until: float
    probe_until: float


class Breaking(Work[_Job]):
    """Only the supervisor's loop calls it.

    * `on`: False if no task has a breaker.
    * `known`: whether the open breakers are known; until then the worker receives nothing.
    """

    def __init__(self, runtime: WorkerRuntime, core: Stages) -> None:
        """core: is told what has opened and closed, and takes back the delivery that waited in hand
        for the probe.

        Raises ConfigurationError without a result store that keeps control entries.
        """
        tasks = runtime.app.tasks.values()
        self._breakers: dict[str, CircuitBreaker] = {
            task.name: task.breaker for task in tasks if task.breaker is not None
        }
        self.on = bool(self._breakers)
        self.known = not self.on
        self._core = core
        self._clock = runtime.clock
        self._name, self._holder = runtime.name, runtime.holder
        self._open: dict[str, _Known] = {}
        self._windows: dict[str, FailureWindow] = {}
        self._probes: dict[str, WorkItem] = {}
        self._opening: set[str] = set()
        self._read_at = 0.0
        self._warned_at: float | None = None
        self._lane: Lane[_Job] | None = None
        if self.on:
            store = controls_of(runtime.app.results)
            if store is None:
                raise ConfigurationError(
                    "circuit breakers need a result store, such as local:// or tables://; set "
                    "AZTASK_RESULTS"
                )
            self._store = Breakers(store)
            self._time = StoreClock(store, runtime.clock)
            self._lane = runtime.lane("breakers", self, threads=1)
            self._part = self._lane.part

    @property
    def active(self) -> bool:
        """Whether a breaker of a task of this worker is open."""
        return bool(self._open)

    def tick(self, now: float) -> None:
        """Read what is open, and renew the probes, if that is due.

        now: on the clock of the deadlines.
        """
        if self._lane is not None and now >= self._read_at and not len(self._lane):
            self._read_at = now + READ_SECONDS
            probes = list(self._probes)
            self._submit(lambda at: self._read(probes, at))

    def stop(self) -> None:
        """Finish what is queued, and end the thread."""
        if self._lane is not None:
            self._lane.stop()

    # -- deliveries --------------------------------------------------------------------------

    def admits(self, item: WorkItem) -> bool:
        """Whether the delivery may run: its breaker is closed, or it is the probe."""
        task = message_of(item).task
        return task not in self._open or self._probes.get(task) is item

    def asks(self, item: WorkItem) -> bool:
        """Ask for the probe with this delivery, if that is possible now; it waits in hand then."""
        task, now = message_of(item).task, self._clock.monotonic()
        known = self._open[task]
        if task in self._probes or item.stage is not Stage.RECEIVED:
            return False
        if now < known.until or now < known.probe_until:
            return False
        self._probes[task] = item
        self._submit(
            lambda at: self._store.probe(task, self._holder, at), lambda: self._asked(task, item)
        )
        return True

    def delay(self, item: WorkItem, growing: float) -> float:
        """Seconds for which the delivery is put off: until the probe is possible, and spread.

        growing: the delay of a pause, which grows with each put-off.
        """
        task = message_of(item).task
        known = self._open[task]
        left = max(known.until, known.probe_until) - self._clock.monotonic()
        spread = chance.uniform(1.0, 1.0 + SPREAD)
        return max(left * spread, min(growing, self._breakers[task].longest))

    def ended(self, item: WorkItem) -> None:
        """Count a delivery that has ended; the probe closes its breaker, or keeps it open."""
        task = item.task.name if item.task is not None else ""
        breaker = self._breakers.get(task)
        if breaker is None:
            return
        failed = _failed(item)
        if self._probes.get(task) is item:
            del self._probes[task]
            self._probed(task, breaker, failed=failed)
        elif failed is not None and task not in self._open:
            self._count(task, breaker, failed=failed)

    def _count(self, task: str, breaker: CircuitBreaker, *, failed: bool) -> None:
        now = self._clock.monotonic()
        window = self._windows.setdefault(task, FailureWindow(breaker.window))
        window.add(now, failed=failed)
        if not failed or task in self._opening:
            return
        runs, failures = window.counts(now)
        if runs < breaker.minimum or failures < breaker.share * runs:
            return
        why = f"{failures} of {runs} runs failed in {breaker.window:g} s"
        self._opening.add(task)

        def opened(at: float) -> Open:
            until = at + breaker.pause_after(0)
            return self._store.open(OpenBreaker(task, at, until, self._name, why))

        self._submit(opened, lambda: self._opening.discard(task))

    def _probed(self, task: str, breaker: CircuitBreaker, *, failed: bool | None) -> None:
        known = self._open.get(task)
        failures = known.row.failures + 1 if known is not None else 1
        if failed is None:
            self._submit(lambda at: self._store.released(task, self._holder))
        elif failed:
            pause = breaker.pause_after(failures)
            self._submit(lambda at: self._store.failed(task, self._holder, at + pause))
        else:
            self._submit(lambda at: self._store.succeeded(task, self._holder))

    def _asked(self, task: str, item: WorkItem) -> None:
        """Let the delivery go on: as the probe, or as one of those that are put off."""
        if self._probes.get(task) is not item:  # its lease was lost in the meantime
            return
        known = self._open.get(task)
        if known is None or known.row.probe_by != self._holder:
            del self._probes[task]
            if known is not None:  # also if the store was unreachable: the next one asks later
                later = self._clock.monotonic() + READ_SECONDS
                known.probe_until = max(known.probe_until, later)
        else:
            logger.info("task %s: %s probes its circuit breaker", task, item.label)
        self._core.reconsidered(item)

    # -- the store ---------------------------------------------------------------------------

    def _submit(
        self, call: Callable[[float], Open], then: Callable[[], None] | None = None
    ) -> None:
        assert self._lane is not None  # noqa: S101  # only called if a task has a breaker
        self._lane.submit([_Job(call, then)])

    def _read(self, probes: Sequence[str], now: float) -> Open:
        """Read what is open, and renew the probes of this worker; on the lane's thread."""
        rows = self._store.read()
        for task in probes:
            row = rows.get(task)
            ours = row is not None and row.probe_by == self._holder
            if row and ours and row.probe_until - now < PROBE_SECONDS - 2 * READ_SECONDS:
                rows = self._store.probe(task, self._holder, now)
        return rows

    def work(self, jobs: Sequence[_Job]) -> None:
        """Ask the store; on the lane's thread."""
        for job in jobs:
            try:
                self._time.refresh()
                job.rows = job.call(self._time.now())
                job.ahead = self._time.deadline(0.0)
            except AztaskError as error:
                self._part.trouble(error)
                self._warn(error)
            except Exception as error:  # noqa: BLE001  # the other jobs are done
                self._part.failed(error)
            else:
                self._warned_at = None

    def _warn(self, error: AztaskError) -> None:
        now = self._clock.monotonic()
        if self._warned_at is None or now - self._warned_at >= REPEATED_SECONDS:
            self._warned_at = now
            then = "the last known ones stand" if self.known else "nothing is received until then"
            line = "circuit breakers cannot be read or changed, retry follows, %s: %s"
            logger.warning(line, then, error)

    def done(self, jobs: Sequence[_Job]) -> None:
        """Go on with the store's answers."""
        for job in jobs:
            if job.rows is not None:
                self._take(job.rows, job.ahead)
            if job.then is not None:
                job.then()

    def _take(self, rows: Open, ahead: float) -> None:
        """Go on with these rows, and report what has changed."""
        self.known = True
        former, self._open = self._open, {}
        news: list[tuple[OpenBreaker, str]] = []
        for task, row in rows.items():
            if task not in self._breakers:
                continue
            self._open[task] = _Known(row, row.until + ahead, row.probe_until + ahead)
            if task not in former or former[task].row.until != row.until:
                self._windows.pop(task, None)
                news.append((row, _opened(row)))
        for task, known in former.items():
            if task not in self._open:
                self._windows.pop(task, None)
                news.append((known.row, "resumed: its circuit breaker has closed"))
        if news:
            self._core.breakers_changed(news)


def _opened(row: OpenBreaker) -> str:
    if row.failures:
        return f"paused by its circuit breaker for longer: {row.failures} failed probes in a row"
    return f"paused by its circuit breaker: {row.why}"


def _failed(item: WorkItem) -> bool | None:
    """Whether the run failed; None if the delivery did not run, or its outcome does not count."""
    outcome = item.outcome
    if item.run is None or outcome is None or (item.notes and not item.settled):
        return None
    if outcome.state in (State.FAILED, State.RETRYING):
        return True
    return False if outcome.state is State.SUCCEEDED else None
