"""The dispatcher: sends ready deliveries to the pool and turns its answers into outcomes."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Final

from aztask.errors import MaxLeaseExceeded
from aztask.settlement import Abandon, from_record
from aztask.support.failpoint import hit
from aztask.support.parts import Part
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.work import Stage, Stop, WorkItem, names, report_killed
from aztask.worker.pool.leaseguard import NO_DEADLINE, NO_NEWS, STOP_GRACE
from aztask.worker.pool.pool import Pool, PoolProcess
from aztask.worker.pool.requests import TaskRequests
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Stages, each

# -- Notices pool processes that no longer work, and replaces them.
#
# Rules
# 1. Each ready process is asked every `PING_SECONDS` whether its control thread is alive. One that
#    has not answered for `SILENT_SECONDS` is shown as a failing part, and no more: a task may hold
#    the interpreter, which is its right until its time limit.
# 2. A process that has closed its connection is ending; one that is still there `ENDING_SECONDS`
#    later is killed.
# 3. A process that runs nothing, by its board, and has deliveries for `IDLE_SECONDS` is stuck: it
#    is killed. What it has not read goes to others, and the rest has failed.

PING_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0
ENDING_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 30.0


class PoolWatch:
    """Only the supervisor's loop uses it. Times are on the clock of the deadlines."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._part = Part("pool processes")
        self._pinged: dict[PoolProcess, float] = {}
        self._idle: dict[PoolProcess, float] = {}
        self._asked: dict[PoolProcess, float] = {}
        self._ending: dict[PoolProcess, float] = {}

    def alive(self, process: PoolProcess) -> None:
        """The process has answered the ping."""
        self._pinged.pop(process, None)

    def tick(self, now: float) -> None:
        """Check all processes. Cheap enough for every tick."""
        living = self._pool.processes
        for known in (self._pinged, self._idle, self._asked, self._ending):
            for gone in known.keys() - set(living):
                del known[gone]
        silent: list[PoolProcess] = []
        for process in living:
            if process.ready and not process.kill_reason:
                self._ping(process, now)
                self._check_ending(process, now)
                self._check_idle(process, now)
            if now - self._pinged.get(process, now) > SILENT_SECONDS:
                silent.append(process)
        self._part.begin()
        if silent:
            names = ", ".join(str(process) for process in silent)
            self._part.trouble(
                f"{names} has not answered for more than {SILENT_SECONDS:g} s: does a task hold "
                "the interpreter?"
            )
        self._part.rest()

    def _ping(self, process: PoolProcess, now: float) -> None:
        if process not in self._pinged and now - self._asked.get(process, 0.0) >= PING_SECONDS:
            self._pinged[process] = self._asked[process] = now
            process.tell(["ping", 0])

    def _check_ending(self, process: PoolProcess, now: float) -> None:
        if process.link.hung_up and now - self._ending.setdefault(process, now) > ENDING_SECONDS:
            self._kill(process, "it closed its connection to the worker")

    def _check_idle(self, process: PoolProcess, now: float) -> None:
        if not process.items or process.link.running():
            self._idle.pop(process, None)
        elif now - self._idle.setdefault(process, now) > IDLE_SECONDS:
            self._kill(process, "it was given tasks and ran none of them")

    @staticmethod
    def _kill(process: PoolProcess, reason: str) -> None:
        logger.error("%s is replaced: %s", process, reason)
        process.kill(reason)


logger = logging.getLogger(__name__)


class PoolDispatcher:
    """Feeds the pool and handles its answers, in the supervisor's loop."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        pool: Pool,
        pipeline: Pipeline,
        requests: TaskRequests,
        core: Stages,
    ) -> None:
        self._core = core
        self.watch = PoolWatch(pool)
        self._mailbox = runtime.mailbox
        self._killed = runtime.app.hooks.killed
        self._deliveries = runtime.deliveries
        self._clock = runtime.clock
        self._pool = pool
        self._pipeline = pipeline
        self._decisions = pipeline.decisions
        self._requests = requests

    def fill(self) -> None:
        """Start missing pool processes, and read what they answer from now on."""
        for process in self._pool.fill():
            self._mailbox.watch(process.link.outbox, partial(self._read, process))

    def bury(self) -> None:
        """Handle the pool processes that have ended since the last turn."""
        for process in self._pool.take_ended():
            self._ended(process)

    def feed(self) -> None:
        """Send ready deliveries to the pool; those whose lease has expired never run."""
        room = self._pool.room()
        ready = self._deliveries.ready
        if not room or not ready:
            return
        now = self._clock.monotonic()
        batch: list[WorkItem] = []
        while ready and len(batch) < room:
            item = ready.popleft()
            if item.stage is not Stage.READY:
                continue  # it was put aside
            if item.settled or item.lease.alive(now):
                batch.append(item)
            else:
                item.note("lease_lost", "it expired before the task could start")
                logger.warning(
                    "%s: the lease expired while the message waited in this worker, it will be "
                    "redelivered; lower --prefetch or raise --lease",
                    item.label,
                )
                self._core.ended([item])
        left = self._pool.feed(batch, _packet, self._core)
        self._deliveries.back(left)
        hit("sent", len(batch) - len(left))

    def tell(self, item: WorkItem, packet: list[Any]) -> None:
        """Send a control packet to the process that runs the item."""
        for process in self._pool.processes:
            if item.number in process.items:
                process.tell(packet)

    def _read(self, process: PoolProcess) -> None:
        """Handle a process's answers; `aztask.worker.pool.runner` lists them."""
        concluded: list[WorkItem] = []
        try:
            answers = process.link.answers()
        except Exception as error:  # noqa: BLE001  # task code can write anything to the socket
            self._unreadable(process, error)
            return
        if process.link.hung_up and not process.unwatched:  # or each wait would end at once
            process.unwatched = True
            self._mailbox.unwatch(process.link.outbox)
        for answer in answers:
            try:
                self._take(process, answer, concluded)
            except Exception as error:  # noqa: BLE001  # it concerns one delivery
                number = answer[1] if isinstance(answer, list) and len(answer) > 1 else None
                if (item := self._deliveries.numbered(number)) is None:
                    self._unreadable(process, error)
                    break
                self._core.put_aside(item, error)
        self._core.finish([item for item in concluded if item.stage is Stage.DECIDED])

    def _unreadable(self, process: PoolProcess, error: Exception) -> None:
        """Replace a process that sent something else than an answer."""
        logger.error(
            "%s sent an answer that cannot be read, it is replaced", process, exc_info=error
        )
        process.kill(f"it sent an answer that cannot be read: {type(error).__name__}")

    def _take(self, process: PoolProcess, answer: list[Any], concluded: list[WorkItem]) -> None:
        """Handle one answer. concluded: gets the item if it has an outcome now."""
        kind, *rest = answer
        if kind in ("done", "failed", "parked", "renewed", "lost", "stopped"):
            number, started_at, seconds, *details = rest
            item = process.items.pop(number, None)
            process.ran += 1
            if item is None:
                logger.warning(
                    "%s answered for delivery %s, which it does not hold: ignored",
                    process,
                    number,
                )
                return
            if item.run is not None:
                item.run.started_at, item.run.duration = started_at, seconds
            self._pool.observe(seconds)
            if self._conclude(item, kind, details):
                concluded.append(item)
        elif kind == "late":
            if item := process.items.pop(rest[0], None):
                item.taken_back()
                self._core.late([item])
        elif kind == "ready":
            process.ready = True
            self.fill()
        elif kind == "alive":
            self.watch.alive(process)
        elif kind == "broken":
            logger.error("a pool process %s", rest[0])
        elif kind == "overdue":
            self._overdue(process, *rest)
        else:
            self._requests.answer(process, kind, *rest)

    def _overdue(self, process: PoolProcess, number: int, ends: bool) -> None:
        """A pool process stopped a task itself, because this worker was silent for too long.

        ends: the task did not stop, so the process ended.
        """
        item = process.items.get(number)
        if item is None or item.run is None:
            return
        if item.run.stop is None:
            item.run.stop = Stop(NO_NEWS, self._clock.monotonic() + STOP_GRACE)
            logger.warning(
                "%s: its process interrupted it, it will be redelivered: %s (was this worker "
                "stopped or suspended?)",
                item.label,
                NO_NEWS,
            )
        if ends:
            process.kill(f"task {item.key.task_id} did not stop: {NO_NEWS}", number)

    def _conclude(self, item: WorkItem, kind: str, details: list[Any]) -> bool:
        """Turn an answer into the item's outcome; False when there is nothing to settle."""
        if item.stage is not Stage.RUNNING:
            return False
        if kind == "done":
            self._decisions.succeeded(item, details[0])
        elif item.run is not None and item.run.cancelled:
            self._decisions.cancelled(item)
        elif kind == "stopped":
            self._give_back(item, "the worker stops")
            return False
        elif kind == "failed":
            record, error_type, error, trace = details
            self._decisions.failed(item, from_record(record), error_type, error, trace)
        elif kind == "parked":
            self._decisions.parked(item, *details)
        elif kind == "renewed":
            self._decisions.renewed(item, *details)
        else:
            self._gone(
                item,
                item.stop.reason
                if item.stop
                else "the task ended itself because its lease was lost",
            )
            return False
        return True

    def _give_back(self, item: WorkItem, why: str) -> None:
        """Release the message of a run that does not count."""
        logger.info("%s is given back, any worker runs it again: %s", item.label, why)
        self._pipeline.release([item], why)
        self._core.ended([item])

    def _gone(self, item: WorkItem, why: str) -> None:
        """The task stopped because of its lease. Nothing is recorded.

        A lost lease is not settled. A lease that is still held is abandoned, so that the message is
        redelivered at once.
        """
        item.note("lease_lost", why)
        if item.settled or not item.lease.alive(self._clock.monotonic()):
            self._core.ended([item])
        else:
            item.decide(Abandon())
            self._core.finish([item])

    def _ended(self, process: PoolProcess) -> None:
        """A pool process ended: its unread deliveries go to others, its running tasks failed."""
        self._read(process)
        if not process.unwatched:
            process.unwatched = True
            self._mailbox.unwatch(process.link.outbox)
        reason = process.ending()
        self._deliveries.back(process.take_back())
        running = list(process.items.values())
        process.items.clear()
        if running or not process.retiring:
            logger.warning("%s ended while it ran %s: %s", process, names(running), reason)
        self._pool.ended(process)
        each(running, lambda item: self._interrupted(item, process.culprit, reason), self._core)
        self.fill()

    def _interrupted(self, item: WorkItem, culprit: int | None, reason: str) -> None:
        """End an item whose process ended: it failed, lost its lease, or ran beside the culprit."""
        run = item.run
        if item.stage is not Stage.RUNNING or run is None:
            return
        if run.started_at is not None:
            run.duration = self._clock.monotonic() - run.started_at
        if self._killed:
            kind = "WorkerCrashed" if culprit is None else "TaskKilled"
            report_killed(self._killed, item, kind, reason, self._clock)
        if run.cancelled:
            self._decisions.cancelled(item)
            self._core.finish([item])
        elif run.stop is not None and run.stop.failed:
            self._decisions.died(item, MaxLeaseExceeded.__name__, run.stop.reason)
            self._core.finish([item])
        elif run.stop is not None and run.stop.given_back:
            self._give_back(item, reason)
        elif run.stop is not None:
            self._gone(item, run.stop.reason)
        elif culprit is not None and item.number != culprit:
            self._give_back(item, f"it ran beside another task: {reason}")
        else:
            kind = "WorkerCrashed" if culprit is None else "TimeLimitExceeded"
            self._decisions.died(item, kind, reason)
            self._core.finish([item])


def _packet(item: WorkItem) -> list[Any]:
    """The packet of a delivery, as `aztask.worker.pool.runner` describes it."""
    deadline = NO_DEADLINE if item.settled else item.delivery.deadline
    deadline = min(deadline, item.permits_until)
    delivery = item.delivery
    fields = item.message_fields()
    packet = [item.number, fields, delivery.delivery_count, deadline, delivery.enqueued_at]
    given = None if item.input is None else item.input.packet()
    if item.window is not None and item.window.timed:
        return [*packet, given, [item.window.opens, item.window.closes]]
    return packet if given is None else [*packet, given]
