"""The dispatcher: sends ready deliveries to the pool and turns its answers into outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from aztask.errors import MaxLeaseExceeded
from aztask.settlement import Abandon, from_record
from aztask.support.failpoint import hit
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.reporting import report_killed
from aztask.worker.pipeline.work import Stage, Stop, WorkItem, names
from aztask.worker.pool.children import Pool, PoolProcess
from aztask.worker.pool.forking import ForkServerHandle
from aztask.worker.pool.leaseguard import NO_DEADLINE, NO_NEWS, STOP_GRACE
from aztask.worker.pool.requests import TaskRequests
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


class PoolDispatcher:
    """Feeds the pool and handles its answers, in the supervisor's loop."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        pool: Pool,
        pipeline: Pipeline,
        requests: TaskRequests,
        *,
        finish: Callable[[Sequence[WorkItem]], None],
        over: Callable[[Sequence[WorkItem]], None],
        late: Callable[[Sequence[WorkItem]], None],
    ) -> None:
        """finish: takes items that have an outcome. over: takes items that need nothing more.

        late: takes items that missed their slots before they started.
        """
        self._mailbox = runtime.mailbox
        self._killed = runtime.app.hooks.killed
        self._deliveries = runtime.deliveries
        self._clock = runtime.clock
        self._pool = pool
        self._pipeline = pipeline
        self._verdicts = pipeline.verdicts
        self._requests = requests
        self._finish = finish
        self._over = over
        self._late = late
        pool.on_process = self._watch
        pool.on_server = self._watch_server

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
            if item.settled or item.lease.alive(now):
                batch.append(item)
            else:
                item.note("lease_lost", "it expired before the task could start")
                logger.warning(
                    "%s: the lease expired while the message waited in this worker, it will be "
                    "redelivered; lower --prefetch or raise --lease",
                    item.label,
                )
                self._over([item])
        left = self._pool.feed(batch, _packet)
        self._deliveries.back(left)
        hit("sent", len(batch) - len(left))

    def tell(self, item: WorkItem, packet: list[Any]) -> None:
        """Send a control packet to the process that runs the item."""
        for process in self._pool.processes:
            if item.number in process.items:
                process.tell(packet)

    def _watch(self, process: PoolProcess) -> None:
        self._mailbox.watch(process.outbox, lambda: self._read(process))

    def _watch_server(self, server: ForkServerHandle) -> None:
        self._mailbox.watch(server, lambda: self._served(server))

    def _served(self, server: ForkServerHandle) -> None:
        """Handle pool processes that started or ended, or the end of their server and of all."""
        ended = self._pool.served(server)
        if server.gone:
            self._mailbox.unwatch(server)
            server.close()
        for process in ended:
            self._ended(process)

    def _read(self, process: PoolProcess) -> None:
        """Handle a process's answers; `aztask.worker.pool.runner` lists them."""
        concluded: list[WorkItem] = []
        for kind, *rest in process.answers():
            if kind in ("done", "failed", "lost"):
                number, started_at, seconds, *details = rest
                item = process.items.pop(number, None)
                if item is None:
                    logger.warning(
                        "%s answered for delivery %s, which it does not hold: ignored",
                        process,
                        number,
                    )
                    continue
                if item.run is not None:
                    item.run.started_at, item.run.duration = started_at, seconds
                self._pool.observe(seconds)
                if self._conclude(item, kind, details):
                    concluded.append(item)
            elif kind == "late":
                if item := process.items.pop(rest[0], None):
                    item.taken_back()
                    self._late([item])
            elif kind == "ready":
                process.ready = True
                self._pool.fill()
            elif kind == "broken":
                logger.error("a pool process %s", rest[0])
            elif kind == "overdue":
                self._overdue(process, *rest)
            else:
                self._requests.answer(process, kind, *rest)
        self._finish(concluded)

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
            self._verdicts.succeeded(item, details[0])
        elif item.run is not None and item.run.cancelled:
            self._verdicts.cancelled(item)
        elif kind == "failed":
            record, error_type, error, trace = details
            self._verdicts.failed(item, from_record(record), error_type, error, trace)
        else:
            self._gone(
                item,
                item.stop.reason
                if item.stop
                else "the task ended itself because its lease was lost",
            )
            return False
        return True

    def _gone(self, item: WorkItem, why: str) -> None:
        """The task stopped because of its lease. Nothing is recorded.

        A lost lease is not settled. A lease that is still held is abandoned, so that the message is
        redelivered at once.
        """
        item.note("lease_lost", why)
        if item.settled or not item.lease.alive(self._clock.monotonic()):
            self._over([item])
        else:
            item.decide(Abandon())
            self._finish([item])

    def _ended(self, process: PoolProcess) -> None:
        """A pool process ended: its unread deliveries go to others, its running tasks failed."""
        self._read(process)
        self._mailbox.unwatch(process.outbox)
        reason = process.ending()
        self._deliveries.back(process.take_back())
        running = list(process.items.values())
        process.items.clear()
        if running or not process.retiring:
            logger.warning("%s ended while it ran %s: %s", process, names(running), reason)
        self._pool.ended(process)
        for item in running:
            self._interrupted(item, process.culprit, reason)
        self._pool.fill()

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
            self._verdicts.cancelled(item)
            self._finish([item])
        elif run.stop is not None and run.stop.failed:
            self._verdicts.died(item, MaxLeaseExceeded.__name__, run.stop.reason)
            self._finish([item])
        elif run.stop is not None:
            self._gone(item, run.stop.reason)
        elif culprit is not None and item.number != culprit:
            self._pipeline.release([item], f"it ran beside another task: {reason}")
            self._over([item])
        else:
            kind = "WorkerCrashed" if culprit is None else "TimeLimitExceeded"
            self._verdicts.died(item, kind, reason)
            self._finish([item])


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
