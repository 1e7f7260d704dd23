"""The dispatcher: sends ready deliveries to the pool and turns its answers into outcomes."""

from __future__ import annotations

import logging
import selectors
from collections.abc import Callable, Sequence
from typing import Any

from aztask.lease.keeper import LeaseKeeper
from aztask.settlement import Abandon, from_record
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.pipeline import Executor
from aztask.worker.pipeline.work import Job, Stage
from aztask.worker.pool.children import Pool, PoolProcess
from aztask.worker.pool.forking import Server
from aztask.worker.pool.requests import Requests

logger = logging.getLogger(__name__)

NO_DEADLINE = 1e18


class Dispatcher:
    """Between the supervisor's loop and the pool."""

    def __init__(
        self,
        pool: Pool,
        deliveries: Deliveries,
        executor: Executor,
        keeper: LeaseKeeper,
        requests: Requests,
        selector: selectors.BaseSelector,
        *,
        clock: Clock,
        finish: Callable[[Sequence[Job]], None],
        over: Callable[[Sequence[Job]], None],
    ) -> None:
        """finish: takes jobs with an outcome. over: takes jobs with nothing left to do."""
        self._pool = pool
        self._deliveries = deliveries
        self._executor = executor
        self._keeper = keeper
        self._requests = requests
        self._selector = selector
        self._clock = clock
        self._finish = finish
        self._over = over
        pool.on_process = self._watch
        pool.on_server = self._watch_server

    def feed(self) -> None:
        """Send ready deliveries to the pool; those whose lease lapsed meanwhile never run."""
        room = self._pool.room()
        ready = self._deliveries.ready
        if not room or not ready:
            return
        now = self._clock.monotonic()
        batch: list[Job] = []
        while ready and len(batch) < room:
            job = ready.popleft()
            if job.settled or job.lease.alive(now):
                batch.append(job)
            else:
                job.note("lease_lost", "it lapsed before the task could start")
                logger.warning(
                    "task %s: the lease lapsed while the message waited in this worker; "
                    "lower --prefetch or raise --lease",
                    job.key.task_id,
                )
                self._over([job])
        left = self._pool.feed(batch, _packet)
        for job in batch:
            job.stage = Stage.SENT
        for job in left:
            job.stage = Stage.READY
        self._deliveries.back(left)
        hit("sent", len(batch) - len(left))

    def tell(self, job: Job, packet: list[Any]) -> None:
        """A control packet to the process that runs the job."""
        for process in self._pool.processes:
            if job.number in process.jobs:
                process.tell(packet)

    def _watch(self, process: PoolProcess) -> None:
        self._selector.register(process.outbox, selectors.EVENT_READ, lambda: self._read(process))

    def _watch_server(self, server: Server) -> None:
        self._selector.register(server, selectors.EVENT_READ, lambda: self._served(server))

    def _served(self, server: Server) -> None:
        """Pool processes have started or ended, or their server has and all of them with it."""
        ended = self._pool.served(server)
        if server.gone:
            self._selector.unregister(server)
            server.close()
        for process in ended:
            self._ended(process)

    def _read(self, process: PoolProcess) -> None:
        """Take a process's answers; see `aztask.worker.pool.runner` for what they are."""
        concluded: list[Job] = []
        for kind, *rest in process.answers():
            if kind in ("done", "failed", "lost"):
                number, started_at, seconds, *details = rest
                job = process.jobs.pop(number, None)
                if job is None:
                    logger.warning("%s answered for run %s, which it does not run", process, number)
                    continue
                job.started_at, job.duration = started_at, seconds
                self._pool.observe(seconds)
                if self._conclude(job, kind, details):
                    concluded.append(job)
            elif kind == "ready":
                process.ready = True
                self._pool.fill()
            elif kind == "broken":
                logger.error("a pool process cannot start: %s", rest[0])
            else:
                self._requests.answer(process, kind, *rest)
        self._finish(concluded)

    def _conclude(self, job: Job, kind: str, details: list[Any]) -> bool:
        """Turn an answer into the job's outcome; False when there is nothing to settle."""
        if job.stage is Stage.DONE:
            return False
        job.stage = Stage.FINISHING
        if kind == "done":
            self._executor.succeeded(job, details[0])
        elif job.cancelled:
            self._executor.cancelled(job)
        elif kind == "failed":
            record, error_type, error, trace = details
            self._executor.failed(job, from_record(record), error_type, error, trace)
        else:
            self._gone(job, job.stop_reason or "the task gave up")
            return False
        return True

    def _gone(self, job: Job, why: str) -> None:
        """The task stopped because of its lease. Nothing is recorded.

        A lost lease is not settled; one that is held still (the task reached its `max_lease`) is
        abandoned, so that the message need not wait for its end.
        """
        job.note("lease_lost", why)
        if job.settled or not job.lease.alive(self._clock.monotonic()):
            self._over([job])
        else:
            job.settlement = Abandon()
            self._finish([job])

    def _ended(self, process: PoolProcess) -> None:
        """A pool process is gone: what it had not read goes on, what it ran has failed."""
        self._read(process)
        self._selector.unregister(process.outbox)
        reason = process.ending()
        self._deliveries.back(process.take_back())
        running = list(process.jobs.values())
        process.jobs.clear()
        if running or not process.retiring:
            logger.warning("%s (%d tasks ran in it)", reason, len(running))
        self._pool.ended(process)
        for job in running:
            self._interrupted(job, process.culprit, reason)
        self._pool.fill()

    def _interrupted(self, job: Job, culprit: int | None, reason: str) -> None:
        """What ran in a process that is gone: failed, lost, or merely beside the culprit."""
        if job.stage is Stage.DONE:
            return
        job.stage = Stage.FINISHING
        now = self._clock.monotonic()
        job.duration = now - (now if job.started_at is None else job.started_at)
        if job.cancelled:
            self._executor.cancelled(job)
            self._finish([job])
        elif job.stop_reason:
            self._gone(job, job.stop_reason)
        elif culprit is not None and job.number != culprit:
            self._executor.release([job], f"it ran beside another task: {reason}")
            self._over([job])
        else:
            kind = "WorkerCrashed" if culprit is None else "TimeLimitExceeded"
            self._executor.died(job, kind, reason)
            self._finish([job])


def _packet(job: Job) -> list[Any]:
    """A delivery as the pool gets it; see `aztask.worker.pool.runner`."""
    deadline = NO_DEADLINE if job.settled else job.delivery.deadline
    return [job.number, job.message_fields(), job.delivery.delivery_count, deadline]
