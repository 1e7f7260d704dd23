"""Deferred messages and the pointers that call for them: the strategy ``defer``.

A deferred message is received by its position alone, so the position travels in a pointer: a
message of the same task without a body, scheduled for the time of the retry. It is sent *before*
the original is deferred, and settled *after* the deferred message is.

Rules
1. A run on behalf of a pointer is a run of the deferred message: its key, its lease, its start row.
   The pointer is kept under a lease of its own until the other is settled.
2. A pointer ends only when its message needs it no more: settled for good, deferred anew with the
   next pointer, or gone. Where the message goes back to the deferred ones, so does its pointer.
3. A pointer whose message is not among the deferred ones waits: it may be about to be deferred, or
   be leased on behalf of another copy. After `LAST_LOOK` looks, two leases and more, it is not
   needed: the message has become an ordinary one again, or runs under another pointer.

Crash windows, all but the last closed by leases that lapse:

* Pointer sent, message not deferred: the message comes again by itself and runs, sooner than it
  was due. The pointer finds it running, or gone, or deferred anew, and then runs it early.
* Pointer received, nothing settled: both leases lapse. The message is deferred again, the pointer
  comes again and calls for it.
* Message settled, pointer not: the pointer comes again and finds the message gone, or deferred
  anew, and then runs it early.
* A pointer that the broker itself dead-letters (it killed one worker after the other) leaves its
  message deferred. The run is recorded as failed then, and the pointer's replay runs the message as
  a new generation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from aztask.app import App
from aztask.brokers.delivery import Delivery, Lost, Settled, Unknown
from aztask.errors import BrokerError, CodecError, LeaseError
from aztask.lease.keeper import LeaseKeeper
from aztask.lease.state import Lease
from aztask.message.message import TaskMessage
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Decision,
    Defer,
    Hold,
    Release,
    Settlement,
)
from aztask.support.failpoint import hit
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Pointer, Stage, WorkItem, message_of

logger = logging.getLogger(__name__)

UNDECODABLE = "undecodable"
FOREIGN_POINTER = "foreign-pointer"
FIRST_LOOK_SECONDS = 1.0
LOOKS_BEFORE_A_LEASE = 5
LAST_LOOK = 7


class Pointers:
    """Fetches what pointers point to, and settles them. Any thread may call."""

    def __init__(self, app: App, keeper: LeaseKeeper, redelivery: Redelivery) -> None:
        self._app = app
        self._keeper = keeper
        self._redelivery = redelivery
        self._counts_in_row = app.results is not None

    # -- receiving ---------------------------------------------------------------------------

    def fetch(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """The items that can go on: each pointer's item has become the deferred message's.

        The others have a settlement. Raises BrokerError; asking again does no harm.
        """
        pointing = [item for item in items if _points(item)]
        if not pointing:
            return list(items)
        groups: dict[int, list[WorkItem]] = {}
        for item in pointing:
            groups.setdefault(id(item.receiver), []).append(item)
        for group in groups.values():
            self._fetch_group(group)
        hit("fetched", sum(item.pointer is not None for item in pointing))
        return [item for item in items if item.stage is Stage.RECEIVED]

    def _fetch_group(self, items: list[WorkItem]) -> None:
        receiver = items[0].receiver
        wanted = {message_of(item).pointer for item in items}
        found = receiver.receive_deferred([each for each in wanted if each is not None])
        by_position = {int(each.position): each for each in found}
        for item in items:
            delivery = by_position.pop(message_of(item).pointer or 0, None)
            if delivery is None:
                item.decide(self._not_there(item))
            else:
                self._become(item, delivery)

    def _become(self, item: WorkItem, delivery: Delivery) -> None:
        """From now on the item is the deferred message's, and holds both leases."""
        pointing = message_of(item)
        item.pointer = Pointer(item.delivery, item.lease)
        item.delivery = delivery
        item.lease = Lease.of(delivery)
        self._keeper.hold(item.receiver, [item.lease])
        try:
            message = self._app.codec.from_envelope(delivery.envelope, item.queue)
        except CodecError as error:
            item.decide(DeadLetter(UNDECODABLE, str(error)))
            return
        if message.id != pointing.id:
            item.decide(Abandon())  # it is deferred again, for its own pointer
            text = f"it points to message {delivery.position}, which belongs to another task id"
            self._settle_pointer(item, DeadLetter(FOREIGN_POINTER, text))
            return
        item.open(self._called(message, pointing, delivery), item.task)

    def _called(
        self, message: TaskMessage, pointing: TaskMessage, delivery: Delivery
    ) -> TaskMessage:
        """The deferred message with the counts that hold for this run."""
        if pointing.generation > message.generation:
            # the pointer was replayed out of the dead letters: so is its message, which starts over
            return replace(
                message,
                generation=pointing.generation,
                hop=pointing.hop,
                resubmit_count=0 if self._counts_in_row else pointing.resubmit_count,
                snooze_count=0 if self._counts_in_row else pointing.snooze_count,
                delivery_base=delivery.delivery_count - 1,
            )
        if self._counts_in_row:
            return message
        return replace(
            message,
            resubmit_count=pointing.resubmit_count,
            snooze_count=pointing.snooze_count,
            delivery_base=pointing.delivery_base,
        )

    def _not_there(self, item: WorkItem) -> Decision:
        """Its message is not among the deferred ones: see rule 3."""
        position = message_of(item).pointer or 0
        found = self._app.broker.peek(item.queue, after=position - 1, limit=1)
        if not found or found[0].position != position:
            logger.info("message %d of %s is gone, its pointer ends", position, item.queue)
            return Complete()
        looks = item.delivery.delivery_count
        if looks >= LAST_LOOK:
            logger.warning(
                "message %d of %s is not deferred: it comes by itself, its pointer ends",
                position,
                item.queue,
            )
            return Complete()
        lease = item.delivery.lease_seconds
        pause = lease if looks >= LOOKS_BEFORE_A_LEASE else FIRST_LOOK_SECONDS * 2 ** (looks - 1)
        return Hold(min(pause, lease))

    # -- settling ----------------------------------------------------------------------------

    def send(self, items: Iterable[WorkItem]) -> None:
        """Send the pointers of those that are about to be deferred. Raises BrokerError.

        Crash window: a worker that dies after this leaves a pointer to a message that is not
        deferred; see above.
        """
        queues: dict[str, list[WorkItem]] = {}
        for item in items:
            if isinstance(item.settlement, Defer):
                queues.setdefault(item.queue, []).append(item)
        for queue, group in queues.items():
            self._app.broker.send(queue, [self._redelivery.pointer(item) for item in group])
            hit("pointed", len(group))

    def follow(
        self, items: Sequence[WorkItem], answers: Sequence[Settled | Lost | Unknown]
    ) -> None:
        """Settle the pointers of messages that were settled just now (rule 2)."""
        for item, answer in zip(items, answers, strict=True):
            if item.pointer is not None and isinstance(answer, Settled):
                hit("parted")
                how = item.settlement
                self._settle_pointer(
                    item, how if isinstance(how, Abandon | Release) else Complete()
                )

    def _settle_pointer(self, item: WorkItem, how: Settlement) -> None:
        """One that cannot be settled comes again, and finds what became of its message."""
        pointer = item.pointer
        if pointer is None:
            return
        try:
            self._keeper.begin(pointer.lease)
            answer = item.receiver.settle([(pointer.delivery, how)])[0]
        except LeaseError as error:
            logger.info("the pointer to message %s is not ours: %s", item.delivery.position, error)
        except BrokerError as error:
            logger.warning("a pointer on %s was not settled: %s", item.queue, error)
            self._keeper.settlement_failed(pointer.lease)
        else:
            self._keeper.book([(pointer.lease, answer)])


def _points(item: WorkItem) -> bool:
    return item.pointer is None and message_of(item).pointer is not None
