"""A Kombu transport over every aztask broker, so that Celery and plain Kombu run on it.

::

    from aztask import transport
    transport.register()
    connection = kombu.Connection("aztask://", transport_options={"broker": broker})

Transport options: ``broker``, a Broker, a function that returns one, or (after ``register`` was
given a function that opens them) a URL or connection string; ``lease``, seconds, default 60;
``declare``, False for credentials that may not create queues; ``accept``, content types that are
handed to consumers besides msgpack, json, text and bytes; ``limits``, `aztask.limits.Limits`.

Rules
1. An acknowledgement completes, a reject dead-letters, a requeue abandons. Everything handed out
   is renewed until then; closing the channel gives the rest back.
2. A body that cannot be decoded is dead-lettered here, once, and never reaches a consumer.
3. A message that comes before its ``eta`` is hidden again, not held.
4. After a fork the child opens its own broker and does no I/O for what its parent holds.
5. No fanout is advertised, because there is none.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from time import monotonic, time
from typing import Any, Final

from amqp.protocol import queue_declare_ok_t
from kombu.transport import TRANSPORT_ALIASES, base, virtual

from aztask.brokers.base import Broker
from aztask.codec import CONTENT_TYPES, Codec
from aztask.display import one_line
from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    CodecError,
    ContentRefused,
    QueueNotFound,
    SendUnconfirmed,
)
from aztask.leasekeeper import LeaseKeeper
from aztask.settlement import Abandon, Complete, DeadLetter, Release, Resubmit
from aztask.translation import next_link, seconds_early, to_envelope, to_message
from aztask.transport_options import TransportOptions
from aztask.unacked import Holding, Source, Unacked, log_lost

ALIAS: Final = "aztask"
UNDECODABLE: Final = "undecodable"
REJECTED: Final = "rejected"

BATCH: Final = 32
"""Messages that one request may bring where no prefetch count says less."""

_LONGEST_WAIT = 1.0
_LOCAL_WAIT = 0.1

_open_broker: Callable[[str], Broker] | None = None


def register(open_broker: Callable[[str], Broker] | None = None) -> None:
    """Make ``aztask://`` known to Kombu; open_broker: what turns a URL option into a broker."""
    global _open_broker
    TRANSPORT_ALIASES[ALIAS] = "aztask.transport:Transport"
    if open_broker is not None:
        _open_broker = open_broker


class Channel(virtual.Channel):
    """What producers and consumers talk to. Publishing and settling are safe from any thread."""

    do_restore = False
    supports_fanout = False

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.transport = connection
        self.no_ack_consumers: set[str] = set()
        self._sources: dict[str, Source] = {}
        self._ready: deque[Holding] = deque()
        self._unacked: Unacked | None = None
        self._prefetch = 0
        self._tags = count(1)
        self._pid = os.getpid()

    # -- producers ---------------------------------------------------------------------------

    def prepare_message(  # noqa: PLR0917 - Kombu calls it with these, by position
        self,
        body: Any,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Called by Kombu's producer for each message."""
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
        self, message: dict[str, Any], exchange: str, routing_key: str, **_: Any
    ) -> None:
        """Send to one queue, or to every queue that is bound to the exchange.

        Raises EncodeError, or what `Broker.send` raises. A direct exchange without a queue is
        QueueNotFound: a message is never dropped silently.
        """
        envelopes = [to_envelope(message, time())]
        broker = self.transport.broker
        for queue in self._routes(exchange, routing_key) if exchange else (routing_key,):
            broker.send(queue, envelopes)

    def _routes(self, exchange: str, routing_key: str) -> list[str]:
        routes = sorted(self._lookup(exchange, routing_key))
        if not routes and self.typeof(exchange).type == "direct":
            raise QueueNotFound(
                f"no queue is bound to exchange {exchange!r} with key {routing_key!r} in this"
                " process; declare the queue before publishing, or publish to the queue itself"
            )
        return routes

    # -- queues ------------------------------------------------------------------------------

    def queue_declare(self, queue: str, passive: bool = False, **_: Any) -> Any:
        """Create the queue if it is missing, unless the option ``declare`` is False."""
        if not passive and self.transport.options.declare:
            self.transport.broker.declare(queue)
        return queue_declare_ok_t(queue, self._size(queue) if passive else 0, 0)

    def _size(self, queue: str) -> int:
        return self.transport.broker.stats(queue).active or 0

    def _purge(self, queue: str) -> int:
        return self.transport.broker.purge(queue)

    def _delete(self, queue: str, *_: Any, **__: Any) -> None:
        self.transport.broker.delete(queue)

    # -- consumers ---------------------------------------------------------------------------

    def basic_qos(
        self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False
    ) -> None:
        """At most `prefetch_count` messages unacknowledged on this channel; 0 for no limit."""
        self._prefetch = prefetch_count or 0

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        consumer_tag: str,
        **_: Any,
    ) -> None:
        """Hand what comes into `queue` to `callback`; no_ack: deleted at receipt."""
        self._sources[consumer_tag] = self._source(queue, no_ack, consumer_tag, callback)
        if no_ack:
            self.no_ack_consumers.add(consumer_tag)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop; what was received and not handed out yet is given back."""
        source = self._sources.pop(consumer_tag, None)
        if source is None:
            return
        mine = [holding for holding in self._ready if holding.consumer_tag == consumer_tag]
        for holding in mine:
            self._ready.remove(holding)
            self.unacked.settle(holding.tag, Release())
        source.close()

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> Any:
        """One message, or None."""
        found: list[Any] = []
        source = self._source(queue, no_ack, "", found.append)
        remote = self.transport.broker.capabilities.remote
        while not found and self.fetch(source, _LONGEST_WAIT if remote else 0.0, limit=1):
            self._hand_out(source, self._ready.pop())
        return found[0] if found else None

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        """Complete; with `multiple`, everything handed out before it too."""
        tags = self.unacked.tags_up_to(delivery_tag) if multiple else [delivery_tag]
        for tag in tags:
            self.unacked.settle(tag, Complete())

    def basic_reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Dead-letter, or with `requeue` make it available again at once."""
        self.unacked.settle(
            delivery_tag,
            Abandon() if requeue else DeadLetter(REJECTED, "a consumer rejected the message"),
        )

    def basic_recover(self, requeue: bool = False) -> None:
        """Give everything back that was handed out and not acknowledged."""
        for tag in self.unacked.tags_up_to(next(self._tags)):
            self.unacked.settle(tag, Abandon())

    # -- receiving ---------------------------------------------------------------------------

    @property
    def unacked(self) -> Unacked:
        """What was handed out and not settled."""
        if self._unacked is None:
            self._unacked = Unacked(self.transport.keeper)
        return self._unacked

    def open_sources(self) -> Iterator[Source]:
        """The consumers that may receive now, as far as the prefetch count allows."""
        if not self._prefetch or len(self.unacked) < self._prefetch:
            yield from self._sources.values()

    def deliver_one(self) -> bool:
        """Hand out one message that was received before; whether there was one."""
        while self._ready:
            holding = self._ready.popleft()
            source = self._sources.get(holding.consumer_tag)
            if source is None:
                self.unacked.settle(holding.tag, Release())
            elif self._hand_out(source, holding):
                return True
        return False

    def fetch(self, source: Source, wait: float, limit: int = BATCH) -> bool:
        """Receive from `source`, waiting at most `wait` seconds; whether anything came."""
        if self._prefetch:
            limit = min(limit, self._prefetch - len(self.unacked))
        if source.no_ack:
            limit = 1  # what is deleted at receipt and not handed out would be lost
        deliveries = source.receiver.receive(limit, wait)
        holdings = [
            Holding(next(self._tags), source.receiver, delivery, source.consumer_tag)
            for delivery in deliveries
        ]
        if not source.no_ack:
            self.unacked.hold(source.receiver, holdings, self.transport.options.lease)
        self._ready.extend(holdings)
        return bool(deliveries)

    def _source(
        self, queue: str, no_ack: bool, consumer_tag: str, callback: Callable[[Any], Any]
    ) -> Source:
        lease = self.transport.options.lease
        return Source(
            self.transport.broker,
            queue,
            lease=lease,
            no_ack=bool(no_ack),
            consumer_tag=consumer_tag,
            callback=callback,
        )

    def _hand_out(self, source: Source, holding: Holding) -> bool:
        """Give one message to its consumer, unless it is early or cannot be decoded."""
        delivery = holding.delivery
        envelope = delivery.envelope
        early = seconds_early(envelope, time())
        if early and holding.lease is not None:
            clone = replace(envelope, message_id=next_link(envelope), delay=early)
            self.unacked.settle(holding.tag, Resubmit(early, counted=False, envelope=clone))
            return False
        try:
            fields = to_message(envelope, self.transport.options.limits)
            self.transport.check_body(fields["body"], envelope.content_type)
        except CodecError as error:
            description = one_line(f"{type(error).__name__}: {error}", 1000)
            self.unacked.settle(holding.tag, DeadLetter(UNDECODABLE, description))
            return False
        info = {
            "exchange": "",
            "routing_key": delivery.queue,
            "consumer_tag": holding.consumer_tag,
            "redelivered": delivery.delivery_count > 1,
            "delivery_count": delivery.delivery_count,
        }
        fields["properties"].update(delivery_tag=holding.tag, delivery_info=info)
        source.callback(
            base.Message(delivery_tag=holding.tag, delivery_info=info, channel=self, **fields)
        )
        return True

    def close(self) -> None:
        """Cancel the consumers and give back what they have not acknowledged."""
        if not self.closed:
            if self._pid == os.getpid():
                for tag in list(self._sources):
                    self.basic_cancel(tag)
                if self._unacked is not None:
                    self.basic_recover(requeue=True)
            elif self._unacked is not None:
                self._unacked.forget()
            self._sources.clear()
            self._ready.clear()
        super().close()


class Transport(virtual.Transport):
    """One connection: its broker, its channels, and the keeper of what they handed out."""

    Channel = Channel
    driver_type = "aztask"
    driver_name = "aztask"
    connection_errors = (BrokerUnavailable, SendUnconfirmed, ConnectionError, OSError)
    channel_errors = (BrokerError,)
    implements = virtual.Transport.implements.extend(exchange_type=frozenset({"direct", "topic"}))

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.options = TransportOptions.read(client.transport_options)
        self._codec = Codec(limits=self.options.limits)
        self._broker: Broker | None = None
        self._keeper: LeaseKeeper | None = None
        self._pid = 0
        self._turn = 0

    @property
    def broker(self) -> Broker:
        """The broker of this process; a child opens its own after a fork."""
        if self._broker is None or self._pid != os.getpid():
            self._broker, self._keeper, self._pid = (
                self.options.open(_open_broker),
                None,
                os.getpid(),
            )
        return self._broker

    @property
    def keeper(self) -> LeaseKeeper:
        """Renews what the channels of this connection handed out; started at the first use."""
        broker = self.broker
        if self._keeper is None:
            self._keeper = LeaseKeeper(broker, on_lost=log_lost).start()
        return self._keeper

    def check_body(self, body: bytes, content_type: str) -> None:
        """Raises CodecError unless a consumer can decode `body` safely."""
        if content_type not in self.options.accept:
            raise ContentRefused(
                f"content type {one_line(repr(content_type), 60)} is not accepted here;"
                " the transport option accept names further ones"
            )
        if content_type in CONTENT_TYPES.values():
            self._codec.decode_body(body, content_type)

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Hand one message to its consumer. Raises socket.timeout after `timeout` seconds."""
        ends_at = None if timeout is None else monotonic() + timeout
        while not any(channel.deliver_one() for channel in list(self.channels)):
            left = _LONGEST_WAIT if ends_at is None else ends_at - monotonic()
            if not self._fetch(max(0.0, min(left, _LONGEST_WAIT))) and left <= 0:
                raise TimeoutError

    def _fetch(self, wait: float) -> bool:
        """Receive from one consumer's queue, in turns, waiting at most `wait` seconds in all."""
        sources = [(ch, source) for ch in list(self.channels) for source in ch.open_sources()]
        if not sources:
            for channel in list(self.channels)[:1]:
                channel.unacked.wait_for_change(min(wait, _LOCAL_WAIT))
            return False
        self._turn += 1
        first = self._turn % len(sources)
        turns = sources[first:] + sources[:first]
        if len(turns) > 1:
            if any(channel.fetch(source, 0.0) for channel, source in turns):
                return True
            share = _LOCAL_WAIT if not self.broker.capabilities.remote else wait / len(turns)
            wait = min(wait, share)
        channel, source = turns[0]
        return bool(channel.fetch(source, wait))

    def close_connection(self, connection: Any) -> None:
        """Close the channels, stop renewing, and close the broker if it was opened here."""
        super().close_connection(connection)
        if self._pid != os.getpid():
            return
        if self._keeper is not None:
            self._keeper.stop()
        if self._broker is not None and self._broker is not self.options.broker:
            self._broker.close()
        self._keeper = self._broker = None
