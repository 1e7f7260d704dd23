"""How a message waits for its next run: the retry strategies.

A retry policy decides *whether* and *when* a task runs again. Here its retry strategy turns that
decision into a settlement, with the clone and the counts that it needs.

    resubmit       sends a scheduled clone, then completes the original
    abandon        returns the message to the queue at once, without the policy's delay
    lease-timeout  settles nothing: the lease expires, and the delay is what is left of it
    hold           keeps and renews the lease without a slot, then abandons the message
    defer          sends a scheduled pointer, then defers the original (see `pointers`)

Rules
1. A clone carries its counts. If the same message is redelivered, its counts are in the run's row
   of the result store. Without a store they are in the message itself, if the service can change
   it; otherwise the service's delivery count replaces them. Then a crash counts as a failure too,
   and a snooze resubmits, so that it does not count as one.
2. A delay that the task itself asked for is kept: `abandon` and `lease-timeout`, which cannot wait,
   resubmit this once.
3. A decision depends on the message, the record and the clock only, so that it can be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from aztask.app import App
from aztask.errors import CapabilityError, CodecError, LeaseError
from aztask.message.envelope import Envelope
from aztask.message.message import PUT_OFF_SERIES, TaskMessage
from aztask.queues.delivery import Delivery
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.retry import EXPIRED
from aztask.sending.sessionrules import strategy_in_session
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Decision,
    Defer,
    Hold,
    Lapse,
    Resubmit,
    Settlement,
    with_envelope,
)
from aztask.stores.records.base import Owned, StartAnswer
from aztask.support import chance
from aztask.support.clock import Clock
from aztask.worker.pipeline.work import PutOff, Stage, WorkItem, message_of

logger = logging.getLogger(__name__)

UNKNOWN_TASK = "unknown-task"
NO_KEY = "encryption-key-missing"
NOT_HERE = (UNKNOWN_TASK, NO_KEY)
"""Why a message waits for another worker, which may run it."""
UNTIMED = frozenset({"abandon", "lease-timeout"})
"""Strategies that cannot wait for a given time."""


class Redelivery:
    """Turns the decisions of retry policies into settlements. Any thread may call."""

    def __init__(self, app: App, keeper: LeaseKeeper, clock: Clock) -> None:
        """Raises CapabilityError if the broker does not support the strategy of a task."""
        self._app = app
        self._keeper = keeper
        self._clock = clock
        can = app.broker.capabilities
        self._in_place = can.resubmit_in_place
        self._counts_in_row = app.results is not None
        self._counts_in_message = app.results is None and can.update
        for task in app.tasks.values():
            if task.retry_strategy not in can.retry_strategies:
                raise CapabilityError(
                    f"task {task.name!r}: {can.name} does not support "
                    f"retry_strategy={task.retry_strategy!r}; it supports "
                    f"{', '.join(can.retry_strategies)}"
                )

    # -- counts ------------------------------------------------------------------------------

    def strategy(self, item: WorkItem) -> str:
        """The retry strategy of the item's task; in a session, one that keeps the order."""
        default = self._app.settings.retry_strategy
        if item.session is not None:
            return strategy_in_session(item.task, default, ordered=item.in_order)
        return item.task.retry_strategy if item.task else default

    def own(self, item: WorkItem, answer: Owned) -> None:
        """Note that the run is ours, and give its message the counts so far (rule 1)."""
        item.claim(answer.starts)
        if answer.saved is not None:
            item.rewrite(saved=answer.saved)
        failures, snoozes = answer.failures, answer.snoozes
        if self._counted_by_service(item):
            failures = max(0, answer.starts - 1)
        if failures or snoozes:
            message = message_of(item)
            item.rewrite(
                resubmit_count=message.resubmit_count + failures,
                snooze_count=message.snooze_count + snoozes,
            )

    def start_limit(self, item: WorkItem) -> int:
        """How often it may be started without a recorded outcome."""
        limit = self._app.settings.max_deliveries
        if self._counted_by_service(item) and item.task is not None:
            limit = max(limit, item.task.retry.max_retries + 1)
        return limit

    def _counted_by_service(self, item: WorkItem) -> bool:
        return (
            not self._counts_in_row
            and not self._counts_in_message
            and self.strategy(item) not in ("resubmit", "defer")
        )

    # -- decisions ---------------------------------------------------------------------------

    def decide(self, item: WorkItem, decision: Decision) -> Decision:
        """The settlement of a failed run. decision: of its retry policy."""
        if not isinstance(decision, Resubmit) or item.settled:
            return decision
        made = self._made(item, decision)
        due = getattr(made, "due", None) or self._clock.wall()
        expires = message_of(item).expires
        if expires is not None and due >= expires:
            return DeadLetter(EXPIRED, "it would expire before its next run")
        return made

    def _made(self, item: WorkItem, retry: Resubmit) -> Decision:
        strategy = self.strategy(item)
        if retry.asked and strategy in UNTIMED:
            strategy = "hold" if item.in_order else "resubmit"
        if not retry.counted and self._counted_by_service(item):
            strategy = "hold" if item.in_order else "resubmit"
        match strategy:
            case "abandon":
                return Abandon()
            case "lease-timeout":
                return Lapse()
            case "hold":
                return Hold(retry.delay, self._clock.wall() + retry.delay)
            case "defer":
                due = self._clock.wall() + retry.delay
                return Defer(retry.delay, due, counted=retry.counted)
        return self.resubmit(retry.delay, counted=retry.counted)

    def put_off(self, item: WorkItem, delay: float) -> Decision:
        """Let it wait without counting, whatever its strategy; in a session it keeps its place."""
        if item.in_order:
            return Hold(delay, self._clock.wall() + delay)
        return self.resubmit(delay, counted=False)

    def resubmit(self, delay: float, *, counted: bool) -> Resubmit:
        """A resubmission that is due in `delay` seconds."""
        return Resubmit(delay=delay, due=self._clock.wall() + delay, counted=counted)

    # -- carrying out ------------------------------------------------------------------------

    def write_counts(self, items: list[WorkItem]) -> None:
        """Without a result store: write the counts into the messages that will be redelivered.

        Crash window: if the worker dies before this, the failure is not counted; if it dies after,
        it is. In both cases the message is redelivered when its lease ends.
        """
        if not self._counts_in_message:
            return
        for item in items:
            outcome = item.outcome
            if outcome is None or not outcome.again or item.settled:
                continue
            counted = outcome.state.value == "retrying"
            message = replace(
                message_of(item),
                resubmit_count=message_of(item).resubmit_count + counted,
                snooze_count=message_of(item).snooze_count + (not counted),
                delivery_base=item.delivery.delivery_count,
            )
            try:
                self._keeper.update(item.lease, item.receiver, self._app.codec.to_envelope(message))
            except (CodecError, LeaseError) as error:
                logger.warning(
                    "%s: its failure is not counted, it will run again: %s", item.label, error
                )

    def waits(self, item: WorkItem) -> bool:
        """Whether its settlement is to wait under the lease, so that nothing is settled now."""
        return isinstance(item.settlement, Hold | Lapse)

    def keep(self, item: WorkItem) -> None:
        """Start to wait as decided; the outcome is durable."""
        hold = item.settlement
        if isinstance(hold, Hold):
            left = hold.delay if hold.due is None else max(0.0, hold.due - self._clock.wall())
            item.hold(self._clock.monotonic() + left)
            for lease in item.leases:
                self._keeper.limit(lease, item.held_until + 2 * lease.seconds)
        else:
            item.end()

    def check(self, item: WorkItem) -> None:
        """Raise CodecError if the broker would refuse the clone that settles `item`."""
        settlement = item.settlement
        if isinstance(settlement, Resubmit) and not item.settled:
            self._app.broker.check(self._app.codec.to_envelope(self.clone(item, settlement)))

    def pairs(self, items: Sequence[WorkItem]) -> list[tuple[Delivery, Settlement]]:
        """Deliveries and settlements, as a receiver takes them."""
        return [(item.delivery, self.ready(item)) for item in items]

    def ready(self, item: WorkItem) -> Settlement:
        """The settlement as the broker takes it; a resubmission gets its clone and its delay.

        The clone depends on the message and the record only, so a repeated settlement sends the
        same clone under the same id.
        """
        settlement = item.settlement
        assert not isinstance(settlement, Hold | Lapse)  # noqa: S101  # waiting items are not settled
        if item.timer:
            return Complete()  # its clone is in the queue already
        if not isinstance(settlement, Resubmit):
            return settlement
        envelope = self.clone_envelope(item, settlement)
        return with_envelope(settlement, envelope, envelope.delay)

    def clone_envelope(self, item: WorkItem, settlement: Resubmit) -> Envelope:
        """The message of the next hop, delayed for the time that is left."""
        clone = self.clone(item, settlement)
        return self._app.codec.to_envelope(clone, delay=self._left(settlement))

    def pointer(self, item: WorkItem) -> Envelope:
        """The pointer to an item that is about to be deferred, under a deterministic id."""
        settlement = item.settlement
        assert isinstance(settlement, Defer)  # noqa: S101  # no other settlement has a pointer
        message = message_of(item).pointing(
            int(item.delivery.position),
            counted=settlement.counted,
            delivery_base=item.delivery.delivery_count,
        )
        return self._app.codec.to_envelope(message, delay=self._left(settlement))

    def _left(self, settlement: Resubmit | Defer) -> float:
        if settlement.due is None:
            return settlement.delay
        return max(0.0, settlement.due - self._clock.wall())

    def clone(self, item: WorkItem, settlement: Resubmit) -> TaskMessage:
        """The message of the next hop."""
        if item.decided is not None and item.decided.clone is not None:
            return item.decided.clone
        message = message_of(item)
        if item.outcome is not None and item.outcome.parked:
            return message.parked(delivery_base=self.delivery_base(item))
        unknown = item.outcome is not None and item.outcome.error_type in NOT_HERE
        since = message.unknown_since
        if unknown and item.outcome is not None and (since is None or since > item.outcome.at):
            since = item.outcome.at
        return message.resubmitted(
            counted=settlement.counted,
            unknown_since=since if unknown else None,
            delivery_base=self.delivery_base(item),
        )

    def delivery_base(self, item: WorkItem) -> int:
        """The delivery count at which the clone starts: 0, unless the broker's count continues."""
        return item.delivery.delivery_count if self._in_place else 0


# -- Putting off -----------------------------------------------------------------------------------
#
# A run that may not start yet waits in the queue, and nothing is counted. A pause, a limit, an open
# circuit breaker or an unknown task name decides this *before* the start row, so the store is not
# written. The clone has the same key as its original and a message id of its own
# (`TaskMessage.put_off`).
#
# Rules
# 1. At most one copy of a run is admitted. After a crash between clone and completion both are in
#    the queue. The first one that starts owns the start row; the other one finds the owner, or the
#    recorded outcome, and is completed.
# 2. A start row names the position of the message that owns it. An original that was delivered
#    before may have such a row, and its clone would be refused as a superfluous copy. So the row of
#    a redelivered original is claimed and given back first: a row without an owner admits any copy.
#    While the row is claimed, a clone that an earlier worker had sent may be completed as a
#    superfluous copy. So the new clone's id is of a series of its own: under the id of that clone,
#    duplicate detection would drop it, and no copy would be left. Services that resubmit in place
#    keep the position and need none of this.
# 3. In a session the message keeps its place: its lease is held for the delay, then it is
#    released. No clone is sent.
# 4. A message is never put off past its expiry: when that comes, it is claimed and recorded as
#    expired.


LONGEST_HOLD: Final = 30.0
"""Seconds that a session is held for a message that was put off, before it is released."""


class PutOffs:
    """Decides how put-off deliveries wait. Any thread may call."""

    def __init__(self, app: App, redelivery: Redelivery, clock: Clock) -> None:
        self._redelivery = redelivery
        self._clock = clock
        self._results = app.results
        self._moves = not app.broker.capabilities.resubmit_in_place

    def wait(
        self,
        item: WorkItem,
        delay: float,
        reason: str,
        slots: str = "",
        unknown_since: float | None = None,
    ) -> bool:
        """Put the delivery off for `delay` seconds; False if it must go through `claim` first.

        reason: for the event, such as "task shop.resize is paused". slots: those that the message
        carries from now on. unknown_since: when a worker first met the task's name; it is kept as
        long as the workers that put the message off do not know the task.

        Raises BrokerUnavailable for a delivery that is claimed, since its row is given back first.
        """
        self.give_back([item])
        if unknown_since is None and item.task is None:
            unknown_since = message_of(item).unknown_since
        item.waits = PutOff(delay, reason, slots, unknown_since)
        if item.stage is Stage.RECEIVED and self._may_have_row(item):
            return False
        self.decide(item)
        return True

    def give_back(self, items: Sequence[WorkItem]) -> None:
        """Give back the start rows of those that are claimed, so that any copy is admitted.

        Raises BrokerUnavailable. Crash window: as in `answered`.
        """
        claimed = [item for item in items if item.claimed is not None]
        if claimed and self._results is not None:
            self._results.disown([(item.key, item.owner) for item in claimed])
        for item in claimed:
            item.claimed = None

    def expired(self, item: WorkItem) -> bool:
        """Whether the message has expired, so that it is claimed and recorded as expired."""
        expires = message_of(item).expires
        return expires is not None and self._clock.wall() >= expires

    def answered(self, items: Sequence[WorkItem], answers: Sequence[StartAnswer]) -> list[WorkItem]:
        """Put off the redelivered items among these, whose rows were claimed for that (rule 2).

        Returns them. Items whose runs have ended, or belong to another copy, are left as they are.

        Crash window: if the worker dies before the row is given back, the row's position is still
        the original's, whose redelivery takes it over.
        """
        put_off = [
            item
            for item, answer in zip(items, answers, strict=True)
            if item.waits is not None and isinstance(answer, Owned)
        ]
        if put_off and self._results is not None:
            self._results.disown([(item.key, item.owner) for item in put_off])
        for item in put_off:
            self.decide(item, series=1 + chance.below(PUT_OFF_SERIES))
        return put_off

    def decide(self, item: WorkItem, *, series: int | None = None) -> None:
        """Decide that the delivery waits as it was put off; series: of the clone's id (rule 2)."""
        put_off, item.waits = item.waits, None
        assert put_off is not None  # noqa: S101  # only called for items that were put off
        now, message = self._clock.wall(), message_of(item)
        delay = put_off.delay
        if message.expires is not None:
            delay = max(0.0, min(delay, message.expires - now))
        if item.in_order:
            delay = min(delay, LONGEST_HOLD)
            item.decide(Hold(delay, now + delay), put_off=put_off.reason)
            return
        # Where the service's count goes on, the base rises with it: this delivery does not count.
        base = 0 if self._moves else message.delivery_base + 1
        clone = message.put_off(
            delivery_base=base,
            slots=put_off.slots or None,
            series=series,
            unknown_since=put_off.unknown_since,
        )
        settlement = Resubmit(delay=delay, due=now + delay, counted=False)
        item.decide(settlement, clone=clone, put_off=put_off.reason)

    def _may_have_row(self, item: WorkItem) -> bool:
        message = message_of(item)
        redelivered = item.delivery.delivery_count - message.delivery_base > 1
        return (
            redelivered
            and self._moves
            and self._results is not None
            and message.pointer is None
            and not item.in_order
        )
