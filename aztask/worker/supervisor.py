"""The supervisor: one loop that moves deliveries from the intakes through the pool to settlement.

Threads: this loop; an intake for each queue; the lease keeper; lanes where the broker or the result
store is remote. Only the loop changes jobs' stages and pool processes; the others post to it.
No task code runs in this process, so nothing a task does delays a renewal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import uuid
from collections import deque
from collections.abc import Sequence
from itertools import count
from types import FrameType
from typing import Any

from aztask.app import App
from aztask.clock import SYSTEM_CLOCK, Clock
from aztask.delivery import Delivery
from aztask.lease import Lease
from aztask.leasekeeper import LeaseKeeper
from aztask.results.base import WorkerRecord
from aztask.settlement import from_record
from aztask.worker.chores import Chores
from aztask.worker.executor import Executor
from aztask.worker.failpoint import hit
from aztask.worker.intake import Intake
from aztask.worker.job import Job, Stage
from aztask.worker.journal import Journal
from aztask.worker.lane import Lane, Mailbox
from aztask.worker.limits import Limits
from aztask.worker.options import WorkerOptions
from aztask.worker.pool.children import Pool, PoolProcess
from aztask.worker.pool.requests import Requests

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
IDLE_TICK_SECONDS = 1.0
RETRY_PAUSE = 0.5
LANE_THREADS = 4
FIRST_PREFETCH = 4
PREFETCH_SECONDS = 0.25
MOST_PREFETCH = 1000
NO_DEADLINE = 1e18


class Supervisor:
    """One worker: `run` returns when it has stopped."""

    def __init__(
        self, app: App, app_spec: str, options: WorkerOptions, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.app = app
        self.options = options
        self._clock = clock
        self.name = options.name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)
        mailbox = self._mailbox = Mailbox(self._wake)
        self.journal = Journal(app.open_events(self.name), clock)
        self.keeper = LeaseKeeper(
            app.broker,
            clock=clock,
            renew_at=app.settings.renew_at,
            on_lost=lambda lease: mailbox.post(lambda: self._lease_lost(lease)),
            on_renewed=lambda lease, age: mailbox.post(lambda: self._renewed(lease, age)),
            on_settleable=self._wake,
        )
        self.executor = Executor(app, self.keeper, name=self.name, clock=clock)
        threads = LANE_THREADS if app.remote else 0
        self._claims: Lane[Job] = Lane(
            "claim", self.executor.claim, self._claimed, mailbox, threads=threads
        )
        self._finishes: Lane[Job] = Lane(
            "finish", self.executor.finish, self._finished, mailbox, threads=threads
        )
        self._pool = Pool(
            app_spec,
            processes=options.processes,
            slots=options.slots,
            on_process=self._watch,
            clock=clock,
        )
        self._limits = Limits(self._pool, self.keeper, app.settings, options, self.journal, clock)
        self._requests = Requests(app, self.keeper, self._limits, mailbox, threads=threads)
        self._chores = Chores(app, clock, mailbox, threads=min(threads, 1))
        self._intakes = [
            Intake(
                app.broker,
                queue,
                lease=self._lease_seconds(queue),
                wait=0.05 if options.burst else 1.0,
                take=lambda intake, batch: mailbox.post(lambda: self._received(intake, batch)),
            )
            for queue in options.queues
        ]
        self._numbers = count(1)
        self._jobs: dict[int, Job] = {}
        self._by_lease: dict[Lease, Job] = {}
        self._ready: deque[Job] = deque()
        self._later: list[tuple[float, Job]] = []
        self._next_tick = 0.0
        self._signals = 0
        self._draining_until: float | None = None
        self._born = clock.wall()
        self.finished = 0

    # -- life --------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until told to stop (a signal, `stop`), or until `burst` or `max_tasks` says so."""
        self._pool.fill()
        self.keeper.start()
        for intake in self._intakes:
            intake.start()
        try:
            while not self._done():
                self._turn()
        finally:
            self._shut()

    def stop(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Drain and end; a second time: give everything back now. A signal handler."""
        self._signals += 1
        self._wake()

    def _done(self) -> bool:
        if self._draining_until is None:
            if self._signals or self._enough() or self._drained():
                self._drain()
            return False
        if not self._jobs:
            return True
        if self._signals > 1 or self._clock.monotonic() >= self._draining_until:
            self._give_back_running()
            return True
        return False

    def _enough(self) -> bool:
        return self.options.max_tasks is not None and self.finished >= self.options.max_tasks

    def _drained(self) -> bool:
        """Whether a burst has come to its end: nothing held, nothing found, nothing delayed."""
        if not self.options.burst or self._jobs:
            return False
        idle = all(intake.idle for intake in self._intakes)
        return idle and self._chores.drained(self.options.queues)

    def _record(self, *, stopped: bool = False) -> WorkerRecord:
        return WorkerRecord(
            self.name,
            self._born,
            self._clock.wall(),
            self.options.queues,
            len(self._jobs),
            self.finished,
            stopped,
        )

    def _drain(self) -> None:
        """Receive nothing more, give back what has not started, let the rest finish."""
        self._draining_until = self._clock.monotonic() + self.options.shutdown_timeout
        for intake in self._intakes:
            intake.stop()
        self._give_back_waiting()

    def _give_back_waiting(self) -> None:
        waiting = list(self._ready) + [job for _, job in self._later if job.settlement is None]
        for process in self._pool.processes:
            waiting += process.take_back()
        self._ready.clear()
        self._later = [entry for entry in self._later if entry[1].settlement is not None]
        if waiting:
            self.executor.release(waiting)
            self._over(waiting, counted=False)

    def _give_back_running(self) -> None:
        """End the pool: what ran is given back, and its start does not count."""
        jobs = list(self._jobs.values())
        for process in self._pool.processes:
            process.kill("the worker stops")
        for process in self._pool.processes:
            process.process.wait()
        logger.warning("%d running tasks are given back", len(jobs))
        self.executor.release([job for job in jobs if job.settlement is None])
        self._over(jobs, counted=False)

    def _shut(self) -> None:
        for intake in self._intakes:
            intake.stop()
        for process in self._pool.processes:
            process.retire()
        for intake in self._intakes:
            intake.join(5.0)
        self._mailbox.run()
        if leftover := list(self._jobs.values()):
            self.executor.release(leftover)
            self._over(leftover, counted=False)
        for lane in (self._claims, self._finishes):
            lane.stop()
        self.keeper.stop()
        self._pool.close()
        self._requests.stop()
        self._chores.tell(self._record(stopped=True))
        self._chores.stop()
        for intake in self._intakes:
            intake.close()
        self.journal.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # -- the turn ----------------------------------------------------------------------------

    def _turn(self) -> None:
        self.journal.flush()
        for key, _ in self._selector.select(self._patience()):
            key.data()
        self._mailbox.run()
        self._finishes.turn()
        self._claims.turn()
        self._feed()
        self._allow()
        now = self._clock.monotonic()
        if now >= self._next_tick:
            self._tick(now)

    def _patience(self) -> float:
        if len(self._claims) or len(self._finishes) or (self._ready and self._pool.room()):
            return 0.0
        return max(0.0, self._next_tick - self._clock.monotonic())

    def _tick(self, now: float) -> None:
        """What is looked at regularly: limits, retries of stages, stuck and missing processes."""
        busy = bool(self._jobs) or self.options.burst or self._draining_until is not None
        self._next_tick = now + (TICK_SECONDS if busy else IDLE_TICK_SECONDS)
        self._limits.enforce(now)
        self._ready.extendleft(reversed(self._pool.take_back_stuck(now)))
        due = [job for at, job in self._later if at <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        self._finishes.submit(job for job in due if job.settlement is not None)
        self._claims.submit(job for job in due if job.settlement is None)
        self._pool.fill()
        self._chores.tick(now, self._record)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is awake already (full), or gone
            self._wake_out.send(b"\0")

    def _woken(self) -> None:
        try:
            while len(self._wake_in.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    # -- receiving ---------------------------------------------------------------------------

    def _lease_seconds(self, queue: str) -> float:
        if self.options.lease is not None:
            return self.options.lease
        return self.app.queue_settings(queue).lease_seconds

    def _received(self, intake: Intake, deliveries: list[Delivery]) -> None:
        """New deliveries: hold their leases, open them, and send them on their way."""
        hit("received", len(deliveries))
        jobs = [self._job(intake, delivery) for delivery in deliveries]
        self.keeper.hold(intake.receiver, [job.lease for job in jobs])
        self.executor.open(jobs)
        self.journal.received(jobs)
        self._finishes.submit(job for job in jobs if job.settlement is not None)
        self._claims.submit(job for job in jobs if job.settlement is None)

    def _job(self, intake: Intake, delivery: Delivery) -> Job:
        number = next(self._numbers)
        lease = Lease(
            delivery,
            seconds=delivery.lease_seconds,
            granted_at=delivery.deadline - delivery.lease_seconds,
        )
        job = Job(
            number,
            delivery,
            intake.receiver,
            lease,
            intake.queue,
            self._clock.wall(),
            f"{self.name}/{number}",
        )
        self._jobs[number] = job
        self._by_lease[lease] = job
        return job

    def _allow(self) -> None:
        """Tell the intakes how much more there is room for."""
        window = self._pool.capacity + self._prefetch()
        if self.options.max_tasks is not None:
            window = min(window, self.options.max_tasks - self.finished)
        room = window - len(self._jobs)
        if self._draining_until is not None:
            room = 0
        elif 0 < room < min(window // 4, 64) and self._ready:
            return  # a fuller batch is worth the short wait
        for intake in self._intakes:
            intake.allow(max(0, room))

    def _prefetch(self) -> int:
        """Deliveries to hold beyond those that run: about a quarter of a second's work."""
        if self.options.prefetch is not None:
            return self.options.prefetch
        mean = self._pool.mean_seconds
        if mean is None:
            return FIRST_PREFETCH
        return min(MOST_PREFETCH, int(self._pool.capacity * PREFETCH_SECONDS / max(mean, 1e-5)))

    # -- running -----------------------------------------------------------------------------

    def _claimed(self, jobs: Sequence[Job]) -> None:
        now = self._clock.monotonic()
        for job in jobs:
            if job.stage is Stage.READY:
                self._ready.append(job)
            elif job.stage is Stage.DONE:
                self._over([job], counted=False)
            elif job.settlement is not None:
                self._finishes.submit([job])
            else:
                self._try_later(job, now)
        self._finishes.turn()

    def _feed(self) -> None:
        """Send ready deliveries to the pool; those whose lease lapsed meanwhile never run."""
        room = self._pool.room()
        if not room or not self._ready:
            return
        now = self._clock.monotonic()
        batch: list[Job] = []
        while self._ready and len(batch) < room:
            job = self._ready.popleft()
            if job.settled or job.lease.alive(now):
                batch.append(job)
            else:
                job.note("lease_lost", "it lapsed before the task could start")
                logger.warning("delivery of %s lapsed while it waited; lower --prefetch", job.key)
                self._over([job], counted=False)
        left = self._pool.feed(batch, self._packet)
        for job in batch:
            job.stage = Stage.SENT
        for job in reversed(left):
            job.stage = Stage.READY
            self._ready.appendleft(job)
        hit("sent", len(batch) - len(left))

    @staticmethod
    def _packet(job: Job) -> list[Any]:
        deadline = NO_DEADLINE if job.settled else job.delivery.deadline
        return [job.number, job.message_fields(), job.delivery.delivery_count, deadline]

    def _watch(self, process: PoolProcess) -> None:
        self._selector.register(process.outbox, selectors.EVENT_READ, lambda: self._read(process))
        self._selector.register(
            process.pidfd, selectors.EVENT_READ, lambda: self._process_ended(process)
        )

    def _read(self, process: PoolProcess) -> None:
        """Take a process's answers; see `aztask.worker.pool.runner` for what they are."""
        concluded: list[Job] = []
        for kind, *rest in process.answers():
            if kind in ("done", "failed", "lost"):
                number, started_at, seconds, *details = rest
                job = process.jobs.pop(number)
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
        self._finishes.submit(concluded)

    def _conclude(self, job: Job, kind: str, details: list[Any]) -> bool:
        """Turn an answer into the job's outcome; False when there is nothing to settle."""
        if job.stage is Stage.DONE:
            return False
        job.stage = Stage.FINISHING
        if kind == "done":
            self.executor.succeeded(job, details[0])
        elif kind == "failed":
            record, error_type, error, trace = details
            self.executor.failed(job, from_record(record), error_type, error, trace)
        else:
            job.note("lease_lost", job.stop_reason or "the task gave up")
            self.keeper.drop([job.lease])
            self._over([job], counted=False)
            return False
        return True

    def _process_ended(self, process: PoolProcess) -> None:
        """A pool process is gone: what it had not read goes on, what it ran has failed."""
        self._read(process)
        self._selector.unregister(process.outbox)
        self._selector.unregister(process.pidfd)
        reason = process.ending()
        unread = process.take_back()
        self._ready.extendleft(reversed(unread))
        running = list(process.jobs.values())
        process.jobs.clear()
        if running or not process.retiring:
            logger.warning("%s (%d tasks ran in it)", reason, len(running))
        self._pool.ended(process)
        for job in running:
            self._interrupted(job, process, reason)
        self._pool.fill()

    def _interrupted(self, job: Job, process: PoolProcess, reason: str) -> None:
        """What ran in a process that is gone: failed, lost, or merely beside the culprit."""
        if job.stage is Stage.DONE:
            return
        job.stage = Stage.FINISHING
        job.duration = self._clock.monotonic() - (job.started_at or self._clock.monotonic())
        if process.culprit is not None and job.number != process.culprit:
            self.executor.release([job])
            self._over([job], counted=False)
        elif job.stop_reason and process.culprit == job.number:
            job.note("lease_lost", job.stop_reason)
            self.keeper.drop([job.lease])
            self._over([job], counted=False)
        else:
            kind = "TimeLimitExceeded" if process.culprit == job.number else "WorkerCrashed"
            self.executor.died(job, kind, reason)
            self._finishes.submit([job])

    # -- finishing ---------------------------------------------------------------------------

    def _finished(self, jobs: Sequence[Job]) -> None:
        now = self._clock.monotonic()
        for job in jobs:
            if job.stage is not Stage.DONE:
                self._try_later(job, now)
        self._over([job for job in jobs if job.stage is Stage.DONE], counted=True)

    def _try_later(self, job: Job, now: float) -> None:
        """A stage could not be done: again soon, or at once when a renewal was in the way."""
        pause = min(RETRY_PAUSE * 2 ** min(job.failures - 1, 5), 10.0) if job.failures else 0.01
        self._later.append((now + pause, job))
        self._next_tick = min(self._next_tick, now + pause)

    def _over(self, jobs: Sequence[Job], *, counted: bool) -> None:
        """These deliveries are done with, however they ended."""
        for job in jobs:
            if self._jobs.pop(job.number, None) is not None:
                self._by_lease.pop(job.lease, None)
                self.finished += counted
                self.journal.ended(job)
        self.keeper.drop(job.lease for job in jobs if not job.settled)

    # -- leases ------------------------------------------------------------------------------

    def _renewed(self, lease: Lease, age: float) -> None:
        job = self._by_lease.get(lease)
        if job is not None:
            self.journal.renewed(job, age)
            self._tell(job, ["renewed", job.number, lease.deadline])

    def _lease_lost(self, lease: Lease) -> None:
        """The broker or the clock says that it is over: stop the task, settle nothing."""
        job = self._by_lease.get(lease)
        if job is not None and job.stage is Stage.SENT:
            self._limits.stop(job, "lease", lease.lost_reason)
        elif job is not None:
            logger.info("lease of %s lost while it waited: %s", job.number, lease.lost_reason)

    def _tell(self, job: Job, packet: list[Any]) -> None:
        for process in self._pool.processes:
            if job.number in process.jobs:
                process.tell(packet)
