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
from aztask.results.deadindex import DeadIndex, IndexedDeadLetter
from aztask.settlement import DeadLetter, Defer
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.worker.pipeline.isolation import isolated
from aztask.worker.pipeline.pointers import Pointers
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Stage, WorkItem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RefusedSettlement:
    """Settling this delivery raised an error that no outage explains."""

    error: Exception


Answer: TypeAlias = Settled | Lost | Unknown | RefusedSettlement
Answers: TypeAlias = list[tuple[WorkItem, Answer]]


class Settler:
    """Settles items and books the answers on their leases. Any thread may call."""

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

    def settle(self, items: Sequence[WorkItem]) -> None:
        """Carry out and book; an answer that is not clear leaves the lease held."""
        self.book(self.carry_out(items))

    def carry_out(self, items: Sequence[WorkItem]) -> Answers:
        """The broker's answers, of the items whose leases may be settled now.

        If this raises, nothing is settled and the leases are held again.
        """
        groups: dict[tuple[int, str], list[WorkItem]] = {}
        for item, may in zip(
            items, self._keeper.begin_settlement(item.lease for item in items), strict=True
        ):
            if may:
                groups.setdefault((id(item.receiver), self._first(item)), []).append(item)
            elif item.settled or item.lease.state is not LeaseState.RENEWING:
                # settled before, or the lease is unknown or lost: what is recorded is recorded,
                # and the redelivery will settle from it
                item.end()
        try:
            return [answer for group in groups.values() for answer in self._settle_group(group)]
        except BaseException:
            self.undo(items)
            raise

    def book(self, answers: Answers) -> list[tuple[WorkItem, Exception]]:
        """Note the answers, once they are sure (a joint transaction is committed).

        Returns the items whose settlement was refused, and why.
        """
        refused = []
        self._keeper.book(
            (item.lease, answer)
            for item, answer in answers
            if not isinstance(answer, RefusedSettlement)
        )
        for item, answer in answers:
            if isinstance(answer, RefusedSettlement):
                self.undo([item])
                refused.append((item, answer.error))
            elif isinstance(answer, Unknown):
                item.tries += 1
            elif isinstance(answer, Lost):
                item.note("settle_failed", item.lease.lost_reason)
                item.end()
            else:
                item.settled = True
                if item.stage is not Stage.READY:  # else it is about to run, at most once
                    item.end()
        return refused

    def undo(self, items: Sequence[WorkItem]) -> None:
        """The settlements that were begun did not happen: the leases are held again."""
        for item in items:
            if item.lease.state is LeaseState.SETTLING:
                self._keeper.settlement_failed(item.lease)

    def _first(self, item: WorkItem) -> str:
        """What has to be stored before it is settled: that may fail without harming others."""
        if isinstance(item.settlement, Defer):
            return "pointer"
        return "note" if self._dead_index and isinstance(item.settlement, DeadLetter) else ""

    def _settle_group(self, group: list[WorkItem]) -> Answers:
        """The answers for items of one receiver; rule 1."""
        if self._joint:
            return self._ask(group)
        answers: dict[WorkItem, Answer] = {}

        def unavailable(items: Sequence[WorkItem], error: Exception) -> None:
            logger.warning("could not settle, %d deliveries wait: %s", len(items), error)
            answers.update((item, Unknown(str(error))) for item in items)

        def refused(item: WorkItem, error: Exception) -> None:
            # settled in the batch that raised because of another one
            done = isinstance(error, AlreadySettled)
            answers[item] = Settled() if done else RefusedSettlement(error)

        isolated(
            group,
            lambda items: answers.update(self._ask(items)),
            unavailable=unavailable,
            refused=refused,
        )
        return list(answers.items())

    def _ask(self, items: Sequence[WorkItem]) -> Answers:
        self._pointers.send(items)
        self._note_dead(items)
        answers = items[0].receiver.settle(self._redelivery.pairs(items))
        self._pointers.follow(items, answers)
        return list(zip(items, answers, strict=True))

    def _note_dead(self, items: Sequence[WorkItem]) -> None:
        """Note the items that are about to be dead-lettered. Raises BrokerUnavailable.

        Crash window: if the worker dies before the dead letter is stored, the note is there too
        early, or stays without a dead letter if the next delivery ends otherwise; see
        `aztask.results.deadindex`.
        """
        if self._dead_index is None:
            return
        now = self._clock.wall()
        letters = [
            IndexedDeadLetter(
                item.queue,
                item.delivery.envelope,
                item.settlement.reason,
                item.settlement.description,
                now,
                item.delivery.delivery_count,
            )
            for item in items
            if isinstance(item.settlement, DeadLetter)
        ]
        if letters:
            self._dead_index.note(letters)
            hit("noted", len(letters))
