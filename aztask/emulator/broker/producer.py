"""Links on which clients send: messages are stored, then confirmed."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from aztask.emulator.amqp import (
    DECODE_ERROR,
    INVALID_FIELD,
    MESSAGE_SIZE_EXCEEDED,
    AmqpError,
    outgoing,
    sections,
)
from aztask.emulator.amqp.link import Inbound, ReceivingLink
from aztask.emulator.amqp.sections import Sections
from aztask.emulator.broker import stored
from aztask.emulator.broker.broker import Service
from aztask.emulator.broker.conditions import as_amqp
from aztask.emulator.broker.dispatch import StoreChange
from aztask.emulator.broker.entities import Entity
from aztask.emulator.broker.forwarding import error_of, refused, sendable
from aztask.emulator.broker.namespace import Namespace
from aztask.errors import AztaskError
from aztask.queues.engine import NewMessage

# -- incoming messages: checks a transfer and makes the messages that the engine stores ----
#
# Rules
# 1. A batch (message format 0x80013700) is a list of data sections, each a complete message. The
#    envelope around them is ignored. All of the messages are stored, or none.
# 2. A message without an id gets one, as on the service. SDKs rely on it ([seen] @azure/service-bus
#    7.9 cannot settle a message without an id).
# 3. A message is checked completely before any of it is stored.


BATCH_FORMAT = 0x80013700
MAX_KEY = 128
MAX_BATCH = 4500


def messages_of(
    namespace: Namespace, entity: Entity, payload: bytes, message_format: int, now: float
) -> list[NewMessage]:
    """Return the messages of one transfer, ready to be stored.

    now: UTC epoch seconds. Raises AmqpError if one of them is refused.
    """
    if message_format != BATCH_FORMAT:
        return [new_message(namespace, entity, payload, now)]
    envelope = sections.cut(payload)
    if not envelope.data_items or len(envelope.data_items) > MAX_BATCH:
        raise AmqpError(
            DECODE_ERROR, f"a batch of {len(envelope.data_items)} messages; 1 to {MAX_BATCH}"
        )
    return [
        new_message(namespace, entity, envelope.raw[start:end], now)
        for start, end in envelope.data_items
    ]


def new_message(namespace: Namespace, entity: Entity, raw: bytes, now: float) -> NewMessage:
    """Return one encoded message, ready to be stored. Raises AmqpError if it is refused.

    now: UTC epoch seconds.
    """
    message = sections.cut(raw)
    session = _session(message.property(sections.GROUP_ID))
    refusal = refused(namespace, entity, session, len(raw))
    if refusal is not None:
        raise error_of(refusal)
    message_id = _message_id(message.property(sections.MESSAGE_ID))
    new = stored.to_stored(message)
    if not message_id:
        message_id = uuid4().hex
        new = stored.with_message_id(new, message_id)
    due = _due(message, now) if message.annotations else None
    start = now if due is None else due
    expires = None if new.ttl == stored.NO_TTL else start + new.ttl / 1000
    return NewMessage(new.pack(), message_id, session, due, expires)


def _session(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_KEY):
        raise AmqpError(INVALID_FIELD, f"the session id must be a string of at most {MAX_KEY}")
    return value


def _message_id(value: Any) -> str:
    """Return a message id as text: it may be a string, uuid, binary or number (part 3.2.11)."""
    if value is None:
        return ""
    text = value.hex() if isinstance(value, bytes) else str(value)
    if len(text) > MAX_KEY:
        raise AmqpError(INVALID_FIELD, f"the message id has {len(text)} characters, over {MAX_KEY}")
    return text


def _due(message: Sections, now: float) -> float | None:
    due = message.annotations.get(stored.SCHEDULED_TIME)
    if due is None:
        return None
    if not isinstance(due, int):
        raise AmqpError(INVALID_FIELD, f"{stored.SCHEDULED_TIME} must be a timestamp")
    return due / 1000 if due / 1000 > now else None


CREDIT = 1000


class Producer:
    """A client's link that sends to a queue or topic."""

    def __init__(self, broker: Service, link: ReceivingLink, path: str) -> None:
        self.broker = broker
        self.link = link
        self.path = path

    def received(self, message: Inbound) -> None:
        """Store a message or a batch, or reject it at once if it is refused."""
        namespace = self.broker.namespace
        try:
            if message.too_large:
                raise AmqpError(
                    MESSAGE_SIZE_EXCEEDED,
                    f"a message of more than {self.link.max_message_size} bytes; send smaller ones",
                )
            entity = sendable(namespace, self.path)
            messages = messages_of(
                namespace,
                entity,
                message.payload,
                message.message_format,
                self.broker.clock.wall(),
            )
        except AmqpError as error:
            self.answer(message, outgoing.rejected(error.condition, error.description))
            return
        self.broker.committer.submit(_StoreMessages(self, message, entity.path, messages))

    def answer(self, message: Inbound, state: bytes) -> None:
        """Settle the delivery, unless the client sent it settled."""
        if not message.settled:
            delivery_id = message.delivery_id
            self.link.session.write(outgoing.disposition(True, delivery_id, delivery_id, state))


class _StoreMessages(StoreChange):
    """Stores the messages of one transfer, all of them or none."""

    def __init__(
        self, producer: Producer, message: Inbound, queue: str, messages: list[NewMessage]
    ) -> None:
        self._producer = producer
        self._message = message
        self._queue = queue
        self._messages = messages

    def execute(self) -> None:
        broker = self._producer.broker
        broker.engine.send(self._queue, self._messages)
        broker.queue_changed(self._queue)

    def succeed(self) -> None:
        self._producer.answer(self._message, outgoing.ACCEPTED)

    def fail(self, error: AztaskError) -> None:
        reason = as_amqp(error)
        self._producer.answer(
            self._message, outgoing.rejected(reason.condition, reason.description)
        )
