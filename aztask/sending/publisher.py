"""The publisher: sends task messages to queues, one by one through Kombu, many at once directly.

Rules
1. Both ways call the same encoder and give the broker equal envelopes, byte for byte.
2. Any number of threads may publish through one publisher. After a fork the child makes its own,
   with a broker of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kombu import Connection, Producer

from aztask.celery.transport import Transport
from aztask.errors import EncodeError
from aztask.hooks import Sending
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.queues.base import Broker
from aztask.stores.events.event import Event, EventKind
from aztask.stores.events.sink import EventSink
from aztask.stores.records.base import NOTE_BYTES
from aztask.support import clock
from aztask.support.forks import fork_safe_lock


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


# -- the events of a program that sends: of its messages, and of the occurrences of schedules ------


class EventWriters(Protocol):
    """What gives each writer of events a sink of its own: an `App`."""

    def open_events(self, writer: str, /) -> EventSink:
        """Open the sink of the writer of this name. The caller closes it."""
        ...


class SendEvents:
    """Writes events to a file of this process, made with the first event. Any thread may call.

    A forked child opens a file of its own.
    """

    def __init__(self, writers: EventWriters) -> None:
        self._writers = writers
        self._lock = fork_safe_lock()
        self._sink: tuple[int, EventSink] | None = None

    def emit(self, kind: EventKind, messages: Sequence[TaskMessage]) -> None:
        """Write one event for each message."""
        known = self._sink
        if known is not None and known[0] == os.getpid() and known[1].idle:
            return  # as mostly, without the lock
        with self._lock:
            sink = self._open()
            if sink.idle:
                return
            now = clock.wall()
            for message in messages:
                sink.emit(
                    Event(
                        kind,
                        message.id,
                        message.task,
                        message.queue,
                        ts=now,
                        workflow_id=message.workflow,
                        parent_id=message.parent_id,
                    )
                )
            sink.flush()

    def report(self, event: Event) -> None:
        """Write one event, at the present time if it has none."""
        with self._lock:
            sink = self._open()
            if not sink.idle:
                sink.emit(event._replace(ts=event.ts or clock.wall()))
                sink.flush()

    def close(self) -> None:
        """Close the file; the next event opens another one."""
        with self._lock:
            if self._sink is not None and self._sink[0] == os.getpid():
                self._sink[1].close()
            self._sink = None

    def _open(self) -> EventSink:
        """The sink of this process. The caller has the lock."""
        pid = os.getpid()
        if self._sink is None or self._sink[0] != pid:
            self._sink = (pid, self._writers.open_events(f"sender-{socket.gethostname()}-{pid}"))
        return self._sink[1]


# -- the headers and the note that hooks add to the messages of a send ---------------------


def with_headers(common: dict[str, Any], sent: Sending) -> list[dict[str, Any]]:
    """The fields of each message of a send, with the headers that hooks have set.

    Raises EncodeError for a note that no store keeps, before anything is sent.
    """
    if sent.each is None:
        return [with_shared_headers(common, sent)] * len(sent.ids)
    _check_note(sent)
    return [_with(common, {**sent.headers, **headers}) for headers in sent.each]


def with_shared_headers(common: dict[str, Any], sent: Sending) -> dict[str, Any]:
    """The fields of all messages of a send whose `each` is None; raises as `with_headers`."""
    _check_note(sent)
    return _with(common, sent.headers)


def _check_note(sent: Sending) -> None:
    if sent.note is not None and len(sent.note) > NOTE_BYTES:
        raise EncodeError(f"a note has at most {NOTE_BYTES} bytes, not {len(sent.note)}")


def _with(common: dict[str, Any], headers: Mapping[str, Any]) -> dict[str, Any]:
    if not headers:
        return common
    if len(headers) == 1 and "traceparent" in headers:  # telemetry alone
        return {**common, "traceparent": headers["traceparent"]}
    traceparent = headers.get("traceparent", common.get("traceparent"))
    extra = {name: value for name, value in headers.items() if name != "traceparent"}
    return {**common, "traceparent": traceparent, "extra": {**common["extra"], **extra}}
