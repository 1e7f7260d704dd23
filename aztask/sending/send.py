"""Sending invocations: calls become messages, in batches, and are reported as events.

Rules
1. A known task id is sent once: sending it again returns the existing result, unless forced.
2. The messages of one send go out in the order of their calls, so that a session keeps that order.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from aztask.adaptive.advisor import LeaseAdvisor
from aztask.brokers.base import Broker
from aztask.connections import Connections
from aztask.context import current_context
from aztask.errors import BrokerError, CodecError, SendUnconfirmed
from aztask.events.sink import Event, EventKind, EventSink
from aztask.hooks import Hooks, Sending
from aztask.message.codec import Codec
from aztask.message.message import MESSAGE_DEFAULTS, TaskMessage
from aztask.payloads.payloads import Payloads
from aztask.results.base import RunKey, RunRecord, State
from aztask.sending.publisher import Publisher
from aztask.sending.sessionrules import check_session
from aztask.support.display import short_repr
from aztask.support.durations import to_seconds
from aztask.support.frozen import build
from aztask.task import Invocation, Task
from aztask.taskoptions import SendOptions, delay_seconds, expiry

BATCH: Final = 500
"""Messages in one batch of `map`: one transaction, and little memory for millions of calls."""


class Publication(NamedTuple):
    """Messages for one queue, to be received `delay` seconds from now."""

    queue: str
    messages: Sequence[TaskMessage]
    delay: float


class Sender:
    """The part of an app that sends. Any thread may call; a forked child reconnects."""

    def __init__(
        self,
        connections: Connections,
        codec: Codec,
        leases: LeaseAdvisor,
        open_events: Callable[[str], EventSink],
        hooks: Hooks,
        payloads: Payloads | None = None,
    ) -> None:
        """payloads: stores large arguments; None if nothing does."""
        self._payloads = payloads
        self._large = payloads is not None
        self._connections = connections
        self._codec = codec
        self._leases = leases
        self._open_events = open_events
        self._hooks = hooks
        self._lock = threading.Lock()
        self._publisher: tuple[Broker, Publisher] | None = None
        self._sink: tuple[int, EventSink] | None = None
        self._origin = f"{os.getpid()}@{socket.gethostname()}"

    def send(
        self,
        name: str,
        task: Task[..., Any] | None,
        queue: str,
        calls: Sequence[Invocation],
        options: SendOptions,
        sessions: bool,
    ) -> list[str]:
        """Send all calls and return the task ids, once the broker has accepted all.

        * `sessions`: True if the app knows that the queue has sessions.
        """
        steps = self.steps(name, task, queue, calls, options, sessions)
        try:
            due = next(steps)
            while True:
                try:
                    self.publish(due)
                except BaseException as error:  # noqa: BLE001  # the steps raise it again
                    due = steps.throw(error)
                else:
                    due = next(steps)
        except StopIteration as end:
            ids: list[str] = end.value
            return ids

    def steps(
        self,
        name: str,
        task: Task[..., Any] | None,
        queue: str,
        calls: Sequence[Invocation],
        options: SendOptions,
        sessions: bool,
    ) -> Generator[Publication, None, list[str]]:
        """The steps of `send`: yields what is to be published next, and returns the task ids.

        So callers may publish for several sends at once (`aztask.sending.asyncsend`). They throw
        the error of publishing into the generator, which raises it again.
        """
        can = self._connections.broker().capabilities
        session, ordered = check_session(name, task, queue, options, sessions=sessions, can=can)
        own_id = options.get("task_id")
        generation = self._generation(own_id, force=options.get("force", False)) if own_id else 0
        if generation is None:
            return [str(own_id)]
        now = time.time()
        delay = delay_seconds(options, now) if options else 0.0  # mostly there are none
        parent = current_context()
        common = {
            **MESSAGE_DEFAULTS,
            "task": name,
            "queue": queue,
            "expires": expiry(options, task.expires if task else None, now),
            "origin": self._origin,
            "generation": generation,
            "session": session,
            "ordered": ordered,
            "lease_seconds": self._leases.lease_seconds(queue),
            "root_id": (parent.message.root_id or parent.task_id) if parent else None,
            "parent_id": parent.task_id if parent else None,
        }
        ids: list[str] = []
        for first in range(0, len(calls), BATCH):
            batch = calls[first : first + BATCH]
            batch_ids = [own_id or new_id() for _ in batch]
            if self._hooks.send:
                sent = Sending(name, queue, batch_ids)
                with self._hooks.send.around(sent):
                    fields = _with_headers(common, sent)
                    messages = yield from self._send_batch(queue, fields, batch, batch_ids, delay)
            else:
                fields = [common] * len(batch)
                messages = yield from self._send_batch(queue, fields, batch, batch_ids, delay)
            ids += batch_ids
            if own_id:
                self._expect(messages, delay)
            self._emit("enqueued", messages)
        return ids

    def message_ids(self, messages: Sequence[TaskMessage]) -> set[str]:
        """The ids under which the broker knows these messages."""
        return {self._codec.message_id(message) for message in messages}

    def close(self) -> None:
        """Close the publisher and the event file; they open again when needed."""
        with self._lock:
            if self._sink is not None and self._sink[0] == os.getpid():
                self._sink[1].close()
            self._sink = self._publisher = None

    def publish(self, due: Publication) -> None:
        """Publish these messages; returns when the broker has accepted them."""
        publisher = self._open_publisher()
        if len(due.messages) == 1:
            publisher.publish(due.queue, due.messages[0], delay=due.delay)
        else:
            publisher.publish_many(due.queue, due.messages, delay=due.delay)

    def _send_batch(
        self,
        queue: str,
        fields: Sequence[dict[str, Any]],
        calls: Sequence[Invocation],
        ids: Sequence[str],
        delay: float,
    ) -> Generator[Publication, None, list[TaskMessage]]:
        """Publish one message per call, and return them.

        * `fields`: what each message has beside its call.
        """
        made = (self._message(*each) for each in zip(fields, calls, ids, strict=True))
        if len(calls) == 1:  # the usual case: one comparison
            messages = list(made)
            if self._payloads is not None and len(messages[0].body) > self._payloads.threshold:
                messages = self._payloads.offload(messages)
        else:
            messages = list(made) if self._payloads is None else self._payloads.offload(made)
        try:
            yield Publication(queue, messages, delay)
        except SendUnconfirmed as error:
            self._emit_unconfirmed(messages, error)
            raise
        except (BrokerError, CodecError):  # nothing was stored
            if self._payloads is not None:
                self._payloads.drop(messages)
            raise
        return messages

    def _generation(self, task_id: str, *, force: bool) -> int | None:
        """The generation to send; None if the task id is known and not forced.

        Nothing is reserved: two senders at the same time may both send, with the same message id.
        Then one run is recorded, and the worker drops the other copy.
        """
        results = self._connections.results()
        known = results.get(task_id) if results else None
        if known is None:
            return 0
        return known.key.generation + 1 if force else None

    def _expect(self, messages: Sequence[TaskMessage], delay: float | timedelta) -> None:
        """Store the sent task ids, so that sending them again finds them.

        If the process dies before this, a second send of the id is stored as well; the worker then
        drops one of the two.
        """
        results = self._connections.results()
        if results is not None:
            due = time.time() + to_seconds(delay, "delay")
            results.expect(
                RunRecord(RunKey(*message.key), message.task, message.queue, State.PENDING, due=due)
                for message in messages
            )

    def _message(self, common: dict[str, Any], call: Invocation, task_id: str) -> TaskMessage:
        body, content_type, content_encoding = self._codec.encode_arguments(
            call.args, call.kwargs, large=self._large
        )
        values = {
            **common,
            "id": task_id,
            "root_id": common["root_id"] or task_id,
            "body": body,
            "content_type": content_type,
            "content_encoding": content_encoding,
        }
        if self._codec.argsrepr:
            values["argsrepr"] = short_repr(call.args, len(body))
            values["kwargsrepr"] = short_repr(call.kwargs, len(body)) if call.kwargs else "{}"
        return build(TaskMessage, values)

    def _open_publisher(self) -> Publisher:
        """The publisher of the current broker (a forked child has another one)."""
        broker = self._connections.broker()
        known = self._publisher
        if known is None or known[0] is not broker:
            known = self._publisher = (broker, Publisher(broker, self._codec))
        return known[1]

    def _emit_unconfirmed(self, messages: Sequence[TaskMessage], error: SendUnconfirmed) -> None:
        """Write events for a batch of which the broker confirmed only a part."""
        doubtful = {envelope.message_id for envelope in error.unconfirmed}
        pairs = [(each, self._codec.message_id(each) in doubtful) for each in messages]
        self._emit("enqueued", [each for each, in_doubt in pairs if not in_doubt])
        self._emit("send_unconfirmed", [each for each, in_doubt in pairs if in_doubt])

    def _emit(self, kind: EventKind, messages: Sequence[TaskMessage]) -> None:
        with self._lock:
            if self._sink is None or self._sink[0] != os.getpid():
                writer = f"sender-{socket.gethostname()}-{os.getpid()}"
                self._sink = (os.getpid(), self._open_events(writer))
            sink = self._sink[1]
            if sink.idle:
                return
            now = time.time()
            for message in messages:
                sink.emit(Event(kind, message.id, message.task, message.queue, ts=now))
            sink.flush()


def _with_headers(common: dict[str, Any], sent: Sending) -> list[dict[str, Any]]:
    """The fields of each message of a send, with the headers that hooks have set."""
    if sent.each is None:
        return [_with(common, sent.headers)] * len(sent.ids)
    return [_with(common, {**sent.headers, **headers}) for headers in sent.each]


def _with(common: dict[str, Any], headers: Mapping[str, Any]) -> dict[str, Any]:
    if not headers:
        return common
    traceparent = headers.get("traceparent", common.get("traceparent"))
    extra = {name: value for name, value in headers.items() if name != "traceparent"}
    return {**common, "traceparent": traceparent, "extra": extra}


def new_id() -> str:
    """A random UUID (RFC 9562, version 4) as text; several times faster than `uuid.uuid4`."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
