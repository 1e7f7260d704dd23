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

from collections.abc import Callable
from typing import NamedTuple, Protocol

from aztask.errors import QueueNotFound
from aztask.queues.engine import Engine, Leased
from aztask.support.clock import Clock

BATCH_MESSAGES = 200
BATCH_BYTES = 2 * 1024 * 1024
DEAD_LETTERS_EVERY = 0.1  # seconds between two checks for expired messages


class Source(NamedTuple):
    """What a consumer reads.

    queue: the engine's name of the queue. dead: read its dead letters. session: read this session.
    """

    queue: str
    dead: bool = False
    session: str | None = None


class Consumer(Protocol):
    """A link that receives, as the dispatcher uses it."""

    source: Source
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
        self._waiting: dict[Source, list[Consumer]] = {}
        self._by_queue: dict[tuple[str, bool], set[Source]] = {}
        self._marked: set[Source] = set()
        self._sizes: dict[Source, int] = {}
        self._quiet_until: dict[Source, float] = {}
        self.plan_flush: Callable[[], None] = lambda: None

    def join(self, consumer: Consumer) -> None:
        """Add a consumer to those that wait at its source."""
        source = consumer.source
        self._waiting.setdefault(source, []).append(consumer)
        self._by_queue.setdefault((source.queue, source.dead), set()).add(source)

    def leave(self, consumer: Consumer) -> None:
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

    def consumers(self, queue: str) -> list[Consumer]:
        """Return the consumers of a queue, of its dead letters and of its sessions."""
        return [
            consumer
            for source, consumers in self._waiting.items()
            if source.queue == queue
            for consumer in consumers
        ]

    def wake(self, source: Source) -> None:
        """Check this source at the end of the turn."""
        if source in self._waiting:
            self._mark(source)
            self.plan_flush()

    def _mark(self, source: Source) -> None:
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

    def _check_due(self, source: Source, now: float) -> None:
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

    def _collect(self, source: Source, offset: float, deliveries: list[Callable[[], None]]) -> None:
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

    def _take(self, consumer: Consumer, limit: int) -> list[Leased]:
        try:
            return consumer.take(self._engine, limit)
        except QueueNotFound:
            return []

    def _batch(self, source: Source) -> int:
        return max(1, min(BATCH_MESSAGES, BATCH_BYTES // (self._sizes.get(source, 0) + 1)))


class _Delivery:
    """Delivers a batch to its consumer when called, after the commit."""

    __slots__ = ("_consumer", "_messages", "_offset")

    def __init__(self, consumer: Consumer, messages: list[Leased], offset: float) -> None:
        self._consumer, self._messages, self._offset = consumer, messages, offset

    def __call__(self) -> None:
        self._consumer.deliver(self._messages, self._offset)


class _WakeAgain:
    """Checks a source again in the next turn, because its last batch was full."""

    __slots__ = ("_dispatcher", "_source")

    def __init__(self, dispatcher: DeliveryDispatcher, source: Source) -> None:
        self._dispatcher, self._source = dispatcher, source

    def __call__(self) -> None:
        self._dispatcher.wake(self._source)
