"""The Kombu channel: publishing, consuming and settling over a broker.

Rules: publishing and settling are safe from any thread; receiving belongs to one thread, as in
Kombu. See `aztask.transport` for the rest.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from time import time
from typing import Any, Final, Protocol

from amqp.protocol import queue_declare_ok_t
from kombu.transport import base, virtual

from aztask.brokers.base import Broker, QueueOptions
from aztask.errors import CodecError, QueueNotFound
from aztask.lease.keeper import LeaseKeeper
from aztask.message.cloneids import next_link
from aztask.message.envelope import Envelope
from aztask.retry import EXPIRED, UNDECODABLE
from aztask.settlement import Abandon, Complete, DeadLetter, Release, Resubmit, Settlement
from aztask.support.display import one_line
from aztask.transport.consumers import QueueConsumer, source_of
from aztask.transport.options import TransportOptions, nothing
from aztask.transport.translation import seconds_early, to_envelope, to_message
from aztask.transport.unacked import Unacked, UnackedDelivery

logger = logging.getLogger(__name__)

REJECTED: Final = "rejected"

BATCH: Final = 32
"""Messages that one request may fetch, unless the prefetch count is lower."""

_REMOTE_WAIT = 1.0


class ChannelConnection(Protocol):
    """The part of a connection that a channel needs."""

    client: Any
    options: TransportOptions

    @property
    def broker(self) -> Broker:
        """The broker of this process."""
        ...

    @property
    def keeper(self) -> LeaseKeeper:
        """The keeper that renews this connection's leases."""
        ...

    def check_body(self, body: bytes, content_type: str) -> None:
        """Raise CodecError unless a consumer can decode `body` safely."""
        ...

    def address(self, queue: str) -> str:
        """The queue's name in the broker. Raises InvalidQueueName."""
        ...


class Channel(virtual.Channel):
    """The channel of producers and consumers. Any thread may publish and settle."""

    Message = base.Message
    do_restore = False
    supports_fanout = False

    def __init__(self, connection: ChannelConnection, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.link = connection
        self.no_ack_consumers: set[str] = set()
        self._sources: dict[str, QueueConsumer] = {}
        self._getters: dict[tuple[str, bool], QueueConsumer] = {}
        self._retired: list[QueueConsumer] = []
        self._ready: deque[UnackedDelivery] = deque()
        self._unacked: Unacked | None = None
        self._prefetch = 0
        self._tags = count(1)
        self._pid = os.getpid()

    # -- producers ---------------------------------------------------------------------------

    def prepare_message(
        self,
        body: Any,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Build Kombu's message dict; Kombu's producer calls this for each message."""
        properties = {} if properties is None else properties
        if priority:
            properties["priority"] = priority
        return {
            "body": body,
            "content-type": content_type,
            "content-encoding": content_encoding,
            "headers": headers or {},
            "properties": properties,
        }

    def basic_publish(
        self,
        message: dict[str, Any],
        exchange: str,
        routing_key: str,
        mandatory: bool = False,
        **_: Any,
    ) -> None:
        """Send to one queue, or to every queue that is bound to the exchange.

        What no queue is bound for is dropped with a log line, as in AMQP. It raises QueueNotFound
        for a Celery task, for a `mandatory` message, and for an exchange that was not declared.
        Raises EncodeError, or what `Broker.send` raises.
        """
        envelopes = [to_envelope(message, time())]
        broker = self.link.broker
        queues = self._routes(exchange, routing_key) if exchange else [routing_key]
        for queue in queues:
            broker.send(self.link.address(queue), envelopes)
        if not queues:
            self._unroutable(message, exchange, routing_key, mandatory)

    def _routes(self, exchange: str, routing_key: str) -> list[str]:
        if exchange not in self.state.exchanges:
            raise QueueNotFound(
                f"exchange {exchange!r} was not declared in this process; declare it before"
                " publishing, or publish to the queue itself"
            )
        table = self.get_table(exchange)
        found = self.typeof(exchange).lookup(table, exchange, routing_key, None)
        return sorted(found) or ([self.deadletter_queue] if self.deadletter_queue else [])

    @staticmethod
    def _unroutable(
        message: dict[str, Any], exchange: str, routing_key: str, mandatory: bool
    ) -> None:
        """Drop a message that no queue is bound for, or raise QueueNotFound."""
        if mandatory or "task" in message["headers"]:
            raise QueueNotFound(
                f"no queue is bound to exchange {exchange!r} with key {routing_key!r} in this"
                " process; declare the queue before publishing, or publish to the queue itself"
            )
        logger.info(
            "dropped a message: no queue is bound to exchange %r with key %r", exchange, routing_key
        )

    # -- queues ------------------------------------------------------------------------------

    def queue_declare(self, queue: str, passive: bool = False, **_: Any) -> Any:
        """Create the queue if it is missing, unless the option ``declare`` is False.

        A new queue gets the lease and the sessions that the options name; an existing one keeps
        its own. With `passive` it raises QueueNotFound if the queue is missing.
        """
        options = self.link.options
        if not passive and options.declare:
            lease = options.leases.get(queue, options.lease)
            sessions = True if queue in options.sessions else None
            wanted = QueueOptions(lease=lease, sessions=sessions, implied=frozenset({"lease"}))
            self.link.broker.declare(self.link.address(queue), wanted)
        return queue_declare_ok_t(queue, self._size(queue) if passive else 0, 0)

    def _size(self, queue: str) -> int:
        stats = self.link.broker.stats(self.link.address(queue))
        return stats.living if stats.active is None else stats.active

    def _purge(self, queue: str) -> int:
        return self.link.broker.purge(self.link.address(queue))

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any
    ) -> None:
        """Delete the queue with its messages; with `if_empty` only if it has none."""
        if not (if_empty and self._size(queue)):
            for exchange, routing_key, _arguments in list(self.state.queue_bindings(queue)):
                self.queue_unbind(queue, exchange, routing_key)
            self.state.queue_bindings_delete(queue)
            self.link.broker.delete(self.link.address(queue))

    # -- consumers ---------------------------------------------------------------------------

    def basic_qos(
        self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False
    ) -> None:
        """Allow at most `prefetch_count` unacknowledged messages on this channel; 0: no limit."""
        self._prefetch = prefetch_count or 0

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        consumer_tag: str,
        **_: Any,
    ) -> None:
        """Deliver messages of `queue` to `callback`; with `no_ack` they are deleted at receipt."""
        self._sources[consumer_tag] = self._source(queue, no_ack, consumer_tag, callback)
        if no_ack:
            self.no_ack_consumers.add(consumer_tag)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop the consumer; messages that were received but not delivered are given back."""
        source = self._sources.pop(consumer_tag, None)
        if source is None:
            return
        mine = [holding for holding in self._ready if holding.consumer_tag == consumer_tag]
        for holding in mine:
            self._ready.remove(holding)
        self.unacked.give_back([holding.tag for holding in mine if holding.lease], Release())
        # Messages already delivered must still be settled through this receiver.
        self._retired.append(source)

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> Any:
        """Receive one message, or None if there is none."""
        found: list[Any] = []
        key = (queue, bool(no_ack))
        source = self._getters.get(key)
        if source is None:
            source = self._getters[key] = self._source(queue, no_ack, "", nothing)
        source.callback = found.append
        remote = self.link.broker.capabilities.remote
        while not found and self.fetch(source, _REMOTE_WAIT if remote else 0.0, limit=1):
            self._hand_out(source, self._ready.pop())
        return found[0] if found else None

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        """Complete the message; with `multiple`, all messages delivered before it, too."""
        tags = self.unacked.tags_up_to(delivery_tag) if multiple else [delivery_tag]
        for tag in tags:
            self.unacked.settle(tag, Complete())

    def basic_reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Dead-letter the message, or with `requeue` make it available again at once."""
        self.unacked.settle(
            delivery_tag,
            Abandon() if requeue else DeadLetter(REJECTED, "a consumer rejected the message"),
        )

    def basic_recover(self, requeue: bool = False) -> None:
        """Give back all messages that were delivered and not acknowledged."""
        self.unacked.give_back(self.unacked.tags_up_to(next(self._tags)), Abandon())

    # -- receiving ---------------------------------------------------------------------------

    @property
    def unacked(self) -> Unacked:
        """The messages that were delivered and not settled."""
        self._notice_fork()
        if self._unacked is None:
            self._unacked = Unacked(self.link.keeper)
        return self._unacked

    def open_sources(self) -> Iterator[QueueConsumer]:
        """The consumers that may receive now, as far as the prefetch count allows."""
        if not self._prefetch or len(self.unacked) < self._prefetch:
            yield from self._sources.values()

    def deliver_one(self) -> bool:
        """Deliver one message that was received before; False if there was none."""
        self._notice_fork()
        while self._ready:
            holding = self._ready.popleft()
            if holding.lapsed():
                self.unacked.drop(holding)
                continue
            source = self._sources.get(holding.consumer_tag)
            if source is None:
                self.unacked.settle(holding.tag, Release())
            elif self._hand_out(source, holding):
                return True
        return False

    def fetch(self, source: QueueConsumer, wait: float, limit: int = BATCH) -> bool:
        """Receive from `source`, waiting at most `wait` seconds; True if any message came."""
        if self._prefetch and source.consumer_tag:
            limit = min(limit, self._prefetch - len(self.unacked))
        if source.no_ack:
            limit = 1  # a message deleted at receipt and not delivered would be lost
        if source.source.sessions and self.unacked.holds(source.receiver):
            return False  # its session's next message waits until this one is settled
        deliveries = source.receive(limit, wait)
        holdings = [
            UnackedDelivery(next(self._tags), source.receiver, delivery, source.consumer_tag)
            for delivery in deliveries
        ]
        if not source.no_ack:
            self.unacked.hold(source.receiver, holdings, source.source.lease)
        self._ready.extend(holdings)
        return bool(deliveries)

    def _source(
        self, queue: str, no_ack: bool, consumer_tag: str, callback: Callable[[Any], Any]
    ) -> QueueConsumer:
        broker = self.link.broker
        return QueueConsumer(
            broker,
            source_of(broker, self.link.options, queue, self.link.address(queue)),
            no_ack=bool(no_ack),
            consumer_tag=consumer_tag,
            callback=callback,
        )

    def _hand_out(self, source: QueueConsumer, holding: UnackedDelivery) -> bool:
        """Deliver one message to its consumer, unless no consumer may get it now."""
        delivery = holding.delivery
        verdict = self._judge(delivery.envelope, time())
        if not isinstance(verdict, dict):
            self._keep_back(holding, verdict)
            return False
        info = {
            "exchange": "",
            "routing_key": source.source.queue,
            "consumer_tag": holding.consumer_tag,
            "redelivered": delivery.delivery_count > 1,
            "delivery_count": delivery.delivery_count,
        }
        verdict["properties"].update(delivery_tag=holding.tag, delivery_info=info)
        source.callback(
            self.Message(delivery_tag=holding.tag, delivery_info=info, channel=self, **verdict)
        )
        return True

    def _judge(self, envelope: Envelope, now: float) -> dict[str, Any] | Settlement:
        """The arguments of Kombu's Message, or the settlement if it must not be delivered."""
        early = seconds_early(envelope, now)
        if early:
            clone = replace(envelope, message_id=next_link(envelope), delay=early)
            return Resubmit(early, counted=False, envelope=clone)
        # Celery's messages carry the expiry as a header, too: Celery records them as revoked.
        expires_at = envelope.expires_at
        if expires_at is not None and expires_at <= now and not envelope.headers.get("expires"):
            return DeadLetter(EXPIRED, "its expiry had passed when a consumer received it")
        try:
            fields = to_message(envelope, self.link.options.limits)
            self.link.check_body(fields["body"], fields["content_type"])
        except CodecError as error:
            return DeadLetter(UNDECODABLE, one_line(f"{type(error).__name__}: {error}", 1000))
        return fields

    def _keep_back(self, holding: UnackedDelivery, settlement: Settlement) -> None:
        """Settle a message that is not delivered to any consumer.

        A message that was deleted at receipt cannot be settled: an early one is sent again, any
        other is logged.
        """
        envelope = holding.delivery.envelope
        if holding.lease is not None:
            self.unacked.settle(holding.tag, settlement)
        elif isinstance(settlement, Resubmit) and settlement.envelope is not None:
            self.link.broker.send(holding.delivery.queue, [settlement.envelope])
        else:
            logger.warning(
                "dropped message %s, received with no_ack: %s", envelope.message_id, settlement
            )

    def close(self) -> None:
        """Cancel the consumers and give back the messages they have not acknowledged."""
        if not self.closed:
            self._notice_fork()
            for tag in list(self._sources):
                self.basic_cancel(tag)
            if self._unacked is not None:
                self.basic_recover(requeue=True)
            for source in (*self._retired, *self._getters.values()):
                source.close()
        super().close()

    def _notice_fork(self) -> None:
        """In a child, forget the parent's messages, and receive through a broker of its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._ready.clear()
            self._unacked = None
            self._retired.clear()
            self._getters.clear()
            for source in self._sources.values():
                source.reopen(self.link.broker)
