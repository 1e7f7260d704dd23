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
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from aztask.address.shards import shard_of_session
from aztask.errors import AztaskError, BrokerError, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    Delivery,
    Lost,
    Position,
    Receiver,
    Renewed,
    SessionHolder,
    Settled,
    Unknown,
)
from aztask.queues.sharded.positions import by_shard, outer_position
from aztask.settlement import Settlement
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.threadpool import ThreadPool

logger = logging.getLogger(__name__)

SLICE: Final = 0.1
SESSION_SLICE: Final = 1.0
"""Seconds of waiting in one shard; a service needs some time to give out a session."""
GLANCE: Final = 0.0001
"""Seconds: a receiver that polls looks only if its next poll is due."""
SHORTEST_REST: Final = 0.5
LONGEST_REST: Final = 15.0
"""Seconds for which a shard that failed rests; they double with each failure in a row."""

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


class Resting:
    """The shards that failed, until when each rests, and why. Any thread may call."""

    def __init__(self, names: Sequence[str], clock: Clock) -> None:
        self._names = names
        self._clock = clock
        self._failures: dict[int, tuple[int, float, AztaskError]] = {}

    def awake(self, number: int) -> bool:
        """Whether the shard may be asked now."""
        found = self._failures.get(number)
        return found is None or found[1] <= self._clock.monotonic()

    def failed(self, number: int, error: AztaskError) -> None:
        """A receive from the shard raised an error."""
        before = self._failures.get(number)
        count = 0 if before is None else before[0] + 1
        seconds = min(LONGEST_REST, SHORTEST_REST * 2.0 ** min(count, 10))
        self._failures[number] = (count, self._clock.monotonic() + seconds, error)
        logger.warning(
            "shard %s: cannot receive, retry in %.1f s: %s", self._names[number], seconds, error
        )

    def works(self, number: int) -> None:
        """A receive from the shard worked."""
        if self._failures and self._failures.pop(number, None) is not None:
            logger.info("shard %s: receiving works again", self._names[number])

    def raise_if_all(self) -> None:
        """Raise the newest error if no shard may be asked now."""
        if len(self._failures) == len(self._names):
            found = sorted(self._failures.values(), key=lambda each: each[1])
            if found[0][1] > self._clock.monotonic():
                raise found[-1][2]


class ShardedReceiver:
    """Takes deliveries from all shards of one queue, or from their dead letters."""

    def __init__(
        self,
        queue: str,
        receivers: Sequence[Receiver],
        names: Sequence[str],
        *,
        begin: int = 0,
        workers: ThreadPool | None = None,
        renewers: ThreadPool | None = None,
        sessions_in: int = 1,
        slice_seconds: float = SLICE,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """receivers: one of each shard. begin: the shard that is looked at first.

        workers: threads for settlements. renewers: other threads, so renewals never wait. None: the
        service is in this process, and all is done by the caller's thread. sessions_in: how many of
        the shards sessions are spread over.
        """
        self._queue = queue
        self._receivers = receivers
        self._clock = clock
        self._slice, self._sessions_in = slice_seconds, sessions_in
        self._workers, self._renewers = workers, renewers
        self._resting = Resting(names, clock)
        self._lock = threading.Lock()
        self._next = begin % len(receivers)
        self._closed = False

    def set_lease(self, seconds: float) -> None:
        """Set the lease, in seconds, for the next receives."""
        for each in self._receivers:
            each.set_lease(seconds)

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries of one shard, as soon as there is one; [] after `wait` seconds.

        Raises the error of a shard if none can be received from.
        """
        until = self._clock.monotonic() + wait
        glance = GLANCE if wait > 0 else 0.0
        first = self._next
        for step in range(len(self._receivers)):
            if found := self._look((first + step) % len(self._receivers), limit, glance):
                return found
        while (left := until - self._clock.monotonic()) > 0 and not self._closed:
            self._resting.raise_if_all()
            if found := self._look(self._turn(), limit, min(left, self._slice)):
                return found
        self._resting.raise_if_all()
        return []

    def _turn(self) -> int:
        """The next shard to wait in. Threads that receive at the same time wait in different ones.

        A shard that rests is passed over; if all do, the caller finds out.
        """
        with self._lock:
            for _ in self._receivers:
                number = self._next
                self._next = (number + 1) % len(self._receivers)
                if self._resting.awake(number):
                    break
            return number

    def _look(self, number: int, limit: int, wait: float) -> list[Delivery]:
        if self._closed or not self._resting.awake(number):
            return []
        try:
            found = self._from(number, limit, wait)
        except AztaskError as error:
            self._resting.failed(number, error)
            return []
        except Exception:
            self._next = (number + 1) % len(self._receivers)  # it keeps no other shard waiting
            raise
        self._resting.works(number)
        if found:
            self._next = (number + 1) % len(self._receivers)
        return found

    def _from(self, number: int, limit: int, wait: float) -> list[Delivery]:
        found = self._receivers[number].receive(limit, wait)
        return [ShardDelivery(self._queue, number, each) for each in found]

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """Lease deferred messages, or dead letters, by position; missing ones are skipped."""
        found: list[Delivery] = []
        for number, inner in by_shard(positions, len(self._receivers)).items():
            some = self._receivers[number].receive_deferred(inner)
            found += [ShardDelivery(self._queue, number, each) for each in some]
        return found

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend each lease to `seconds` from now (the receiver's lease by default)."""

        def renew_some(number: int, some: Sequence[Delivery]) -> list[Renewed | Lost | Unknown]:
            return self._receivers[number].renew(some, seconds)

        ours = [own_shard(each) for each in deliveries]
        return self._in_shards(
            [(each.shard, each.inner) for each in ours],
            renew_some,
            lambda error: Unknown(str(error), untouched=True),
            self._renewers,
        )

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """Replace the message's content in place and renew its lease."""
        ours = own_shard(delivery)
        return self._receivers[ours.shard].update(ours.inner, envelope)

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement. The clone of a resubmission stays in the shard."""

        def settle_some(
            number: int, some: Sequence[tuple[Delivery, Settlement]]
        ) -> list[Settled | Lost | Unknown]:
            return self._receivers[number].settle(some)

        ours = [(own_shard(delivery), how) for delivery, how in pairs]
        return self._in_shards(
            [(each.shard, (each.inner, how)) for each, how in ours],
            settle_some,
            lambda error: Unknown(str(error)),
            self._workers,
        )

    def _in_shards(
        self,
        items: Sequence[tuple[int, Item]],
        ask: Callable[[int, Sequence[Item]], list[Answer]],
        unknown: Callable[[AztaskError], Answer],
        pool: ThreadPool | None,
    ) -> list[Answer]:
        """The answers for the items, each asked of its shard, in order (rules 3 and 4)."""
        groups: dict[int, list[int]] = {}
        for place, (number, _) in enumerate(items):
            groups.setdefault(number, []).append(place)

        def ask_one(group: tuple[int, list[int]]) -> list[Answer]:
            number, places = group
            some = [items[place][1] for place in places]
            try:
                return ask(number, some)
            except BrokerError as error:
                if len(groups) == 1 or pool is None:  # in one file it fails for all, or for none
                    raise
                return [unknown(error)] * len(some)

        wanted = list(groups.items())
        answered = map(ask_one, wanted) if pool is None else pool.map(ask_one, wanted)
        found: dict[int, Answer] = {}
        for (_, places), answers in zip(wanted, answered, strict=True):
            found.update(zip(places, answers, strict=True))
        return [found[place] for place in range(len(items))]

    def close(self) -> None:
        """Stop receiving. Leased messages stay leased until their leases end."""
        self._closed = True
        for each in self._receivers:
            each.close()


class ShardedSessions(ShardedReceiver):
    """Takes one session after another, from any shard, or one session only.

    While it holds unsettled messages it stays with the shard of their session.
    """

    only: str | None = None
    """The session that it receives, if it receives no other."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._held: list[ShardDelivery] = []

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries of one session; [] after `wait` seconds."""
        if self.only is not None:
            number = shard_of_session(self.only, self._sessions_in)
            return self._taken(self._from(number, limit, wait))
        now = self._clock.monotonic()
        until = now + wait
        self._held = [each for each in self._held if now < each.deadline]
        if self._held:  # its error is the caller's, who would come again at once otherwise
            return self._taken(self._from(self._held[0].shard, limit, wait))
        while not self._closed:
            self._resting.raise_if_all()
            left = until - self._clock.monotonic()
            number = self._turn()
            if found := self._look(number, limit, max(0.0, min(left, self._slice))):
                self._next = number  # as long as it has this session
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
            self._turn()  # the sessions of another shard come next
        self._held = []
        for number in range(len(self._receivers)):
            self._holder(number).let_go()

    def session_state(self, session: str) -> bytes | None:
        """The bytes that were last stored with the session. Raises LeaseLost, BrokerUnavailable."""
        return self._of(session).session_state(session)

    def set_session_state(self, session: str, state: bytes | None) -> None:
        """Store bytes with the session; None removes them. Raises as `session_state`."""
        self._of(session).set_session_state(session, state)

    def _of(self, session: str) -> SessionHolder:
        return self._holder(shard_of_session(session, self._sessions_in))

    def _holder(self, number: int) -> SessionHolder:
        receiver = self._receivers[number]
        assert isinstance(receiver, SessionHolder)  # noqa: S101  # every receiver of sessions is one
        return receiver
