"""A broker some of whose queues have shards: one queue for its callers, several at the service.

Rules
1. Queues without shards are passed on as they are.
2. A send of messages for several shards is several sends. If one of them fails after another was
   accepted, SendUnconfirmed names the messages that may be missing; sent again under their ids they
   go to the same shards, whose services recognise copies.
3. Numbers and positions name the shard, see `aztask.queues.sharded.positions`.
4. An empty sharded queue is polled twice as often as another one, however many shards it has: each
   shard is polled that much less often. Receivers begin with different shards, so that several
   workers look at a shard at different times.
5. A new task's id is drawn again while its shard is at an address that does not answer. All else
   goes to its shard, and fails with it.
6. Which shards a queue has may change at any moment, see `aztask.queues.sharded.layouts`. Nothing
   here remembers it longer than for one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import Final, TypeVar

from aztask.address.owner import Identified
from aztask.address.shards import (
    MOST_SHARDS,
    ShardCounts,
    read_shard_name,
    shard_name,
    shard_names,
)
from aztask.errors import (
    AztaskError,
    BrokerError,
    BrokerUnavailable,
    CapabilityError,
    QueueNotFound,
    SendUnconfirmed,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    ANY_SESSION,
    AnySession,
    Broadcaster,
    Broker,
    Capabilities,
    Inspectable,
    Inspector,
    Listing,
    Mailboxes,
    NameChecker,
    Networked,
    Peeked,
    Permission,
    Position,
    QueueFacts,
    QueueOptions,
    QueueStats,
    Receiver,
    ReceiverOptions,
    Transactional,
)
from aztask.queues.sharded.addresses import AddressBroker
from aztask.queues.sharded.layouts import DeclaredLayouts, ShardLayouts
from aztask.queues.sharded.moves import ShardMoves
from aztask.queues.sharded.positions import behind, inner_position, outer_position
from aztask.queues.sharded.receiver import (
    SESSION_SLICE,
    SLICE,
    ShardedReceiver,
    ShardedSessions,
    ShardReceivers,
    open_receiver,
)
from aztask.support import chance
from aztask.support.chance import new_id, new_ids
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.finding import Finding
from aztask.support.threadpool import ThreadPool

THREADS: Final = 16
"""ShardCount that are asked at the same time."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ShardedBroker:
    """A broker that spreads the messages of some queues over their shards. Any thread may call."""

    def __init__(
        self,
        broker: Broker,
        layouts: ShardLayouts,
        *,
        poll_ceiling: float = 1.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """poll_ceiling: that of the broker."""
        self._broker = broker
        self.layouts = layouts
        self.moves = ShardMoves(broker, layouts)
        self._poll_ceiling = poll_ceiling
        self._clock = clock
        self._closed = False
        self.addresses = broker if isinstance(broker, AddressBroker) else None
        remote = broker.capabilities.remote
        self._workers = ThreadPool("shards", THREADS) if remote else None
        self._renewers = ThreadPool("shard-renewals", THREADS) if remote else None

    @property
    def capabilities(self) -> Capabilities:
        """What the service can do, and its limits."""
        return self._broker.capabilities

    def names(self, queue: str) -> tuple[str, ...]:
        """The queues of the service that may hold messages or dead letters of `queue`.

        Some of them need not exist. Raises BrokerUnavailable if its shards are not known.
        """
        if not self.layouts.has(queue):
            return (queue,)
        layout, wish = self.layouts.layout(queue), self.layouts.wish(queue)
        if self.addresses is not None:
            numbers = [each for each in range(layout.top) if self.addresses.has(queue, each)]
            return tuple(shard_name(queue, number) for number in numbers)
        return shard_names(queue, max(layout.top, wish.read))

    def needed(self, queue: str) -> tuple[str, ...]:
        """Those that must exist: messages are sent to them, or received from them."""
        if not self.layouts.has(queue):
            return (queue,)
        layout = self.layouts.layout(queue)
        numbers = {*layout.sent.numbers, *layout.reading(self.layouts.wish(queue))}
        return tuple(shard_name(queue, number) for number in sorted(numbers))

    def check_name(self, queue: str) -> None:
        """Raise InvalidQueueName unless the service allows the name, and those of its shards."""
        if isinstance(self._broker, NameChecker):
            for name in shard_names(queue, self.layouts.wish(queue).read):
                self._broker.check_name(name)

    # -- queues ------------------------------------------------------------------------------

    def declare(self, queue: str, options: QueueOptions = QueueOptions()) -> None:
        """Create the shards that are missing, or apply the options to those that exist."""
        for name in self.needed(queue):
            self._broker.declare(name, options)

    def delete(self, queue: str) -> None:
        """Delete all shards. Raises QueueNotFound if there is none."""
        self._there(self._broker.delete, self.names(queue))

    def listing(self) -> Listing:
        """All queues of the service; the shards of a queue are that queue."""
        found = self._broker.listing()
        return Listing(tuple(sorted({self._whole(name) for name in found.queues})), found.foreign)

    def _whole(self, name: str) -> str:
        queue, number = read_shard_name(name)
        if not number or not self.layouts.has(queue):
            return name
        return queue if name in self.names(queue) else name

    def queues(self) -> list[str]:
        """The sorted names of the queues that aztask can use."""
        return list(self.listing().queues)

    def stats(self, queue: str) -> QueueStats:
        """The sums over the shards. Raises QueueNotFound if there is none."""
        return QueueStats.sum(queue, self.shard_stats(queue))

    def shard_stats(self, queue: str) -> list[QueueStats]:
        """The counts of each shard that exists. Raises QueueNotFound if there is none."""
        return self._there(self._broker.stats, self.names(queue))

    def peek(
        self,
        queue: str,
        *,
        dead_letter: bool = False,
        after: Position | None = None,
        limit: int = 100,
    ) -> list[Peeked]:
        """Read messages without leasing them, in order of position, starting behind `after`.

        Where a service shows no positions, those of the first shards come first.
        """
        if not self.layouts.has(queue):
            return self._broker.peek(queue, dead_letter=dead_letter, after=after, limit=limit)

        def peek_one(name: str) -> list[Peeked]:
            number = read_shard_name(name)[1]
            found = self._broker.peek(
                name,
                dead_letter=dead_letter,
                after=behind(after, number),
                limit=limit,
            )
            return [replace(each, position=outer_position(number, each.position)) for each in found]

        pages = self._there(peek_one, self.names(queue))
        if self.capabilities.paged_peek:
            # The positions of one service are all numbers.
            return list(islice(merge(*pages, key=lambda each: each.position), limit))
        return [each for page in pages for each in page][:limit]

    def purge(self, queue: str, *, dead_letter: bool = False) -> int:
        """Delete the messages of all shards, or their dead letters; returns how many."""

        def purge_one(name: str) -> int:
            return self._broker.purge(name, dead_letter=dead_letter)

        return sum(self._there(purge_one, self.names(queue)))

    # -- messages ----------------------------------------------------------------------------

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Store all envelopes, each in its shard.

        Raises what the service raises if nothing was stored, and SendUnconfirmed if something was
        or may be (rule 2).
        """
        if not self.layouts.has(queue) or not envelopes:
            self._broker.send(queue, envelopes)
            return
        session = any(each.session is not None for each in envelopes)
        shards = self.layouts.sending(queue, session=session)
        if shards.count == 1 or len(envelopes) == 1:
            self._broker.send(shard_name(queue, shards.of(envelopes[0])), envelopes)
            return
        groups: dict[int, list[Envelope]] = {}
        for each in envelopes:
            groups.setdefault(shards.of(each), []).append(each)
        if len(groups) > 1:
            for each in envelopes:  # before some are stored and one is refused
                self._broker.check(each, reserve=self.capabilities.headroom)

        def send_one(group: tuple[int, list[Envelope]]) -> BrokerError | None:
            number, some = group
            try:
                self._broker.send(shard_name(queue, number), some)
            except BrokerError as error:
                return error
            return None

        wanted = list(groups.items())
        errors = self._each(send_one, wanted)
        failed = [
            (error, some)
            for error, (_, some) in zip(errors, wanted, strict=True)
            if error is not None
        ]
        if not failed:
            return
        error = failed[0][0]
        unsure = any(isinstance(each, SendUnconfirmed) for each, _ in failed)
        if not unsure and len(failed) == len(wanted):
            raise error
        missing = [
            each
            for why, some in failed
            for each in (why.unconfirmed if isinstance(why, SendUnconfirmed) else some)
        ]
        raise SendUnconfirmed(
            f"{len(failed)} of {len(wanted)} shards of queue {queue!r} have not confirmed their "
            f"messages: {error}",
            missing,
        ) from error

    def fresh_ids(self, queue: str, count: int) -> list[str]:
        """New task ids, none of which has its shard at an address that does not answer.

        So a task that no program knows yet is sent where it can be, and all that is sent to it
        later follows its id. If no address answers, or it is not known which shards there are, the
        ids are any, and the send says what is wrong.
        """
        found = new_ids(count)
        if self.addresses is None or not self.layouts.has(queue):
            return found
        try:
            shards = self.layouts.sending(queue, session=False)
        except AztaskError:
            return found
        silent = [each for each in shards.numbers if not self._answers(queue, each)]
        if not silent or len(silent) == shards.count:
            return found
        for place in range(count):
            while shards.of_id(found[place]) in silent:
                found[place] = new_id()
        return found

    def _answers(self, queue: str, number: int) -> bool:
        assert self.addresses is not None  # noqa: S101  # the caller has looked
        name = shard_name(queue, number)
        return self.addresses.outages.answers(self.addresses.home_of(name), name)

    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        """Raise EncodeError or MessageTooLarge if the service could not store the envelope."""
        self._broker.check(envelope, reserve=reserve)

    def cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        """Remove scheduled messages by message id; returns how many were removed.

        A message id does not say the shard, so each one is asked.
        """

        def cancel_one(name: str) -> int:
            return self._broker.cancel_scheduled(name, message_ids)

        return sum(self._there(cancel_one, self.names(queue)))

    def send_timer(self, queue: str, envelope: Envelope) -> int:
        """Store one delayed message; returns the number by which `cancel_timer` removes it."""
        if not self.layouts.has(queue):
            return self._broker.send_timer(queue, envelope)
        shard = self.layouts.sending(queue, session=envelope.session is not None).of(envelope)
        return self._broker.send_timer(shard_name(queue, shard), envelope) * MOST_SHARDS + shard

    def cancel_timer(self, queue: str, number: int) -> bool:
        """Remove the scheduled message of this number; False if it is not there."""
        if not self.layouts.has(queue):
            return self._broker.cancel_timer(queue, number)
        shard, inner = inner_position(number)
        name = shard_name(queue, shard)
        return name in self.names(queue) and self._broker.cancel_timer(name, int(inner))

    def receiver(
        self,
        queue: str,
        *,
        lease: float,
        prefetch: int = 0,
        session: str | AnySession | None = None,
        dead_letter: bool = False,
        delete: bool = False,
        poll_ceiling: float | None = None,
    ) -> Receiver:
        """A receiver of all shards whose leases last `lease` seconds."""
        options = ReceiverOptions(queue, lease, session, dead_letter, delete)
        if not self.layouts.has(queue):
            return open_receiver(self._broker, options, prefetch, poll_ceiling)
        ceiling = self._poll_ceiling if poll_ceiling is None else poll_ceiling
        shards = ShardReceivers(self._broker, self.moves, options, prefetch, ceiling, self._clock)
        kind = ShardedReceiver if session is None else ShardedSessions
        found = kind(
            shards,
            begin=chance.share(),
            workers=self._workers,
            renewers=self._renewers,
            clock=self._clock,
            slice_seconds=SESSION_SLICE if session is not None and self._workers else SLICE,
        )
        if isinstance(found, ShardedSessions) and session is not ANY_SESSION:
            found.only = str(session)
        return found

    def _each(self, call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """The answers for the items, asked at the same time where that saves waiting."""
        if self._workers is None or self._closed:  # closed, the service's broker says so
            return list(map(call, items))
        return self._workers.map(call, items)

    def _there(self, call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """As `_each`, without the shards that do not exist: a file has a queue from its first use.

        Raises QueueNotFound if none does.
        """

        def ask(item: Item) -> Answer | QueueNotFound:
            try:
                return call(item)
            except QueueNotFound as missing:
                return missing

        answers = self._each(ask, items)
        found = [each for each in answers if not isinstance(each, QueueNotFound)]
        if not found:
            raise next(each for each in answers if isinstance(each, QueueNotFound))
        return found

    # -- what some services have -------------------------------------------------------------

    def inspector(self) -> Inspector:
        """The inspector of this broker's queues. Raises CapabilityError if it has none."""
        if not isinstance(self._broker, Inspectable):
            raise CapabilityError("the queues of this broker cannot be inspected")
        return ShardInspector(self._broker.inspector(), self)

    def mailboxes(self) -> Mailboxes:
        """The mailboxes of the service: they have no shards. Raises CapabilityError."""
        if not isinstance(self._broker, Broadcaster):
            raise CapabilityError("this broker has no mailboxes")
        return self._broker.mailboxes()

    def close(self) -> None:
        """Close all connections of the broker."""
        self._closed = True
        for pool in (self._workers, self._renewers):
            if pool is not None:
                pool.close()
        self._broker.close()


class RemoteShards(ShardedBroker):
    """One of a service that is reached over a network."""

    @property
    def server(self) -> tuple[str, int | None]:
        """The service's host name, and its port if the address names one."""
        assert isinstance(self._broker, Networked)  # noqa: S101  # `sharded` has looked
        return self._broker.server


class JointShards(ShardedBroker):
    """One whose sends and settlements can join the transaction of a store."""

    @property
    def identity(self) -> str:
        """The broker's name, for the owner of rows."""
        assert isinstance(self._broker, Identified)  # noqa: S101  # `sharded` has looked
        return self._broker.identity

    @property
    def transaction_key(self) -> str:
        """Names the file of the queues, see `Transactional`."""
        return self._joint.transaction_key

    def transaction(self) -> AbstractContextManager[None]:
        """All sends and settlements of this thread are one, in all shards."""
        return self._joint.transaction()

    @property
    def _joint(self) -> Transactional:
        assert isinstance(self._broker, Transactional)  # noqa: S101  # `sharded` has looked
        return self._broker


def sharded(
    broker: Broker,
    shards: ShardCounts,
    layouts: ShardLayouts | None = None,
    *,
    poll_ceiling: float = 1.0,
    clock: Clock = SYSTEM_CLOCK,
) -> Broker:
    """The broker with shards, if any queue has some; what else it can do stays.

    layouts: by default those of the code, `shards`.
    """
    if not shards and not isinstance(broker, AddressBroker):
        return broker
    kind = ShardedBroker
    if isinstance(broker, Transactional) and isinstance(broker, Identified):
        kind = JointShards
    elif isinstance(broker, Networked):
        kind = RemoteShards
    known = layouts or DeclaredLayouts(shards)
    return kind(broker, known, poll_ceiling=poll_ceiling, clock=clock)


class ShardInspector:
    """Inspects the shards of a queue, and says of each one what differs from the first."""

    def __init__(self, inspector: Inspector, broker: ShardedBroker) -> None:
        self._inspector = inspector
        self._broker = broker

    def facts(self, queue: str) -> QueueFacts:
        """The settings of the first shard that is not as it should be: missing, or different."""
        found = [facts for _, facts in self._asked(queue, self._inspector.facts)]
        first = replace(found[0], queue=queue)
        for each in found[1:]:
            if replace(each, queue=queue) != first:
                return replace(each, queue=queue)
        return first

    def rights(self, queue: str) -> Sequence[Permission]:
        """The permissions on the first shard where one is missing."""
        rights: Sequence[Permission] = ()
        for _, rights in self._asked(queue, self._inspector.rights):
            if any(each.error is not None for each in rights):
                break
        return rights

    def _asked(self, queue: str, ask: Callable[[str], Answer]) -> Iterator[tuple[str, Answer]]:
        """The answer for each shard. Of several addresses, one that does not answer is passed over:
        `surroundings` says which; raises its error if none answers.
        """
        error, answered = None, False
        for name in self._broker.needed(queue):
            try:
                answer = ask(name)
            except BrokerUnavailable as unavailable:
                if self._broker.addresses is None:
                    raise
                error = unavailable
            else:
                answered = True
                yield name, answer
        if error is not None and not answered:
            raise error

    def clock_offset(self, queue: str) -> float | None:
        """Seconds that the service's clock is ahead of ours; None if unknown."""
        for _, offset in self._asked(queue, self._inspector.clock_offset):
            return offset
        return None

    def surroundings(self) -> Sequence[Finding]:
        """Findings that concern all queues."""
        return self._inspector.surroundings()
