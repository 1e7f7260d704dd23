"""Carries out settlements, one batch for each receiver, and removes what they leave behind.

Rules
1. A delivery that cannot be settled does not harm the others. Without a joint transaction, each
   receiver's batch succeeds or fails alone. In a joint transaction, an error rolls everything back,
   and the caller splits the batch.
2. Two things are stored before the settlement: the pointer to a deferred message, and the note of
   a dead letter if the service lists only a few dead letters.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from typing import Final, TypeAlias

from aztask.errors import AlreadySettled
from aztask.hooks import Hook, Settling
from aztask.message.message import TaskMessage
from aztask.message.payload import stored_in
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.queues.lease.state import LeaseState
from aztask.settlement import DeadLetter, Defer
from aztask.stores.payloads.payloads import Payloads, owned
from aztask.stores.records.deadindex import DeadIndex, IndexedDeadLetter
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.support.threadpool import ThreadPool
from aztask.worker.pipeline.isolation import isolated
from aztask.worker.pipeline.pointers import Pointers
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.reporting import settling_of
from aztask.worker.pipeline.work import Stage, WorkItem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RefusedSettlement:
    """The settlement of this delivery raised an error that no outage explains."""

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
        hook: Hook[Settling] | None = None,
    ) -> None:
        """dead_index: where dead letters are noted. joint: the caller's transaction covers all.
        hook: runs around the requests."""
        self._keeper = keeper
        self._redelivery = redelivery
        self._pointers = pointers
        self._dead_index = dead_index
        self._clock = clock
        self._joint = joint
        self._hook = hook

    def settle(self, items: Sequence[WorkItem]) -> None:
        """Carry out and book; after an ambiguous answer the lease stays held."""
        self.book(self.carry_out(items))

    def carry_out(self, items: Sequence[WorkItem]) -> Answers:
        """Settle the items whose leases allow it now; returns the broker's answers.

        If this raises, nothing is settled and the leases are held again.
        """
        groups: dict[tuple[int, str], list[WorkItem]] = {}
        for item, may in zip(
            items, self._keeper.begin_settlement(item.lease for item in items), strict=True
        ):
            if may:
                groups.setdefault((id(item.receiver), self._first(item)), []).append(item)
            elif item.settled or item.lease.state is not LeaseState.RENEWING:
                # settled before, or the lease is unknown or lost: the outcome is recorded, and the
                # redelivery will settle from it
                item.end()
        try:
            return [answer for group in groups.values() for answer in self._settle_group(group)]
        except BaseException:
            self.undo(items)
            raise

    def book(self, answers: Answers) -> list[tuple[WorkItem, Exception]]:
        """Note the answers, once they are final (a joint transaction is committed).

        Returns the items whose settlement was refused, each with the error.
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
                if item.stage is not Stage.READY:  # else it is at-most-once and runs now
                    item.end()
        return refused

    def undo(self, items: Sequence[WorkItem]) -> None:
        """Hold the leases again whose settlements were begun but did not happen."""
        for item in items:
            if item.lease.state is LeaseState.SETTLING:
                self._keeper.settlement_failed(item.lease)

    def _first(self, item: WorkItem) -> str:
        """What is stored before its settlement; a group of its own, so that only it can fail."""
        if isinstance(item.settlement, Defer):
            return "pointer"
        return "note" if self._dead_index and isinstance(item.settlement, DeadLetter) else ""

    def _settle_group(self, group: list[WorkItem]) -> Answers:
        """The answers for items of one receiver, under rule 1."""
        if self._joint:
            return self._ask(group)
        answers: dict[WorkItem, Answer] = {}

        def unavailable(items: Sequence[WorkItem], error: Exception) -> None:
            logger.warning("%d deliveries could not be settled: %s", len(items), error)
            answers.update((item, Unknown(str(error))) for item in items)

        def refused(item: WorkItem, error: Exception) -> None:
            # it was settled in the larger batch, which raised because of another item
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
        if not self._hook:
            return list(self._settled(items))
        settling = settling_of(items)
        with self._hook.around(settling):
            pairs = self._settled(items)
            settling.answers = [answer for _, answer in pairs]
        return list(pairs)

    def _settled(
        self, items: Sequence[WorkItem]
    ) -> list[tuple[WorkItem, Settled | Lost | Unknown]]:
        self._pointers.send(items)
        self._note_dead(items)
        answers = items[0].receiver.settle(self._redelivery.pairs(items))
        self._pointers.follow(items, answers)
        return list(zip(items, answers, strict=True))

    def _note_dead(self, items: Sequence[WorkItem]) -> None:
        """Note the items that are about to be dead-lettered. Raises BrokerUnavailable.

        Crash window: if the worker dies before the dead letter is stored, the note is there too
        early, or stays without a dead letter if the next delivery ends otherwise; see
        `aztask.stores.records.deadindex`.
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


# -- removal ---------------------------------------------------------------------------------
#
# Removes the payloads of messages that have ended.
#
# Rules
# 1. A payload is removed after its message's last settlement was confirmed, and only by the
#    delivery that has the recorded outcome: a superfluous copy of a message removes nothing. Only
#    the arguments and checkpoints of the task itself are removed, as their names tell
#    (`aztask.stores.payloads.store`): a checkpoint may refer to a value that other tasks use, too.
# 2. Dead letters keep their payloads, so that a replay works.
# 3. Removal never fails a delivery. What is left over is removed by ``aztask doctor --collect``.
#
# Crash window: if the worker dies after the settlement and before the removal, the payload is left
# over.


CLOSING_SECONDS: Final = 10.0


class PayloadRemoval:
    """Removes payloads: at once from a folder, on a thread of its own from a container."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._threads: ThreadPool | None = None
        self._last: Future[None] | None = None

    def after(self, items: Sequence[WorkItem]) -> None:
        """Remove the payloads of those that have ended."""
        names: list[str] = []
        for item in items:
            opened = item.opened
            if opened is not None and (opened.message.payload or opened.message.saved):
                names += _ended(item, opened.message)
        if not names:
            return
        if not self._payloads.store.remote:
            self._remove(names)
            return
        with self._lock:
            self._waiting += names
            if self._threads is None:
                self._threads = ThreadPool("payload-removal", 1)
            self._last = self._threads.submit(self._remove_waiting)

    def close(self) -> None:
        """Finish what is waiting, for `CLOSING_SECONDS` at most."""
        if self._last is not None and self._threads is not None:
            try:
                self._last.result(CLOSING_SECONDS)
            except NotInTime:
                logger.warning(
                    "payloads of ended tasks are left over, aztask doctor --collect removes them"
                )
            self._threads.close()

    def _remove_waiting(self) -> None:
        """Remove all that has arrived since the last request, in one request."""
        with self._lock:
            names, self._waiting = self._waiting, []
        self._remove(names)

    def _remove(self, names: Sequence[str]) -> None:
        self._payloads.discard(names)
        hit("removed", len(names))


def _ended(item: WorkItem, message: TaskMessage) -> Iterator[str]:
    """The names of the payloads that belong to an item's task, if it has ended for good.

    A task that continues with other arguments does not need those before.
    """
    outcome = item.outcome
    if not item.settled or outcome is None or not (outcome.state.final or outcome.renewed):
        return
    at_most_once = item.task is not None and item.task.delivery == "at-most-once"
    if isinstance(item.settlement, DeadLetter) and not at_most_once:
        return
    references = [message.payload] if message.payload is not None else []
    if (saved := stored_in(message.saved)) is not None:
        references.append(str(saved))
    yield from owned(references, message.id)
