"""The publisher: sends task messages to queues, one by one through Kombu, many at once directly.

Rules
1. Both ways call the same encoder and give the broker equal envelopes, byte for byte.
2. Any number of threads may publish through one publisher. After a fork the child makes its own,
   with a broker of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kombu import Connection, Producer

from aztask.celery.transport import Transport
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.queues.base import Broker


class Publisher:
    """Sends messages through one broker with one codec."""

    def __init__(self, broker: Broker, codec: Codec) -> None:
        self._broker = broker
        self._codec = codec
        connection: Any = Connection(transport=Transport, transport_options={"broker": broker})
        self._connection = connection
        self._producer: Any = Producer(connection.channel())

    def publish(self, queue: str, message: TaskMessage, *, delay: float = 0.0) -> None:
        """Send one message, to be received `delay` seconds from now.

        When this returns, the broker has accepted it. Raises EncodeError, and what `Broker.send`
        raises.
        """
        envelope = self._codec.to_envelope(message, delay=delay)
        self._producer.publish(
            envelope.body,
            routing_key=queue,
            content_type=envelope.content_type,
            content_encoding=envelope.content_encoding,
            headers=envelope.headers,
            **_properties(envelope),
        )

    def publish_many(
        self, queue: str, messages: Sequence[TaskMessage], *, delay: float = 0.0
    ) -> None:
        """Send all messages as one batch, in order. Raises what `publish` raises."""
        encode = self._codec.to_envelope
        self._broker.send(queue, [encode(message, delay=delay) for message in messages])

    def close(self) -> None:
        """Close the Kombu connection; the broker stays open."""
        self._connection.release()


def _properties(envelope: Envelope) -> dict[str, Any]:
    """The properties from which the transport rebuilds an equal envelope."""
    properties: dict[str, Any] = {
        "message_id": envelope.message_id,
        "correlation_id": envelope.correlation_id,
        "type": envelope.subject,
        "delay": envelope.delay,
        **envelope.properties,
    }
    if envelope.session is not None:
        properties["session"] = envelope.session
    if envelope.expires_at is not None:
        properties["expires_at"] = envelope.expires_at
    return properties


# -- messages that are to be published, as a value -----------------------------------------


class Publication(NamedTuple):
    """Messages for one queue, to be received `delay` seconds from now."""

    queue: str
    messages: Sequence[TaskMessage]
    delay: float
