"""A sweep over dead letters: takes them under renewed leases, replaces or removes some of them.

Rules
1. A dead letter is completed only after its replacement was accepted. If broker and results share a
   file, both happen in one transaction, one dead letter at a time.
2. Dead letters that were taken but not settled are released at the end, so that this does not count
   as a delivery.
3. Memory is bounded: at most `HELD_MOST` dead letters are held without being acted on.
4. Copies of one dead letter (see `aztask.operate.deadletters.letters`) are all settled, and counted
   as one: the numbers of a `Report` are dead letters, not messages.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Self

from aztask.app import App
from aztask.errors import AztaskError, EncodeError, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.operate.deadletters.letters import DeadLetterView
from aztask.queues.base import shared_transaction
from aztask.queues.delivery import Delivery, Lost, Position, Settled, Unknown
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.queues.lease.state import Lease, LeaseState
from aztask.settlement import Complete, Release, Settlement
from aztask.stores.records.base import RunKey, RunRecord, State
from aztask.stores.records.deadindex import key_of
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.failpoint import hit

logger = logging.getLogger(__name__)

LOCAL_LEASE = 5.0
REMOTE_LEASE = 60.0
LOCAL_WAIT = 0.05
REMOTE_WAIT = 5.0
PAUSE = 0.01
HELD_MOST = 20_000
"""The most unselected dead letters that are held to reach the ones behind them."""
COPIES_WITHIN = 50_000
"""How many of the last dead letters are remembered, to recognise copies of one invocation."""
IDS_KEPT = 10_000
"""The most ids that a report lists."""

Answers = list[Settled | Lost | Unknown]


@dataclass(slots=True)
class Report:
    """The result of a replay or a purge.

    * `done`: dead letters acted on; `ids`: the ids of the first `IDS_KEPT`.
    * `lost`: dead letters that another process holds or has removed, or whose completion was not
      confirmed: check if they still exist.
    * `unreadable`: dead letters that cannot be sent again: they could not be read, or the service
      does not take what is in them.
    * `held_back`: dead letters of unique tasks whose key another task holds; they stay among the
      dead letters. `blocked`: their ids, each with the id of the task that holds its key.
    * `refused`: dead letters that were refused as too old or unsigned; they stay unless the caller
      vouches for them.
    """

    done: int = 0
    lost: int = 0
    unreadable: int = 0
    held_back: int = 0
    refused: int = 0
    ids: list[str] = field(default_factory=list)
    blocked: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replacement:
    """The envelope that replaces a dead letter. `message` is None if it cannot be decoded."""

    envelope: Envelope
    message: TaskMessage | None


@dataclass(frozen=True, slots=True)
class HeldLetter:
    """A dead letter that is held under a lease."""

    letter: DeadLetterView
    lease: Lease


class Sweep:
    """A context manager that takes dead letters of one queue and settles them."""

    def __init__(
        self,
        app: App,
        queue: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.joint = shared_transaction(app.broker, app.results)
        self.report = Report()
        self._app = app
        self._queue = queue
        self._sleep = clock.sleep
        remote = app.broker.capabilities.remote
        self._wait = REMOTE_WAIT if remote else LOCAL_WAIT
        self._keeper = LeaseKeeper(app.broker, clock=clock)
        self._receiver = app.broker.receiver(
            queue, lease=REMOTE_LEASE if remote else LOCAL_LEASE, dead_letter=True
        )
        self._held: dict[Lease, None] = {}
        self._aside = 0
        self._copies = not app.broker.capabilities.paged_peek
        self._acted: OrderedDict[str, None] = OrderedDict()

    def __enter__(self) -> Self:
        self._keeper.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Release the dead letters still held; an error here never hides one of the block."""
        try:
            ours = [lease for lease in self._held if self._begin(lease)]
            self._book(ours, self._settle(ours, Release()))
        except AztaskError:
            if kind is None:
                raise
        finally:
            self._keeper.stop()
            self._receiver.close()

    def take(self, limit: int) -> list[Lease]:
        """Take up to `limit` more dead letters; an empty list means that there are no more."""
        return self._hold(self._receiver.receive(limit, self._wait))

    def take_at(self, positions: Sequence[Position]) -> list[Lease]:
        """Take the dead letters at `positions`, as far as they exist and are free.

        Only if the broker has the capability ``dead_by_position``.
        """
        return self._hold(self._receiver.receive_deferred(positions))

    def keep_aside(self, count: int) -> None:
        """Count `count` of the last ones taken as held only to reach others behind them.

        Raises AztaskError if there are too many.
        """
        self._aside += count
        if self._aside > HELD_MOST:
            raise AztaskError(
                f"more than {HELD_MOST:,} unselected dead letters of queue {self._queue!r} come "
                "before the selected ones, and this service delivers them only in order; replay or "
                "purge some of those first"
            )

    def replace(self, batch: Sequence[tuple[HeldLetter, Replacement]]) -> None:
        """Send the replacements, store the new runs, complete the dead letters.

        If the process dies in between, the replacements are sent and their dead letters still
        exist; this cannot happen if all of it is one transaction. One that the service does not
        take as it is, because another program wrote a field that is too long, keeps no other one
        from its replay: it stays, and is counted as unreadable.
        """
        try:
            self._replace(batch)
        except (EncodeError, MessageTooLarge) as error:
            if len(batch) > 1:
                for pair in batch:
                    self.replace([pair])
                return
            self.report.unreadable += 1
            logger.warning("dead letter %s stays: %s", batch[0][0].letter.id, error)

    def _replace(self, batch: Sequence[tuple[HeldLetter, Replacement]]) -> None:
        ours = [pair for pair in batch if self._begin(pair[0].lease)]
        leases = [taken.lease for taken, _ in ours]
        answers: Answers = []
        try:
            with self._transaction():
                self._send([new for _, new in ours])
                hit("replayed", len(ours))
                answers = self._settle(leases, Complete())
                if self.joint is not None and not all(isinstance(a, Settled) for a in answers):
                    raise _Undo
        except _Undo:
            pass  # each answer says if its lease was lost
        except AztaskError:
            for lease in leases:
                self._keeper.settlement_failed(lease)
            raise
        self._count([taken for taken, _ in batch], self._book(leases, answers))

    def remove(self, batch: Sequence[HeldLetter]) -> None:
        """Complete these dead letters without a replacement."""
        leases = [taken.lease for taken in batch if self._begin(taken.lease)]
        self._count(batch, self._book(leases, self._settle(leases, Complete())))

    def is_copy(self, taken: HeldLetter) -> bool:
        """True if another copy of this dead letter has been acted on, or held back, in this sweep.

        The last `COPIES_WITHIN` dead letters are remembered.
        """
        return self._copies and key_of(taken.letter.envelope) in self._acted

    def note(self, taken: HeldLetter) -> None:
        """Remember that this dead letter was counted."""
        if self._copies:
            self._acted[key_of(taken.letter.envelope)] = None
            if len(self._acted) > COPIES_WITHIN:
                self._acted.popitem(last=False)

    def settled(self, taken: HeldLetter) -> bool:
        """True if the dead letter is certainly gone."""
        return taken.lease.state is LeaseState.SETTLED

    # -- inside ------------------------------------------------------------------------------

    def _hold(self, deliveries: Sequence[Delivery]) -> list[Lease]:
        leases = [Lease.of(each) for each in deliveries]
        self._held.update(dict.fromkeys(leases))
        self._keeper.hold(self._receiver, leases)
        return leases

    def _send(self, new: Sequence[Replacement]) -> None:
        if not new:
            return
        self._app.broker.send(self._queue, [each.envelope for each in new])
        if self._app.results is not None:
            self._app.results.expect(
                RunRecord(RunKey(*message.key), message.task, message.queue, State.PENDING)
                for message in (each.message for each in new)
                if message is not None
            )

    def _begin(self, lease: Lease) -> bool:
        """True if the lease may be settled now, after waiting for a renewal that is under way."""
        while not self._keeper.begin_settlement([lease])[0]:
            if lease.state is not LeaseState.RENEWING:
                return False
            self._sleep(PAUSE)
        return True

    def _settle(self, leases: Sequence[Lease], how: Settlement) -> Answers:
        if not leases:
            return []
        return self._receiver.settle([(lease.delivery, how) for lease in leases])

    def _book(self, leases: Sequence[Lease], answers: Answers) -> set[Lease]:
        """Pass the answers to the keeper; returns the leases that are certainly settled."""
        booked = list(zip(leases, answers, strict=True))
        self._keeper.book(booked)
        self._keeper.drop(lease for lease, answer in booked if isinstance(answer, Unknown))
        for lease in leases:
            self._held.pop(lease, None)
        return {lease for lease, answer in booked if isinstance(answer, Settled)}

    def _count(self, batch: Sequence[HeldLetter], settled: set[Lease]) -> None:
        for taken in batch:
            self._held.pop(taken.lease, None)
            if taken.lease in settled:
                if self.is_copy(taken):
                    continue
                self.note(taken)
                self.report.done += 1
                if len(self.report.ids) < IDS_KEPT:
                    self.report.ids.append(taken.letter.id)
            else:
                self.report.lost += 1

    def _transaction(self) -> AbstractContextManager[None]:
        return self.joint.transaction() if self.joint is not None else nullcontext()


class _Undo(Exception):
    """Rolls back the joint transaction: the lease was lost in it, so nothing may be sent."""
