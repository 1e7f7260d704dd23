"""The half of a Kombu channel that publishes: exchanges, queues, and what goes where.

Rules
1. Publishing is safe from any thread.
2. A queue's bindings are known to the process that declared them. A temporary queue that is bound
   to an exchange is a mailbox, which every process can publish to; see
   `aztask.celery.transport.boxes`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import time
from typing import Any, Final, Protocol, TypeVar
from uuid import uuid4

from amqp.protocol import queue_declare_ok_t
from kombu.transport import virtual

from aztask.celery.transport.boxes import NO_CONTROL, Boxes
from aztask.celery.transport.options import TransportOptions
from aztask.celery.transport.unacked import Changes
from aztask.errors import (
    ConfigurationError,
    ContentRefused,
    DecodeError,
    EncodeError,
    MessageTooLarge,
    QueueNotFound,
)
from aztask.message.bounds import MessageLimits, check_size
from aztask.message.compression import ZLIB, decompress
from aztask.message.encryption import is_encrypted
from aztask.message.envelope import Envelope
from aztask.message.headers import COMPRESSION, read_time, to_iso
from aztask.message.message import MESSAGE_ID_LIMIT, build
from aztask.message.signatures import ANNOUNCED
from aztask.queues.base import Binding, Broker, QueueOptions
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.support.durations import to_seconds

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

    def least_served(self) -> float:
        """Of all consumers of the connection, what the one has had that comes next."""
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
        if self.link.boxes.undecided:
            self._declare_undecided()
        lead = self.link.broker.capabilities.lead
        envelope = to_envelope(message, time(), lead)
        if not exchange:
            self._send(routing_key, envelope)
            return
        queues = self._routes(exchange, routing_key)
        for queue in queues:
            self._send(queue, envelope)
        kind = self.typeof(exchange).type
        revokes = kind == "fanout" and self.link.boxes.keep_revoked(exchange, message)
        direct = kind == "direct"
        is_task = "task" in message["headers"]
        # Whether a mailbox got it is not known on every service, so no task is left to that.
        alone = direct and (queues or is_task)
        reached = bool(queues)
        if not alone and fitting(
            partial(self.link.boxes.publish, exchange, routing_key, recent=kind == "topic"),
            envelope,
        ):
            reached = True
        if revokes:  # from now on: other threads may have sent tasks before
            self.link.boxes.hold_tasks()
        if not reached and self.deadletter_queue:
            self._send(self.deadletter_queue, envelope)
        elif not reached and (is_task or mandatory or direct):
            self._unroutable(exchange, routing_key, refused=is_task or mandatory)

    def _send(self, queue: str, envelope: Envelope) -> None:
        """Send to a queue; a task goes to the queue of its priority, if there are priorities."""
        address = self.link.address(queue)
        if "task" in envelope.headers:
            if self.link.options.priorities:
                level = envelope.properties.get("priority")
                address = self.link.options.queue_for(address, level)
            if (lead := self.link.boxes.lead()) > (envelope.delay or 0.0):
                envelope = replace(envelope, delay=lead)
        fitting(lambda each: self.link.broker.send(address, [each]), envelope)

    def addresses(self, queue: str) -> list[str]:
        """The queues of the broker that belong to a queue: one, or one for each priority."""
        return [name for name, _ in self.link.options.queues_of(self.link.address(queue))]

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
            for address in self.addresses(queue):
                self.link.broker.declare(address, wanted)

    def _declare_undecided(self, queue: str | None = None) -> None:
        """Create temporary queues that are used without being bound to an exchange."""
        for name in self.link.boxes.take_undecided(queue):
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
        found = [self.link.broker.stats(address) for address in self.addresses(queue)]
        return sum(each.living if each.active is None else each.active for each in found)

    def _purge(self, queue: str) -> int:
        return sum(self.link.broker.purge(address) for address in self.addresses(queue))

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any
    ) -> None:
        """Delete the queue with its messages; with `if_empty` only if it has none."""
        if self.link.boxes.has(queue) or self.link.boxes.take_undecided(queue):
            self.link.boxes.delete(queue)
        elif not (if_empty and self._size(queue)):
            for exchange, routing_key, _arguments in list(self.state.queue_bindings(queue)):
                self.queue_unbind(queue, exchange, routing_key)
            self.state.queue_bindings_delete(queue)
            for address in self.addresses(queue):
                self.link.broker.delete(address)


# -- convert Kombu's message dict into an envelope and back, for the transport. No I/O -------------
#
# Rules
# 1. The body travels as raw bytes: no base64, no JSON around it.
# 2. An AMQP property goes into the envelope's field for it. Other properties are passed on if they
#    are plain values; AMQP would drop them.
# 3. A message without an id gets a fresh one, also written into the producer's own properties, so
#    that Kombu's retry of the same publish sends the same id again.
# 4. Delays come from the property ``delay`` or ``countdown`` (seconds), or from Celery's ``eta``.

LONGEST_DELAY: Final = 6 * 86400.0
"""Seconds: longer delays are chained, as a Storage queue hides a message for at most seven days."""

HELD_SECONDS: Final = 3.0
"""A message that arrives so many seconds before its eta, or less, is held until then."""

_PLACED: Final = frozenset(
    {
        "message_id",
        "correlation_id",
        "type",
        "session",
        "partition_key",
        "delay",
        "countdown",
        "expires_at",
        "expiration",
        "delivery_mode",
        "delivery_info",
        "delivery_tag",
        "body_encoding",
    }
)


_Sent = TypeVar("_Sent")

_PLAIN: Final = (str, bytes, bool, int, float, list, tuple, dict)


def to_envelope(message: dict[str, Any], now: float, lead: float = 0.0) -> Envelope:
    """The envelope of a message that Kombu publishes; `now` is in UTC epoch seconds.

    lead: seconds before its eta at which a message becomes visible.

    Raises EncodeError for an impossible delay or expiry.
    """
    properties: dict[str, Any] = message["properties"]
    headers: Mapping[str, Any] = message["headers"]
    body = message["body"]
    message_id = properties.get("message_id")
    if message_id is None:
        message_id = properties["message_id"] = str(uuid4())
    elif not isinstance(message_id, str) or not 0 < len(message_id) <= MESSAGE_ID_LIMIT:
        raise EncodeError(f"message_id must be a text of 1 to {MESSAGE_ID_LIMIT} characters")
    delay = properties.get("delay")
    if delay is None:
        delay, headers = _delay(properties, headers, now, lead)
    expires_at = properties.get("expires_at")
    if expires_at is None and "expiration" in properties:
        expires_at = now + _milliseconds(properties["expiration"])
    values = {
        "body": body.encode("utf-8") if isinstance(body, str) else bytes(body),
        "headers": headers,
        "message_id": message_id,
        "content_type": message["content-type"] or "application/data",
        "content_encoding": message["content-encoding"] or "binary",
        "subject": properties.get("type"),
        "correlation_id": properties.get("correlation_id"),
        "session": properties.get("session"),
        "partition_key": properties.get("partition_key"),
        "delay": delay,
        "expires_at": expires_at,
        "properties": {
            name: value
            for name, value in properties.items()
            if name not in _PLACED and isinstance(value, _PLAIN)
        },
        "problem": "",
    }
    return build(Envelope, values)


def fitting(send: Callable[[Envelope], _Sent], envelope: Envelope) -> _Sent:
    """Send a message; compressed, as Kombu compresses, if the service refuses it as too large.

    Celery writes what comes after a task into its message: a chord of a thousand tasks takes
    300 KB, and 64 KiB is what a Storage queue takes. Such bodies shrink to a tenth.
    Raises MessageTooLarge for one that is too large even so, or compressed already.
    """
    try:
        return send(envelope)
    except MessageTooLarge as error:
        if COMPRESSION in envelope.headers:
            raise
        headers = {**envelope.headers, COMPRESSION: ZLIB}
        body = zlib.compress(envelope.body, 9)
        try:
            return send(replace(envelope, body=body, headers=headers))
        except MessageTooLarge:
            raise error from None


def _delay(
    properties: Mapping[str, Any], headers: Mapping[str, Any], now: float, lead: float
) -> tuple[float, Mapping[str, Any]]:
    """(seconds to hide the message, its headers): a long delay needs an eta for its chain."""
    delay = 0.0
    if properties.get("countdown") is not None:
        try:
            delay = to_seconds(properties["countdown"], "countdown")
        except ConfigurationError as error:
            raise EncodeError(str(error)) from None
    elif headers.get("eta") is not None:
        try:
            left = read_time("eta", headers["eta"]) - lead - now
        except DecodeError as error:
            raise EncodeError(str(error)) from None
        return min(LONGEST_DELAY, max(0.0, left)), headers
    if delay > LONGEST_DELAY:
        return LONGEST_DELAY, {**headers, "eta": to_iso(now + delay)}
    return delay, headers


def _milliseconds(value: object) -> float:
    """AMQP's expiration as a number: a text of milliseconds, as Kombu writes it."""
    try:
        return to_seconds(float(str(value)[:32]) / 1000.0, "expiration")
    except (ValueError, ConfigurationError):
        raise EncodeError(f"expiration {str(value)[:32]!r} is not milliseconds") from None


def to_message(envelope: Envelope, limits: MessageLimits) -> dict[str, Any]:
    """The arguments of Kombu's Message for a received envelope, with its body decompressed.

    Raises CodecError for a message that could not be read, and for a body that is too long or
    cannot be decompressed.
    """
    if envelope.problem:
        raise DecodeError(envelope.problem)
    headers = dict(envelope.headers)
    properties = {
        "delivery_mode": 2,
        "priority": 0,
        **envelope.properties,
        "message_id": envelope.message_id,
        "correlation_id": envelope.correlation_id,
    }
    for name, value in (
        ("type", envelope.subject),
        ("session", envelope.session),
        ("expires_at", envelope.expires_at),
    ):
        if value is not None:
            properties[name] = value
    body = envelope.body
    check_size(len(body), limits)
    if is_encrypted(body):
        raise ContentRefused(
            "its arguments are encrypted by aztask, and a Celery worker has no key for them: let a"
            " worker of aztask serve the queue"
        )
    compression = headers.pop(COMPRESSION, None)
    return {
        "body": decompress(body, compression, limits) if compression else body,
        "content_type": envelope.content_type.removesuffix(ANNOUNCED),
        "content_encoding": envelope.content_encoding,
        "headers": headers,
        "properties": properties,
    }


def seconds_early(envelope: Envelope, now: float) -> float | None:
    """Seconds until the ``eta`` in the headers, 0 if it has passed; None if there is none."""
    eta = envelope.headers.get("eta")
    if eta is None:
        return None
    try:
        return max(0.0, read_time("eta", eta) - now)
    except DecodeError:
        return None  # a header of another program: its consumer knows the meaning
