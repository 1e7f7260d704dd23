"""The consumers of a Kombu channel: each receives from one queue of the broker.

Rules
1. The lease is the one that the options give for the queue. Without one it is the queue's own lock
   on Service Bus, else the service's default.
2. If the lock may not be read, the service's default is tried. The broker compares it with the
   messages; if it does not fit, the consumer goes on with the lock that the messages show.
3. A queue with sessions is received one message at a time, so the messages of a session stay in
   order. A session that still has messages after `SESSION_SHARE` lets the others have their turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep, thread_time
from typing import Any, Final, Self

from kombu import Consumer
from kombu.exceptions import ContentDisallowed
from kombu.serialization import loads

from aztask.celery.transport.boxes import Boxes
from aztask.celery.transport.options import TransportOptions
from aztask.errors import ContentRefused, LeaseRefused, QueueNotFound
from aztask.queues.base import (
    ANY_SESSION,
    Broker,
    Inspectable,
    MessageWaiter,
    QueueFacts,
    Receiver,
    SessionHolder,
)
from aztask.queues.delivery import Delivery
from aztask.settlement import Complete
from aztask.support.display import one_line

# -- Content types ---------------------------------------------------------------------------------
#
# Which content types a consumer gets: those that Kombu itself would decode for it.
#
# Rules
# 1. A consumer of Kombu or Celery says it in its `accept` (Celery: ``accept_content``). One that
#    says nothing gets every type except those that Kombu disables, pickle and yaml.
# 2. A program that consumes or fetches without a `kombu.Consumer` gets every type: nothing is
#    decoded before it asks for that, and then Kombu applies the program's own rule.
# 3. Any other message is dead-lettered with a log line. Left to Kombu, it would end the consumer's
#    loop, and Celery would delete it if it is no task.


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one consumer gets.

    * `consumer`: the Kombu consumer; None if the program decodes for itself (rule 2).
    * `further`: content types that it gets whether it accepts them or not.
    """

    consumer: Consumer | None = None
    further: frozenset[str] = frozenset()

    @classmethod
    def by(cls, callback: Callable[[Any], Any], further: frozenset[str]) -> Self:
        """What the consumer gets that this callback belongs to."""
        consumer = getattr(callback, "__self__", None)
        return cls(consumer if isinstance(consumer, Consumer) else None, further)

    def check(self, content_type: str) -> None:
        """Raise ContentRefused for a type that the consumer does not get."""
        if self.consumer is None or content_type in self.further:
            return
        try:
            loads(b"", content_type, "binary", accept=self.consumer.accept)  # only checks
        except ContentDisallowed:
            raise ContentRefused(
                f"this consumer does not accept {one_line(repr(content_type), 60)}; Celery's"
                " setting accept_content, or accept of a kombu.Consumer, names what it accepts"
            ) from None


WHATEVER: Final = Accepted()
"""For a program that decodes for itself (rule 2)."""


# -- Consumers -------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

SESSION_SHARE: Final = 10.0
"""Seconds after which a session is given back while others may wait."""


@dataclass(slots=True)
class ConsumedQueue:
    """A queue as a consumer receives from it.

    * `queue`: its name in Kombu.
    * `address`: its name in the broker.
    * `lease`: seconds.
    * `given`: whether the options gave the lease, so that another one is an error.
    * `sessions`: whether the queue has sessions.
    """

    queue: str
    address: str
    lease: float
    given: bool = False
    sessions: bool = False


def source_of(
    broker: Broker, options: TransportOptions, queue: str, address: str | None = None
) -> ConsumedQueue:
    """How to receive from `queue`, by rule 1. Asks the service for what the options do not say.

    * `address`: the queue's name in the broker, if it is another one.

    Raises BrokerUnavailable, InvalidQueueName.
    """
    address = queue if address is None else address
    can = broker.capabilities
    lease = options.leases.get(queue, options.lease)
    sessions = queue in options.sessions
    facts = None
    if (can.fixed_lease and lease is None) or (can.sessions and not sessions):
        facts = _facts(broker, address)
    if facts is not None:
        sessions = sessions or bool(facts.sessions)
    own = facts.lease_seconds if facts is not None else None
    return ConsumedQueue(
        queue, address, lease or own or can.default_lease_seconds, lease is not None, sessions
    )


def _facts(broker: Broker, address: str) -> QueueFacts | None:
    return broker.inspector().facts(address) if isinstance(broker, Inspectable) else None


class QueueConsumer:
    """One consumer of one queue, whose receiver is opened at the first use."""

    def __init__(
        self,
        broker: Broker,
        source: ConsumedQueue,
        *,
        no_ack: bool,
        consumer_tag: str,
        callback: Callable[[Any], Any],
        accepted: Accepted = WHATEVER,
        weight: int = 1,
    ) -> None:
        """weight: how many messages it gets for one of a consumer of weight 1; see `served`."""
        self.source = source
        self.weight = weight
        self.served = 0.0  # messages it has had, divided by its weight: the least comes next
        self.no_ack = no_ack
        self.consumer_tag = consumer_tag
        self.callback = callback
        self.accepted = accepted
        self.gave_all = False  # the last receive brought as many as it asked for
        self.waited = 0.0  # seconds, in that receive: its time without its own work
        self._session = ""
        self._session_since = 0.0
        self.reopen(broker)

    def reopen(self, broker: Broker) -> None:
        """Receive through `broker` from now on."""
        self._broker = broker
        self._receiver: Receiver | None = None

    @property
    def receiver(self) -> Receiver:
        """The receiver, opened if it is not open yet."""
        if self._receiver is None:
            self._receiver = self._broker.receiver(
                self.source.address,
                lease=self.source.lease,
                delete=self.no_ack,
                session=ANY_SESSION if self.source.sessions else None,
            )
        return self._receiver

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries, as soon as there is one; [] after `wait` seconds.

        Raises LeaseRefused if the options give another lease than the queue's lock.
        """
        if self.source.sessions:
            limit = 1
            self._take_turns()
        self.gave_all = False
        began = monotonic() - thread_time()
        try:
            deliveries = self.receiver.receive(limit, wait)
        except LeaseRefused as error:
            self._adopt(error)
            return []
        self.waited = monotonic() - thread_time() - began
        self.served += len(deliveries) / self.weight
        self.gave_all = len(deliveries) >= limit and not self.source.sessions
        if self.source.sessions and deliveries and deliveries[0].session != self._session:
            self._session, self._session_since = deliveries[0].session or "", monotonic()
        return deliveries

    def _take_turns(self) -> None:
        """Give back a session that was served for `SESSION_SHARE`. Nothing of it is held now."""
        receiver = self._receiver
        if (
            isinstance(receiver, SessionHolder)
            and self._session
            and monotonic() - self._session_since > SESSION_SHARE
        ):
            self._session = ""
            receiver.let_go()

    def _adopt(self, error: LeaseRefused) -> None:
        """Go on with the lock that the messages have shown (rule 2)."""
        lease = self.source.lease if error.actual is None else max(1.0, round(error.actual))
        if self.source.given or lease == self.source.lease:
            raise error
        logger.info(
            "queue %s holds its messages for %g s: this is its lease from now on; the transport"
            " option leases can give it, so that it need not be found out",
            self.source.queue,
            lease,
        )
        self.source.lease = lease
        self.close()
        self._receiver = None

    def close(self) -> None:
        """Close the receiver, if it is open."""
        if self._receiver is not None:
            self._receiver.close()


class MailboxConsumer(QueueConsumer):
    """A consumer of a mailbox."""

    def __init__(
        self,
        boxes: Boxes,
        broker: Broker,
        queue: str,
        *,
        no_ack: bool,
        consumer_tag: str,
        callback: Callable[[Any], Any],
        accepted: Accepted = WHATEVER,
    ) -> None:
        super().__init__(
            broker,
            ConsumedQueue(queue, queue, broker.capabilities.default_lease_seconds, given=True),
            no_ack=no_ack,
            consumer_tag=consumer_tag,
            callback=callback,
            accepted=accepted,
        )
        self._boxes = boxes

    @property
    def receiver(self) -> Receiver:
        """The receiver, opened if it is not open yet."""
        if self._receiver is None:
            self._receiver = self._boxes.receiver(self.source.queue, self.no_ack)
        return self._receiver

    def await_message(self, seconds: float) -> bool:
        """True once a message may be there, which is left there; False after `seconds`.

        For receivers that can wait so, which are those of a local broker.
        """
        try:
            if self._boxes.usable(self.source.queue) and isinstance(self.receiver, MessageWaiter):
                return self.receiver.await_message(seconds)
        except QueueNotFound:  # the receive finds out, too, and creates it again
            pass
        return True

    def has_news(self) -> bool:
        """True if a message may have come since the last call."""
        try:
            if self._boxes.usable(self.source.queue) and isinstance(self.receiver, MessageWaiter):
                return self.receiver.has_news()
        except QueueNotFound:  # as above
            pass
        return True

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` messages that the mailbox is bound for; [] after `wait` seconds.

        A mailbox that the broker has removed, because this process did not keep it for long, is
        created again.
        """
        if not self._boxes.usable(self.source.queue):
            sleep(wait)
            return []
        try:
            found = self.receiver.receive(limit, wait)
        except QueueNotFound:
            self.close()
            self._receiver = None
            self._boxes.renew(self.source.queue)
            return []
        wanted = [each for each in found if self._boxes.wanted(self.source.queue, each.envelope)]
        if len(wanted) < len(found) and not self.no_ack:
            rest = [each for each in found if each not in wanted]
            self.receiver.settle([(each, Complete()) for each in rest])
        return wanted
