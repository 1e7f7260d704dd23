"""Carrying out settlements: one batch for each receiver, and what the broker answered.

Rules
1. A delivery that cannot be settled harms no other one. Outside of a joint transaction each
   receiver's batch stands by itself; within one, an error takes the whole transaction back, and the
   caller splits the batch.
2. What has to be stored first is stored first: the pointer to a deferred message, and the note of a
   dead letter where the service shows only a few.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aztask.brokers.delivery import Lost, Settled, Unknown
from aztask.errors import AlreadySettled
from aztask.lease.keeper import LeaseKeeper
from aztask.lease.state import LeaseState
from aztask.results.deadindex import DeadIndex
from aztask.settlement import DeadLetter, Defer
from aztask.support.clock import Clock
from aztask.worker.pipeline.deadnotes import note_dead
from aztask.worker.pipeline.isolation import isolated
from aztask.worker.pipeline.pointers import Pointers
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Job, Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refused:
    """Settling this delivery raised an error that no outage explains."""

    error: Exception


Answer: TypeAlias = Settled | Lost | Unknown | Refused
Answers: TypeAlias = list[tuple[Job, Answer]]


class Settling:
    """Settles jobs and books the answers on their leases. Any thread may call."""

    def __init__(
        self,
        keeper: LeaseKeeper,
        redelivery: Redelivery,
        pointers: Pointers,
        dead_index: DeadIndex | None,
        *,
        clock: Clock,
        joint: bool,
    ) -> None:
        """joint: settlements are part of the caller's transaction."""
        self._keeper = keeper
        self._redelivery = redelivery
        self._pointers = pointers
        self._dead_index = dead_index
        self._clock = clock
        self._joint = joint

    def settle(self, jobs: Sequence[Job]) -> None:
        """Carry out and book; an answer that is not clear leaves the lease held."""
        self.book(self.carry_out(jobs))

    def carry_out(self, jobs: Sequence[Job]) -> Answers:
        """The broker's answers, of the jobs whose leases may be settled now.

        If this raises, nothing is settled and the leases are held again.
        """
        groups: dict[tuple[int, str], list[Job]] = {}
        for job, may in zip(
            jobs, self._keeper.begin_settlement(job.lease for job in jobs), strict=True
        ):
            if may:
                groups.setdefault((id(job.receiver), self._first(job)), []).append(job)
            elif job.settled or job.lease.state is not LeaseState.RENEWING:
                # settled before, or the lease is unknown or lost: what is recorded is recorded,
                # and the redelivery will settle from it
                job.stage = Stage.DONE
        try:
            return [answer for group in groups.values() for answer in self._settle_group(group)]
        except BaseException:
            self.undo(jobs)
            raise

    def book(self, answers: Answers) -> list[tuple[Job, Exception]]:
        """Note the answers, once they are sure (a joint transaction is committed).

        Returns the jobs whose settlement was refused, and why.
        """
        settled, refused = [], []
        for job, answer in answers:
            if isinstance(answer, Settled):
                job.settled = True
                job.stage = Stage.DONE
                settled.append(job.lease)
            elif isinstance(answer, Lost):
                self._keeper.lapse(job.lease, answer.reason or "the broker says so")
                job.note("settle_failed", job.lease.lost_reason)
                job.stage = Stage.DONE
            elif isinstance(answer, Unknown):
                self._keeper.settlement_failed(job.lease)
                job.failures += 1
            else:
                self.undo([job])
                refused.append((job, answer.error))
        self._keeper.settled(settled)
        return refused

    def undo(self, jobs: Sequence[Job]) -> None:
        """The settlements that were begun did not happen: the leases are held again."""
        for job in jobs:
            if job.lease.state is LeaseState.SETTLING:
                self._keeper.settlement_failed(job.lease)

    def _first(self, job: Job) -> str:
        """What has to be stored before it is settled: that may fail without harming others."""
        if isinstance(job.settlement, Defer):
            return "pointer"
        return "note" if self._dead_index and isinstance(job.settlement, DeadLetter) else ""

    def _settle_group(self, group: list[Job]) -> Answers:
        """The answers for jobs of one receiver; rule 1."""
        if self._joint:
            return self._ask(group)
        answers: dict[Job, Answer] = {}

        def unavailable(jobs: Sequence[Job], error: Exception) -> None:
            logger.warning("could not settle, %d deliveries wait: %s", len(jobs), error)
            answers.update((job, Unknown(str(error))) for job in jobs)

        def refused(job: Job, error: Exception) -> None:
            # settled in the batch that raised because of another one
            done = isinstance(error, AlreadySettled)
            answers[job] = Settled() if done else Refused(error)

        isolated(
            group,
            lambda jobs: answers.update(self._ask(jobs)),
            unavailable=unavailable,
            refused=refused,
        )
        return list(answers.items())

    def _ask(self, jobs: Sequence[Job]) -> Answers:
        self._pointers.send(jobs)
        note_dead(self._dead_index, jobs, self._clock.wall())
        answers = jobs[0].receiver.settle(self._redelivery.pairs(jobs))
        self._pointers.follow(jobs, answers)
        return list(zip(jobs, answers, strict=True))
