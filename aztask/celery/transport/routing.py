"""The half of a Kombu channel that publishes: exchanges, queues, and what goes where.

Rules
1. Publishing is safe from any thread.
2. A queue's bindings are known to the process that declared them. A temporary queue that is bound
   to an exchange is a mailbox, which every process can publish to; see
   `aztask.celery.transport.boxes`.
"""

from __future__ import annotations

import logging
from time import time
from typing import Any, Protocol

from amqp.protocol import queue_declare_ok_t
from kombu.transport import virtual

from aztask.celery.transport.boxes import NO_CONTROL, Boxes
from aztask.celery.transport.options import TransportOptions
from aztask.celery.transport.translation import to_envelope
from aztask.celery.transport.unacked import Changes
from aztask.errors import ConfigurationError, QueueNotFound
from aztask.message.envelope import Envelope
from aztask.queues.base import Binding, Broker, QueueOptions
from aztask.queues.lease.keeper import LeaseKeeper

logger = logging.getLogger(__name__)


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

    def decoded(self, body: bytes, content_type: str) -> Any:
        """The content of a body; None if aztask does not know its format. Raises CodecError."""
        ...

    @property
    def boxes(self) -> Boxes:
        """The mailboxes of this connection."""
        ...

    def address(self, queue: str) -> str:
        """The queue's name in the broker. Raises InvalidQueueName."""
        ...

    @property
    def changes(self) -> Changes:
        """What may allow the next receive."""
        ...

    @property
    def looped(self) -> bool:
        """True if an event loop of this process delivers this connection's messages."""
        ...

    def fetch_commands(self) -> None:
        """Receive the commands of all channels, before messages that have just come."""
        ...

    def consuming(self) -> None:
        """Tell the connection that there is a further consumer."""
        ...

    def arrived(self) -> None:
        """Tell the thread that delivers that another thread has something for it."""
        ...


class RoutingChannel(virtual.Channel):
    """The part of a channel that declares, binds and publishes."""

    def __init__(self, connection: ChannelConnection, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.link = connection
        self.mailboxes: set[str] = set()

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
        """Send to one queue, or to every queue and mailbox that is bound to the exchange.

        What nothing is bound for is dropped with a log line, as in AMQP. It raises QueueNotFound
        for a Celery task, for a `mandatory` message, and for an exchange that was not declared.
        Raises EncodeError, or what `Broker.send` raises.
        """
        self._declare_undecided()
        broker = self.link.broker
        lead = broker.capabilities.lead
        envelope = to_envelope(message, time(), lead)
        if not exchange:
            broker.send(self.link.address(routing_key), [envelope])
            return
        queues = self._routes(exchange, routing_key)
        for queue in queues:
            self._send(queue, envelope)
        kind = self.typeof(exchange).type
        direct = kind == "direct"
        is_task = "task" in message["headers"]
        # Whether a mailbox got it is not known on every service, so no task is left to that.
        alone = direct and (queues or is_task)
        boxes = self.link.boxes
        reached = bool(queues)
        if not alone and boxes.publish(exchange, routing_key, envelope, recent=kind == "topic"):
            reached = True
        if not reached and self.deadletter_queue:
            self._send(self.deadletter_queue, envelope)
        elif not reached and (is_task or mandatory or direct):
            self._unroutable(exchange, routing_key, refused=is_task or mandatory)

    def _send(self, queue: str, envelope: Envelope) -> None:
        self.link.broker.send(self.link.address(queue), [envelope])

    def _routes(self, exchange: str, routing_key: str) -> list[str]:
        if exchange not in self.state.exchanges:
            raise QueueNotFound(
                f"exchange {exchange!r} was not declared in this process; declare it before"
                " publishing, or publish to the queue itself"
            )
        table = self.get_table(exchange)
        return sorted(self.typeof(exchange).lookup(table, exchange, routing_key, None))

    @staticmethod
    def _unroutable(exchange: str, routing_key: str, *, refused: bool) -> None:
        """Report a message that nothing is bound for: raise QueueNotFound if it is `refused`."""
        if refused:
            raise QueueNotFound(
                f"no queue is bound to exchange {exchange!r} with key {routing_key!r} in this"
                " process; declare the queue before publishing, or publish to the queue itself"
            )
        logger.info(
            "dropped a message: no queue is bound to exchange %r with key %r", exchange, routing_key
        )

    # -- queues ------------------------------------------------------------------------------

    def exchange_declare(self, exchange: Any = None, type: str = "direct", **options: Any) -> None:
        """Remember the exchange. Raises ConfigurationError for a fanout if it is switched off."""
        if type == "fanout" and not self.link.options.remote_control:
            raise ConfigurationError(f"exchange {exchange!r}: {NO_CONTROL}")
        super().exchange_declare(exchange, type, **options)

    def queue_declare(
        self,
        queue: str,
        passive: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        **_: Any,
    ) -> Any:
        """Create the queue if it is missing, unless the option ``declare`` is False.

        A new queue gets the lease and the sessions that the options name; an existing one keeps
        its own. With `passive` it raises QueueNotFound if the queue is missing. A temporary queue,
        `exclusive` or `auto_delete`, is created when it is bound or used.
        """
        if not passive and (exclusive or auto_delete) and self.link.boxes.declare(queue):
            return queue_declare_ok_t(queue, 0, 0)
        if not passive:
            self._declare(queue)
        return queue_declare_ok_t(queue, self._size(queue) if passive else 0, 0)

    def _declare(self, queue: str) -> None:
        options = self.link.options
        if options.declare:
            lease = options.leases.get(queue, options.lease)
            sessions = True if queue in options.sessions else None
            wanted = QueueOptions(lease=lease, sessions=sessions, implied=frozenset({"lease"}))
            self.link.broker.declare(self.link.address(queue), wanted)

    def _declare_undecided(self, queue: str | None = None) -> None:
        """Create temporary queues that are used without being bound to an exchange."""
        for name in self.link.boxes.undecided(queue):
            self._declare(name)

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **options: Any,
    ) -> None:
        """Bind the queue to the exchange: a temporary one for all processes, any other for this."""
        if exchange:
            kind = self.typeof(exchange).type
            if self.link.boxes.bind(queue, Binding(exchange, routing_key or "", kind)):
                self.mailboxes.add(queue)
                return
        super().queue_bind(queue, exchange, routing_key, arguments, **options)

    def _size(self, queue: str) -> int:
        if self.link.boxes.has(queue):
            return 0
        stats = self.link.broker.stats(self.link.address(queue))
        return stats.living if stats.active is None else stats.active

    def _purge(self, queue: str) -> int:
        return self.link.broker.purge(self.link.address(queue))

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any
    ) -> None:
        """Delete the queue with its messages; with `if_empty` only if it has none."""
        if self.link.boxes.has(queue) or self.link.boxes.undecided(queue):
            self.link.boxes.delete(queue)
        elif not (if_empty and self._size(queue)):
            for exchange, routing_key, _arguments in list(self.state.queue_bindings(queue)):
                self.queue_unbind(queue, exchange, routing_key)
            self.state.queue_bindings_delete(queue)
            self.link.broker.delete(self.link.address(queue))
