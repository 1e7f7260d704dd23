"""One client: accepts or refuses its links and dispatches their events.

Rules
1. The address of an attach decides the purpose of a link. Then its context handles its events.
2. With a shared access key, a link needs a valid token for its entity at attach and for all its
   life.
"""

from __future__ import annotations

from aztask.emulator.amqp import (
    CONNECTION_FORCED,
    DETACH_FORCED,
    INVALID_FIELD,
    NOT_ALLOWED,
    NOT_IMPLEMENTED,
    AmqpError,
    encode,
)
from aztask.emulator.amqp.link import (
    COORDINATOR,
    AmqpLink,
    Inbound,
    Outbound,
    ReceivingLink,
    SendingLink,
)
from aztask.emulator.amqp.performatives import Disposition, Open
from aztask.emulator.broker.access import TokenClaims, denied
from aztask.emulator.broker.broker import Service
from aztask.emulator.broker.consumer import Consumer, PendingSession, receivable
from aztask.emulator.broker.dispatch import MessageSource
from aztask.emulator.broker.entities import MANAGEMENT, Address, parse_address
from aztask.emulator.broker.entra import Right
from aztask.emulator.broker.forwarding import sendable
from aztask.emulator.broker.nodes import (
    CbsLink,
    ManagementLink,
    Replies,
    RequestLink,
    Responder,
    Responders,
)
from aztask.emulator.broker.producer import CREDIT, Producer
from aztask.emulator.broker.transactions import ControlLink, Transactions

REQUEST_SIZE = 1024 * 1024
CBS_NODE = "$cbs"
LEAST_ALONE = 5.0  # seconds that a connection may have no links: SDKs need one to open the first
DESTINATION = "com.microsoft:transfer-destination-address"
"""The property of a link that sends through its target to another entity ("send via")."""


class Client:
    """Handles the events of one connection."""

    def __init__(self, broker: Service) -> None:
        self.broker = broker
        self.claims = TokenClaims(broker.access, broker.clock.wall)
        self.container = ""
        self._paused = False
        self._producers: dict[AmqpLink, Producer] = {}
        self._consumers: dict[AmqpLink, Consumer] = {}
        self._requests: dict[AmqpLink, RequestLink | ControlLink] = {}
        self.transactions = Transactions(broker)
        self._responders = Responders()
        self._accepting: dict[AmqpLink, PendingSession] = {}
        self._addresses: dict[AmqpLink, Address] = {}
        self._in_use: set[str] = set()  # names of links, since the last check of idle ones
        self._last_use: dict[AmqpLink, tuple[tuple[int, ...], float]] = {}
        self._had_links = False
        self._alone_since = broker.clock.monotonic()

    # -- the connection

    def authenticated(self, user: str, password: str) -> bool:
        """Check SASL PLAIN credentials: the name of the shared access key and the key."""
        self.claims.trusted = self.broker.access.password(user, password)
        return self.claims.trusted

    def opened(self, peer: Open) -> None:
        """Remember the name of the client's container."""
        self.container = peer.container_id[:200]

    @property
    def links(self) -> int:
        """The number of links to entities that this client has."""
        return len(self._producers) + len(self._consumers) + len(self._accepting)

    def addresses(self) -> list[str]:
        """Return what the client has links to: each with its direction, sorted."""
        return sorted(
            f"{'to' if link.receiving else 'from'} {address.claimed}"
            + (MANAGEMENT if address.management else "")
            for link, address in self._addresses.items()
        )

    def paused(self, paused: bool) -> None:
        """Stop deliveries while the socket is full, resume them when it has room."""
        self._paused = paused
        for consumer in self._consumers.values():
            consumer.paused = paused
            if not paused:
                consumer.credited()

    # -- links

    def attached(self, link: AmqpLink) -> None:
        """Accept the link, refuse it, or let it wait for a session."""
        end = link.target if link.receiving else link.source
        try:
            if end is None:
                raise AmqpError(INVALID_FIELD, "the attach names no source or target here")
            if end.kind == COORDINATOR:
                self._attach_control(link)
                return
            if end.dynamic:
                raise AmqpError(NOT_IMPLEMENTED, "dynamic nodes are not available here")
            address = parse_address(end.address)
            if isinstance(link, ReceivingLink):
                self._attach_receiving(link, address)
            elif isinstance(link, SendingLink):
                self._attach_sending(link, address)
        except AmqpError as error:
            link.refuse(error)

    def _attach_control(self, link: AmqpLink) -> None:
        if not isinstance(link, ReceivingLink):
            raise AmqpError(NOT_ALLOWED, "the coordinator only takes messages")
        self._requests[link] = ControlLink(self.broker, link, self.transactions)
        link.max_message_size = REQUEST_SIZE
        link.accept(max_message_size=REQUEST_SIZE)
        link.grant(CREDIT)

    def _attach_receiving(self, link: ReceivingLink, address: Address) -> None:
        size, properties = REQUEST_SIZE, encode.NULL
        if address.cbs:
            replies = Replies(link, CBS_NODE, self._responders)
            self._requests[link] = CbsLink(replies, self.broker, self.claims)
        elif address.management:
            self._check(link, address)
            self._requests[link] = ManagementLink(
                Replies(link, _node(address), self._responders),
                self.broker,
                address,
                self.claims,
                lambda: list(self._consumers.values()),
                self.transactions,
                self._in_use,
            )
        else:
            self._check(link, address, Right.SEND)
            if address.dead:
                raise AmqpError(NOT_ALLOWED, "messages cannot be sent to the dead letters")
            entity = sendable(self.broker.namespace, address.entity)
            size = entity.max_message_bytes
            destination = link.properties.get(DESTINATION)
            target = None
            if isinstance(destination, str):
                target = self._destination(destination)
                properties = encode.map_of(
                    [(encode.symbol(DESTINATION), encode.string(destination))]
                )
            self._producers[link] = Producer(
                self.broker, link, entity.path, self.transactions, target
            )
        link.max_message_size = size
        link.accept(max_message_size=size, properties=properties)
        link.grant(CREDIT)

    def _destination(self, text: str) -> str:
        """Return the entity to which a link sends through another one. Raises AmqpError."""
        address = parse_address(text)
        self.claims.check(address.claimed, Right.SEND)
        return sendable(self.broker.namespace, address.entity).path

    def _attach_sending(self, link: SendingLink, address: Address) -> None:
        if not address.cbs:
            self._check(link, address, None if address.management else Right.LISTEN)
        if address.cbs or address.management:
            node = CBS_NODE if address.cbs else _node(address)
            responder = Responder(link, node)
            self._responders.append(responder)
            link.context = responder
            link.accept(max_message_size=REQUEST_SIZE)
            return
        entity = receivable(self.broker, address, link.source.filters if link.source else {})
        if entity.sessions and not address.dead:
            accepting = PendingSession(
                self.broker, link, entity, lambda consumer: self._accepted(link, consumer)
            )
            self._accepting[link] = accepting
            accepting.submit()
            return
        consumer = Consumer(self.broker, link, MessageSource(entity.path, address.dead))
        consumer.paused, consumer.transactions = self._paused, self.transactions
        self._consumers[link] = link.context = consumer
        self.broker.dispatcher.join(consumer)
        link.accept(max_message_size=entity.max_message_bytes)

    def _accepted(self, link: AmqpLink, consumer: Consumer) -> None:
        self._accepting.pop(link, None)
        consumer.paused, consumer.transactions = self._paused, self.transactions
        self._consumers[link] = consumer

    def _check(self, link: AmqpLink, address: Address, right: Right | None = None) -> None:
        self.claims.check(address.claimed, right)
        self._addresses[link] = address
        self.broker.namespace.note_use(address.entity)

    def received(self, link: ReceivingLink, message: Inbound) -> None:
        """Pass on a message for an entity, or a request."""
        target = self._producers.get(link) or self._requests.get(link)
        if target is not None:
            target.received(message)

    def credited(self, link: SendingLink) -> None:
        """Send waiting messages or responses: the client granted credit."""
        if link.context is not None:
            link.context.credited()

    def settled(self, deliveries: list[Outbound], disposition: Disposition) -> None:
        """Settle deliveries, which may belong to several links."""
        if len(deliveries) == 1:
            consumer = self._consumers.get(deliveries[0].link)
            if consumer is not None:
                consumer.settled(deliveries, disposition)
            return
        by_link: dict[AmqpLink, list[Outbound]] = {}
        for delivery in deliveries:
            by_link.setdefault(delivery.link, []).append(delivery)
        for link, own in by_link.items():
            consumer = self._consumers.get(link)
            if consumer is not None:
                consumer.settled(own, disposition)

    def detached(self, link: AmqpLink) -> None:
        """Forget a link that ended."""
        self._addresses.pop(link, None)
        self._last_use.pop(link, None)
        self._producers.pop(link, None)
        if isinstance(self._requests.pop(link, None), ControlLink):
            self.transactions.detached(link)
        self._accepting.pop(link, None)
        consumer = self._consumers.pop(link, None)
        if consumer is not None:
            consumer.detached()
        self._responders[:] = [other for other in self._responders if other.link is not link]

    # -- time, and changes from outside

    def tick(self) -> None:
        """Retry pending sessions, and end links whose session lock has expired."""
        for accepting in list(self._accepting.values()):
            if accepting.waiting and accepting.should_retry():
                accepting.submit()
        for consumer in list(self._consumers.values()):
            consumer.tick()
        self.transactions.tick()

    def note_use(self) -> None:
        """Note that the entities of all links are used: their client may still need them."""
        for address in self._addresses.values():
            self.broker.namespace.note_use(address.entity)

    def check_idle(self) -> None:
        """Detach links that were not used for long. Raises AmqpError if none was there for long.

        ``$cbs`` does not count as a link. A link that waits for a session is in use, and so is one
        that a request to ``$management`` names, as on the service (the SDKs renew locks this way,
        github.com/Azure/azure-sdk-for-python/pull/10209). The links to ``$management`` stay: the
        Python SDK (7.15) does not open them again by itself.
        """
        now, limit = self.broker.clock.monotonic(), self.broker.faults.idle
        if not limit:
            return
        for link, address in list(self._addresses.items()):
            use = link.used()
            if address.management:
                continue
            before = self._last_use.get(link, (None, 0.0))[0]
            if not link.attached or before != use or link.name in self._in_use:
                self._last_use[link] = (use, now)
            elif now - self._last_use[link][1] >= limit:
                link.detach(_idle(f"{self.container}:{link.name}", link, limit))
        self._in_use.clear()
        control = any(isinstance(each, ControlLink) for each in self._requests.values())
        if self._addresses or control:
            self._had_links, self._alone_since = True, now
        allowed = max(limit / 2 if self._had_links else limit / 10, LEAST_ALONE)
        if now - self._alone_since >= allowed:
            raise AmqpError(
                CONNECTION_FORCED,
                "The connection was inactive for more than the allowed"
                f" {allowed * 1000:.0f} milliseconds and is closed by container 'LinkTracker'.",
            )

    def check_tokens(self) -> None:
        """Detach the links whose token has expired."""
        now = self.broker.clock.wall()
        for link, address in list(self._addresses.items()):
            if self.claims.expiry(address.claimed) <= now:
                link.detach(denied(f"the token for {address.claimed!r} has expired"))

    def entity_deleted(self, path: str) -> None:
        """Detach the links of an entity that was deleted."""
        for link, known in list(self._addresses.items()):
            if known.entity.lower() == path.lower():
                link.detach(AmqpError("amqp:not-found", f"the entity {path!r} was deleted"))


def _idle(name: str, link: AmqpLink, limit: float) -> AmqpError:
    """Return the service's error for a link that was not used for `limit` seconds."""
    kind = "Publisher" if link.receiving else "Consumer"
    minutes, seconds = divmod(round(limit), 60)
    return AmqpError(
        DETACH_FORCED,
        f"The link {name!r} is force detached. Code: {kind.lower()}(link{link.handle}). Details:"
        f" AmqpMessage{kind}.IdleTimerExpired: Idle timeout: 00:{minutes:02}:{seconds:02}.",
    )


def _node(address: Address) -> str:
    inner = "/$transfer" * address.transfer + "/$dead" * address.dead
    return f"{address.entity.lower()}{inner}"
