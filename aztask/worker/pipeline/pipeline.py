"""One delivery's life, stage by stage, for many deliveries at once.

    open    verify the signature, read the headers, find the task
    claim   a pointer? receive what it points to. Ended before? repeat its settlement. Cancelled,
            started too often, expired? decide so. Else own the start row: from here on the run is
            ours
    (the pool runs the task under the lease, and the retry policy decides)
    finish  record the outcome, settle or wait as the retry strategy says (`redelivery`), tell

Rules
1. Nothing is settled before its outcome is durable. Where broker and result store share a file,
   both are one transaction.
2. Each stage gets and gives whole batches. It changes jobs, never the supervisor: the supervisor
   reads off the jobs what became of them.
3. A store or a broker that is unreachable leaves the job as it was: it is tried again under its
   lease, and dropped unsettled when the lease ends.
4. Whatever a store, a codec or a broker raises for one delivery is that delivery's alone: see
   `aztask.worker.pipeline.isolation` and `aztask.worker.pipeline.refusals`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from aztask.app import App
from aztask.brokers.base import Transactional
from aztask.errors import BrokerError, CodecError
from aztask.lease.keeper import LeaseKeeper
from aztask.results.base import (
    Cancelled,
    Elsewhere,
    Finish,
    Outcome,
    Owned,
    Recorded,
    ResultStore,
    Start,
    StartAnswer,
    State,
    Unreadable,
)
from aztask.results.deadindex import index_for
from aztask.settlement import Abandon, Complete, DeadLetter, Decision, Release, Resubmit
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.display import storable
from aztask.support.failpoint import hit
from aztask.worker.pipeline.isolation import isolated
from aztask.worker.pipeline.pointers import UNDECODABLE, Pointers
from aztask.worker.pipeline.redelivery import UNKNOWN_TASK, Redelivery
from aztask.worker.pipeline.refusals import Refusals, text_of
from aztask.worker.pipeline.settling import Settling
from aztask.worker.pipeline.work import Job, Stage, message_of

logger = logging.getLogger(__name__)

DELIVERY_LIMIT = "delivery-limit"
EXPIRED = "expired"
UNREADABLE_RECORD = "unreadable-record"
INTERRUPTED = "Interrupted"

UNKNOWN_TASK_STEPS = 10
LONGEST_UNKNOWN_PAUSE = 30.0


class Executor:
    """The stages. One per worker; `claim` and `finish` may run on lane threads."""

    def __init__(
        self, app: App, keeper: LeaseKeeper, *, name: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._app = app
        self._keeper = keeper
        self._name = name
        self._clock = clock
        self._results: ResultStore | None = app.results
        self._redelivery = Redelivery(app, keeper, clock)
        self._pointers = Pointers(app, keeper, self._redelivery)
        broker, results = app.broker, app.results
        self._joint: Transactional | None = (
            broker
            if isinstance(broker, Transactional)
            and isinstance(results, Transactional)
            and broker.transaction_key == results.transaction_key
            else None
        )
        self._settling = Settling(
            keeper,
            self._redelivery,
            self._pointers,
            index_for(broker, results),
            clock=clock,
            joint=self._joint is not None,
        )
        self._refusals = Refusals(self._redelivery, self._settling, results, name=name)

    # -- open --------------------------------------------------------------------------------

    def open(self, jobs: Iterable[Job]) -> None:
        """Verify and read the headers. What cannot be read gets its settlement right here."""
        for job in jobs:
            try:
                self._open(job)
            except CodecError as error:
                job.settlement = DeadLetter(UNDECODABLE, str(error))
                logger.warning("message %s on %s: %s", job.delivery.position, job.queue, error)
            except Exception as error:  # a hostile message must not end the worker
                job.settlement = DeadLetter(UNDECODABLE, text_of(error))
                logger.exception("message %s on %s", job.delivery.position, job.queue)

    def _open(self, job: Job) -> None:
        job.message = self._app.codec.from_envelope(job.delivery.envelope, job.queue)
        job.saved = job.message.saved
        job.task = self._app.tasks.get(job.message.task)
        early = (job.message.eta or 0.0) - self._clock.wall()
        if early > 0:
            # a foreign producer's eta: put off in the broker, never held here
            job.clone = job.message.chained(delivery_base=self._redelivery.delivery_base(job))
            job.settlement = Resubmit(delay=early, counted=False)

    # -- claim -------------------------------------------------------------------------------

    def claim(self, jobs: Sequence[Job]) -> None:
        """Own the start rows. Crash window: a worker that dies from here on until the outcome is
        recorded leaves a start row whose owner is gone; the redelivery takes it over.
        """
        isolated(
            jobs,
            self._claim,
            unavailable=partial(self._put_off, "the result store does not answer"),
            refused=self._refusals.unclaimable,
        )

    def _claim(self, jobs: Sequence[Job]) -> None:
        """As `claim`; repeated for a start row that is ours already, it changes nothing."""
        try:
            jobs = self._pointers.fetch(jobs)
        except BrokerError as error:
            self._put_off("deferred messages could not be received", jobs, error)
            return
        if self._results is None:
            answers: list[StartAnswer] = [
                Owned(job.delivery.delivery_count - message_of(job).delivery_base) for job in jobs
            ]
        else:
            answers = self._results.start([self._start(job) for job in jobs])
        for job, answer in zip(jobs, answers, strict=True):
            try:
                self._claimed(job, answer)
            except Exception as error:  # noqa: BLE001  # it is this delivery's alone
                self._refusals.unclaimable(job, error)
        self._complete_first([job for job in jobs if job.stage is Stage.READY])
        hit("claimed", sum(job.owned for job in jobs))

    def _start(self, job: Job) -> Start:
        task, position = message_of(job).task, job.delivery.position
        return Start(job.key, task, job.queue, position, job.owner, self._name, self._clock.wall())

    def _claimed(self, job: Job, answer: StartAnswer) -> None:
        """Decide what the store's answer means for this delivery."""
        if isinstance(answer, Recorded):
            job.outcome = answer.outcome
            job.recorded = job.repeated = True
            job.settlement = answer.outcome.settlement
        elif isinstance(answer, Elsewhere):
            job.settlement = Complete()
        elif isinstance(answer, Unreadable):
            # it may have ended, so it is not run; as a dead letter nothing of it is lost
            job.settlement = DeadLetter(UNREADABLE_RECORD, answer.reason)
        elif isinstance(answer, Cancelled):
            job.owned = True
            self.cancelled(job)
        else:
            self._redelivery.own(job, answer)
            self._before_run(job)
        job.failures = 0

    def _before_run(self, job: Job) -> None:
        """The reasons not to run a delivery that we own; else it is ready."""
        message = message_of(job)
        limit = self._redelivery.start_limit(job)
        now = self._clock.wall()
        if message.expires is not None and now >= message.expires:
            self._conclude(job, State.EXPIRED, Complete())
        elif job.starts > limit:
            text = f"started {limit} times without an outcome; see the worker's log for the cause"
            self._conclude(job, State.FAILED, DeadLetter(DELIVERY_LIMIT, text))
        elif job.task is None:
            self._unknown_task(job, now)
        else:
            job.stage = Stage.READY

    def _unknown_task(self, job: Job, now: float) -> None:
        """Put it off while a rolling deploy may still bring the task, then give up."""
        message = message_of(job)
        grace = self._app.settings.unknown_task_grace_seconds
        delay = min(LONGEST_UNKNOWN_PAUSE, grace / UNKNOWN_TASK_STEPS)
        since = message.unknown_since if message.unknown_since is not None else now
        # in its place in a session the same message comes again: what it waited, its snoozes tell
        waited = message.snooze_count * delay if job.in_order else now - since
        if waited < grace:
            logger.warning("task %s is unknown here; trying again later", message.task)
            settlement = self._redelivery.put_off(job, delay)
            self._conclude(job, State.SNOOZED, settlement, UNKNOWN_TASK)
        else:
            text = f"no worker knew the task {message.task!r} for {grace:g} s"
            self._conclude(job, State.FAILED, DeadLetter(UNKNOWN_TASK, text))

    def _complete_first(self, jobs: list[Job]) -> None:
        """At most once: the message goes before the task runs; a crash from here on loses it."""
        once = [job for job in jobs if job.task and job.task.delivery == "at-most-once"]
        if not once:
            return
        for job in once:
            job.settlement = Complete()
        isolated(
            once,
            self._settling.settle,
            unavailable=self._not_settled,
            refused=lambda job, error: self._not_settled([job], error),
        )
        for job in once:
            job.settlement = None
            job.stage = Stage.READY if job.settled else Stage.DONE

    # -- the outcome -------------------------------------------------------------------------

    def succeeded(self, job: Job, value: bytes) -> None:
        """The task returned."""
        settlement = job.settlement = Complete()
        at, seconds = self._clock.wall(), job.duration
        job.outcome = Outcome(State.SUCCEEDED, settlement, value, at=at, duration=seconds)

    def failed(self, job: Job, decision: Decision, error_type: str, error: str, trace: str) -> None:
        """The task raised; `decision` is what its retry policy says."""
        state = State.FAILED
        settlement = self._redelivery.decide(job, decision)
        if not isinstance(settlement, DeadLetter) and not job.settled:
            counted = not isinstance(decision, Resubmit) or decision.counted
            state = State.RETRYING if counted else State.SNOOZED
        self._conclude(job, state, settlement, error_type, error, trace)

    def died(self, job: Job, error_type: str, error: str) -> None:
        """The task did not end by itself: its process died, or it was killed at a limit."""
        policy = job.task.retry if job.task else self._app.retry
        settlement = policy.decide_named(error_type, error, message_of(job))
        self.failed(job, settlement, error_type, error, "")

    def cancelled(self, job: Job) -> None:
        """The task was stopped because somebody cancelled it."""
        self._conclude(job, State.CANCELLED, Complete())

    def _conclude(
        self,
        job: Job,
        state: State,
        settlement: Decision,
        error_type: str = "",
        error: str = "",
        trace: str = "",
    ) -> None:
        if isinstance(settlement, DeadLetter) and not error_type:
            error_type, error = settlement.reason, settlement.description
        texts = (storable(error_type), storable(error), storable(trace))
        job.settlement = settlement
        job.outcome = Outcome(state, settlement, None, *texts, self._clock.wall(), job.duration)

    # -- finish ------------------------------------------------------------------------------

    def finish(self, jobs: Sequence[Job]) -> None:
        """Record the outcomes, then settle.

        If the process dies before the record, the task runs again; if it dies after the record
        and before the settlement, the redelivery finds the record and repeats the settlement.
        Where both share a file neither can happen alone.
        """
        isolated(
            [job for job in jobs if self._still_ours(job)],
            self._finish,
            unavailable=self._not_settled,
            refused=self._refusals.unfinishable,
        )

    def _finish(self, jobs: Sequence[Job]) -> None:
        """As `finish`, and repeatable: what is recorded or settled is not done again."""
        jobs = [job for job in jobs if job.stage is not Stage.DONE and self._refusals.sendable(job)]
        with self._transaction(jobs):
            kept = self._record(jobs)
            hit("recorded", len(kept))
            self._redelivery.write_counts(kept)
            answers = self._settling.carry_out(
                [job for job in kept if not self._redelivery.waits(job)]
            )
        for job, error in self._settling.book(answers):
            self._refusals.unfinishable(job, error)
        for job in kept:
            if self._redelivery.waits(job):
                self._redelivery.keep(job)
        hit("settled", sum(job.settled for job in kept))

    def release(self, jobs: Sequence[Job], why: str = "the worker stopped") -> None:
        """Give back deliveries that did not run, or whose run shall not count.

        What is delivered at most once cannot be given back any more: its run has failed, as `why`
        says.
        """
        gone = [job for job in jobs if job.settled]
        if gone:
            for job in gone:
                self.died(job, INTERRUPTED, why)
            self.finish(gone)
        jobs = [job for job in jobs if not job.settled]
        for job in jobs:
            job.outcome = None
            job.settlement = Release()
        isolated(
            jobs,
            self._release,
            unavailable=self._not_settled,
            refused=lambda job, error: self._not_settled([job], error),
        )
        for job in jobs:
            job.stage = Stage.DONE

    def _release(self, jobs: Sequence[Job]) -> None:
        owned = [(job.key, job.owner) for job in jobs if job.owned]
        with self._transaction(jobs):
            if self._results is not None and owned:
                self._results.disown(owned)
            answers = self._settling.carry_out([job for job in jobs if self._still_ours(job)])
        self._settling.book(answers)

    def abandon(self, jobs: Sequence[Job]) -> None:
        """Give back deliveries after an error that ends the worker. Their starts count.

        One of them may have caused the error: uncounted, it would end every worker that gets it.
        """
        for job in jobs:
            job.outcome, job.settlement = None, Abandon()
        isolated(
            [job for job in jobs if self._still_ours(job)],
            self._settling.settle,
            unavailable=self._not_settled,
            refused=lambda job, error: self._not_settled([job], error),
        )

    def _still_ours(self, job: Job) -> bool:
        """Whether its lease holds. Where it does not, nothing is recorded and nothing settled."""
        if job.settled or job.lease.alive(self._clock.monotonic()):
            return True
        job.note("lease_lost", job.lease.lost_reason or "its deadline passed")
        job.stage = Stage.DONE
        return False

    def _record(self, jobs: list[Job]) -> list[Job]:
        """The jobs whose outcome stands; those that somebody took over end here."""
        if self._results is None:
            return jobs
        due = [job for job in jobs if job.outcome is not None and not job.recorded]
        finishes = [
            Finish(job.key, job.owner, job.outcome) for job in due if job.outcome is not None
        ]
        if not finishes:
            return jobs
        fenced = set()
        for job, recorded in zip(due, self._results.record(finishes), strict=True):
            job.recorded = recorded and self._joint is None
            if not recorded:
                fenced.add(job)
                job.note("lease_lost", "another worker took the run over")
                self._keeper.drop(job.leases)
                job.stage = Stage.DONE
        return [job for job in jobs if job not in fenced] if fenced else jobs

    def _not_settled(self, jobs: Sequence[Job], error: Exception) -> None:
        self._settling.undo(jobs)
        self._put_off("could not record or settle", jobs, error)

    def _put_off(self, what: str, jobs: Sequence[Job], error: Exception) -> None:
        logger.warning("%s, %d deliveries wait: %s", what, len(jobs), error)
        for job in jobs:
            job.failures += 1

    @contextmanager
    def _transaction(self, jobs: Sequence[Job]) -> Iterator[None]:
        """One transaction where broker and store share a file. Taken back, the leases are held."""
        try:
            with self._joint.transaction() if self._joint is not None else nullcontext():
                yield
        except BaseException:
            self._settling.undo(jobs)
            raise
