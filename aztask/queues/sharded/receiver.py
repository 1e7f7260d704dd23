"""Receivers of sharded queues: they take from all shards in turn.

Rules
1. A receive looks into each shard once, without waiting, and begins with the one behind the last
   that had messages: no shard waits because another one is full. Then it waits in one shard after
   the other, each time for `SLICE` seconds at most.
2. A shard that cannot be received from rests for a while, with a line in the log, and the others go
   on. Only if none is left, the receive raises the error of one.
3. A delivery is settled and renewed by the receiver that it came from. If the service cannot be
   asked for one shard, the answers of the others count: those of that shard are `Unknown`. In one
   file all shards fail together, as a transaction does.
4. Where the service is asked over a network, shards are asked at the same time.
5. All shards of an address that does not answer rest together: see
   `aztask.queues.sharded.addresses`. Until it answers, nothing is asked there, and leases are
   `Unknown`, as they may still be held.
6. Each receive asks which shards there are now. A shard that is new gets a receiver, one that is
   left keeps it, for what may still be held of it. A receive also ends a move when the former
   shards are empty: so it ends although the command that began it is gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from aztask.address.shards import ShardLayout, ShardRange, shard_name
from aztask.errors import (
    AztaskError,
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    LeaseLost,
    QueueNotFound,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    Broker,
    Delivery,
    Lost,
    Position,
    Receiver,
    ReceiverOptions,
    Renewed,
    SessionHolder,
    Settled,
    Unknown,
)
from aztask.queues.sharded.addresses import AddressBroker, Resting
from aztask.queues.sharded.moves import ShardMoves
from aztask.queues.sharded.positions import by_shard, outer_position
from aztask.settlement import Settlement
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.threadpool import ThreadPool

logger = logging.getLogger(__name__)

SLICE: Final = 0.1
SESSION_SLICE: Final = 1.0
"""Seconds of waiting in one shard; a remote service needs some time to give out a session."""
MOST_FETCHED: Final = 1_000
ACCEPT_SECONDS: Final = 0.1
"""Seconds of waiting for messages of a session that has none."""
GLANCE: Final = 0.0001
"""Seconds: a receiver that polls looks only if its next poll is due."""
SHORTEST_PATIENCE: Final = 1.0
LONGEST_PATIENCE: Final = 10.0
PATIENCE_NUMBER: Final = 0.15
"""Renewals wait for an address for this part of a lease, between these seconds."""
SILENT: Final = "its address does not answer; it is tried again when that does"

IDLE_POLLS: Final = 2.0
"""How many times as often an empty sharded queue is polled as an unsharded one."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ShardDelivery(Delivery):
    """Shows the queue and the position in it; the rest is that of the delivery of the shard.

    `inner`: the delivery of the shard, for its receiver. What a receiver changes is read from it:
    the renewal of one delivery of a session moves the deadlines of the others.
    """

    __slots__ = ("inner", "shard")

    def __init__(self, queue: str, shard: int, inner: Delivery) -> None:
        self.shard, self.inner = shard, inner
        self.queue = queue
        self.position = outer_position(shard, inner.position)
        self.token = inner.token
        self.delivery_count = inner.delivery_count
        self.enqueued_at = inner.enqueued_at
        self.session = inner.session
        self.dead_letter_reason = inner.dead_letter_reason
        self.dead_letter_description = inner.dead_letter_description

    @property
    def envelope(self) -> Envelope:  # type: ignore[override]  # a field of the base
        """The message as it is now."""
        return self.inner.envelope

    @property
    def deadline(self) -> float:  # type: ignore[override]  # a field of the base
        """The end of the lease, on the broker's clock."""
        return self.inner.deadline

    @property
    def lease_seconds(self) -> float:  # type: ignore[override]  # a field of the base
        """The duration that was granted last."""
        return self.inner.lease_seconds


def own_shard(delivery: Delivery) -> ShardDelivery:
    """The delivery, which a sharded queue made. Raises ConfigurationError for another one."""
    if not isinstance(delivery, ShardDelivery):
        raise ConfigurationError("this delivery came from another broker; settle it there")
    return delivery


def open_receiver(
    broker: Broker, options: ReceiverOptions, prefetch: int, poll_ceiling: float | None
) -> Receiver:
    """A receiver of one queue of the service."""
    return broker.receiver(
        options.queue,
        lease=options.lease,
        prefetch=prefetch,
        session=options.session,
        dead_letter=options.dead_letter,
        delete=options.delete,
        poll_ceiling=poll_ceiling,
    )


class ShardReceivers:
    """The receivers of one queue's shards, each opened when it is first needed."""

    def __init__(
        self,
        broker: Broker,
        moves: ShardMoves,
        options: ReceiverOptions,
        prefetch: int,
        poll_ceiling: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """broker: whose queues the shards are. options: for each of them, with the whole queue."""
        self._broker, self._moves = broker, moves
        self._options, self._prefetch, self._poll_ceiling = options, prefetch, poll_ceiling
        self.opened: dict[int, Receiver] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.queue = options.queue
        self.addresses = broker if isinstance(broker, AddressBroker) else None
        self.resting = Resting(self.queue, clock, self.addresses)
        for number in self.numbers():
            self._open(number)

    def _open(self, number: int) -> None:
        """Open the receiver of a shard, unless its address does not answer: then `get` does it."""
        if self.addresses is None:
            self.get(number)
        elif self.resting.answers(number):
            try:
                self.get(number)
            except BrokerUnavailable as error:
                self.resting.failed(number, error)

    def numbers(self) -> tuple[int, ...]:
        """The shards to receive from now. Raises BrokerUnavailable if they are not known."""
        if self._options.dead_letter:
            numbers = tuple(range(self.top()))
        else:
            numbers = self._layout().reading(self._moves.layouts.wish(self.queue))
        if self.addresses is None:
            return numbers
        return tuple(each for each in numbers if self.addresses.has(self.queue, each))

    def top(self) -> int:
        """All messages and dead letters are in shards below this number."""
        return max(self._layout().top, self._moves.layouts.wish(self.queue).read)

    def _layout(self) -> ShardLayout:
        """Of sessions, one that is certainly no older than the last but one."""
        session = self._options.session is not None
        return self._moves.layouts.layout(self.queue, session=session)

    def sessions(self) -> ShardRange:
        """The shards among which a session has its one."""
        layout = self._layout()
        return layout.former if layout.ordered and layout.former else layout.sent

    def get(self, number: int) -> Receiver:
        """The receiver of a shard."""
        found = self.opened.get(number)
        if found is not None:
            return found
        # Fewer polls of each shard, so that all of them cost what two queues cost.
        pause = self._poll_ceiling
        if (count := len(self.numbers())) > 1:
            pause *= count / IDLE_POLLS
        options = replace(self._options, queue=shard_name(self.queue, number))
        # Not under the lock: opening may wait for a file that another thread has locked.
        made = open_receiver(self._broker, options, self._prefetch, pause)
        with self._lock:
            found = self.opened.get(number)
            if found is None:
                found = made
                self.opened = {**self.opened, number: found}
            closed = self._closed
        if closed or found is not made:
            made.close()
        return found

    def former_holders(self, session: str) -> Iterator[FormerHolder]:
        """A receiver for each former shard of a session, the last one first."""
        layout = self._layout()
        present = self.sessions().of_session(session)
        for number in dict.fromkeys(each.of_session(session) for each in layout.past):
            if number != present and (not self.addresses or self.addresses.has(self.queue, number)):
                name = shard_name(self.queue, number)
                options = replace(self._options, queue=name, session=session)
                found = open_receiver(self._broker, options, 0, None)
                assert isinstance(found, FormerHolder)  # noqa: S101  # as every receiver of sessions
                yield found

    def set_lease(self, seconds: float) -> None:
        """Set the lease, in seconds, for the next receives."""
        with self._lock:
            self._options = replace(self._options, lease=seconds)
        for each in self.opened.values():
            each.set_lease(seconds)

    def end_move(self) -> None:
        """End a move if that is due. What fails is tried again later."""
        if self._options.dead_letter or self._closed:
            return
        try:
            if self._moves.end(self.queue):
                logger.info("queue %s: all messages are in its new shards", self.queue)
        except AztaskError as error:
            logger.debug("queue %s: its former shards cannot be looked at: %s", self.queue, error)

    def close(self) -> None:
        """Close all of them, and those that are opened later."""
        with self._lock:
            self._closed = True
        for each in self.opened.values():
            each.close()


@runtime_checkable
class FormerHolder(Receiver, SessionHolder, Protocol):
    """A receiver of one session."""


def _held_state(former: FormerHolder, session: str) -> bytes | None:
    """The state that the session has there. Raises QueueNotFound, BrokerUnavailable."""
    former.receive(1, ACCEPT_SECONDS)  # accepts the session; it has no messages there
    try:
        return former.session_state(session)
    except LeaseLost:
        raise BrokerUnavailable(
            f"the former shard of session {session!r} is held by another receiver; try again"
        ) from None


class ShardedReceiver:
    """Takes deliveries from all shards of one queue, or from their dead letters."""

    def __init__(
        self,
        shards: ShardReceivers,
        *,
        begin: float = 0.0,
        workers: ThreadPool | None = None,
        renewers: ThreadPool | None = None,
        slice_seconds: float = SLICE,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """begin: which shard is looked at first, as a part of all: 0.0 to below 1.0.

        workers: threads for settlements. renewers: other threads, so renewals never wait. None: the
        service is in this process, and all is done by the caller's thread.
        """
        self._shards = shards
        self._queue = shards.queue
        self._clock = clock
        self._slice = slice_seconds
        self._workers, self._renewers = workers, renewers
        self._resting = shards.resting
        self._lock = threading.Lock()
        self._next = int(begin * len(shards.numbers()))
        self._closed = False

    @property
    def _receivers(self) -> dict[int, Receiver]:
        return self._shards.opened

    def set_lease(self, seconds: float) -> None:
        """Set the lease, in seconds, for the next receives."""
        self._shards.set_lease(seconds)

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries of one shard, as soon as there is one; [] after `wait` seconds.

        Raises the error of a shard if none can be received from.
        """
        until = self._clock.monotonic() + wait
        glance = GLANCE if wait > 0 else 0.0
        self._shards.end_move()
        numbers, first = self._shards.numbers(), self._next
        for step in range(len(numbers)):
            if found := self._look((first + step) % len(numbers), numbers, limit, glance):
                return found
        while (left := until - self._clock.monotonic()) > 0 and not self._closed:
            self._resting.raise_if_all(numbers)
            if found := self._look(self._turn(numbers), numbers, limit, min(left, self._slice)):
                return found
        self._resting.raise_if_all(numbers)
        return []

    def _turn(self, numbers: Sequence[int]) -> int:
        """The place of the next shard to wait in. Threads that receive at the same time wait in
        different ones.

        A shard that rests is passed over; if all do, the caller finds out.
        """
        with self._lock:
            for _ in numbers:
                place = self._next % len(numbers)
                self._next = place + 1
                if self._resting.awake(numbers[place]):
                    break
            return place

    def _look(self, place: int, numbers: Sequence[int], limit: int, wait: float) -> list[Delivery]:
        """What the shard at this place of `numbers` has."""
        number = numbers[place]
        if self._closed or not self._resting.awake(number):
            return []
        try:
            found = self._from(number, limit, wait)
        except AztaskError as error:
            self._resting.failed(number, error)
            return []
        except Exception:
            self._next = place + 1  # it keeps no other shard waiting
            raise
        self._resting.works(number)
        if found:
            self._next = place + 1
        return found

    def _from(self, number: int, limit: int, wait: float) -> list[Delivery]:
        try:
            found = self._shards.get(number).receive(limit, wait)
        except BrokerUnavailable as error:
            self._resting.silent(number, error)
            raise
        return [ShardDelivery(self._queue, number, each) for each in found]

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """Lease deferred messages, or dead letters, by position; missing ones are skipped."""
        found: list[Delivery] = []
        for number, inner in by_shard(positions, self._shards.top()).items():
            some = self._shards.get(number).receive_deferred(inner)
            found += [ShardDelivery(self._queue, number, each) for each in some]
        return found

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend each lease to `seconds` from now (the receiver's lease by default)."""

        def renew_some(number: int, some: Sequence[Delivery]) -> list[Renewed | Lost | Unknown]:
            return self._shards.get(number).renew(some, seconds)

        ours = [own_shard(each) for each in deliveries]
        return self._in_shards(
            [(each.shard, each.inner) for each in ours],
            renew_some,
            # Of an address that answers late, the renewal may still be under way.
            lambda error, asked: Unknown(str(error), untouched=not asked),
            self._renewers,
            self._patience(deliveries),
        )

    def _patience(self, deliveries: Sequence[Delivery]) -> float | None:
        """Seconds after which renewals at one address stop waiting for another; None for one.

        A lease is renewed when 30 % of it are left: the leases of the others need most of that.
        """
        if self._shards.addresses is None or not deliveries:
            return None
        shortest = min(each.lease_seconds for each in deliveries)
        return max(SHORTEST_PATIENCE, min(LONGEST_PATIENCE, PATIENCE_NUMBER * shortest))

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """Replace the message's content in place and renew its lease."""
        ours = own_shard(delivery)
        return self._shards.get(ours.shard).update(ours.inner, envelope)

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement. The clone of a resubmission stays in the shard."""

        def settle_some(
            number: int, some: Sequence[tuple[Delivery, Settlement]]
        ) -> list[Settled | Lost | Unknown]:
            return self._shards.get(number).settle(some)

        ours = [(own_shard(delivery), how) for delivery, how in pairs]
        return self._in_shards(
            [(each.shard, (each.inner, how)) for each, how in ours],
            settle_some,
            lambda error, asked: Unknown(str(error)),
            self._workers,
        )

    def _in_shards(
        self,
        items: Sequence[tuple[int, Item]],
        ask: Callable[[int, Sequence[Item]], list[Answer]],
        unknown: Callable[[AztaskError, bool], Answer],
        pool: ThreadPool | None,
        patience: float | None = None,
    ) -> list[Answer]:
        """The answers for the items, each asked of its shard, in order (rules 3, 4 and 5).

        * `unknown`: the answer after this error; True: the shard has been asked all the same.
        * `patience`: seconds to wait for a shard; the answer of a later one is unknown.
        """
        groups: dict[int, list[int]] = {}
        for place, (number, _) in enumerate(items):
            groups.setdefault(number, []).append(place)

        def ask_one(group: tuple[int, list[int]]) -> list[Answer]:
            number, places = group
            some = [items[place][1] for place in places]
            if not self._resting.answers(number):
                return [unknown(BrokerUnavailable(SILENT), False)] * len(some)
            try:
                return ask(number, some)
            except BrokerError as error:
                self._resting.silent(number, error)
                if len(groups) == 1 or pool is None:  # in one file it fails for all, or for none
                    raise
                return [unknown(error, False)] * len(some)

        def waited(group: tuple[int, list[int]], asked: Future[list[Answer]]) -> list[Answer]:
            number, places = group
            try:
                return asked.result(max(0.0, until - monotonic()))
            except FutureTimeout:
                late = BrokerUnavailable(f"no answer after {patience:.0f} s")
                self._resting.silent(number, late)
                return [unknown(late, True)] * len(places)

        wanted = list(groups.items())
        if pool is None:
            answered = list(map(ask_one, wanted))
        elif patience is None:
            answered = pool.map(ask_one, wanted)
        else:
            until = monotonic() + patience
            asked = [pool.submit(partial(ask_one, group)) for group in wanted]
            answered = [waited(*each) for each in zip(wanted, asked, strict=True)]
        found: dict[int, Answer] = {}
        for (_, places), answers in zip(wanted, answered, strict=True):
            found.update(zip(places, answers, strict=True))
        return [found[place] for place in range(len(items))]

    def close(self) -> None:
        """Stop receiving. Leased messages stay leased until their leases end."""
        self._closed = True
        self._shards.close()


class ShardedSessions(ShardedReceiver):
    """Takes one session after another, from any shard, or one session only.

    While it holds unsettled messages it stays with the shard of their session.
    """

    only: str | None = None
    """The session that it receives, if it receives no other."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._held: list[ShardDelivery] = []
        self._fetched: set[str] = set()  # whose former shards hold no state

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries of one session; [] after `wait` seconds."""
        if self.only is not None:
            number = self._shards.sessions().of_session(self.only)
            return self._taken(self._from(number, limit, wait))
        now = self._clock.monotonic()
        until = now + wait
        self._held = [each for each in self._held if now < each.deadline]
        if self._held:  # its error is the caller's, who would come again at once otherwise
            return self._taken(self._from(self._held[0].shard, limit, wait))
        while not self._closed:
            self._shards.end_move()
            numbers = self._shards.numbers()
            self._resting.raise_if_all(numbers)
            left = until - self._clock.monotonic()
            place = self._turn(numbers)
            if found := self._look(place, numbers, limit, max(0.0, min(left, self._slice))):
                self._next = place  # as long as it has this session
                return self._taken(found)
            if left <= 0:
                break
        return []

    def _taken(self, found: list[Delivery]) -> list[Delivery]:
        self._held += map(own_shard, found)
        return found

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement, and note which messages of the session are left."""
        answers = super().settle(pairs)
        gone = {
            id(delivery)
            for (delivery, _), answer in zip(pairs, answers, strict=True)
            if not isinstance(answer, Unknown)
        }
        self._held = [each for each in self._held if id(each) not in gone]
        return answers

    def let_go(self) -> None:
        """Release the session and its leased messages now."""
        if self.only is None:
            self._next += 1  # the sessions of another shard come next
        self._held = []
        for number in self._receivers:
            self._holder(number).let_go()

    def session_state(self, session: str) -> bytes | None:
        """The bytes that were last stored with the session. Raises LeaseLost, BrokerUnavailable.

        If the queue had other shards before, they may still be there, and come along now.
        """
        holder = self._of(session)
        state = holder.session_state(session)
        return self._fetch(session, holder) if state is None else state

    def set_session_state(self, session: str, state: bytes | None) -> None:
        """Store bytes with the session; None removes them. Raises as `session_state`."""
        holder = self._of(session)
        if state is None:
            self._fetch(session, None)  # or an older state would come back
        holder.set_session_state(session, state)

    def _fetch(self, session: str, holder: SessionHolder | None) -> bytes | None:
        """The state that the session has in a former shard, moved to its holder; None: removed.

        Crash window: if the process dies before the former state is removed, it is found again only
        when there is no newer one; a removal removes it, too.
        """
        if session in self._fetched:
            return None
        found: bytes | None = None
        for former in self._shards.former_holders(session):
            try:
                state = _held_state(former, session)
                if state is not None and found is None and holder is not None:
                    holder.set_session_state(session, found := state)
                if state is not None:
                    former.set_session_state(session, None)
            except QueueNotFound:
                continue  # nothing is left of this shard
            finally:
                former.let_go()
                former.close()
        if len(self._fetched) >= MOST_FETCHED:
            self._fetched.clear()
        self._fetched.add(session)
        return found

    def _of(self, session: str) -> SessionHolder:
        """The receiver that holds the session: that of its messages here."""
        for each in self._held:
            if each.session == session:
                return self._holder(each.shard)
        return self._holder(self._shards.sessions().of_session(session))

    def _holder(self, number: int) -> SessionHolder:
        receiver = self._shards.get(number)
        assert isinstance(receiver, SessionHolder)  # noqa: S101  # every receiver of sessions is one
        return receiver
