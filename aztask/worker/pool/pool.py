"""The worker's side of the pool: starts processes, feeds them, and knows what each one holds.

Rules
1. A delivery is either in the socket (not read, so it can be taken back), or read (it counts as
   running), or answered. A process that dies leaves exactly the second kind behind.
2. Short tasks are sent ahead, about `AHEAD_SECONDS` of work per slot, so that no slot waits for the
   worker. Long tasks are not sent ahead, so that none waits behind another. Deliveries that wait
   behind an unexpectedly long task are taken back and given to a free slot.
3. Processes are started and killed on the supervisor's thread only, because the kernel's
   parent-death signal follows that thread.
4. A pool that is scaled replaces the processes that have another number of slots, and a pool that
   recycles replaces worn-out ones: a new one starts, and when it is ready, the old one ends after
   the tasks that it runs. Until that is done, no more tasks than the new number are sent, those
   that still run in old processes included.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable
from typing import Any

from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.worker.pipeline.work import WorkItem
from aztask.worker.pool.link import Link, PoolPlan, Starter
from aztask.worker.stages import Aside

logger = logging.getLogger(__name__)

AHEAD_SECONDS = 0.02
MOST_AHEAD = 64
STUCK_SECONDS = 0.05
CLOSING_SECONDS = 5.0
"""For the hooks and lifespans of all processes that were retired, together."""

FULL_SECONDS = 0.02
"""How long a process whose socket is full gets no further delivery."""


class PoolProcess:
    """The worker's handle of one pool process."""

    def __init__(self, link: Link, plan: PoolPlan) -> None:
        """plan: the one that it was started for."""
        self.link = link
        self.slots = plan.slots
        self.alone = plan.alone
        self.items: dict[int, WorkItem] = {}
        self.ready = False
        self.retiring = False
        self.unwatched = False
        self.full_until = 0.0
        self.ran = 0
        self.worn_out = ""
        self.kill_reason = ""
        self.culprit: int | None = None

    def __str__(self) -> str:
        return f"pool process {self.link.pid}"

    def send(self, item: WorkItem, packet: list[Any]) -> bool:
        """Put one delivery into its socket; False if that is full or the process has ended."""
        if not self.link.send(packet):
            return False
        item.sent()
        self.items[item.number] = item
        return True

    def tell(self, packet: list[Any]) -> None:
        """Send a control packet; a process that has ended or does not listen misses it."""
        if not self.link.tell(packet):
            logger.warning("%s does not read its control socket: it misses %r", self, packet[0])

    def running(self) -> list[tuple[WorkItem, float]]:
        """The items that its slots run, and their starts (clock of the deadlines)."""
        if not self.items:
            return []
        found = ((self.items.get(number), at) for number, at in self.link.running().items())
        return [(item, at) for item, at in found if item is not None]

    def take_back(self) -> list[WorkItem]:
        """Take back the deliveries that it has not read; it will not see them."""
        found = (self.items.pop(number, None) for number in self.link.unread())
        items = [item for item in found if item is not None]
        for item in items:
            item.taken_back()
        return items

    def retire(self) -> None:
        """Have every slot end after the deliveries that it holds; then lifespans close."""
        if self.retiring:
            return
        self.retiring = True
        for _ in range(self.slots):
            self.link.send([])

    def kill(self, reason: str, culprit: int | None = None) -> None:
        """Kill it now. culprit: the delivery because of which it is killed."""
        if not self.kill_reason:
            self.kill_reason, self.culprit = reason, culprit
            self.link.kill()

    def wait(self) -> None:
        """Wait until the killed process is dead."""
        self.link.wait()

    def close_lifespans(self, seconds: float) -> None:
        """Let a retired process that runs nothing close its lifespans, for `seconds` at most."""
        if self.ready and self.retiring and not self.items and not self.kill_reason:
            self.link.wait(seconds)

    def ending(self) -> str:
        """Why it ended, as a clause for the log and for records."""
        status = self.link.status
        if self.kill_reason:
            return self.kill_reason
        if self.link.failed:
            return f"a pool process cannot start: {self.link.failed}"
        if status is None:
            return "the pool process ended together with the pool's fork server"
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = f"signal {-status}"
            return f"the pool process was ended by {name}"
        return f"the pool process exited with status {status}"

    def close(self) -> None:
        """Free what its link has open."""
        self.link.close()


class Pool:
    """All pool processes of a worker."""

    def __init__(self, plan: PoolPlan, starter: Starter, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._plan = plan
        self._starter = starter
        self._changing = False
        self._clock = clock
        self.processes: list[PoolProcess] = []
        self.mean_seconds: float | None = None
        self._failed_starts = 0
        self._start_after = 0.0
        self._ending = False

    @property
    def capacity(self) -> int:
        """How many tasks can run at the same time."""
        return self._plan.processes * self._plan.slots

    def scale(self, concurrency: int) -> None:
        """Run this many tasks at the same time, beginning with the next `fill` (rule 4)."""
        if concurrency != self.capacity:
            self._plan = self._plan.scaled(concurrency)
            self._changing = True

    def shrink(self) -> list[WorkItem]:
        """Retire what a scaled pool needs no longer; returns the deliveries that this takes back.

        Cheap enough for every tick.
        """
        if not self._changing:
            return []
        current = [process for process in self.processes if self._is_current(process)]
        current.sort(key=lambda each: (not each.ready, -len(each.items)))
        surplus = current[self._plan.processes :]
        if any(process.ready for process in current):
            others = (each for each in self.processes if each not in current)
            surplus += [each for each in others if not each.retiring]
        items: list[WorkItem] = []
        for process in surplus:
            items += process.take_back()
            process.retire()
        self._changing = not all(self._is_current(process) for process in self.processes)
        return items

    def _is_current(self, process: PoolProcess) -> bool:
        plan = self._plan
        of_now = process.slots == plan.slots and process.alone == plan.alone
        return of_now and not process.retiring and not process.worn_out

    def recycle(self, most_tasks: int | None, most_bytes: int | None) -> None:
        """Have `fill` replace processes that have run this many tasks or use this much memory.

        Their siblings go on (rule 4). Cheap enough for every second.
        """
        for process in self.processes:
            if not process.ready or process.retiring or process.worn_out or self._ending:
                continue
            if most_tasks is not None and process.ran >= most_tasks:
                process.worn_out = f"it has run {process.ran} tasks"
            elif most_bytes is not None and (used := process.link.memory()) > most_bytes:
                process.worn_out = f"it uses {used >> 20} MiB"
            if process.worn_out:
                logger.info("%s is replaced: %s", process, process.worn_out)
                self._changing = True

    def retire(self) -> None:
        """Have all processes end after the tasks that they run; no further one is started."""
        self._ending = True
        for process in self.processes:
            process.retire()

    def closing(self) -> list[PoolProcess]:
        """The retired processes that run nothing and have not ended: their lifespans close."""
        return [each for each in self.processes if each.ready and not each.items]

    def fill(self) -> list[PoolProcess]:
        """Start missing processes: the first one at once, the others when it is ready.

        On a machine with few cores, the first task starts sooner this way. Returns what was
        started, whose answers have to be read from now on.
        """
        started: list[PoolProcess] = []
        while (
            self._missing()
            and (not self.processes or any(process.ready for process in self.processes))
            and self._clock.monotonic() >= self._start_after
        ):
            try:
                process = PoolProcess(self._starter.start(self._plan), self._plan)
            except OSError as error:
                logger.error("a pool process cannot start: %s; it will be tried again", error)
                self._start_later()
                break
            self.processes.append(process)
            started.append(process)
        return started

    def _missing(self) -> bool:
        if self._ending:
            return False
        if not self._changing:
            return len(self.processes) < self._plan.processes
        return sum(map(self._is_current, self.processes)) < self._plan.processes

    def take_ended(self) -> list[PoolProcess]:
        """The processes that have ended since the last call, each for `ended`."""
        if not (links := self._starter.ended()):
            return []
        return [process for process in self.processes if process.link in links]

    def check_starter(self) -> None:
        """Mend what starts processes, if it does not answer; cheap enough for every tick."""
        self._starter.check(self._clock.monotonic())

    def running(self) -> list[tuple[WorkItem, float]]:
        """The items that run, and their starts (clock of the deadlines)."""
        return [pair for process in self.processes for pair in process.running()]

    def room(self) -> int:
        """How many deliveries can be sent now, including those that are sent ahead."""
        window = self._plan.slots + self._ahead()
        now = self._clock.monotonic()
        if self._changing:
            return self._room_while_changing(now)
        return sum(
            max(0, window - len(process.items))
            for process in self.processes
            if process.ready and now >= process.full_until
        )

    def _room_while_changing(self, now: float) -> int:
        """As `room`, with the old number of slots in old processes, and nothing sent ahead."""
        room = sum(
            max(0, process.slots - len(process.items))
            for process in self.processes
            if process.ready and not process.retiring and now >= process.full_until
        )
        held = sum(len(process.items) for process in self.processes)
        return max(0, min(room, self.capacity - held))

    def feed(
        self, items: Iterable[WorkItem], packet: Callable[[WorkItem], list[Any]], aside: Aside
    ) -> list[WorkItem]:
        """Send each item to the least busy process; returns those that found none.

        packet: makes the packet of an item. One that cannot be sent at all is put aside.
        """
        ahead = 0 if self._changing else self._ahead()
        left: list[WorkItem] = []
        open_processes = [each for each in self.processes if each.ready and not each.retiring]
        for item in items:
            process = min(open_processes, key=_load, default=None)
            if process is None or len(process.items) >= process.slots + ahead:
                left.append(item)
                continue
            try:
                sent = process.send(item, packet(item))
            except Exception as error:  # noqa: BLE001  # it concerns this delivery alone
                aside.put_aside(item, error)
                continue
            if not sent:
                process.full_until = self._clock.monotonic() + FULL_SECONDS
                open_processes.remove(process)
                left.append(item)
        return left

    def observe(self, seconds: float) -> None:
        """Note how long a task took; the number of deliveries sent ahead follows from it."""
        if self.mean_seconds is None or seconds > self.mean_seconds:
            self.mean_seconds = seconds
        else:
            self.mean_seconds += 0.05 * (seconds - self.mean_seconds)

    def take_back_stuck(self, now: float) -> list[WorkItem]:
        """Take back the deliveries that wait behind tasks that run longer than expected."""
        items: list[WorkItem] = []
        for process in self.processes:
            if process.ready and len(process.items) > process.slots:
                running = process.link.running()
                if len(running) == process.slots and all(
                    now - at > STUCK_SECONDS for at in running.values()
                ):
                    items += process.take_back()
        if items:
            self.mean_seconds = max(self.mean_seconds or 0.0, STUCK_SECONDS)
        return items

    def ended(self, process: PoolProcess) -> None:
        """Forget a process that has ended. If it never got ready, the next start waits."""
        self.processes.remove(process)
        if process.ready:
            self._failed_starts = 0
        else:
            self._start_later()
        process.close()

    def close(self) -> None:
        """End all processes and the fork server; retired processes may close their lifespans."""
        give_up_at = self._clock.monotonic() + CLOSING_SECONDS
        for process in self.processes:
            process.close_lifespans(max(0.0, give_up_at - self._clock.monotonic()))
        for process in self.processes:
            process.kill("the worker ended")
        for process in self.processes:
            process.wait()
            process.close()
        self.processes.clear()
        self._starter.close()

    def _start_later(self) -> None:
        """Delay the next start: the more starts failed in a row, the longer."""
        self._failed_starts += 1
        pause = min(30.0, 0.5 * 2**self._failed_starts)
        self._start_after = self._clock.monotonic() + pause

    def _ahead(self) -> int:
        """How many deliveries to send to a process beyond its slots."""
        mean = self.mean_seconds
        if mean is None or mean > AHEAD_SECONDS / 2:
            return 0
        return self._plan.slots * min(MOST_AHEAD, int(AHEAD_SECONDS / max(mean, 1e-6)))


def _load(process: PoolProcess) -> float:
    """The share of a process's slots that have something to do."""
    return len(process.items) / process.slots
