"""Incoming messages: checks a transfer and makes the messages that the engine stores.

Rules
1. A batch (message format 0x80013700) is a list of data sections, each a complete message. The
   envelope around them is ignored. All of the messages are stored, or none.
2. A message without an id gets one, as on the service. SDKs rely on it ([seen] @azure/service-bus
   7.9 cannot settle a message without an id).
3. A message is checked completely before any of it is stored.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from aztask.emulator.amqp import sections
from aztask.emulator.amqp.errors import (
    DECODE_ERROR,
    INVALID_FIELD,
    NOT_ALLOWED,
    NOT_FOUND,
    AmqpError,
)
from aztask.emulator.amqp.sections import Sections
from aztask.emulator.broker import stored
from aztask.emulator.broker.conditions import ENTITY_DISABLED
from aztask.emulator.broker.entities import Entity, Kind
from aztask.emulator.broker.namespace import Namespace
from aztask.engine import NewMessage

BATCH_FORMAT = 0x80013700
MAX_KEY = 128
MAX_BATCH = 4500
_TOPIC = Kind.TOPIC  # used for each message; an attribute of an Enum is slow to look up


def sendable(namespace: Namespace, path: str) -> Entity:
    """Return the entity at `path` if it accepts messages. Raises AmqpError otherwise."""
    entity = namespace.find(path)
    if entity is None:
        raise AmqpError(NOT_FOUND, f"the messaging entity {path[:300]!r} could not be found")
    if entity.kind is Kind.SUBSCRIPTION:
        raise AmqpError(NOT_ALLOWED, f"{entity.path!r} is a subscription: send to its topic")
    if not entity.status.sends:
        raise AmqpError(ENTITY_DISABLED, f"{entity.path!r} is {entity.status.value}")
    return entity


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
    if session is None and (entity.sessions or entity.kind is _TOPIC):
        _check_session(namespace, entity)
    message_id = _message_id(message.property(sections.MESSAGE_ID))
    new = stored.to_stored(message)
    if not message_id:
        message_id = uuid4().hex
        new = stored.with_message_id(new, message_id)
    due = _due(message, now) if message.annotations else None
    start = now if due is None else due
    expires = None if new.ttl == stored.NO_TTL else start + new.ttl / 1000
    return NewMessage(new.pack(), message_id, session, due, expires)


def _check_session(namespace: Namespace, entity: Entity) -> None:
    """Raise AmqpError if the entity, or a subscription of the topic, requires sessions."""
    if entity.sessions:
        raise AmqpError(
            NOT_ALLOWED, f"{entity.path!r} requires sessions: set the message's session id"
        )
    if entity.kind is Kind.TOPIC:
        for subscription in namespace.subscriptions(entity):
            if subscription.sessions:
                raise AmqpError(
                    NOT_ALLOWED,
                    f"the subscription {subscription.path!r} requires sessions:"
                    " set the message's session id",
                )


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
