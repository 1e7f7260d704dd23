"""A broker of its own: queues in the memory of one process, under leases.

It shows what an adapter has to write, and keeps the promises of the contract (``tests/contract``).
Nothing survives the process.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from aztask import errors
from aztask.message.envelope import Envelope
from aztask.queues import base
from aztask.queues.base import Delivery, Lost, MessageState, Peeked, Renewed, Settled, Unknown
from aztask.queues.delivery import OwnDelivery, unsettled
from aztask.queues.kinds import BrokerKind, Opening
from aztask.queues.skeleton import BrokerSkeleton
from aztask.settlement import Abandon, DeadLetter, Defer, Release, Resubmit, Settlement
from aztask.support.clock import SYSTEM_CLOCK, Clock

CAPABILITIES = base.Capabilities(
    name="memory", atomic_resubmit=True, paged_peek=True, peeks_leases=True, remote=False
)
GONE = Lost("the lease has ended, or the message was settled before")


@dataclass(eq=False)
class Message:
    """A message in the shelf. due: UTC. token, until: its last lease, on the lease clock."""

    number: int
    envelope: Envelope
    due: float
    count: int = 0
    token: str = ""
    until: float = 0.0
    dead: DeadLetter | None = None

    def state(self, clock: Clock) -> MessageState:
        if self.until > clock.monotonic():
            return MessageState.LEASED
        return MessageState.SCHEDULED if self.due > clock.wall() else MessageState.ACTIVE


class Shelf:
    """The queues of one process; several brokers may share them. Hold `changed` to use them."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.queues: dict[str, list[Message]] = {}
        self._numbers = itertools.count(1)

    def messages(self, queue: str) -> list[Message]:
        if queue not in self.queues:
            raise errors.QueueNotFound(f"queue {queue!r} does not exist; declare it first")
        return self.queues[queue]

    def living(self, queue: str, dead_letter: bool = False) -> list[Message]:
        return [each for each in self.messages(queue) if (each.dead is not None) == dead_letter]

    def put(self, queue: str, envelope: Envelope, delay: float) -> None:
        due = self.clock.wall() + delay
        self.messages(queue).append(Message(next(self._numbers), envelope, due))
        self.changed.notify_all()


class MemoryBroker(BrokerSkeleton):
    """The queues of a shelf."""

    title = "memory queue"

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(KIND)
        self._shelf = shelf

    def _declare(self, queue: str, options: base.QueueOptions) -> None:
        with self._shelf.changed:
            self._shelf.queues.setdefault(queue, [])

    def _delete(self, queue: str) -> None:
        with self._shelf.changed:
            self._shelf.messages(queue)
            del self._shelf.queues[queue]

    def _names(self) -> list[str]:
        with self._shelf.changed:
            return list(self._shelf.queues)

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        self._usable_for(queue)
        for envelope in envelopes:
            self.check(envelope)
        with self._shelf.changed:
            self._shelf.messages(queue)
            for envelope in envelopes:
                self._shelf.put(queue, envelope, envelope.delay)

    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        if len(envelope.body) + reserve > CAPABILITIES.max_message_bytes:
            raise errors.MessageTooLarge("the message is too large; store its data elsewhere")

    def _receiver(
        self, options: base.ReceiverOptions, poll_ceiling: float | None
    ) -> MemoryReceiver:
        return MemoryReceiver(self._shelf, options)

    def _stats(self, queue: str) -> base.QueueStats:
        with self._shelf.changed:
            states = [each.state(self._shelf.clock) for each in self._shelf.living(queue)]
            dead = len(self._shelf.living(queue, True))
        active, leased, scheduled, _ = map(states.count, MessageState)
        return base.QueueStats(queue, active, leased, scheduled, 0, dead)

    def _peek(
        self, queue: str, dead_letter: bool, after: base.Position | None, limit: int
    ) -> list[Peeked]:
        with self._shelf.changed:
            found = self._shelf.living(queue, dead_letter)
            behind = [each for each in found if each.number > int(after or 0)]
            return [_peeked(each, self._shelf.clock) for each in behind[: max(limit, 0)]]

    def _purge(self, queue: str, dead_letter: bool) -> int:
        with self._shelf.changed:
            every, clock = self._shelf.messages(queue), self._shelf.clock
            found = self._shelf.living(queue, dead_letter)
            purged = [each for each in found if each.state(clock) is not MessageState.LEASED]
            every[:] = [each for each in every if each not in purged]
        return len(purged)

    def _close(self) -> None:
        pass  # the shelf belongs to who made it


def _peeked(message: Message, clock: Clock) -> Peeked:
    due = message.due if message.state(clock) is MessageState.SCHEDULED else None
    why = (message.dead.reason, message.dead.description) if message.dead else (None, None)
    state, put_at = message.state(clock), message.due
    return Peeked(message.envelope, message.number, state, message.count, put_at, due, *why)


class MemoryReceiver:
    """Takes deliveries from one queue of a shelf, or from its dead letters."""

    def __init__(self, shelf: Shelf, options: base.ReceiverOptions) -> None:
        self._shelf, self._clock = shelf, shelf.clock
        self._queue, self._dead = options.queue, options.dead_letter
        self._lease, self._delete = options.lease, options.delete
        self._closed = False

    def set_lease(self, seconds: float) -> None:
        self._lease = seconds

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        until = time.monotonic() + wait
        with self._shelf.changed:
            while not self._closed:
                found = self._shelf.living(self._queue, self._dead)
                ready = [each for each in found if each.state(self._clock) is MessageState.ACTIVE]
                left = until - time.monotonic()
                if ready or left <= 0:
                    return [self._granted(each) for each in ready[:limit]]
                self._shelf.changed.wait(min(left, 0.02))  # a lease or a delay may end by itself
        return []

    def _granted(self, message: Message) -> Delivery:
        message.count += 1
        message.token = secrets.token_hex(8)
        message.until = until = self._clock.monotonic() + self._lease
        if self._delete:
            self._shelf.messages(self._queue).remove(message)
        delivery = OwnDelivery(
            *(self._queue, message.envelope, message.number, message.token, message.count),
            *(message.due, until, self._lease),
            settled=self._delete,
        )
        if message.dead is not None:
            delivery.dead_letter_reason = message.dead.reason
            delivery.dead_letter_description = message.dead.description
        return delivery

    def receive_deferred(self, positions: Sequence[base.Position]) -> list[Delivery]:
        raise errors.CapabilityError("memory queues cannot defer; resubmit the message")

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        with self._shelf.changed:
            return [self._renewed(each, seconds or self._lease) for each in deliveries]

    def _renewed(self, delivery: Delivery, seconds: float) -> Renewed | Lost:
        message = self._held(delivery)
        if message is None:
            return GONE
        message.until = delivery.deadline = self._clock.monotonic() + seconds
        delivery.lease_seconds = seconds
        return Renewed(message.until)

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        raise errors.CapabilityError("memory queues cannot change a message in place")

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        for delivery, settlement in pairs:
            unsettled(OwnDelivery, delivery)
            if isinstance(settlement, Defer):
                raise errors.CapabilityError("memory queues cannot defer; resubmit the message")
            if isinstance(settlement, Resubmit) and settlement.envelope is None:
                raise errors.ConfigurationError("a resubmission needs its clone")
        with self._shelf.changed:
            return [self._settled(*pair) for pair in pairs]

    def _settled(self, delivery: Delivery, settlement: Settlement) -> Settled | Lost:
        message = self._held(delivery)
        if message is None:
            return GONE
        message.until, unsettled(OwnDelivery, delivery).settled = 0.0, True
        if isinstance(settlement, DeadLetter):
            message.dead = settlement
        elif not isinstance(settlement, Abandon | Release):
            self._shelf.messages(self._queue).remove(message)
        if isinstance(settlement, Resubmit) and settlement.envelope is not None:
            self._shelf.put(self._queue, settlement.envelope, settlement.delay)
        self._shelf.changed.notify_all()
        return Settled()

    def _held(self, delivery: Delivery) -> Message | None:
        for message in self._shelf.messages(self._queue):
            if message.token == delivery.token and message.until > self._clock.monotonic():
                return message
        return None

    def close(self) -> None:
        self._closed = True


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """``memory://NAME``: a shelf of this process."""

    scheme: ClassVar[str] = "memory"
    name: str


class MemoryKind(BrokerKind):
    """What such a broker is, before it is opened."""

    capabilities = CAPABILITIES
    shelves: ClassVar[dict[str, Shelf]] = {}

    def parse(self, rest: str) -> MemoryAddress:
        return MemoryAddress(rest)

    def check_name(self, queue: str) -> None:
        if not re.fullmatch(r"[a-z0-9](-?[a-z0-9]){0,62}", queue, re.ASCII):
            raise errors.InvalidQueueName(
                f"{queue[:80]!a} cannot name a queue: use 1 to 63 lower-case letters, digits and "
                "single hyphens between them"
            )

    def open(self, address: MemoryAddress, opening: Opening) -> MemoryBroker:
        return MemoryBroker(self.shelves.setdefault(address.name, Shelf()))


KIND = MemoryKind()
