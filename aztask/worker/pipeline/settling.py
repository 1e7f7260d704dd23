"""Carries out settlements, one batch for each receiver, and removes what they leave behind.

A delivery that fails alone is found in its batch (`isolated`), and tried again or dead-lettered
(`Refusals`).

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from aztask.errors import (
    AlreadySettled,
    BrokerError,
    CodecError,
    ConfigurationError,
    ForeignId,
    MessageTooLarge,
)
from aztask.hooks import Hook, Settling
from aztask.message.encryption import Locked
from aztask.message.message import TaskMessage
from aztask.message.payload import stored_in
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.queues.lease.state import LeaseState
from aztask.settlement import DeadLetter, Defer
from aztask.stores.payloads.payloads import Payloads, owned
from aztask.stores.records.base import Outcome, ResultStore, RunKey, RunRecord, State
from aztask.stores.records.deadindex import DeadIndex, IndexedDeadLetter
from aztask.stores.records.owners import FOREIGN_ID
from aztask.support.clock import Clock
from aztask.support.display import safe_str
from aztask.support.failpoint import hit
from aztask.support.floodlog import FloodLog
from aztask.support.threadpool import ThreadPool
from aztask.worker.pipeline.pointers import Pointers
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Stage, WorkItem, message_of, settling_of

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
    if isinstance(item.settlement, DeadLetter) and not item.at_most_once:
        return
    references = [message.payload] if message.payload is not None else []
    if (saved := stored_in(message.saved)) is not None:
        references.append(str(saved))
    yield from owned(references, message.id)


# -- Deliveries that fail alone --------------------------------------------------------------------
#
# Their content makes a stage raise an error that no outage explains.
#
# Rules
# 1. Such a delivery's stage is tried `TRIES` times. Then it is dead-lettered with the error as the
#    description, so that it neither blocks a queue nor is lost.
# 2. If the dead letter cannot be recorded or stored either, the lease is left to expire. The start
#    counts, so the delivery limit applies.
# 3. A recorded outcome does not change. If the retry that it decided cannot be sent, that retry is
#    recorded as failed, and its message becomes the dead letter.


UNPROCESSABLE = "unprocessable"
RETRY_TOO_LARGE = "retry-too-large"
TRIES = 3


class Refusals:
    """Retries or dead-letters deliveries that fail alone. Any thread may call."""

    def __init__(
        self,
        redelivery: Redelivery,
        settling: Settler,
        results: ResultStore | None,
        *,
        name: str,
        floods: FloodLog,
    ) -> None:
        """name: the worker's name, for the records."""
        self._floods = floods
        self._redelivery = redelivery
        self._settling = settling
        self._results = results
        self._name = name

    def unclaimable(self, item: WorkItem, error: Exception) -> None:
        """Handle `error`, which claiming `item` alone raised."""
        if isinstance(error, ForeignId):  # it will not change
            self._floods.warning(
                logger, FOREIGN_ID, "%s did not run, dead-lettered: %s", item.label, error
            )
            item.decide(DeadLetter(FOREIGN_ID, str(error)))
            return
        text = text_of(error)
        item.tries += 1
        last = item.tries >= TRIES
        then = "it is dead-lettered" if last else "it will be tried again"
        line = "%s could not be claimed, %s: %s"
        self._floods.warning(logger, "unclaimable", line, item.label, then, text)
        if last:
            item.decide(DeadLetter(UNPROCESSABLE, text))

    def unfinishable(self, item: WorkItem, error: Exception) -> None:
        """Handle `error`, which recording or settling `item` alone raised."""
        self._settling.undo([item])
        item.tries += 1
        text = text_of(error)
        self._floods.warning(
            logger,
            "unfinishable",
            "%s could not be recorded or settled (try %d of %d), %s: %s",
            item.label,
            item.tries,
            TRIES,
            "it will be tried again" if item.tries < TRIES else "it is dead-lettered",
            text,
        )
        if item.tries < TRIES:
            return
        if item.decided is not None and item.decided.refused:
            self._floods.warning(
                logger,
                "not dead-lettered",
                "%s cannot be dead-lettered either: it is redelivered when its lease expires",
                item.label,
            )
            item.note("settle_failed", text)
            item.end()
        elif self._dead_letter(item, DeadLetter(UNPROCESSABLE, text)):
            item.tries = 0

    def sendable(self, item: WorkItem) -> bool:
        """Whether `item` can be settled now.

        A retry that the broker would refuse becomes a dead letter before anything is recorded.
        """
        try:
            self._redelivery.check(item)
        except CodecError as error:
            reason = RETRY_TOO_LARGE if isinstance(error, MessageTooLarge) else UNPROCESSABLE
            line = "%s cannot be retried, dead-lettered: %s: %s"
            self._floods.warning(logger, reason, line, item.label, reason, error)
            return self._dead_letter(item, DeadLetter(reason, f"the retry cannot be sent: {error}"))
        return True

    def _dead_letter(self, item: WorkItem, dead: DeadLetter) -> bool:
        """Decide to dead-letter; False if the store cannot record that now: try again later."""
        decided = item.decided
        outcome = decided.outcome if decided is not None else None
        if decided is None or outcome is None:
            item.decide(dead, refused=True)
            return True
        failed = replace(
            outcome,
            state=State.FAILED,
            settlement=dead,
            value=None,
            error_type=outcome.error_type or dead.reason,
            error=outcome.error or dead.description,
        )
        if not decided.recorded:
            item.decide(dead, failed, refused=True)
            return True
        if not self._buried(item, failed):
            return False
        item.decide(dead, outcome, recorded=True, repeated=decided.repeated, refused=True)
        return True

    def _buried(self, item: WorkItem, failed: Outcome) -> bool:
        """Record the run that was to follow as failed (rule 3); whether that worked."""
        if self._results is None:
            return True
        key = RunKey(item.key.task_id, item.key.generation, item.key.hop + 1)
        task = message_of(item).task
        try:
            run = RunRecord(key, task, item.queue, State.FAILED, self._name, outcome=failed)
            self._results.bury([run])
        except UNDONE as error:
            logger.warning(
                "%s: its failure could not be recorded, it will be tried again: %s",
                item.label,
                error,
            )
            item.tries += 1
            return False
        return True


def text_of(error: Exception) -> str:
    """``Type: text`` on one line."""
    return f"{type(error).__name__}: {safe_str(error, 500)}"


# -- The bad delivery of a batch -------------------------------------------------------------------
#
# It is found, and the others are processed. A stage works on batches, because a batch costs one
# request or one transaction. If a batch fails for a reason other than an outage, it is split in
# halves until the bad delivery is alone. A batch of 256 with one bad delivery costs 16 further
# calls. A delivery whose row is encrypted with a missing key is one of those, although it waits as
# in an outage.


UNDONE = (BrokerError, ConfigurationError)
"""Errors after which a broker or a store did nothing, or not everything: every delivery waits.
A missing permission is one of them: it may be granted again, so it does not end the worker."""


def isolated(
    items: Sequence[WorkItem],
    work: Callable[[Sequence[WorkItem]], None],
    *,
    unavailable: Callable[[Sequence[WorkItem], Exception], None],
    refused: Callable[[WorkItem, Exception], None],
) -> None:
    """Give `items` to `work`, so that a bad delivery does not harm the others.

    * work: may be called again with some of the items after it raised, so it must be repeatable.
    * unavailable: gets the items of a call that raised one of `UNDONE`.
    * refused: gets each item that makes `work` raise any other error when it is alone.
    """
    if not items:
        return
    try:
        work(items)
    except Exception as error:  # noqa: BLE001  # a store, a codec or a broker may raise anything
        alone = len(items) == 1
        if isinstance(error, UNDONE) and (alone or not isinstance(error, Locked)):
            unavailable(items, error)
            return
        if alone:
            refused(items[0], error)
            return
        half = len(items) // 2
        for part in (items[:half], items[half:]):
            isolated(part, work, unavailable=unavailable, refused=refused)
