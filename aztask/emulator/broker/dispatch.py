"""Distributes messages to the consumers that wait for them.

Rules
1. Consumers wait at the source that they read: a queue, its dead letters, or one session. They take
   turns, so that a consumer with much credit does not starve the others.
2. A batch is limited in messages, and in bytes by the sizes in the batch before. The rest follows
   in the next turn of the loop, when the socket has taken this batch.
3. Every tick checks all sources with a waiting consumer, because a schedule may fall due and a lock
   may expire without any request. The forwarder runs before the consumers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from aztask.errors import AztaskError, BrokerUnavailable, QueueNotFound
from aztask.queues.engine import Database, Engine, Leased
from aztask.support.clock import Clock

BATCH_MESSAGES = 200
BATCH_BYTES = 2 * 1024 * 1024
DEAD_LETTERS_EVERY = 0.1  # seconds between two checks for expired messages


class MessageSource(NamedTuple):
    """What a consumer reads.

    queue: the engine's name of the queue. dead: read its dead letters. session: read this session.
    """

    queue: str
    dead: bool = False
    session: str | None = None


class WaitingConsumer(Protocol):
    """A link that receives, as the dispatcher uses it."""

    source: MessageSource
    delete: bool

    def capacity(self) -> int:
        """Return how many messages the link takes now."""

    def take(self, engine: Engine, limit: int) -> list[Leased]:
        """Receive for this link, inside the transaction."""

    def deliver(self, messages: list[Leased], offset: float) -> None:
        """Send the messages. offset: the seconds from the lease clock to UTC epoch seconds."""

    def exhausted(self) -> None:
        """The source has no more messages now: answer a drain."""


class Forwarding(Protocol):
    """Moves messages from queue to queue, inside the transaction."""

    @property
    def pending(self) -> bool:
        """Whether there may be messages to move."""

    def run(self) -> set[tuple[str, bool]]:
        """Move messages; return the queues that got some; True: dead letters."""


class DeliveryDispatcher:
    """Collects deliveries for all waiting consumers.

    plan_flush: set by the server; makes the current turn of the loop end with a flush.
    """

    def __init__(self, engine: Engine, clock: Clock, forwarding: Forwarding) -> None:
        self._engine = engine
        self._clock = clock
        self._forwarding = forwarding
        self._waiting: dict[MessageSource, list[WaitingConsumer]] = {}
        self._by_queue: dict[tuple[str, bool], set[MessageSource]] = {}
        self._marked: set[MessageSource] = set()
        self._sizes: dict[MessageSource, int] = {}
        self._quiet_until: dict[MessageSource, float] = {}
        self.plan_flush: Callable[[], None] = lambda: None

    def join(self, consumer: WaitingConsumer) -> None:
        """Add a consumer to those that wait at its source."""
        source = consumer.source
        self._waiting.setdefault(source, []).append(consumer)
        self._by_queue.setdefault((source.queue, source.dead), set()).add(source)

    def leave(self, consumer: WaitingConsumer) -> None:
        """Remove a consumer whose link ended."""
        source = consumer.source
        consumers = self._waiting.get(source, [])
        if consumer in consumers:
            consumers.remove(consumer)
        if not consumers and source in self._waiting:
            del self._waiting[source]
            self._sizes.pop(source, None)
            self._quiet_until.pop(source, None)
            self._by_queue[source.queue, source.dead].discard(source)

    def consumers(self, queue: str) -> list[WaitingConsumer]:
        """Return the consumers of a queue, of its dead letters and of its sessions."""
        return [
            consumer
            for source, consumers in self._waiting.items()
            if source.queue == queue
            for consumer in consumers
        ]

    def wake(self, source: MessageSource) -> None:
        """Check this source at the end of the turn."""
        if source in self._waiting:
            self._mark(source)
            self.plan_flush()

    def _mark(self, source: MessageSource) -> None:
        self._marked.add(source)
        self._quiet_until.pop(source, None)

    def queue_changed(self, queue: str, dead: bool = False) -> None:
        """Check a queue, or its dead letters, in the next flush: messages may be available."""
        for source in self._by_queue.get((queue, dead), ()):
            self._mark(source)

    def tick(self) -> None:
        """Check every source with a waiting consumer for messages that fell due."""
        now = self._clock.monotonic()
        for source, consumers in self._waiting.items():
            if self._quiet_until.get(source, 0.0) > now or source in self._marked:
                continue
            if any(consumer.capacity() for consumer in consumers):
                self._check_due(source, now)
        if self._marked:
            self.plan_flush()

    def _check_due(self, source: MessageSource, now: float) -> None:
        """Mark the source if a message is due, else remember when to check it again.

        The engine moves expired messages to the dead letters only when the queue is read. A peek at
        zero messages is enough.
        """
        try:
            if source.dead:
                self._engine.peek(source.queue, 0, 0)
            wait = self._engine.pending(source.queue, dead_letter=source.dead)
        except QueueNotFound:
            return
        if wait <= 0:
            self._marked.add(source)
        else:
            self._quiet_until[source] = now + min(wait, DEAD_LETTERS_EVERY if source.dead else wait)

    def due(self) -> bool:
        """Return whether a source is marked, or messages wait to be forwarded."""
        return bool(self._marked) or self._forwarding.pending

    def collect(self) -> list[Callable[[], None]]:
        """Receive for all marked sources; the returned calls deliver the messages."""
        for queue, dead in self._forwarding.run():
            self.queue_changed(queue, dead)
        marked, self._marked = self._marked, set()
        if not marked:
            return []
        offset = self._clock.wall() - self._clock.monotonic()
        deliveries: list[Callable[[], None]] = []
        for source in marked:
            self._collect(source, offset, deliveries)
        return deliveries

    def rolled_back(self) -> None:
        """All receives were rolled back; the next tick checks the sources again."""

    def _collect(
        self, source: MessageSource, offset: float, deliveries: list[Callable[[], None]]
    ) -> None:
        consumers = self._waiting.get(source)
        if not consumers:
            return
        consumers.append(consumers.pop(0))
        dry = False  # the source has no more messages
        for consumer in list(consumers):
            limit = 0 if dry else min(consumer.capacity(), self._batch(source))
            messages = self._take(consumer, limit) if limit else []
            if messages:
                self._quiet_until.pop(source, None)
                self._sizes[source] = max(len(message.payload) for message in messages)
                deliveries.append(_Delivery(consumer, messages, offset))
            dry = dry or len(messages) < limit
            if dry:
                deliveries.append(consumer.exhausted)
        if not dry and any(consumer.capacity() for consumer in consumers):
            deliveries.append(_WakeAgain(self, source))

    def _take(self, consumer: WaitingConsumer, limit: int) -> list[Leased]:
        try:
            return consumer.take(self._engine, limit)
        except QueueNotFound:
            return []

    def _batch(self, source: MessageSource) -> int:
        return max(1, min(BATCH_MESSAGES, BATCH_BYTES // (self._sizes.get(source, 0) + 1)))


class _Delivery:
    """Delivers a batch to its consumer when called, after the commit."""

    __slots__ = ("_consumer", "_messages", "_offset")

    def __init__(self, consumer: WaitingConsumer, messages: list[Leased], offset: float) -> None:
        self._consumer, self._messages, self._offset = consumer, messages, offset

    def __call__(self) -> None:
        self._consumer.deliver(self._messages, self._offset)


class _WakeAgain:
    """Checks a source again in the next turn, because its last batch was full."""

    __slots__ = ("_dispatcher", "_source")

    def __init__(self, dispatcher: DeliveryDispatcher, source: MessageSource) -> None:
        self._dispatcher, self._source = dispatcher, source

    def __call__(self) -> None:
        self._dispatcher.wake(self._source)


# -- Group commit ----------------------------------------------------------------------------------
#
# Group commit: all changes of one turn of the event loop share one transaction.
#
# Rules
# 1. A `StoreChange` is executed inside the transaction and answered after its commit, so a change
#    that was confirmed is on disk. If the process dies before the commit, no client has got an
#    answer.
# 2. If the transaction fails, each change is tried in a transaction of its own. One bad change (for
#    a deleted queue, say) does not fail its neighbours.
# 3. Deliveries are collected last in the same transaction, so that a message that was just sent or
#    given back is delivered at once.

log = logging.getLogger(__name__)


class StoreChange:
    """One change of the store, and the answer to the client that asked for it.

    atomic: `execute` makes a single call of the engine, which is a transaction by itself.
    """

    __slots__ = ()
    atomic = False

    def execute(self) -> None:
        """Change the store. Called again if the first transaction was rolled back."""

    def succeed(self) -> None:
        """Called after the commit: answer that the change was made."""

    def fail(self, error: AztaskError) -> None:
        """Called if the change was not made: answer with the error."""


class Collector(Protocol):
    """Receives messages from the store for the waiting consumers."""

    def due(self) -> bool:
        """Return whether there may be messages to receive."""

    def collect(self) -> list[Callable[[], None]]:
        """Receive inside the transaction; return calls that deliver after the commit."""

    def rolled_back(self) -> None:
        """The transaction failed, and with it all receives: try again later."""


class Committer:
    """Collects changes until the loop's next turn, then commits them together.

    soon: calls a function in the loop's next turn. after_flush: called after each flush, to write
    to the sockets.
    """

    def __init__(self, database: Database, soon: Callable[[Callable[[], None]], object]) -> None:
        self._database = database
        self._soon = soon
        self._changes: list[StoreChange] = []
        self._flush_planned = False
        self.reading = False  # no flush is planned between here and `finish_reading`
        self.flushing = False
        self.collector: Collector | None = None
        self.after_flush: Callable[[], None] = lambda: None

    def submit(self, change: StoreChange) -> None:
        """Make this change at the end of the turn."""
        self._changes.append(change)
        if not self._flush_planned:
            self.plan_flush()

    def plan_flush(self) -> None:
        """Flush at the end of this turn. Called during a flush, it plans another one."""
        if not self._flush_planned:
            self._flush_planned = True
            if not self.flushing and not self.reading:
                self._soon(self.flush)

    def finish_reading(self, *, now: bool) -> None:
        """End the reading of one client's bytes.

        now: flush now, because no other client is active; else in the loop's next turn.
        """
        self.reading = False
        if self._flush_planned:
            if now:
                self.flush()
            else:
                self._soon(self.flush)

    def flush(self) -> None:
        """Commit the collected changes, answer, deliver, then write to the sockets."""
        self.flushing, self._flush_planned = True, False
        changes, self._changes = self._changes, []
        try:
            simple = not changes or (len(changes) == 1 and changes[0].atomic)
            if simple and not (self.collector and self.collector.due()):
                for change in changes:
                    self._alone(change)
            else:
                self._together(changes)
            self.after_flush()
        finally:
            self.flushing = False
            if self._flush_planned:
                self._soon(self.flush)

    def _together(self, changes: list[StoreChange]) -> None:
        """Make all changes and collect deliveries in one transaction."""
        deliveries: list[Callable[[], None]] = []
        try:
            with self._database.transaction():
                for change in changes:
                    change.execute()
                if self.collector:
                    deliveries = self.collector.collect()
        except AztaskError as error:
            if self.collector:
                self.collector.rolled_back()
            self._one_by_one(changes, error)
        else:
            for change in changes:
                change.succeed()
            for deliver in deliveries:
                deliver()

    def _alone(self, change: StoreChange) -> None:
        """Make a change that needs no transaction around it."""
        try:
            change.execute()
        except AztaskError as error:
            change.fail(error)
        else:
            change.succeed()

    def _one_by_one(self, changes: list[StoreChange], error: AztaskError) -> None:
        if len(changes) == 1 or isinstance(error, BrokerUnavailable):
            for change in changes:
                change.fail(error)
            return
        for change in changes:
            try:
                with self._database.transaction():
                    change.execute()
            except AztaskError as failure:
                change.fail(failure)
            else:
                change.succeed()
