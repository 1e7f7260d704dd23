"""Putting off: a run that may not start yet waits in the queue, and nothing is counted.

A pause, a limit, an open circuit breaker or an unknown task name decides this *before* the start
row, so the store is not written. The clone has the same key as its original and a message id of its
own (`TaskMessage.put_off`).

Rules
1. At most one copy of a run is admitted. After a crash between clone and completion both are in the
   queue. The first one that starts owns the start row; the other one finds the owner, or the
   recorded outcome, and is completed.
2. A start row names the position of the message that owns it. An original that was delivered before
   may have such a row, and its clone would be refused as a superfluous copy. So the row of a
   redelivered original is claimed and given back first: a row without an owner admits any copy.
   While the row is claimed, a clone that an earlier worker had sent may be completed as a
   superfluous copy. So the new clone's id is of a series of its own: under the id of that clone,
   duplicate detection would drop it, and no copy would be left.
   Services that resubmit in place keep the position and need none of this.
3. In a session the message keeps its place: its lease is held for the delay, then it is
   released. No clone is sent.
4. A message is never put off past its expiry: when that comes, it is claimed and recorded as
   expired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aztask.app import App
from aztask.message.message import PUT_OFF_SERIES
from aztask.settlement import Hold, Resubmit
from aztask.stores.records.base import Owned, StartAnswer
from aztask.support import chance
from aztask.support.clock import Clock
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import PutOff, Stage, WorkItem, message_of

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
