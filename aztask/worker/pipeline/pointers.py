"""Deferred messages and the pointers that call for them: the strategy ``defer``.

A deferred message is received by its position alone, so the position travels in a pointer: a
message of the same task without a body, scheduled for the time of the retry. It is sent *before*
the original is deferred, and settled *after* the deferred message is.

Rules
1. A run on behalf of a pointer is a run of the deferred message: its key, its lease, its start row.
   The pointer is held under its own lease until the message is settled.
2. A pointer ends when its message no longer needs it: the message is settled, deferred again with
   the next pointer, or gone. If the message returns to the deferred ones, its pointer returns too.
3. A pointer whose message is not among the deferred ones waits: the message may be about to be
   deferred, or be leased on behalf of another copy. After `LAST_LOOK` looks (more than two leases)
   the pointer is not needed: the message is an ordinary one again, or runs under another pointer.
4. A pointer that no worker sent becomes a dead letter: the broker cannot defer, the message belongs
   to another task id, or it is gone and the result store knows no run of it. Without a result store
   the last case looks like the third crash window below, so the pointer is completed.

Crash windows. Expiring leases close all but the last:

* Pointer sent, message not deferred: the message is redelivered and runs, sooner than it was due.
  The pointer finds it running, or gone, or deferred again, and then runs it early.
* Pointer received, nothing settled: both leases expire. The message is deferred again, the pointer
  is redelivered and calls for it.
* Message settled, pointer not: the pointer is redelivered and finds the message gone, or deferred
  again, and then runs it early.
* A pointer that the broker itself dead-letters (it killed one worker after the other) leaves its
  message deferred. The run is then recorded as failed, and a replay of the pointer runs the message
  as a new generation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from aztask.app import App
from aztask.errors import BrokerError, CodecError, LeaseError
from aztask.message.message import TaskMessage
from aztask.queues.delivery import Delivery, Lost, Settled, Unknown
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.queues.lease.state import Lease
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
from aztask.stores.records.base import State
from aztask.support.failpoint import hit
from aztask.support.floodlog import FloodLog
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Pointer, Stage, WorkItem, message_of

logger = logging.getLogger(__name__)

UNDECODABLE = "undecodable"
FOREIGN_POINTER = "foreign-pointer"
FIRST_LOOK_SECONDS = 1.0
LOOKS_BEFORE_A_LEASE = 5
LAST_LOOK = 7


class Pointers:
    """Receives the messages that pointers point to, and settles pointers. Any thread may call."""

    def __init__(
        self, app: App, keeper: LeaseKeeper, redelivery: Redelivery, floods: FloodLog
    ) -> None:
        self._app = app
        self._floods = floods
        self._keeper = keeper
        self._redelivery = redelivery
        self._counts_in_row = app.results is not None

    # -- receiving ---------------------------------------------------------------------------

    def fetch(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """Receive the deferred messages of the pointers among `items`.

        Returns the items that can continue: the item of each pointer has become that of its
        message. The others have a settlement. Raises BrokerError; calling again is harmless.
        """
        pointing = [item for item in items if _points(item)]
        if not pointing:
            return list(items)
        can = self._app.broker.capabilities
        if not can.defer:
            for item in pointing:
                position = message_of(item).pointer
                text = f"it points to message {position}, but {can.name} cannot defer"
                item.decide(self._foreign(item, text))
            return [item for item in items if item.stage is Stage.RECEIVED]
        groups: dict[int, list[WorkItem]] = {}
        for item in pointing:
            groups.setdefault(id(item.receiver), []).append(item)
        for group in groups.values():
            self._fetch_group(group)
        hit("fetched", sum(item.pointer is not None for item in pointing))
        return [item for item in items if item.stage is Stage.RECEIVED]

    def _fetch_group(self, items: list[WorkItem]) -> None:
        receiver = items[0].receiver
        positions = {message_of(item).pointer for item in items}
        found = receiver.receive_deferred([each for each in positions if each is not None])
        by_position = {int(each.position): each for each in found}
        for item in items:
            delivery = by_position.pop(message_of(item).pointer or 0, None)
            if delivery is None:
                item.decide(self._not_there(item))
            else:
                self._become(item, delivery)

    def _become(self, item: WorkItem, delivery: Delivery) -> None:
        """Make the item that of the deferred message; it holds both leases from now on."""
        pointing = message_of(item)
        item.pointer = Pointer(item.delivery, item.lease)
        item.delivery = delivery
        item.lease = Lease.of(delivery)
        self._keeper.hold(item.receiver, [item.lease])
        try:
            message = self._app.message_in(
                delivery.envelope, item.queue, delivery.position, any_age=True
            )
        except CodecError as error:
            item.decide(DeadLetter(UNDECODABLE, str(error)))
            return
        if message.id != pointing.id:
            item.decide(Abandon())  # it is deferred again, for its own pointer
            text = f"it points to message {delivery.position}, which has another task id"
            self._settle_pointer(item, DeadLetter(FOREIGN_POINTER, text))
            return
        item.open(self._called(message, pointing, delivery), item.task)

    def _called(
        self, message: TaskMessage, pointing: TaskMessage, delivery: Delivery
    ) -> TaskMessage:
        """The deferred message with the counts that hold for this run."""
        if pointing.generation > message.generation:
            # the pointer was replayed from the dead letters, so its message starts over too
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
        """What becomes of a pointer whose message is not among the deferred ones: see rule 3."""
        position = message_of(item).pointer or 0
        found = self._app.broker.peek(item.queue, after=position - 1, limit=1)
        if not found or found[0].position != position:
            if self._never_ran(message_of(item).id):
                text = f"it points to message {position}, which is gone; the task id never ran"
                return self._foreign(item, text)
            logger.info(
                "message %d on queue %s is gone: its pointer is completed", position, item.queue
            )
            return Complete()
        looks = item.delivery.delivery_count
        if looks >= LAST_LOOK:
            self._floods.warning(
                logger,
                "pointer to a message that is not deferred",
                "message %d on queue %s is no longer deferred: its pointer is completed",
                position,
                item.queue,
            )
            return Complete()
        lease = item.delivery.lease_seconds
        pause = lease if looks >= LOOKS_BEFORE_A_LEASE else FIRST_LOOK_SECONDS * 2 ** (looks - 1)
        return Hold(min(pause, lease))

    def _never_ran(self, task_id: str) -> bool:
        """Whether no worker deferred a message of this task, as far as the result store knows.

        Before a worker defers a message, it records the run that failed.
        """
        results = self._app.results
        if results is None:
            return False
        run = results.get(task_id)
        return run is None or run.state is State.PENDING

    def _foreign(self, item: WorkItem, text: str) -> DeadLetter:
        line = "%s is a pointer that no worker sent, dead-lettered: %s"
        self._floods.warning(logger, FOREIGN_POINTER, line, item.label, text)
        return DeadLetter(FOREIGN_POINTER, text)

    # -- settling ----------------------------------------------------------------------------

    def send(self, items: Iterable[WorkItem]) -> None:
        """Send the pointers of items that are about to be deferred. Raises BrokerError.

        Crash window: if the worker dies after this, the pointer's message is not deferred; see
        above.
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
        """Settle the pointers of messages that have just been settled (rule 2)."""
        for item, answer in zip(items, answers, strict=True):
            if item.pointer is not None and isinstance(answer, Settled):
                hit("parted")
                how = item.settlement
                self._settle_pointer(
                    item, how if isinstance(how, Abandon | Release) else Complete()
                )

    def _settle_pointer(self, item: WorkItem, how: Settlement) -> None:
        """Settle a pointer. If that fails it is redelivered, and finds its message settled."""
        pointer = item.pointer
        if pointer is None:
            return
        try:
            self._keeper.begin(pointer.lease)
            answer = item.receiver.settle([(pointer.delivery, how)])[0]
        except LeaseError as error:
            logger.info(
                "%s: the lease of its pointer was lost, it is redelivered: %s", item.label, error
            )
        except BrokerError as error:
            logger.warning(
                "%s: its pointer was not settled, it is redelivered: %s", item.label, error
            )
            self._keeper.settlement_failed(pointer.lease)
        else:
            self._keeper.book([(pointer.lease, answer)])


def _points(item: WorkItem) -> bool:
    return item.pointer is None and message_of(item).pointer is not None
