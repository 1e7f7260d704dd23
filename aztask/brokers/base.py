"""The broker protocol: what every queue service looks like to the rest of aztask.

Rules
1. Batch in, batch out: every call takes many and answers for each one, in order.
2. A delivery's ``deadline`` is counted from the instant *before* the granting request was sent, on
   the clock of `aztask.support.clock`; past it nobody may act on the delivery, whatever the service
   thinks.
3. Renewal and settlement of one delivery never run at the same time; the adapter serialises them.
   After a settlement no renewal is sent.
4. Answers are values: `Settled`, `Lost` (the service's verdict: not ours any more) or `Unknown`
   (no answer: it may or may not have happened). Only a service that cannot be reached at all, or a
   queue that does not exist, raises.
5. What a service cannot do is declared in `Capabilities`; asking for it raises CapabilityError.
6. After a fork the child must not use its parent's handles; ``close`` in the child does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol, runtime_checkable

from aztask.brokers.delivery import Delivery, Lost, Position, Renewed, Settled, Unknown
from aztask.brokers.listing import Listing
from aztask.message.envelope import Envelope
from aztask.retry import RETRY_STRATEGIES
from aztask.settlement import Settlement

__all__ = [
    "ANY_SESSION",
    "AnySession",
    "Broker",
    "Capabilities",
    "Delivery",
    "Listing",
    "Lost",
    "MessageState",
    "Peeked",
    "Position",
    "QueueOptions",
    "QueueStats",
    "Receiver",
    "ReceiverOptions",
    "Renewed",
    "SessionHolder",
    "Settled",
    "Transactional",
    "Unknown",
]


class AnySession(Enum):
    """Ask for whichever session has work and no receiver."""

    ANY = "any"


ANY_SESSION: Final = AnySession.ANY


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a service can do, and its limits.

    default_lease_seconds: what is asked for where nobody says otherwise; longer where every
    renewal is a risk. max_lease_seconds: the longest lease it grants at once. fixed_lease: leases
    last as long as the queue says, not the receiver. update: a message can be changed in place
    (checkpoints travel in it). atomic_resubmit: clone and complete happen together;
    resubmit_in_place: as one change of the message, whose delivery count goes on.
    native_dead_letter: dead letters are a sub-queue of the service. dead_by_position: any of them
    can be leased by its position, through ``receive_deferred`` of a receiver of dead letters.
    remote: calls wait for a network, so callers keep several under way. receives_at_once: how many
    receives side by side pay on a busy queue, where one brings few messages and takes long.
    """

    name: str
    sessions: bool = False
    defer: bool = False
    update: bool = False
    release: bool = False
    fixed_lease: bool = False
    duplicate_detection: bool = False
    atomic_resubmit: bool = False
    resubmit_in_place: bool = False
    native_dead_letter: bool = False
    dead_by_position: bool = False
    paged_peek: bool = False
    cancel_scheduled: bool = False
    remote: bool = True
    default_lease_seconds: float = 60.0
    max_lease_seconds: float = 7 * 86400.0
    max_message_bytes: int = 256 * 1024
    receive_limit: int = 100
    receives_at_once: int = 1

    @property
    def retry_strategies(self) -> tuple[str, ...]:
        """Which retry strategies work here: all but `defer` where the service cannot defer."""
        return tuple(each for each in RETRY_STRATEGIES if each != "defer" or self.defer)


class MessageState(Enum):
    """Where a peeked message stands."""

    ACTIVE = "active"
    LEASED = "leased"
    SCHEDULED = "scheduled"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class Peeked:
    """A message looked at without taking it. enqueued_at, due: UTC epoch seconds."""

    envelope: Envelope
    position: Position
    state: MessageState
    delivery_count: int
    enqueued_at: float
    due: float | None = None
    dead_letter_reason: str | None = None
    dead_letter_description: str | None = None


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Counts of one queue's messages; None where the service does not tell.

    total: all but the dead, where the service tells no more than that.
    """

    queue: str
    active: int | None
    leased: int | None
    scheduled: int | None
    deferred: int | None
    dead: int | None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What `Broker.declare` may ask for; None leaves the service's default.

    lease: seconds (Service Bus: the lock duration). duplicate_window: seconds within which a
    message id is stored once; 0 switches detection off. max_deliveries: the broker's own limit.
    time_to_live: seconds. implied: which of these nobody asked for: they hold for a queue that is
    created, and change none that exists.
    """

    lease: float | None = None
    duplicate_window: float | None = None
    max_deliveries: int | None = None
    time_to_live: float | None = None
    sessions: bool | None = None
    implied: frozenset[str] = frozenset()

    def asked(self) -> QueueOptions:
        """Without what is implied: what may be applied to a queue that exists."""
        return replace(self, **dict.fromkeys(self.implied), implied=frozenset())

    def insisting(self, **given: Any) -> QueueOptions:
        """With `given` asked for."""
        return replace(self, **given, implied=self.implied - given.keys())


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """What the receivers of every adapter have in common.

    lease: seconds that a lease lasts, until `Receiver.set_lease` changes it. session: the session
    to receive from, or `ANY_SESSION`; None: a receiver without sessions. dead_letter: receive the
    queue's dead letters. delete: receive-and-delete, at most once. max_state_bytes: the largest
    state that a session may have.
    """

    queue: str
    lease: float
    session: str | AnySession | None = None
    dead_letter: bool = False
    delete: bool = False
    max_state_bytes: int = 256 * 1024


class Receiver(Protocol):
    """Takes deliveries from one queue (or one of its sessions). Safe to call from any thread."""

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries, as soon as there is one; [] after `wait` seconds."""
        ...

    def set_lease(self, seconds: float) -> None:
        """Ask for leases of so many seconds from the next receive on.

        Without effect where the service fixes them (capability ``fixed_lease``).
        """
        ...

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """Lease deferred messages; those that are gone or leased are left out.

        Dead letters too where the service has the capability ``dead_by_position``.
        """
        ...

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend each lease to `seconds` from now (the receiver's lease by default).

        A granted deadline is written into the delivery too.
        """
        ...

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """Replace the message's content in place and renew its lease (checkpoints)."""
        ...

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement. A second one of the same delivery raises AlreadySettled."""
        ...

    def close(self) -> None:
        """Stop receiving. What is leased stays leased until its lease ends."""
        ...


@runtime_checkable
class SessionHolder(Protocol):
    """What a receiver of sessions can do beside receiving."""

    def let_go(self) -> None:
        """Give the session back now, with what is leased in it: that counts as no delivery.

        A receiver of any session looks for the next one at its next receive.
        """
        ...

    def session_state(self, session: str) -> bytes | None:
        """What was last stored with the session.

        Raises LeaseLost when the receiver does not hold it (any more), BrokerUnavailable.
        """
        ...

    def set_session_state(self, session: str, state: bytes | None) -> None:
        """Store bytes with the session, which outlive its messages; None removes them.

        Raises as `session_state` (BrokerUnavailable: it may be stored), and MessageTooLarge.
        """
        ...


@runtime_checkable
class Broker(Protocol):
    """One queue service. Thread rules are the adapter's business: any thread may call."""

    @property
    def capabilities(self) -> Capabilities:
        """What this service can do."""
        ...

    def declare(self, queue: str, options: QueueOptions = QueueOptions()) -> None:
        """Create the queue if it is missing (needs the right to manage).

        To one that exists what is asked for is applied, and what is implied is not.
        """
        ...

    def delete(self, queue: str) -> None:
        """Delete the queue and all that is in it. Raises QueueNotFound."""
        ...

    def listing(self) -> Listing:
        """All queues of the service, those that aztask can use apart from the others.

        Raises BrokerUnavailable, and ConfigurationError where the right to list them is missing.
        """
        ...

    def queues(self) -> list[str]:
        """The names of the queues that aztask can use, sorted. Raises as `listing`."""
        ...

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Store all; on return they are accepted and will not be lost.

        Raises BrokerUnavailable (nothing stored), SendUnconfirmed (it may be: send those again
        under the same ids), QueueNotFound, QueueFull, MessageTooLarge (nothing stored).
        """
        ...

    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        """Refuse a clone or a checkpoint that this broker could not store, without storing it.

        reserve: bytes that the message must have room for beside its present content. Raises
        EncodeError or MessageTooLarge.
        """
        ...

    def cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        """Remove messages that are not due yet, by message id; how many were removed."""
        ...

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
        """A receiver whose leases last `lease` seconds.

        delete: receive-and-delete, at most once; such deliveries cannot be settled. poll_ceiling:
        seconds between two looks at an empty queue, where the service has to be polled; None: as
        the broker was made.
        """
        ...

    def stats(self, queue: str) -> QueueStats:
        """The queue's counts. Raises QueueNotFound."""
        ...

    def peek(
        self,
        queue: str,
        *,
        dead_letter: bool = False,
        after: Position | None = None,
        limit: int = 100,
    ) -> list[Peeked]:
        """Look at messages in order of position, those after `after`, without taking them."""
        ...

    def purge(self, queue: str, *, dead_letter: bool = False) -> int:
        """Delete what is in the queue, or in its dead letters; how many were deleted."""
        ...

    def close(self) -> None:
        """Let go of connections and files."""
        ...


@runtime_checkable
class Transactional(Protocol):
    """A broker whose sends and settlements can join one transaction with other stores' writes."""

    @property
    def transaction_key(self) -> str:
        """Equal keys: the same file, hence one transaction is possible."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """All or nothing for what this thread does inside; may be nested."""
        ...
