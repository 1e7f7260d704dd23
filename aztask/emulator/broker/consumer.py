"""Links that receive: from a queue, a subscription, their dead letters, or one session.

Rules
1. A link in receive-and-delete mode gets settled deliveries with an empty tag, as from the service.
   Any other link holds a lock for each delivery.
2. When a link ends, its messages stay locked until their locks expire. Its session is released.
3. A link has at most `MAX_UNSETTLED` unsettled deliveries, whatever its credit. Deliveries that
   were settled over another link do not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any

from aztask.emulator.amqp import (
    INVALID_FIELD,
    NOT_ALLOWED,
    NOT_FOUND,
    AmqpError,
    encode,
    outgoing,
)
from aztask.emulator.amqp.link import Outbound, SendingLink, with_filter
from aztask.emulator.amqp.performatives import Disposition
from aztask.emulator.broker import stored
from aztask.emulator.broker.broker import Lock, Service
from aztask.emulator.broker.conditions import (
    ENTITY_DISABLED,
    SESSION_CANNOT_BE_LOCKED,
    SESSION_LOST,
    TIMEOUT,
    as_amqp,
)
from aztask.emulator.broker.dispatch import MessageSource, StoreChange
from aztask.emulator.broker.entities import Address, Entity, EntityKind
from aztask.emulator.broker.settlement import DispositionSettler, SettlementAction, action_of
from aztask.emulator.broker.transactions import (
    SettledDeliveries,
    Transactions,
    transactional,
    unknown,
)
from aztask.errors import AztaskError, LeaseLost
from aztask.queues.engine import Engine, Leased, SessionLease, number_of

log = logging.getLogger(__name__)

SESSION_FILTER = "com.microsoft:session-filter"
TIMEOUT_PROPERTY = "com.microsoft:timeout"
LOCKED_UNTIL_PROPERTY = "com.microsoft:locked-until-utc"
MAX_UNSETTLED = 20_000
TIDY_SECONDS = 1.0  # between two searches for deliveries without a lock
DEFAULT_TIMEOUT_MS = 65_000
_UUID, _GUID = Struct(">IHH8s"), Struct("<IHH8s")
_TICKS_AT_EPOCH = 621_355_968_000_000_000  # .NET's ticks of 100 ns from the year 1 to 1970
_TICKS_PER_SECOND = 10_000_000


class Consumer:
    """A client's link that receives messages.

    lease: the session that the link holds, None for a link without a session. transactions: those
    of its connection.
    """

    def __init__(
        self,
        broker: Service,
        link: SendingLink,
        source: MessageSource,
        lease: SessionLease | None = None,
    ) -> None:
        self.broker = broker
        self.link = link
        self.source = source
        self.transactions: Transactions | None = None
        self.delete = link.pre_settled
        self.lease = lease
        self.paused = False
        self._tidied_at = 0.0
        self._renewing = False

    def capacity(self) -> int:
        """Return how many messages this link takes now."""
        link = self.link
        if not link.attached or self.paused or not link.session.ready:
            return 0
        if len(link.unsettled) >= MAX_UNSETTLED:
            self._forget_settled()
        return min(link.credit, MAX_UNSETTLED - len(link.unsettled))

    def _forget_settled(self) -> None:
        """Forget deliveries without a lock: it expired, or ``$management`` settled them."""
        now = self.broker.clock.monotonic()
        if now - self._tidied_at < TIDY_SECONDS:
            return
        self._tidied_at = now
        locks = self.broker.locks
        for delivery in list(self.link.unsettled.values()):
            lock = delivery.context
            if not delivery.settling and locks.get(lock.token) is None:
                self.link.session.settle(delivery)

    def take(self, engine: Engine, limit: int) -> list[Leased]:
        """Receive inside the transaction; return nothing if the session's lock was lost."""
        queue, dead, _ = self.source
        if self.lease is not None and not self.held():
            return []
        try:
            return engine.receive(
                queue, limit, session=self.lease, dead_letter=dead, delete=self.delete
            )
        except LeaseLost:
            return []

    def held(self) -> bool:
        """Return whether this link holds a session whose lock has not expired."""
        return self.lease is not None and self.lease.until > self.broker.clock.monotonic()

    def deliver(self, messages: list[Leased], offset: float) -> None:
        """Send messages that were received for this link.

        One that cannot be read is logged and stays locked, until the delivery limit makes it a dead
        letter. The others of its batch are sent.

        offset: the seconds from the lease clock to UTC epoch seconds.
        """
        link, locks = self.link, self.broker.locks
        queue, dead, _ = self.source
        locked = not self.delete
        # Unpacking a tuple once is faster than reading eleven attributes of each message.
        for seq, token, body, _, session, count, enqueued, _, until, reason, text in messages:
            key = bytes.fromhex(token) if locked else b""
            try:
                payload = stored.deliver(
                    body,
                    sequence=number_of(seq),
                    enqueued_ms=int(enqueued * 1000),
                    delivery_count=count - 1,
                    lock_token=key,
                    locked_until_ms=int((until + offset) * 1000) if locked else None,
                    dead=(reason or "", text or "") if dead else None,
                )
            except Exception:
                log.exception(
                    "%s: the message with the number %d cannot be read", queue, number_of(seq)
                )
                continue
            lock = None
            if locked:
                lock = Lock(queue, dead, seq, token, session, until)
                locks.add(lock)
            link.send(payload, guid_bytes(key) if locked else b"", lock)

    def exhausted(self) -> None:
        """Answer a drain: the source has no more messages."""
        if self.link.draining and self.link.attached:
            self.link.drained()

    def credited(self) -> None:
        """Use the client's new credit, or answer its drain."""
        if self.link.draining and not self.link.credit:
            self.link.drained()
        elif self.link.credit:
            self.broker.dispatcher.wake(self.source)

    def settled(self, deliveries: list[Outbound], disposition: Disposition) -> None:
        """Settle deliveries as the client asks, except those whose settlement has begun."""
        action = action_of(disposition.state)
        fresh = deliveries
        if len(deliveries) > 1 or deliveries[0].settling:
            fresh = [delivery for delivery in deliveries if not delivery.settling]
        if action is None:
            if disposition.settled:
                for delivery in fresh:
                    self.link.session.settle(delivery)
            return
        if not fresh:
            return
        for delivery in fresh:
            delivery.settling = True
        if action.transaction is not None:
            self._settled_within(action.transaction, fresh, action, disposition)
            return
        settler = DispositionSettler(self.broker, self.link, fresh, action, disposition)
        self.broker.committer.submit(settler)

    def _settled_within(
        self,
        number: bytes,
        deliveries: list[Outbound],
        action: SettlementAction,
        disposition: Disposition,
    ) -> None:
        """Make the settlement part of a transaction, and confirm that, not its success."""
        state = transactional(number, action.echo)
        try:
            if self.transactions is None:
                raise unknown(number)
            self.transactions.add(number, SettledDeliveries(self.broker, deliveries, action))
        except AmqpError as error:
            state = outgoing.rejected(error.condition, error.description)
            for delivery in deliveries:
                delivery.settling = False
            if disposition.settled and self.transactions is not None:
                self.transactions.refuse(number, error)
        if not disposition.settled:
            for delivery in deliveries:
                one = delivery.delivery_id
                self.link.session.write(outgoing.disposition(False, one, one, state))

    def detached(self) -> None:
        """Leave the dispatcher and release the session: the link ended."""
        self.broker.dispatcher.leave(self)
        if self.lease is not None:
            self.broker.committer.submit(
                _SessionRelease(self.broker, self.source.queue, self.lease)
            )

    def tick(self) -> None:
        """Detach the link when its session's lock has expired.

        A receive-and-delete link keeps its session as long as it is attached, because its client
        never renews the lock ([seen] the SDK's own tests run longer than a lock this way).
        """
        if self.lease is None:
            return
        if not self.held():
            self.link.detach(SESSION_LOST)
        elif self.delete and not self._renewing and self._renewal_due():
            self._renewing = True
            self.broker.committer.submit(_SessionRenewal(self))

    def _renewal_due(self) -> bool:
        """Return whether less than half of the session's lock is left."""
        entity = self.broker.namespace.find(self.source.queue)
        if entity is None or self.lease is None:
            return False
        return self.lease.until - self.broker.clock.monotonic() < entity.lock_seconds / 2

    def renew(self) -> None:
        """Renew the session's lock, inside the transaction."""
        self._renewing = False
        if self.lease is not None and self.link.attached:
            renewed = self.broker.engine.renew_session(self.source.queue, self.lease)
            self.lease = renewed or self.lease


class _SessionRelease(StoreChange):
    """Releases a session, so that other links can accept it."""

    def __init__(self, broker: Service, queue: str, lease: SessionLease) -> None:
        self._broker, self._queue, self._lease = broker, queue, lease

    def execute(self) -> None:
        if self._broker.namespace.find(self._queue) is not None:
            self._broker.engine.release_session(self._queue, self._lease)
            self._broker.queue_changed(self._queue)


class _SessionRenewal(StoreChange):
    """Renews the session lock of a receive-and-delete link, unless its queue was deleted."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def execute(self) -> None:
        if self._consumer.broker.namespace.find(self._consumer.source.queue) is not None:
            self._consumer.renew()


def guid_bytes(key: bytes) -> bytes:
    """Convert a UUID from network order to the order of .NET's GUIDs, used in delivery tags."""
    return _GUID.pack(*_UUID.unpack(key))


def receivable(broker: Service, address: Address, filters: Mapping[str, Any]) -> Entity:
    """Return the entity if a client may receive from it. Raises AmqpError otherwise.

    filters: of the source of its link, by name.
    """
    entity = broker.namespace.find(address.entity)
    if entity is None:
        raise AmqpError(
            NOT_FOUND, f"the messaging entity {address.entity[:300]!r} could not be found"
        )
    if entity.kind is EntityKind.TOPIC:
        raise AmqpError(NOT_ALLOWED, f"{entity.path!r} is a topic: receive from a subscription")
    if not entity.status.receives:
        raise AmqpError(ENTITY_DISABLED, f"{entity.path!r} is {entity.status.value}")
    if entity.forward_to and not address.dead:
        raise AmqpError(
            NOT_ALLOWED, f"{entity.path!r} forwards to {entity.forward_to!r}: receive there"
        )
    with_session = SESSION_FILTER in filters
    if not isinstance(filters.get(SESSION_FILTER), str | None):
        raise AmqpError(INVALID_FIELD, "the session filter must be a session id or null")
    if with_session and (not entity.sessions or address.dead):
        raise AmqpError(
            NOT_ALLOWED, f"{address.entity!r} has no sessions here: receive without a session"
        )
    if entity.sessions and not with_session and not address.dead:
        raise AmqpError(NOT_ALLOWED, f"{entity.path!r} requires sessions: receive from a session")
    return broker.namespace.transfer(entity) if address.transfer else entity


class PendingSession(StoreChange):
    """A link that waits for a session: a named one, or the next one with messages.

    accepted: called with the consumer when the link has got its session.
    """

    def __init__(
        self,
        broker: Service,
        link: SendingLink,
        entity: Entity,
        accepted: Callable[[Consumer], None],
    ) -> None:
        self._broker = broker
        self._accepted = accepted
        self.link = link
        self.entity = entity
        name = link.source.filters.get(SESSION_FILTER) if link.source else None
        self.session: str | None = name
        timeout = link.properties.get(TIMEOUT_PROPERTY)
        milliseconds = timeout if isinstance(timeout, int) else DEFAULT_TIMEOUT_MS
        self.deadline = broker.clock.monotonic() + milliseconds / 1000
        self._lease: SessionLease | None = None
        self._submitted = False

    def submit(self) -> None:
        """Try at the end of the turn, once: a second session would be accepted and lost."""
        if not self._submitted:
            self._submitted = True
            self._broker.committer.submit(self)

    @property
    def waiting(self) -> bool:
        """Whether the link is still neither accepted nor refused."""
        return self.link.state.value == "pending"

    def should_retry(self) -> bool:
        """Return whether to try again now: a message is available, or the deadline has passed."""
        if self._broker.clock.monotonic() >= self.deadline:
            return True
        return self._broker.engine.pending(self.entity.path) <= 0

    def execute(self) -> None:
        self._lease = None
        if self.waiting:
            self._lease = self._broker.engine.accept_session(self.entity.path, self.session)

    def succeed(self) -> None:
        """Accept the link with the session's name, refuse it, or keep waiting."""
        self._submitted = False
        lease = self._lease
        if not self.waiting:
            if lease is not None:  # the link ended during this turn
                release = _SessionRelease(self._broker, self.entity.path, lease)
                self._broker.committer.submit(release)
        elif lease is not None:
            self._accept(lease)
        elif self.session is not None:
            self.link.refuse(
                AmqpError(
                    SESSION_CANNOT_BE_LOCKED,
                    f"the session {self.session!r} is locked by another receiver",
                )
            )
        elif self._broker.clock.monotonic() >= self.deadline:
            self.link.refuse(
                AmqpError(TIMEOUT, f"no session of {self.entity.path!r} became available in time")
            )

    def _accept(self, lease: SessionLease) -> None:
        until = lease.until + self._broker.lock_token_offset()
        ticks = _TICKS_AT_EPOCH + int(until * _TICKS_PER_SECOND)
        source = self.link.source
        self.link.accept(
            max_message_size=self.entity.max_message_bytes,
            source=with_filter(source, SESSION_FILTER, encode.string(lease.session))
            if source
            else None,
            properties=encode.map_of([(encode.symbol(LOCKED_UNTIL_PROPERTY), encode.long(ticks))]),
        )
        consumer = Consumer(
            self._broker, self.link, MessageSource(self.entity.path, False, lease.session), lease
        )
        self.link.context = consumer
        self._accepted(consumer)
        self._broker.dispatcher.join(consumer)
        consumer.credited()

    def fail(self, error: AztaskError) -> None:
        """Refuse the link with the error."""
        self._submitted = False
        self.link.refuse(as_amqp(error))
