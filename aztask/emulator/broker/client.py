"""One client: accepts or refuses its links and dispatches their events.

Rules
1. The address of an attach decides the purpose of a link. Then its context handles its events.
2. With a shared access key, a link needs a valid token for its entity at attach and for all its
   life.
"""

from __future__ import annotations

from aztask.emulator.amqp import INVALID_FIELD, NOT_ALLOWED, NOT_IMPLEMENTED, AmqpError
from aztask.emulator.amqp.link import (
    COORDINATOR,
    AmqpLink,
    Inbound,
    Outbound,
    ReceivingLink,
    SendingLink,
)
from aztask.emulator.amqp.performatives import Disposition, Open
from aztask.emulator.broker.access import Right, TokenClaims, denied
from aztask.emulator.broker.broker import Service
from aztask.emulator.broker.consumer import Consumer, PendingSession, receivable
from aztask.emulator.broker.dispatch import MessageSource
from aztask.emulator.broker.entities import Address, parse_address
from aztask.emulator.broker.forwarding import sendable
from aztask.emulator.broker.nodes import CbsLink, ManagementLink, Replies, RequestLink, Responder
from aztask.emulator.broker.producer import CREDIT, Producer

REQUEST_SIZE = 1024 * 1024
CBS_NODE = "$cbs"


class Client:
    """Handles the events of one connection."""

    def __init__(self, broker: Service) -> None:
        self.broker = broker
        self.claims = TokenClaims(broker.access, broker.clock.wall)
        self.container = ""
        self._paused = False
        self._producers: dict[AmqpLink, Producer] = {}
        self._consumers: dict[AmqpLink, Consumer] = {}
        self._requests: dict[AmqpLink, RequestLink] = {}
        self._responders: list[Responder] = []
        self._accepting: dict[AmqpLink, PendingSession] = {}
        self._addresses: dict[AmqpLink, Address] = {}

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
                raise AmqpError(NOT_IMPLEMENTED, "transactions are not available here")
            if end.dynamic:
                raise AmqpError(NOT_IMPLEMENTED, "dynamic nodes are not available here")
            address = parse_address(end.address)
            if isinstance(link, ReceivingLink):
                self._attach_receiving(link, address)
            elif isinstance(link, SendingLink):
                self._attach_sending(link, address)
        except AmqpError as error:
            link.refuse(error)

    def _attach_receiving(self, link: ReceivingLink, address: Address) -> None:
        size = REQUEST_SIZE
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
            )
        else:
            self._check(link, address, Right.SEND)
            if address.dead:
                raise AmqpError(NOT_ALLOWED, "messages cannot be sent to the dead letters")
            entity = sendable(self.broker.namespace, address.entity)
            size = entity.max_message_bytes
            self._producers[link] = Producer(self.broker, link, entity.path)
        link.max_message_size = size
        link.accept(max_message_size=size)
        link.grant(CREDIT)

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
        entity = receivable(self.broker, address, link)
        if entity.sessions and not address.dead:
            accepting = PendingSession(
                self.broker, link, entity, lambda consumer: self._accepted(link, consumer)
            )
            self._accepting[link] = accepting
            accepting.submit()
            return
        consumer = Consumer(self.broker, link, MessageSource(entity.path, address.dead))
        consumer.paused = self._paused
        self._consumers[link] = link.context = consumer
        self.broker.dispatcher.join(consumer)
        link.accept(max_message_size=entity.max_message_bytes)

    def _accepted(self, link: AmqpLink, consumer: Consumer) -> None:
        self._accepting.pop(link, None)
        consumer.paused = self._paused
        self._consumers[link] = consumer

    def _check(self, link: AmqpLink, address: Address, right: Right | None = None) -> None:
        self.claims.check(address.claimed, right)
        self._addresses[link] = address

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
        self._producers.pop(link, None)
        self._requests.pop(link, None)
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


def _node(address: Address) -> str:
    inner = "/$transfer" * address.transfer + "/$dead" * address.dead
    return f"{address.entity.lower()}{inner}"
