"""How a message that shall run again waits meanwhile: the retry strategies.

A retry policy decides *whether* and *when*; here that decision becomes what the strategy makes of
it, with the clone and the counts that go with it.

    resubmit       a scheduled clone, then the original is completed
    abandon        back into the queue at once; the policy's delay does not count
    lease-timeout  nothing is settled: the lease lapses, and the delay is what is left of it
    hold           the lease is kept and renewed without a slot, then abandoned when it is time
    defer          a scheduled pointer, then the original is set aside for it (see `pointers`)

Rules
1. A clone carries its counts. Where the same message comes again they are kept in the run's row of
   the result store; without one, in the message itself where the service can change it, and else
   the service's delivery count stands for them: then a crash counts as a failure too, and what is
   no failure (a snooze) resubmits, so that it is not taken for one.
2. A delay that the task itself asked for is kept: `abandon` and `lease-timeout`, which cannot wait
   for it, resubmit for once.
3. A decision follows from the message, the record and the clock alone, so that it can be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from aztask.app import App
from aztask.brokers.delivery import Delivery
from aztask.errors import CapabilityError, CodecError, LeaseError
from aztask.lease.keeper import LeaseKeeper
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.results.base import Owned
from aztask.retry import EXPIRED
from aztask.sending.sessionrules import strategy_in_session
from aztask.settlement import (
    Abandon,
    DeadLetter,
    Decision,
    Defer,
    Hold,
    Lapse,
    Resubmit,
    Settlement,
    with_envelope,
)
from aztask.support.clock import Clock
from aztask.worker.pipeline.work import WorkItem, message_of

logger = logging.getLogger(__name__)

UNKNOWN_TASK = "unknown-task"
UNTIMED = frozenset({"abandon", "lease-timeout"})
"""Strategies that cannot wait for a given time."""


class Redelivery:
    """Turns decisions into what the strategy makes of them. Any thread may call."""

    def __init__(self, app: App, keeper: LeaseKeeper, clock: Clock) -> None:
        """Raises CapabilityError where a task's strategy is beyond the broker."""
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
                    f"task {task.name!r}: retry_strategy={task.retry_strategy!r} is not possible "
                    f"on {can.name}; it can {', '.join(can.retry_strategies)}"
                )

    # -- counts ------------------------------------------------------------------------------

    def strategy(self, item: WorkItem) -> str:
        """The retry strategy of the item's task, in a session one that suits it."""
        default = self._app.settings.retry_strategy
        if item.session is not None:
            return strategy_in_session(item.task, default, ordered=item.in_order)
        return item.task.retry_strategy if item.task else default

    def own(self, item: WorkItem, answer: Owned) -> None:
        """The run is ours: its message gets the counts of what happened to it so far (rule 1)."""
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
        """How often it may be started without an outcome that counts by itself."""
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
        """What becomes of a run that failed, given what its retry policy said."""
        if not isinstance(decision, Resubmit) or item.settled:
            return decision
        made = self._made(item, decision)
        due = getattr(made, "due", None) or self._clock.wall()
        expires = message_of(item).expires
        if expires is not None and due >= expires:
            return DeadLetter(EXPIRED, "it would expire before its next run")
        return made

    def _made(self, item: WorkItem, wanted: Resubmit) -> Decision:
        strategy = self.strategy(item)
        if wanted.asked and strategy in UNTIMED:
            strategy = "hold" if item.in_order else "resubmit"
        if not wanted.counted and self._counted_by_service(item):
            strategy = "hold" if item.in_order else "resubmit"
        match strategy:
            case "abandon":
                return Abandon()
            case "lease-timeout":
                return Lapse()
            case "hold":
                return Hold(wanted.delay, self._clock.wall() + wanted.delay)
            case "defer":
                due = self._clock.wall() + wanted.delay
                return Defer(wanted.delay, due, counted=wanted.counted)
        return self.resubmit(wanted.delay, counted=wanted.counted)

    def put_off(self, item: WorkItem, delay: float) -> Decision:
        """Let it wait uncounted, whatever its task says, but keep its place in a session."""
        if item.in_order:
            return Hold(delay, self._clock.wall() + delay)
        return self.resubmit(delay, counted=False)

    def resubmit(self, delay: float, *, counted: bool) -> Resubmit:
        """A clone for later, with the time that it is due."""
        return Resubmit(delay=delay, due=self._clock.wall() + delay, counted=counted)

    # -- carrying out ------------------------------------------------------------------------

    def write_counts(self, items: list[WorkItem]) -> None:
        """Without a result store: the counts into the messages that come again themselves.

        Crash window: a worker that dies before has not counted the failure, one that dies after
        has, and in both cases the message comes again when its lease ends.
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
                logger.warning("a failure of %s is not counted: %s", message.id, error)

    def waits(self, item: WorkItem) -> bool:
        """Whether nothing is settled now."""
        return isinstance(item.settlement, Hold | Lapse)

    def keep(self, item: WorkItem) -> None:
        """Its outcome is durable: wait as was decided."""
        hold = item.settlement
        if isinstance(hold, Hold):
            left = hold.delay if hold.due is None else max(0.0, hold.due - self._clock.wall())
            item.hold(self._clock.monotonic() + left)
            for lease in item.leases:
                self._keeper.limit(lease, item.held_until + 2 * lease.seconds)
        else:
            item.end()

    def check(self, item: WorkItem) -> None:
        """Raise CodecError where the broker would refuse the clone that `item` is settled with."""
        settlement = item.settlement
        if isinstance(settlement, Resubmit) and not item.settled:
            self._app.broker.check(self._app.codec.to_envelope(self._clone(item, settlement)))

    def pairs(self, items: Sequence[WorkItem]) -> list[tuple[Delivery, Settlement]]:
        """Deliveries and settlements, as a receiver takes them."""
        return [(item.delivery, self.ready(item)) for item in items]

    def ready(self, item: WorkItem) -> Settlement:
        """The settlement as the broker takes it: a resubmission with its clone and what is left
        of its delay. The clone follows from the message and the record alone, so a repeated
        settlement sends the same clone under the same id.
        """
        settlement = item.settlement
        assert not isinstance(settlement, Hold | Lapse)  # those that wait are not settled
        if not isinstance(settlement, Resubmit):
            return settlement
        clone = self._clone(item, settlement)
        delay = self._left(settlement)
        envelope = self._app.codec.to_envelope(clone, delay=delay)
        return with_envelope(settlement, envelope, delay)

    def pointer(self, item: WorkItem) -> Envelope:
        """The pointer to a item that is about to be deferred; repeated, it has the same id."""
        settlement = item.settlement
        assert isinstance(settlement, Defer)  # asked for no others
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

    def _clone(self, item: WorkItem, settlement: Resubmit) -> TaskMessage:
        if item.decided is not None and item.decided.clone is not None:
            return item.decided.clone
        message = message_of(item)
        unknown = item.outcome is not None and item.outcome.error_type == UNKNOWN_TASK
        since = message.unknown_since
        if unknown and since is None and item.outcome is not None:
            since = item.outcome.at
        return message.resubmitted(
            counted=settlement.counted,
            unknown_since=since if unknown else None,
            delivery_base=self.delivery_base(item),
        )

    def delivery_base(self, item: WorkItem) -> int:
        """What the clone's deliveries count from: its own, where the broker's count goes on."""
        return item.delivery.delivery_count if self._in_place else 0
