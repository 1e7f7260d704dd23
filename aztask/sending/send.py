"""Sending invocations: calls become messages, in batches, and are reported as events.

Rules
1. A known task id is sent once: sending it again returns the existing result, unless forced.
2. The messages of one send go out in the order of their calls, so that a session keeps that order.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from aztask.context import current_context
from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    CodecError,
    EncodeError,
    NotUnique,
    SendUnconfirmed,
)
from aztask.hooks import Hooks, Sending
from aztask.leaseadvice.advisor import LeaseAdvisor
from aztask.message.codec import Codec
from aztask.message.message import CALLER, HISTORY, MESSAGE_DEFAULTS, TaskMessage, build
from aztask.queues.base import Broker
from aztask.queues.sharded.broker import ShardedBroker
from aztask.sending.publisher import (
    EventWriters,
    Publication,
    Publisher,
    SendEvents,
    with_headers,
    with_shared_headers,
)
from aztask.sending.sessionrules import check_session
from aztask.sending.unique import UniqueSender
from aztask.stores.connections import Connections
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.records.base import RunKey, RunRecord, State
from aztask.support import clock
from aztask.support.chance import new_id, new_ids
from aztask.support.display import MASK, short_repr
from aztask.support.durations import to_seconds
from aztask.task import Invocation, Task
from aztask.taskoptions import SendOptions, delay_seconds, expiry
from aztask.uniqueness.engine import UNIQUE
from aztask.uniqueness.rules import FINISHED, QUIET, STARTED, key_of

BATCH: Final = 500
"""Messages in one batch of `map`: one transaction, and little memory for millions of calls."""


class _Plan(NamedTuple):
    """What all messages of one send have in common.

    * `own_id`: the task id, if the caller gave one.
    * `delay`: seconds from the send until the task may start.
    * `fields`: the fields of a `TaskMessage` beside its call and its id.
    * `spread`: the broker of an app with several addresses: new ids avoid those that do not answer.
    """

    queue: str
    own_id: str | None
    delay: float
    fields: dict[str, Any]
    spread: ShardedBroker | None = None

    def ids(self, count: int) -> list[str]:
        """The task ids of `count` messages."""
        if self.own_id is not None:
            return [self.own_id] * count
        if self.spread is not None:
            return self.spread.fresh_ids(self.queue, count)
        return new_ids(count) if count > 1 else [new_id()]


class Sender:
    """The part of an app that sends. Any thread may call; a forked child reconnects."""

    def __init__(
        self,
        connections: Connections,
        codec: Codec,
        leases: LeaseAdvisor,
        writers: EventWriters,
        hooks: Hooks,
        payloads: Payloads | None = None,
    ) -> None:
        """payloads: stores large arguments; None if nothing does."""
        self._payloads = payloads
        self._large = payloads is not None
        self._threshold = math.inf if payloads is None else payloads.threshold
        self._connections = connections
        self._codec = codec
        self._leases = leases
        self.events = SendEvents(writers)
        self._hooks = hooks
        self._publisher: tuple[Broker, Publisher] | None = None
        self._origin = f"{os.getpid()}@{socket.gethostname()}"
        self.unique = UniqueSender(connections, codec)

    def send(
        self,
        name: str,
        task: Task[..., Any] | None,
        queue: str,
        calls: Sequence[Invocation],
        options: SendOptions,
        sessions: bool,
        headers: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Send all calls and return the task ids, once the broker has accepted all.

        * `sessions`: True if the app knows that the queue has sessions.
        * `headers`: further headers of each message.
        """
        if task is not None and task.unique is not None:
            return self._carry_out(self.steps(name, task, queue, calls, options, sessions, headers))
        plan = self._plan(name, task, queue, options, sessions, headers)
        if plan is None:
            return [str(options.get("task_id"))]
        ids: list[str] = []
        for first in range(0, len(calls), BATCH):
            batch = calls[first : first + BATCH]
            note = None
            if self._hooks.send:
                sent = Sending(name, queue, plan.ids(len(batch)))
                with self._hooks.send.around(sent):
                    messages = self._messages_in(plan, batch, sent)
                    self._publish(plan, messages)
                note = sent.note
            else:
                messages = self._messages(plan, batch)
                try:
                    self._publish(plan, messages)
                except BrokerUnavailable:
                    if plan.spread is None or plan.own_id or plan.fields["session"] is not None:
                        raise
                    # Nothing was stored: under ids of another address it is another first send.
                    messages = self._messages(plan, batch)
                    self._publish(plan, messages)
            if plan.own_id:
                self._expect(messages, plan.delay, note)
            self.events.emit("enqueued", messages)
            ids += [message.id for message in messages]
        return ids

    def steps(
        self,
        name: str,
        task: Task[..., Any] | None,
        queue: str,
        calls: Sequence[Invocation],
        options: SendOptions,
        sessions: bool,
        headers: Mapping[str, Any] | None = None,
    ) -> Generator[Publication, None, list[str]]:
        """The steps of `send`: yields what is to be published next, and returns the task ids.

        So callers may publish for several sends at once (`aztask.sending.asyncsend`). They throw
        the error of publishing into the generator, which raises it again. `send` does not use
        this: a generator takes 1 % of the time of a send to a local queue.
        """
        plan = self._plan(name, task, queue, options, sessions, headers)
        if plan is None:
            return [str(options.get("task_id"))]
        if task is not None and task.unique is not None:
            return (yield from self._send_unique(task, plan, calls))
        ids: list[str] = []
        for first in range(0, len(calls), BATCH):
            batch = calls[first : first + BATCH]
            sent = Sending(name, queue, plan.ids(len(batch)))
            with self._hooks.send.around(sent):
                messages = self._messages_in(plan, batch, sent)
                try:
                    yield Publication(queue, messages, plan.delay)
                except BaseException as error:
                    self._failed(messages, error)
                    raise
            if plan.own_id:
                self._expect(messages, plan.delay, sent.note)
            self.events.emit("enqueued", messages)
            ids += [message.id for message in messages]
        return ids

    def _carry_out(self, steps: Generator[Publication, None, list[str]]) -> list[str]:
        """Publish what these steps yield; returns their task ids."""
        try:
            due = next(steps)
            while True:
                try:
                    self.publish(*due)
                except BaseException as error:  # noqa: BLE001  # the steps raise it again
                    due = steps.throw(error)
                else:
                    due = next(steps)
        except StopIteration as end:
            ids: list[str] = end.value
            return ids

    def _send_unique(
        self, task: Task[..., Any], plan: _Plan, calls: Sequence[Invocation]
    ) -> Generator[Publication, None, list[str]]:
        """The steps of `steps` for a unique task, one call after the other."""
        rules, ids = task.unique, list[str]()
        assert rules is not None  # noqa: S101  # the caller has checked it
        for call in calls:
            sent = Sending(task.name, plan.queue, plan.ids(1))
            with self._hooks.send.around(sent):
                (fields,) = with_headers(plan.fields, sent)
                key = key_of(self._codec, task, rules, *call.plain)
                if rules.until in (STARTED, FINISHED):
                    extra = {**fields["extra"], UNIQUE: f"{rules.until}:{key}"}
                    fields = {**fields, "extra": extra}
                if rules.until == QUIET:
                    make = partial(self._debounced, fields, call, sent.ids[0])
                    engine = self.unique.engine(task.name)
                    kept = engine.postpone(rules, key, make, plan.delay)
                    if kept.left and self._payloads is not None:
                        self._payloads.discard(kept.left)
                    ids.append(kept.task_id)
                    continue
                (message,) = self._stored([self._message(fields, call, sent.ids[0])])
                try:
                    answer = yield from self.unique.send(rules, key, message, plan.delay)
                except NotUnique:
                    self._drop(message)
                    raise
                except SendUnconfirmed as error:
                    self._emit_unconfirmed([message], error)
                    raise  # any other error: housekeeping may have sent it, so its payload stays
                if not answer.sent:
                    self._drop(message)
            if answer.sent and plan.own_id:
                self._expect([message], plan.delay, sent.note)
            if answer.sent:
                self.events.emit("enqueued", [message])
            ids.append(answer.task_id)
        return ids

    def _debounced(
        self, fields: dict[str, Any], call: Invocation, own_id: str, task_id: str | None
    ) -> TaskMessage:
        (message,) = self._stored([self._message(fields, call, task_id or own_id)])
        return message

    def message_ids(self, messages: Sequence[TaskMessage]) -> set[str]:
        """The ids under which the broker knows these messages."""
        return {self._codec.message_id(message) for message in messages}

    def enqueued(self, messages: Sequence[TaskMessage]) -> None:
        """Write the events of messages that the broker has accepted. Any thread may call."""
        self.events.emit("enqueued", messages)

    def close(self) -> None:
        """Close the publisher and the event file; they open again when needed."""
        self.events.close()
        self._publisher = None

    def publish(self, queue: str, messages: Sequence[TaskMessage], delay: float) -> None:
        """Publish these messages; returns when the broker has accepted them."""
        publisher = self._open_publisher()
        if len(messages) == 1:
            publisher.publish(queue, messages[0], delay=delay)
        else:
            publisher.publish_many(queue, messages, delay=delay)

    def _plan(
        self,
        name: str,
        task: Task[..., Any] | None,
        queue: str,
        options: SendOptions,
        sessions: bool,
        headers: Mapping[str, Any] | None,
    ) -> _Plan | None:
        """What all messages of a send have in common; None if its task id is known already."""
        own_id, generation = options.get("task_id"), 0
        session, ordered, delay, expires = None, True, 0.0, None
        if options or sessions:  # mostly neither
            can = self._connections.broker().capabilities
            session, ordered = check_session(name, task, queue, options, sessions=sessions, can=can)
            if own_id:
                unknown = self._generation(own_id, force=options.get("force", False))
                if unknown is None:
                    return None
                generation = unknown
        if options or (task is not None and task.expires is not None):
            now = clock.wall()
            delay = delay_seconds(options, now)
            expires = expiry(options, task.expires if task else None, now)
        parent = current_context()
        fields = {
            **MESSAGE_DEFAULTS,
            "task": name,
            "queue": queue,
            "expires": expires,
            "origin": self._origin,
            "generation": generation,
            "session": session,
            "ordered": ordered,
            "lease_seconds": self._leases.lease_seconds(queue) if self._leases.enabled else None,
            "root_id": (parent.message.root_id or parent.task_id) if parent else None,
            "parent_id": parent.task_id if parent else None,
        }
        if generation:  # forced: recorded steps are those of the earlier generation
            headers = {**(headers or {}), HISTORY: str(generation)}
        if parent is not None and (step := parent.steps.current) is not None and step.calls:
            headers = {**(headers or {}), CALLER: parent.task_id}
        if self._codec.argsrepr and task is not None and task.conversion.secret:
            fields |= {"argsrepr": MASK, "kwargsrepr": MASK}
        if headers:
            fields["extra"] = dict(headers)
        broker = self._connections.broker() if self._connections.several else None
        spread = broker if isinstance(broker, ShardedBroker) else None
        return _Plan(queue, own_id, delay, fields, spread)

    def _messages(self, plan: _Plan, calls: Sequence[Invocation]) -> list[TaskMessage]:
        if len(calls) == 1:
            own = plan.own_id or (new_id() if plan.spread is None else plan.ids(1)[0])
            return self._single(plan.fields, calls[0], own)
        parts = zip(calls, plan.ids(len(calls)), strict=True)
        return self._stored(self._message(plan.fields, *each) for each in parts)

    def _single(self, fields: dict[str, Any], call: Invocation, task_id: str) -> list[TaskMessage]:
        message = self._message(fields, call, task_id)
        if len(message.body) <= self._threshold:
            return [message]
        return self._stored((message,))

    def _messages_in(
        self, plan: _Plan, calls: Sequence[Invocation], sent: Sending
    ) -> list[TaskMessage]:
        """The messages of these calls, with the headers that hooks have set."""
        if len(calls) == 1 and sent.each is None:
            return self._single(with_shared_headers(plan.fields, sent), calls[0], sent.ids[0])
        fields = with_headers(plan.fields, sent)
        parts = zip(fields, calls, sent.ids, strict=True)
        return self._stored(self._message(*each) for each in parts)

    def _stored(self, made: Iterable[TaskMessage]) -> list[TaskMessage]:
        """The messages; the bodies of large ones are stored beside the queue."""
        return list(made) if self._payloads is None else self._payloads.offload(made)

    def _publish(self, plan: _Plan, messages: Sequence[TaskMessage]) -> None:
        try:
            self.publish(plan.queue, messages, plan.delay)
        except BaseException as error:
            self._failed(messages, error)
            raise

    def _failed(self, messages: Sequence[TaskMessage], error: BaseException) -> None:
        """Record which of these messages may be sent; drop what was stored for unsent ones."""
        if isinstance(error, SendUnconfirmed):
            self._emit_unconfirmed(messages, error)
        elif isinstance(error, BrokerError | CodecError):
            self._drop(*messages)

    def _drop(self, *messages: TaskMessage) -> None:
        """Remove what was stored for messages that were certainly not sent."""
        if self._payloads is not None:
            self._payloads.drop(messages)

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

    def _expect(
        self, messages: Sequence[TaskMessage], delay: float | timedelta, note: bytes | None
    ) -> None:
        """Store the sent task ids, so that sending them again finds them, and what hooks noted.

        If the process dies before this, a second send of the id is stored as well; the worker then
        drops one of the two.
        """
        results = self._connections.results()
        if results is not None:
            due = clock.wall() + to_seconds(delay, "delay")
            results.expect(
                RunRecord(
                    RunKey(*message.key),
                    message.task,
                    message.queue,
                    State.PENDING,
                    due=due,
                    note=note,
                )
                for message in messages
            )

    def _message(self, common: dict[str, Any], call: Invocation, task_id: str) -> TaskMessage:
        args, kwargs = call[:2] if call.written is None else call.written
        try:
            body, content_type, content_encoding = self._codec.encode_arguments(
                args, kwargs, large=self._large
            )
        except EncodeError as error:
            raise EncodeError(f"task {common['task']}: {error}") from None
        values = {
            **common,
            "id": task_id,
            "root_id": common["root_id"] or task_id,
            "body": body,
            "content_type": content_type,
            "content_encoding": content_encoding,
        }
        if self._codec.argsrepr and values["argsrepr"] is None:  # else it has a secret
            values["argsrepr"] = short_repr(args, len(body))
            values["kwargsrepr"] = short_repr(kwargs, len(body)) if kwargs else "{}"
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
        self.events.emit("enqueued", [each for each, in_doubt in pairs if not in_doubt])
        self.events.emit("send_unconfirmed", [each for each, in_doubt in pairs if in_doubt])
