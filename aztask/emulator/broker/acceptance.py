"""Whether an entity accepts a message: one answer for what is sent and for what is forwarded.

Rules
1. Each cause of a refusal is one row of `CAUSES`. A sender gets its condition as an error; a
   forwarded message becomes a dead letter with its reason. None is accepted and then lost.
2. A full disk is no cause: the transaction fails, and the message stays where it is.
3. The reason of `NO_SESSION` is the service's. For the other causes the service documents no text;
   their reasons are the names of its errors.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aztask.emulator.amqp.errors import MESSAGE_SIZE_EXCEEDED, NOT_ALLOWED, NOT_FOUND, AmqpError
from aztask.emulator.broker.conditions import ENTITY_DISABLED
from aztask.emulator.broker.entities import Entity, Kind
from aztask.emulator.broker.namespace import Namespace

_TOPIC = Kind.TOPIC  # used for each message; an attribute of an Enum is slow to look up


class Cause(NamedTuple):
    """A cause of refusals. condition: of the AMQP error. reason: of the dead letter."""

    condition: str
    reason: str


class Refusal(NamedTuple):
    """One refusal. error: one sentence for a sender. description: of the dead letter."""

    cause: Cause
    error: str
    description: str


MISSING: Final = Cause(NOT_FOUND, "MessagingEntityNotFound")
WRONG_KIND: Final = Cause(NOT_ALLOWED, "MessagingEntityNotFound")
DISABLED: Final = Cause(ENTITY_DISABLED, "MessagingEntityDisabled")
TOO_LARGE: Final = Cause(MESSAGE_SIZE_EXCEEDED, "MessageSizeExceeded")
NO_SESSION: Final = Cause(NOT_ALLOWED, "Session ID is null.")
CAUSES: Final = {
    "missing": MISSING,
    "wrong kind": WRONG_KIND,
    "disabled": DISABLED,
    "too large": TOO_LARGE,
    "no session": NO_SESSION,
}
_NO_SESSION_TEXT = (
    "Session enabled entity doesn't allow a message whose session identifier is null."
)


def sendable(namespace: Namespace, path: str) -> Entity:
    """Return the entity at `path` if it accepts messages. Raises AmqpError otherwise."""
    entity = namespace.find(path)
    refusal = closed(path, entity)
    if refusal is not None:
        raise error_of(refusal)
    assert entity is not None  # noqa: S101  # `closed` refuses a missing one
    return entity


def error_of(refusal: Refusal) -> AmqpError:
    """Return the error that a sender gets."""
    return AmqpError(refusal.cause.condition, refusal.error)


def closed(path: str, entity: Entity | None) -> Refusal | None:
    """Return why the entity at `path` accepts no message at all, or None if it does."""
    if entity is None:
        text = f"the messaging entity {path[:300]!r} could not be found"
        return Refusal(MISSING, text, text)
    if entity.kind is Kind.SUBSCRIPTION:
        text = f"{entity.path!r} is a subscription: send to its topic"
        return Refusal(WRONG_KIND, text, text)
    return disabled(entity)


def disabled(entity: Entity) -> Refusal | None:
    """Return the refusal of an entity that is disabled for sends, or None."""
    if entity.status.sends:
        return None
    text = f"{entity.path!r} is {entity.status.value}"
    return Refusal(DISABLED, text, text)


def refused(namespace: Namespace, entity: Entity, session: str | None, size: int) -> Refusal | None:
    """Return why an open entity refuses this message, or None if it accepts it.

    size: the bytes of the encoded message. A topic refuses a message without a session if one of
    its subscriptions requires sessions.
    """
    if size > entity.max_message_bytes:
        text = (
            f"a message of {size} bytes; {entity.path!r} accepts at most {entity.max_message_bytes}"
        )
        return Refusal(TOO_LARGE, text, text)
    if session is None and (entity.sessions or entity.kind is _TOPIC):
        return _without_session(namespace, entity)
    return None


def _without_session(namespace: Namespace, entity: Entity) -> Refusal | None:
    if entity.sessions:
        return sessionless(f"{entity.path!r} requires sessions: set the message's session id")
    for subscription in namespace.subscriptions(entity):
        if subscription.sessions:
            return sessionless(
                f"the subscription {subscription.path!r} requires sessions:"
                " set the message's session id"
            )
    return None


def sessionless(error: str) -> Refusal:
    """Return the refusal of a message without a session id."""
    return Refusal(NO_SESSION, error, _NO_SESSION_TEXT)
