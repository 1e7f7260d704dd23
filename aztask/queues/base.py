"""The broker protocol: what every queue service looks like to the rest of aztask.

Rules
1. Batch in, batch out: every call takes many items and answers for each one, in order.
2. A delivery's ``deadline`` is counted from the instant *before* the granting request was sent, on
   the clock of `aztask.support.clock`. After the deadline no caller may act on the delivery, even
   if the service would still allow it.
3. Renewal and settlement of one delivery never run at the same time; the adapter serialises them.
   After a settlement no renewal is sent.
4. Answers are values: `Settled`, `Lost` (the service says that we no longer hold the lease) or
   `Unknown` (no answer: it may or may not have happened). A call raises only if the service is
   unreachable or the queue does not exist.
5. What a service cannot do is declared in `Capabilities`; asking for it raises CapabilityError.
6. After a fork the child must not use its parent's handles; ``close`` in the child does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import sha256
from typing import Any, Final, Protocol, runtime_checkable

from aztask.errors import AztaskError
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Delivery, Lost, Position, Renewed, Settled, Unknown
from aztask.retry import RETRY_STRATEGIES
from aztask.settlement import Settlement
from aztask.support.finding import Finding

__all__ = [
    "ANY_SESSION",
    "AnySession",
    "Broker",
    "Capabilities",
    "Delivery",
    "Listing",
    "Lost",
    "MessageState",
    "NameChecker",
    "Peeked",
    "Position",
    "QueueOptions",
    "QueueStats",
    "Receiver",
    "ReceiverOptions",
    "Renewed",
    "SessionHolder",
    "Settled",
    "Sharded",
    "Transactional",
    "Unknown",
    "shared_transaction",
]


@dataclass(frozen=True, slots=True)
class Listing:
    """Sorted names of queues.

    queues: those that aztask can use.
    foreign: queues of other programs, whose names aztask never uses. aztask does not read, change
    or delete them.
    """

    queues: tuple[str, ...]
    foreign: tuple[str, ...] = ()


class AnySession(Enum):
    """Receive from any session that has messages and no receiver."""

    ANY = "any"


ANY_SESSION: Final = AnySession.ANY


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a service can do, and its limits.

    fixed_lease: the queue decides how long a lease lasts, not the receiver.
    update: a message can be changed in place, so checkpoints travel in it.
    own_limits: a queue has its own delivery limit and its own time to live.
    atomic_resubmit: sending the clone and completing the original is one operation.
    resubmit_in_place: a resubmission changes the message itself, so its delivery count continues.
    native_dead_letter: dead letters are a sub-queue of the service.
    dead_by_position: ``receive_deferred`` of a dead-letter receiver leases any dead letter.
    peek_limit: how many messages a peek shows where it cannot go on behind them (`paged_peek`).
    timer_numbers: a scheduled message is cancelled quickly by its number only, which `send_timer`
    gives: by message id, the whole queue is searched.
    peeks_leases: a peek tells leased messages from waiting ones.
    purges_leased: a purge deletes leased messages too.
    remote: calls wait for a network, so callers keep several in progress.
    default_lease_seconds: the lease if you give none; longer where every renewal is a risk.
    max_lease_seconds: the longest lease that one request grants.
    receives_at_once: how many parallel receives are worthwhile on a busy queue, where one receive
    takes long and returns few messages.
    inline_bytes: what a message holds in itself by default: what fits beside headers, counters and
    reasons. Larger arguments are stored apart.
    headroom: bytes that a message must leave free when it is sent, for notes that it gets later.
    checkpoint_share: a checkpoint in the message has this part of that, where messages are small.
    port: where the service listens, unless its address names another one.
    lead: seconds before its due time at which a message for a Kombu consumer becomes visible, so
    that the consumer has it in time.
    telemetry_system, azure_namespace: ``messaging.system`` and ``az.namespace`` of its spans.
    path_in_url: a path follows the name in its URLs, and begins with a slash.
    """

    name: str
    sessions: bool = False
    defer: bool = False
    update: bool = False
    release: bool = False
    fixed_lease: bool = False
    duplicate_detection: bool = False
    own_limits: bool = False
    atomic_resubmit: bool = False
    resubmit_in_place: bool = False
    native_dead_letter: bool = False
    dead_by_position: bool = False
    paged_peek: bool = False
    peek_limit: int = 32
    cancel_scheduled: bool = False
    timer_numbers: bool = False
    peeks_leases: bool = False
    purges_leased: bool = False
    remote: bool = True
    default_lease_seconds: float = 60.0
    max_lease_seconds: float = 7 * 86400.0
    max_message_bytes: int = 256 * 1024
    receive_limit: int = 100
    receives_at_once: int = 1
    inline_bytes: int = 32 * 1024
    headroom: int = 0
    checkpoint_share: int = 8
    port: int = 443
    lead: float = 0.0
    telemetry_system: str = "aztask"
    azure_namespace: str = ""
    path_in_url: bool = False

    @property
    def retry_strategies(self) -> tuple[str, ...]:
        """The retry strategies that work here: all, except `defer` if the service cannot defer."""
        return tuple(each for each in RETRY_STRATEGIES if each != "defer" or self.defer)


class MessageState(Enum):
    """The state of a peeked message."""

    ACTIVE = "active"
    LEASED = "leased"
    SCHEDULED = "scheduled"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class Peeked:
    """A message that was read without leasing it. enqueued_at, due: UTC epoch seconds."""

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
    """Counts of one queue's messages; None if the service does not report the number.

    total: all messages except dead letters, if the service reports only their sum.
    """

    queue: str
    active: int | None
    leased: int | None
    scheduled: int | None
    deferred: int | None
    dead: int | None
    total: int | None = None

    @classmethod
    def sum(cls, queue: str, parts: Sequence[QueueStats]) -> QueueStats:
        """The counts of a queue that consists of these; None where one of them is not known."""

        def added(values: Sequence[int | None]) -> int | None:
            known = [value for value in values if value is not None]
            return sum(known) if len(known) == len(values) else None

        return cls(
            queue,
            added([each.active for each in parts]),
            added([each.leased for each in parts]),
            added([each.scheduled for each in parts]),
            added([each.deferred for each in parts]),
            added([each.dead for each in parts]),
            added([each.total for each in parts]),
        )

    @property
    def waiting(self) -> int:
        """Messages that wait to be received; all but dead letters where only the sum is known."""
        return self.living if self.active is None else self.active

    @property
    def living(self) -> int:
        """The number of messages without dead letters."""
        if self.total is not None:
            return self.total
        counts = (self.active, self.leased, self.scheduled, self.deferred)
        return sum(count or 0 for count in counts)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Settings for `Broker.declare`; None keeps the service's default.

    lease: seconds (Service Bus: the lock duration).
    duplicate_window: seconds within which a message id is stored once; 0 switches detection off.
    max_deliveries: the broker's own limit.
    time_to_live: seconds.
    implied: names of the settings that come from defaults. They apply to a new queue and never
    change an existing one.
    """

    lease: float | None = None
    duplicate_window: float | None = None
    max_deliveries: int | None = None
    time_to_live: float | None = None
    sessions: bool | None = None
    implied: frozenset[str] = frozenset()

    def explicit(self) -> QueueOptions:
        """These options without the implied ones: what may change an existing queue."""
        return replace(self, **dict.fromkeys(self.implied), implied=frozenset())

    def with_explicit(self, **given: Any) -> QueueOptions:
        """These options with `given` set explicitly, so no longer implied."""
        return replace(self, **given, implied=self.implied - given.keys())


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """The options that the receivers of all adapters share.

    lease: seconds that a lease lasts, until `Receiver.set_lease` changes it.
    session: the session to receive from, or `ANY_SESSION`; None for a queue without sessions.
    dead_letter: receive the queue's dead letters.
    delete: receive-and-delete, at most once.
    max_state_bytes: the largest state that a session may have.
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
        """Set the lease, in seconds, for the next receives.

        Has no effect if the queue decides the lease (capability ``fixed_lease``).
        """
        ...

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """Lease deferred messages by position; missing and leased ones are skipped.

        A dead-letter receiver leases dead letters too, if the service has the capability
        ``dead_by_position``.
        """
        ...

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend each lease to `seconds` from now (the receiver's lease by default).

        The new deadline is also stored in the delivery.
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
        """Stop receiving. Leased messages stay leased until their leases end."""
        ...


@runtime_checkable
class Networked(Protocol):
    """A broker that is reached over a network."""

    @property
    def server(self) -> tuple[str, int | None]:
        """The service's host name, and its port if the address names one."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """A broker some of whose queues are several queues of the service."""

    def names(self, queue: str) -> tuple[str, ...]:
        """The queues of the service that hold the messages of `queue`; itself without shards.

        Some of them need not exist.
        """
        ...

    def needed(self, queue: str) -> tuple[str, ...]:
        """Those of them that must exist."""
        ...

    def shard_stats(self, queue: str) -> list[QueueStats]:
        """The counts of each of them that exists. Raises QueueNotFound if none does."""
        ...


@runtime_checkable
class NameChecker(Protocol):
    """A broker that can say whether it allows a queue name, without asking the service."""

    def check_name(self, queue: str) -> None:
        """Raise InvalidQueueName unless the name is allowed here."""
        ...


@runtime_checkable
class MessageWaiter(Protocol):
    """A receiver that can also wait for a message without taking it."""

    def await_message(self, seconds: float) -> bool:
        """True once there may be a message, which is left there; False after `seconds`."""
        ...

    def has_news(self) -> bool:
        """True if there may be a message that was not there at the last call.

        Cheaper than a receive. A delayed message that becomes due is no news.
        """
        ...


@runtime_checkable
class SessionHolder(Protocol):
    """A receiver of sessions: it can also release its session and store a state with it."""

    def let_go(self) -> None:
        """Release the session and its leased messages now, without counting a delivery.

        A receiver of `ANY_SESSION` looks for the next session in its next receive.
        """
        ...

    def session_state(self, session: str) -> bytes | None:
        """The bytes that were last stored with the session, or None.

        Raises LeaseLost if the receiver does not hold the session, and BrokerUnavailable.
        """
        ...

    def set_session_state(self, session: str, state: bytes | None) -> None:
        """Store bytes with the session; None removes them. They outlive the session's messages.

        Raises the same errors as `session_state`, and MessageTooLarge. After BrokerUnavailable the
        state may be stored or not.
        """
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A receiver of a service that hides delayed messages for parts of their delay only."""

    def read_ahead(self) -> None:
        """From now on, deliver them when a part has passed; `Delivery.enqueued_at` is their time.

        For ``aztask move``.
        """
        ...


class EnvelopeSender(Protocol):
    """The part of a broker that sends on what the result store keeps."""

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Send all envelopes, each with its delay; see `Broker.send`."""
        ...


@runtime_checkable
class Broker(Protocol):
    """One queue service. Thread rules are the adapter's business: any thread may call."""

    @property
    def capabilities(self) -> Capabilities:
        """What this service can do, and its limits."""
        ...

    def declare(self, queue: str, options: QueueOptions = QueueOptions()) -> None:
        """Create the queue if it is missing, or apply the options to the existing one.

        Implied options never change an existing queue. Needs the permission to manage.
        """
        ...

    def delete(self, queue: str) -> None:
        """Delete the queue and everything in it. Raises QueueNotFound."""
        ...

    def listing(self) -> Listing:
        """All queues of the service, split into those that aztask can use and the others.

        Raises BrokerUnavailable, and ConfigurationError without the permission to list queues.
        """
        ...

    def queues(self) -> list[str]:
        """The sorted names of the queues that aztask can use. Raises the errors of `listing`."""
        ...

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Store all envelopes; when this returns, they are accepted and will not be lost.

        Raises SendUnconfirmed if some may or may not be stored: send those again under the same
        ids. If it raises BrokerUnavailable, QueueNotFound, QueueFull or MessageTooLarge, nothing
        was stored.
        """
        ...

    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        """Raise EncodeError or MessageTooLarge if this broker could not store the envelope.

        Used for clones and checkpoints before they are needed. Nothing is stored. reserve: bytes
        of free space that the message must have in addition to its content.
        """
        ...

    def cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        """Remove scheduled messages by message id; returns how many were removed."""
        ...

    def send_timer(self, queue: str, envelope: Envelope) -> int:
        """Store one delayed message; returns the number by which `cancel_timer` removes it.

        Raises what `send` raises, and CapabilityError without `Capabilities.timer_numbers`.
        """
        ...

    def cancel_timer(self, queue: str, number: int) -> bool:
        """Remove the scheduled message of this number: one request; False if it is not there."""
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

        prefetch: how many messages the caller means to hold in advance.
        session: see `ReceiverOptions`.
        dead_letter: receive the queue's dead letters.
        delete: receive-and-delete, at most once; such deliveries cannot be settled.
        poll_ceiling: the longest pause in seconds between two polls of an empty queue, if the
        service has to be polled; None uses the broker's setting.
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
        """Read messages without leasing them, in order of position, starting behind `after`."""
        ...

    def purge(self, queue: str, *, dead_letter: bool = False) -> int:
        """Delete the queue's messages, or its dead letters; returns how many were deleted."""
        ...

    def close(self) -> None:
        """Close all connections and files of the broker."""
        ...


@runtime_checkable
class Transactional(Protocol):
    """A broker whose sends and settlements can join one transaction with other stores' writes."""

    @property
    def transaction_key(self) -> str:
        """Two objects with equal keys use the same file, so they can share a transaction."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """Everything that this thread does inside is committed together or not at all. Nests."""
        ...


def shared_transaction(broker: object, results: object) -> Transactional | None:
    """The broker, if its sends and settlements and the store's writes can be one transaction."""
    if (
        isinstance(broker, Transactional)
        and isinstance(results, Transactional)
        and broker.transaction_key == results.transaction_key
    ):
        return broker
    return None


# -- Facts about a queue ---------------------------------------------------------------------------
#
# Facts about a queue, as its service reports them; `aztask doctor` and workers check them.
#
# Rules
# 1. An inspection changes no message and settles none.
# 2. A setting that could not be read is None, and `QueueFacts.unread` says why. Nothing is guessed.
# 3. A missing permission is an answer, not an error.


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """One queue's settings; None: the service has no such setting, or it could not be read.

    exists: None if unknown.
    unread: why settings could not be read; "" if they could.
    lease_seconds: set if the queue decides how long a lease lasts.
    duplicate_window: seconds; 0 if duplicate detection is off.
    dead_letters: whether dead letters can be stored.
    active: whether the queue accepts and delivers messages.
    made_on_use: the queue is created when it is first used, so a missing one is no problem.
    partitioned: whether the service spreads its messages over several stores.
    """

    queue: str
    exists: bool | None = None
    unread: str = ""
    lease_seconds: float | None = None
    duplicate_window: float | None = None
    sessions: bool | None = None
    max_deliveries: int | None = None
    dead_letters: bool | None = None
    active: bool | None = None
    made_on_use: bool = False
    partitioned: bool | None = None


@dataclass(frozen=True, slots=True)
class Permission:
    """A permission, named by one word such as ``receive``. error: None if it is granted.

    known: False if the permission could not be checked without using it.
    """

    name: str
    error: AztaskError | None = None
    known: bool = True


class Inspector(Protocol):
    """Inspects one broker's queues. Any thread may call."""

    def facts(self, queue: str) -> QueueFacts:
        """The queue's settings, in at most two requests.

        Raises BrokerUnavailable, InvalidQueueName.
        """
        ...

    def rights(self, queue: str) -> Sequence[Permission]:
        """Which permissions we have on the queue, checked without changing anything."""
        ...

    def clock_offset(self, queue: str) -> float | None:
        """Seconds that the service's clock is ahead of ours; None if unknown."""
        ...

    def surroundings(self) -> Sequence[Finding]:
        """Findings that concern all queues: the tier, the file, the SDK."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A broker whose queues can be inspected."""

    def inspector(self) -> Inspector:
        """The inspector of this broker's queues."""
        ...


# -- Mailboxes -------------------------------------------------------------------------------------
#
# Mailboxes: queues of one process that get a copy of what is published to an exchange.
#
# Remote control of Celery's workers, its events, and broadcasts need them: a message goes to every
# process that listens, and the sender does not know which ones do.
#
# Rules
# 1. A mailbox belongs to the process that opened it. Opening it again from time to time keeps it.
#    One that was not opened for `Mailboxes.lifetime` seconds is removed with its messages.
# 2. Messages in a mailbox are copies for listeners, not work: they expire after `MESSAGE_SECONDS`.
# 3. An exchange is a name. It exists where a mailbox is bound to it, in any process.
# 4. Notes are short texts for mailboxes that are opened later. They are kept for `KEPT_SECONDS`, or
#    until an exchange has more than `MOST_KEPT`: then the oldest go first. A note that cannot be
#    read is skipped.

PREFIX: Final = "aztask-mailbox-"
"""Names of queues that are mailboxes begin so, and are not listed among the queues."""

MESSAGE_SECONDS: Final = 300.0

KEPT_SECONDS: Final = 10_800.0
"""As long as Celery's workers keep the ids of revoked tasks (`celery.worker.state`)."""

MOST_KEPT: Final = 50_000
"""As many as Celery's workers keep."""

EXCHANGE: Final = "aztask-exchange"
ROUTING_KEY: Final = "aztask-routing-key"
"""Headers that tell a listener where a message was published. They are removed on arrival."""


@dataclass(frozen=True, slots=True, order=True)
class Binding:
    """What a mailbox gets copies of.

    * `kind`: ``fanout`` (everything that is published to the exchange), ``direct`` (the same key)
      or ``topic`` (`key` is a pattern of words: ``*`` is one word, ``#`` any number of words).
    """

    exchange: str
    key: str = ""
    kind: str = "fanout"

    def matches(self, exchange: str, key: str) -> bool:
        """True if a message with `key` that is published to `exchange` belongs into the mailbox."""
        if exchange != self.exchange:
            return False
        if self.kind == "topic":
            return _fits(_words(self.key), _words(key))
        return self.kind == "fanout" or key == self.key


def _words(key: str) -> tuple[str, ...]:
    return tuple(key.split(".")) if key else ()


def _fits(pattern: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """True if the words fit the pattern of a topic exchange (AMQP 0-9-1, section 3.1.3.3)."""
    if not pattern:
        return not words
    first, rest = pattern[0], pattern[1:]
    if first == "#":
        return any(_fits(rest, words[number:]) for number in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and _fits(rest, words[1:])


def queue_name(mailbox: str) -> str:
    """The name of a mailbox's queue: `mailbox` may hold any characters, a queue's name may not."""
    return PREFIX + sha256(mailbox.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Mailboxes(Protocol):
    """The mailboxes of one broker. Any thread may call."""

    @property
    def lifetime(self) -> float:
        """Seconds after which a mailbox is removed that was not opened again."""
        ...

    @property
    def lag(self) -> float:
        """Seconds by which a message may come after one that was sent to a queue later.

        0 if mailboxes are not polled.
        """
        ...

    def open(self, name: str, bindings: Sequence[Binding]) -> None:
        """Create the mailbox or keep it, with exactly these bindings.

        Raises ConfigurationError without the permission to create queues, and BrokerUnavailable.
        """
        ...

    def receiver(self, name: str, *, delete: bool) -> Receiver:
        """A receiver of the mailbox. delete: messages are deleted when they are received."""
        ...

    def publish(self, exchange: str, key: str, envelope: Envelope, *, recent: bool = False) -> bool:
        """Send a copy to each mailbox that is bound for it; False if there certainly is none.

        recent: it may use what it knew some seconds ago. For events, which are many, and for which
        no caller waits.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove the mailbox with its messages; nothing happens if there is none."""
        ...

    def keep(self, exchange: str, notes: Sequence[str]) -> None:
        """Keep notes for mailboxes of the exchange that are opened later (rule 4).

        Raises ConfigurationError without the permissions for it, and BrokerUnavailable.
        """
        ...

    def kept(self, exchange: str) -> list[str]:
        """The notes of the exchange. Raises as `keep`.

        If you open a mailbox first, you miss none: a note is kept before it is published.
        """
        ...


@runtime_checkable
class Broadcaster(Protocol):
    """A broker that has mailboxes."""

    def mailboxes(self) -> Mailboxes:
        """The mailboxes of this broker."""
        ...
