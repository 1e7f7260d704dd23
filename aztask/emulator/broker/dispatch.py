"""Distributes messages to the consumers that wait for them.

Rules
1. Consumers wait at the source that they read: a queue, its dead letters, or one session. They take
   turns, so that a consumer with much credit does not starve the others.
2. A batch is limited in messages, and in bytes by the sizes in the batch before. The rest follows
   in the next turn of the loop, when the socket has taken this batch.
   A source whose sizes are not known yet begins with `FIRST_BATCH` messages. One turn takes about
   `TURN_BYTES`, so that a client that does not read is noticed before all of its links are served.
3. Every tick checks all sources with a waiting consumer, because a schedule may fall due and a lock
   may expire without any request. The forwarder runs before the consumers.
4. A source that fails in an unexpected way, such as at a message that cannot be read, harms no
   other: it is logged and left alone for `BROKEN_SECONDS`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from aztask.emulator.amqp import AmqpError
from aztask.errors import AztaskError, BrokerUnavailable, QueueNotFound
from aztask.queues.engine import Database, Engine, Leased
from aztask.support.clock import Clock

BATCH_MESSAGES = 200
BATCH_BYTES = 2 * 1024 * 1024
FIRST_BATCH = 20
TURN_BYTES = 16 * 1024 * 1024
BROKEN_SECONDS = 60.0
DEAD_LETTERS_EVERY = 0.1  # seconds between two checks for expired messages
log = logging.getLogger(__name__)


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
        self._collected: set[MessageSource] = set()
        self._bytes = 0  # of the messages that this turn has taken
        self._broken_until: dict[MessageSource, float] = {}
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
            self._broken_until.pop(source, None)
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
        if self._is_broken(source):
            return
        self._marked.add(source)
        self._quiet_until.pop(source, None)

    def _is_broken(self, source: MessageSource) -> bool:
        """Return whether the source failed and is left alone (rule 4)."""
        until = self._broken_until.get(source)
        if until is None:
            return False
        if until > self._clock.monotonic():
            return True
        del self._broken_until[source]
        return False

    def _failed(self, source: MessageSource) -> None:
        log.exception(
            "%s: receiving failed after a bug of the emulator; it is left alone for %g s",
            source.queue,
            BROKEN_SECONDS,
        )
        self._broken_until[source] = self._clock.monotonic() + BROKEN_SECONDS
        self._marked.discard(source)

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
            if self._broken_until and self._is_broken(source):
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
        self._collected = marked
        if not marked:
            return []
        offset = self._clock.wall() - self._clock.monotonic()
        deliveries: list[Callable[[], None]] = []
        self._bytes = 0
        for source in marked:
            if self._bytes > TURN_BYTES:
                self._marked.add(source)
                self.plan_flush()
                continue
            try:
                self._collect(source, offset, deliveries)
            except AztaskError:  # the store's: it concerns all sources
                raise
            except Exception:  # noqa: BLE001  # `_failed` logs it
                self._failed(source)
        return deliveries

    def rolled_back(self) -> None:
        """All receives were rolled back; the next tick checks the sources again."""
        for source in self._collected & self._waiting.keys():
            self._mark(source)

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
                sizes = [len(message.payload) for message in messages]
                self._sizes[source] = max(*sizes, self._sizes.get(source, 0) // 2)
                self._bytes += sum(sizes)
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
        size = self._sizes.get(source)
        most = min(BATCH_MESSAGES, FIRST_BATCH if size is None else BATCH_BYTES // (size + 1))
        return max(1, most)


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
#    given back is delivered at once. If collecting them fails, the changes are made without them.
# 4. A change, an answer or a delivery that fails in an unexpected way is one entry of the log. The
#    others of its turn are made.


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


@dataclass(slots=True)
class UndoneBlock:
    """How a block of `undone` ended. error: None if it succeeded."""

    error: AmqpError | None = None


@contextmanager
def undone(database: Database) -> Iterator[UndoneBlock]:
    """Run a block inside the turn's transaction; undo its changes alone if it raises AmqpError."""
    failure = UndoneBlock()
    with database.transaction() as connection:
        connection.execute("SAVEPOINT request")
        try:
            yield failure
        except AmqpError as error:
            failure.error = error
            connection.execute("ROLLBACK TO request")
        connection.execute("RELEASE request")


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
        executed = False
        try:
            with self._database.transaction():
                for change in changes:
                    change.execute()
                executed = True
                if self.collector:
                    deliveries = self.collector.collect()
        except Exception as error:
            if self.collector:
                self.collector.rolled_back()
            if executed and not isinstance(error, AztaskError):
                log.exception("deliveries failed after a bug of the emulator; they are tried again")
            self._one_by_one(changes, None if executed else error)
        else:
            for change in changes:
                _guarded(change.succeed)
            for deliver in deliveries:
                _guarded(deliver)

    def _alone(self, change: StoreChange) -> None:
        """Make a change that needs no transaction around it, or is one itself."""
        try:
            change.execute()
        except Exception as error:  # noqa: BLE001  # `_fail` logs what is unexpected
            _fail(change, error)
        else:
            _guarded(change.succeed)

    def _one_by_one(self, changes: list[StoreChange], error: Exception | None) -> None:
        """Make each change in a transaction of its own. error: of the one that raised; or None."""
        if error and (len(changes) == 1 or isinstance(error, BrokerUnavailable)):
            for change in changes:
                _fail(change, error)
            return
        for change in changes:
            try:
                with self._database.transaction():
                    change.execute()
            except Exception as failure:  # noqa: BLE001  # `_fail` logs what is unexpected
                _fail(change, failure)
            else:
                _guarded(change.succeed)


def _fail(change: StoreChange, error: Exception) -> None:
    """Answer with the error; an unexpected one is logged."""
    if not isinstance(error, AztaskError):
        log.error("a change failed after a bug of the emulator", exc_info=error)
        error = AztaskError("a bug of the emulator, see its log")
    _guarded(partial(change.fail, error))


def _guarded(call: Callable[[], None]) -> None:
    """Answer or deliver to one client; a failure harms no other (rule 4)."""
    try:
        call()
    except Exception:
        log.exception("an answer or a delivery failed after a bug of the emulator")
