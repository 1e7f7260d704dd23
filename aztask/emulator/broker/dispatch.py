"""Who waits for messages, and handing them out.

Rules
1. Consumers wait under the source they read: a queue, its dead letters, or one session. They take
   turns, so that one with much credit does not starve the others.
2. A batch is limited in messages and, by the size of what came before, in bytes: the rest follows
   in the next turn of the loop, when the socket has taken this one.
3. Sources that somebody waits for are looked at again every tick, because schedules fall due and
   locks lapse without anybody's doing. The forwarder runs before the consumers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from aztask.engine import Engine, Leased
from aztask.errors import QueueNotFound
from aztask.support.clock import Clock

BATCH_MESSAGES = 200
BATCH_BYTES = 2 * 1024 * 1024
DEAD_LETTERS_EVERY = 0.1  # seconds between two looks at what may have expired


class Source(NamedTuple):
    """queue: the engine's name."""

    queue: str
    dead: bool = False
    session: str | None = None


class Consumer(Protocol):
    """A link that receives."""

    source: Source
    delete: bool

    def capacity(self) -> int:
        """How many messages it takes now."""

    def take(self, engine: Engine, limit: int) -> list[Leased]:
        """Receive for it, inside the transaction."""

    def deliver(self, messages: list[Leased], offset: float) -> None:
        """Send them; `offset` turns the lease clock into UTC epoch seconds."""

    def exhausted(self) -> None:
        """Nothing is left for it now: the moment to answer a drain."""


class Forwarding(Protocol):
    """Moves messages on, inside the transaction, and says where they went."""

    @property
    def pending(self) -> bool:
        """Whether there is anything to move."""

    def run(self) -> set[str]:
        """Move what has gathered; the engine's names of the queues that got something."""


class DeliveryDispatcher:
    """Collects deliveries for everybody who waits."""

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
        """A consumer is there from now on."""
        source = consumer.source
        self._waiting.setdefault(source, []).append(consumer)
        self._by_queue.setdefault((source.queue, source.dead), set()).add(source)

    def leave(self, consumer: Consumer) -> None:
        """The consumer is gone."""
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
        """Who reads a queue, its dead letters or its sessions."""
        return [
            consumer
            for source, consumers in self._waiting.items()
            if source.queue == queue
            for consumer in consumers
        ]

    def wake(self, source: Source) -> None:
        """Look at this source at the end of the turn."""
        if source in self._waiting:
            self._mark(source)
            self.plan_flush()

    def _mark(self, source: Source) -> None:
        self._marked.add(source)
        self._quiet_until.pop(source, None)

    def queue_changed(self, queue: str, dead: bool = False) -> None:
        """Something may have become available in a queue, or in its dead letters."""
        for source in self._by_queue.get((queue, dead), ()):
            self._mark(source)

    def tick(self) -> None:
        """Look again at every source that somebody waits for, where time may bring something."""
        now = self._clock.monotonic()
        for source, consumers in self._waiting.items():
            if self._quiet_until.get(source, 0.0) > now or source in self._marked:
                continue
            if any(consumer.capacity() for consumer in consumers):
                self._look_ahead(source, now)
        if self._marked:
            self.plan_flush()

    def _look_ahead(self, source: Source, now: float) -> None:
        """Wake the source when it is due; else remember until when it can be left alone.

        Dead letters also come from messages that expire or lapse in the queue itself, which
        happens when somebody looks at it: looking at no message is enough.
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
        """Whether somebody was woken, or something is to be moved."""
        return bool(self._marked) or self._forwarding.pending

    def collect(self) -> list[Callable[[], None]]:
        """Take messages for all woken sources; the calls deliver them."""
        for queue in self._forwarding.run():
            self.queue_changed(queue)
        woken, self._marked = self._marked, set()
        if not woken:
            return []
        offset = self._clock.wall() - self._clock.monotonic()
        deliveries: list[Callable[[], None]] = []
        for source in woken:
            self._collect(source, offset, deliveries)
        return deliveries

    def rolled_back(self) -> None:
        """Nothing that was collected counts; the next tick tries again."""

    def _collect(self, source: Source, offset: float, deliveries: list[Callable[[], None]]) -> None:
        consumers = self._waiting.get(source)
        if not consumers:
            return
        consumers.append(consumers.pop(0))
        dry = False
        for consumer in list(consumers):
            wanted = 0 if dry else min(consumer.capacity(), self._batch(source))
            messages = self._take(consumer, wanted) if wanted else []
            if messages:
                self._quiet_until.pop(source, None)
                self._sizes[source] = max(len(message.payload) for message in messages)
                deliveries.append(_Delivery(consumer, messages, offset))
            dry = dry or len(messages) < wanted
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
    """A batch that was taken for a consumer; called after the commit."""

    __slots__ = ("_consumer", "_messages", "_offset")

    def __init__(self, consumer: Consumer, messages: list[Leased], offset: float) -> None:
        self._consumer, self._messages, self._offset = consumer, messages, offset

    def __call__(self) -> None:
        self._consumer.deliver(self._messages, self._offset)


class _WakeAgain:
    """Looks at a source again in the next turn."""

    __slots__ = ("_dispatcher", "_source")

    def __init__(self, dispatcher: DeliveryDispatcher, source: Source) -> None:
        self._dispatcher, self._source = dispatcher, source

    def __call__(self) -> None:
        self._dispatcher.wake(self._source)
