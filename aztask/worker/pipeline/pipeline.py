"""The path of a delivery, from its receipt to its settlement, for many deliveries at once.

    open     verify the signature, read the headers, find the task
    claim    a pointer? receive the message that it points to. Ended before? repeat its settlement.
             Cancelled, started too often, expired? decide so. Else own the start row: from here on
             the run is ours
    (the pool runs the task under the lease, and the retry policy decides: see `decisions`)
    finish   record the outcome, set the bit of a workflow's task and send what follows, settle or
             wait as the retry strategy says, book the answer

Rules
1. Nothing is settled before its outcome is durable. If broker and result store share a file, both
   are one transaction.
2. Each stage gets batches. It changes items, never the supervisor; the supervisor reads the items.
3. If a store or a broker is unreachable, the item stays as it was. Its stage is retried under its
   lease, and the item is dropped unsettled when the lease ends.
4. An error that a store, a codec or a broker raises for one delivery affects that delivery only:
   see `isolated` and `Refusals` in `settling`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial

from aztask.app import App
from aztask.celery.embedded.launch import may_embed
from aztask.errors import BrokerError, CodecError
from aztask.queues.base import shared_transaction
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.settlement import Abandon, DeadLetter, Release, moved_dead_letter
from aztask.stores.records.base import Finish, Owned, ResultStore, Start, StartAnswer
from aztask.stores.records.deadindex import index_for
from aztask.stores.records.onceruns import OnceRun, OnceRuns, once_runs_of
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.failpoint import hit
from aztask.support.floodlog import FloodLog
from aztask.worker.pipeline.celerysuccessors import CelerySuccessors
from aztask.worker.pipeline.decisions import Decisions
from aztask.worker.pipeline.pointers import UNDECODABLE, Pointers
from aztask.worker.pipeline.redelivery import PutOffs, Redelivery
from aztask.worker.pipeline.settling import PayloadRemoval, Refusals, Settler, isolated, text_of
from aztask.worker.pipeline.uniquekeys import UniqueKeys
from aztask.worker.pipeline.waking import Waking
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.worker.pipeline.workflowends import Turns, WorkflowEnds
from aztask.workflows.engine import engine_for

logger = logging.getLogger(__name__)

INTERRUPTED = "Interrupted"


class Pipeline:
    """The stages, one object per worker; `claim` and `finish` may run on lane threads."""

    def __init__(
        self,
        app: App,
        keeper: LeaseKeeper,
        *,
        name: str,
        clock: Clock = SYSTEM_CLOCK,
        incarnation: str = "",
    ) -> None:
        """name, incarnation: the worker's; see `OnceRun`."""
        self._app = app
        self._keeper = keeper
        self._name = name
        self._clock = clock
        self._results: ResultStore | None = app.results
        self._joint = shared_transaction(app.broker, app.results)
        self._redelivery = Redelivery(app, keeper, clock)
        self.floods = FloodLog(clock)
        self._pointers = Pointers(app, keeper, self._redelivery, self.floods)
        self.put_offs = PutOffs(app, self._redelivery, clock)
        self.decisions = Decisions(app, self._redelivery, clock, self.floods)
        self._settling = Settler(
            keeper,
            self._redelivery,
            self._pointers,
            index_for(app.broker, app.results),
            clock=clock,
            joint=self._joint is not None,
            hook=app.hooks.settle,
        )
        self._refusals = Refusals(
            self._redelivery, self._settling, self._results, name=name, floods=self.floods
        )
        self._removal = PayloadRemoval(app.payloads) if app.payloads is not None else None
        self._embedding = CelerySuccessors(app, clock, self.floods)
        self._unique = UniqueKeys(app, clock)
        self._incarnation = incarnation
        engine = engine_for(app.results, app.workflows, app.codec, clock)
        self._waking = Waking(app, self._redelivery)
        self._turns = Turns(app, engine, self.floods)
        self.following = WorkflowEnds(engine)

    # -- open --------------------------------------------------------------------------------

    def open(self, items: Iterable[WorkItem]) -> None:
        """Verify and read the headers. Messages that cannot be read become dead letters."""
        for item in items:
            try:
                message = self._app.message_in(
                    item.delivery.envelope, item.queue, item.delivery.position
                )
                locked = self._app.codec.locked(message)
                item.open(message, None if locked else self._app.tasks.get(message.task))
                if (dead := moved_dead_letter(item.delivery.envelope)) is not None:
                    item.decide(dead)
                    continue
                if not locked and may_embed(message):
                    self._embedding.open(item)
                if not self.decisions.early(item) and item.task is None:
                    self._put_off_unknown(item)
            except CodecError as error:
                known = moved_dead_letter(item.delivery.envelope)
                item.decide(known or DeadLetter(UNDECODABLE, str(error)))
                text = "%s cannot be read, it is dead-lettered: %s"
                self.floods.warning(logger, UNDECODABLE, text, item.label, error)
            except Exception as error:  # noqa: BLE001  # a hostile message must not end the worker
                item.decide(DeadLetter(UNDECODABLE, text_of(error)))
                text = "%s cannot be read, it is dead-lettered"
                self.floods.warning(logger, type(error).__name__, text, item.label, error=error)

    def _put_off_unknown(self, item: WorkItem) -> None:
        """Put a delivery off that cannot run here, unless it expired or waited enough.

        Its task is unknown here, or it is encrypted with a key that this worker does not have.

        No row is written, so no delivery, retry or snooze is counted. One that was delivered before
        is claimed first, see `PutOffs` rule 2: if its run has ended, its settlement is repeated.
        """
        if self.put_offs.expired(item) or (found := self.decisions.unknown(item)) is None:
            return
        delay, since = found
        message = message_of(item)
        reason = self._app.codec.locked(message) or f"task {message.task} is unknown to this worker"
        self.put_offs.wait(item, delay, reason, unknown_since=since)

    # -- claim -------------------------------------------------------------------------------

    def claim(self, items: Sequence[WorkItem]) -> None:
        """Own the start rows.

        Crash window: if the worker dies between here and the record of the outcome, the start row's
        owner has ended; the redelivery takes the row over.
        """
        isolated(
            items,
            self._claim,
            unavailable=partial(self._try_again, "the result store is unreachable"),
            refused=self._refusals.unclaimable,
        )

    def _claim(self, items: Sequence[WorkItem]) -> None:
        """As `claim`, and repeatable: claiming a start row again changes nothing.

        A worker may freeze anywhere before this, so each lease is checked once more: an item whose
        lease has ended ends, and claims nothing.
        """
        try:
            items = self._pointers.fetch(items)
        except BrokerError as error:
            self._try_again("deferred messages could not be received", items, error)
            return
        items = self._turns.check(self._in_time(items))
        if any(item.place is not None for item in items):
            self.following.prepare(items)
            self._unique.prepare(items)
        self._embedding.prepare(items)
        hit("checked", len(items))
        answers = self._started(items)
        answered = {item.number: answer for item, answer in zip(items, answers, strict=True)}
        items = self._in_time(items)
        answers = [answered[item.number] for item in items]
        if any(item.waits is not None for item in items):
            self.put_offs.answered(items, answers)
        for item, answer in zip(items, answers, strict=True):
            if item.stage is not Stage.RECEIVED:  # it is put off
                continue
            try:
                self.decisions.claimed(item, answer)
            except Exception as error:  # noqa: BLE001  # it affects this delivery only
                self._refusals.unclaimable(item, error)
        self._unique.started(items)
        self._complete_first([item for item in items if item.stage is Stage.READY])
        hit("claimed", sum(item.claimed is not None for item in items))

    def _in_time(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """Those whose leases are held. The others end, and give back what they may have claimed.

        The worker may have stood still since the leases were checked, or the store may have
        answered late. By then another worker can have put the message off: the copy that follows is
        no redelivery of this one, and is completed as long as the row is claimed for this one.

        Crash window: such a copy meets the claimed row, too, if it is received between the store's
        answer and here.
        """
        now = self._clock.monotonic()
        late = [item for item in items if not (item.settled or item.lease.alive(now))]
        asked = [(item.key, item.owner) for item in late if item.numbered]
        if asked and self._results is not None:
            self._results.disown(asked)  # if that fails, all of them come again
        for item in late:
            self._still_ours(item)
        return [item for item in items if item not in late] if late else list(items)

    def _started(self, items: Sequence[WorkItem]) -> Sequence[StartAnswer]:
        """The store's answers to these starts; without a store, the service's delivery counts."""
        if self._results is None:
            return [
                Owned(item.delivery.delivery_count - message_of(item).delivery_base)
                for item in items
            ]
        now = self._clock.wall()
        for item in items:
            item.number_owner()
        return self._results.start(
            [
                Start(
                    item.key, message_of(item).task, item.queue, item.delivery.position,
                    item.owner, self._name, now,
                )
                for item in items
            ]
        )  # fmt: skip

    def _complete_first(self, items: list[WorkItem]) -> None:
        """Complete at-most-once messages before their tasks run; a crash from here on loses them.

        A task does not run unless its message was certainly removed. If the process dies between
        the note and the removal, the run may end as lost although its message is still there: the
        next delivery finds that outcome, and does not run either.
        """
        once = [item for item in items if item.at_most_once]
        isolated(
            once,
            self._note_and_complete,
            unavailable=self._not_settled,
            refused=lambda item, error: self._not_settled([item], error),
        )
        for item in once:
            if not item.settled:
                item.end()

    def _note_and_complete(self, items: Sequence[WorkItem]) -> None:
        if self._once is not None:
            self._once.note([self._once_run(item) for item in items])
            hit("once-noted", len(items))
        self._settling.settle(items)

    @cached_property
    def _once(self) -> OnceRuns | None:
        """Where at-most-once runs are noted; only an app with such tasks asks for it."""
        return once_runs_of(self._results)

    def _once_run(self, item: WorkItem) -> OnceRun:
        task, lease = message_of(item).task, item.delivery.lease_seconds
        now = self._clock.wall()
        return OnceRun(item.key, task, item.queue, self._name, self._incarnation, now, lease)

    # -- finish ------------------------------------------------------------------------------

    def finish(self, items: Sequence[WorkItem]) -> None:
        """Record the outcomes, then settle.

        If the process dies before the record, the task runs again; if it dies after the record
        and before the settlement, the redelivery finds the record and repeats the settlement.
        Where both share a file neither can happen alone.
        """
        isolated(
            [item for item in items if self._still_ours(item)],
            self._finish,
            unavailable=self._not_settled,
            refused=self._refusals.unfinishable,
        )

    def _finish(self, items: Sequence[WorkItem]) -> None:
        """As `finish`, and repeatable: recorded and settled items are skipped."""
        items = [
            item
            for item in items
            if item.stage is not Stage.ENDED and self._refusals.sendable(item)
        ]
        with self._transaction(items):
            kept = self._record(items)
            hit("recorded", len(kept))
            self.following.follow(kept)
            self._waking.follow(kept)
            self._embedding.follow(kept)
            self._unique.ended(kept)
            once = [item for item in kept if item.at_most_once]
            if once and self._once is not None:
                self._once.drop([self._once_run(item) for item in once])
            self._redelivery.write_counts(kept)
            now = [item for item in kept if not self._redelivery.waits(item)]
            answers = self._settling.carry_out(now)
        if self._joint is not None:  # it is committed; else the store's answer said so
            for item in once:
                item.recorded()
        for item, error in self._settling.book(answers):
            self._refusals.unfinishable(item, error)
        for item in kept:
            if self._redelivery.waits(item):
                self._redelivery.keep(item)
        hit("settled", sum(item.settled for item in kept))
        if self._removal is not None:
            self._removal.after(kept)

    def close(self) -> None:
        """Finish the removal of payloads, and log what is left to log."""
        if self._removal is not None:
            self._removal.close()
        self.floods.close()

    def _still_ours(self, item: WorkItem) -> bool:
        """Whether its lease is held. If not, the item ends: nothing is recorded or settled."""
        if item.settled or item.lease.alive(self._clock.monotonic()):
            return True
        item.note("lease_lost", item.lease.lost_reason or "its deadline passed")
        item.end()
        return False

    def _record(self, items: list[WorkItem]) -> list[WorkItem]:
        """Record outcomes; returns the items to settle. Items that another worker owns end here."""
        if self._results is None:
            return items
        due: list[WorkItem] = []
        finishes: list[Finish] = []
        for item in items:
            decided = item.decided
            if decided is not None and decided.outcome is not None and not decided.recorded:
                due.append(item)
                finishes.append(Finish(item.key, item.owner, decided.outcome))
        if not finishes:
            return items
        fenced = set()
        for item, recorded in zip(due, self._results.record(finishes), strict=True):
            if not recorded:
                fenced.add(item)
                item.note("lease_lost", "another worker took the run over")
                item.superseded()
                self._keeper.drop(item.leases)
                item.end()
            elif self._joint is None:  # else the transaction may still be rolled back
                item.recorded()
        return [item for item in items if item not in fenced] if fenced else items

    # -- giving back -------------------------------------------------------------------------

    def release(self, items: Sequence[WorkItem], why: str = "the worker stopped") -> None:
        """Give back deliveries that did not run, or whose run must not count.

        An at-most-once delivery can no longer be given back: its run has failed, with the error
        `why`.
        """
        gone = [item for item in items if item.settled]
        if gone:
            for item in gone:
                self.decisions.died(item, INTERRUPTED, why)
            self.finish(gone)
        items = [item for item in items if not item.settled]
        for item in items:
            item.decide(Release())
        isolated(
            items,
            self._release,
            unavailable=self._not_settled,
            refused=lambda item, error: self._not_settled([item], error),
        )
        for item in items:
            item.end()

    def _release(self, items: Sequence[WorkItem]) -> None:
        claimed = [(item.key, item.owner) for item in items if item.claimed is not None]
        with self._transaction(items):
            if self._results is not None and claimed:
                self._results.disown(claimed)
            ours = [item for item in items if self._still_ours(item)]
            answers = self._settling.carry_out(ours)
        self._settling.book(answers)

    def abandon(self, items: Sequence[WorkItem]) -> None:
        """Give back deliveries after an error that ends the worker. Their starts count.

        One of them may have caused the error: if it did not count, that delivery would end every
        worker that receives it.
        """
        for item in items:
            item.decide(Abandon())
        isolated(
            [item for item in items if self._still_ours(item)],
            self._settling.settle,
            unavailable=self._not_settled,
            refused=lambda item, error: self._not_settled([item], error),
        )

    # -- what fails --------------------------------------------------------------------------

    def _not_settled(self, items: Sequence[WorkItem], error: Exception) -> None:
        self._settling.undo(items)
        self._try_again("outcomes could not be recorded or settled", items, error)

    def _try_again(self, what: str, items: Sequence[WorkItem], error: Exception) -> None:
        logger.warning("%s, %d deliveries are retried: %s", what, len(items), error)
        for item in items:
            item.tries += 1

    @contextmanager
    def _transaction(self, items: Sequence[WorkItem]) -> Iterator[None]:
        """One transaction if broker and store share a file. A rollback holds the leases again."""
        try:
            with self._joint.transaction() if self._joint is not None else nullcontext():
                yield
        except BaseException:
            self._settling.undo(items)
            raise
