"""Forwarding: topics to their subscriptions, queues to queues, dead letters to queues.

Rules
1. A message is moved in one transaction: it is in the old place or in the new one, never in both.
2. A message is forwarded at most `MAX_HOPS` times (the service's limit), then dead-lettered.
3. What the target refuses goes to the transfer dead letters of its source, with the reason
   (`acceptance` has the causes). A dead letter that is forwarded tells its first reason as well.
4. What a subscription of a topic cannot take becomes a dead letter of that subscription, as on the
   service; the other subscriptions get their copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from aztask.emulator.amqp import MESSAGE_SIZE_EXCEEDED, NOT_ALLOWED, NOT_FOUND, AmqpError, sections
from aztask.emulator.broker import stored
from aztask.emulator.broker.conditions import ENTITY_DISABLED
from aztask.emulator.broker.entities import Entity, EntityKind
from aztask.emulator.broker.namespace import Namespace
from aztask.queues.engine import Engine, Leased, NewMessage
from aztask.support.clock import Clock

# -- What an entity accepts ------------------------------------------------------------------------
#
# Whether an entity accepts a message: one answer for what is sent and for what is forwarded.
#
# Rules
# 1. Each cause of a refusal is one row of `CAUSES`. A sender gets its condition as an error; a
#    forwarded message becomes a dead letter with its reason. None is accepted and then lost.
# 2. A full disk is no cause: the transaction fails, and the message stays where it is.
# 3. The reason of `NO_SESSION` is the service's. For the other causes the service documents no
#    text; their reasons are the names of its errors.

_TOPIC = EntityKind.TOPIC  # used for each message; an attribute of an Enum is slow to look up


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
    if entity.kind is EntityKind.SUBSCRIPTION:
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


# -- Forwarding ------------------------------------------------------------------------------------


MAX_HOPS = 4
BATCH = 100
BATCHES_PER_RUN = 10
CHECK_EVERY = 0.1  # seconds between two checks for new dead letters
_LEASE_SECONDS = 60.0
HOPS_EXCEEDED = "MaxTransferHopCountExceeded"

Place: TypeAlias = tuple[str, bool]
"""An engine queue's name, and whether its dead letters are meant."""


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """An entity whose messages are forwarded, or whose dead letters are (`dead`)."""

    source: Entity
    dead: bool


class Forwarder:
    """Moves messages along the routes of the namespace."""

    def __init__(self, engine: Engine, namespace: Namespace, clock: Clock) -> None:
        self._engine = engine
        self._namespace = namespace
        self._clock = clock
        self._revision = -1
        self._routes: list[_Route] = []
        self.pending = False
        self._quiet_until: dict[_Route, float] = {}

    def queues_changed(self) -> None:
        """Check all routes in the next flush: messages were sent or given back."""
        if self.routes:
            self.pending = True
            self._quiet_until.clear()

    def due(self) -> bool:
        """Return whether there are messages to move; a schedule or an expiry may fall due."""
        now = self._clock.monotonic()
        for route in self.routes:
            if self.pending:
                break
            if self._quiet_until.get(route, 0.0) <= now:
                self._check_due(route, now)
        return self.pending

    def _check_due(self, route: _Route, now: float) -> None:
        path, dead = route.source.path, route.dead
        if dead:
            self._engine.peek(path, 0, 0)  # makes the engine dead-letter expired messages
        wait = self._engine.pending(path, dead_letter=dead)
        if wait <= 0:
            self.pending = True
        else:
            self._quiet_until[route] = now + (CHECK_EVERY if dead else max(wait, CHECK_EVERY))

    @property
    def routes(self) -> list[_Route]:
        """The routes of the namespace's current entities."""
        if self._revision != self._namespace.revision:
            self._revision = self._namespace.revision
            self._routes = []
            for entity in self._namespace.all():
                if entity.kind is EntityKind.TOPIC or entity.forward_to:
                    self._routes.append(_Route(entity, False))
                if entity.forward_dead_letters_to:
                    self._routes.append(_Route(entity, True))
        return self._routes

    def run(self) -> set[Place]:
        """Move messages along all routes; return the places that got some.

        A message may pass several queues in one call.
        """
        if not self.pending:
            return set()
        self.pending = False
        reached: set[Place] = set()
        for _ in range(MAX_HOPS + 1):
            moved = set()
            for route in self.routes:
                moved |= self._move(route)
            reached |= moved
            if not moved:
                break
        return reached

    def _move(self, route: _Route) -> set[Place]:
        source = route.source
        reached: set[Place] = set()
        if source.sessions and not route.dead:
            return reached  # only in a file of an earlier release: it can no longer be created
        for _ in range(BATCHES_PER_RUN):
            messages = self._engine.receive(
                source.path, BATCH, _LEASE_SECONDS, dead_letter=route.dead
            )
            for message in messages:
                if source.kind is EntityKind.TOPIC and not route.dead:
                    reached |= self._fan_out(source, message)
                else:
                    reached |= self._forward(route, message)
            if len(messages) < BATCH:
                break
        else:
            self.pending = True
        return reached

    def _fan_out(self, topic: Entity, message: Leased) -> set[Place]:
        """Give each subscription with a matching rule its copy (rule 4)."""
        cut = sections.cut(stored.unpack(message.payload).bare)
        reached: set[Place] = set()
        for target in self._namespace.subscriptions(topic):
            if not any(rule.filter.matches(cut) for rule in target.rules):
                continue
            refusal = disabled(target)
            if target.sessions and message.session is None:
                refusal = refusal or sessionless("")
            if refusal is None:
                self._engine.send(target.path, [_new(message, message.payload)])
            else:
                self._bury(target, _new(message, message.payload), refusal)
            reached.add((target.path, refusal is not None))
        self._engine.complete(topic.path, [(message.seq, message.token)])
        return reached

    def _forward(self, route: _Route, message: Leased) -> set[Place]:
        source, lease = route.source, [(message.seq, message.token)]
        copy = stored.unpack(message.payload)
        if copy.hops >= MAX_HOPS and not route.dead:
            text = f"forwarded {MAX_HOPS} times; the last queue was {source.path}"
            self._engine.dead_letter(source.path, lease, HOPS_EXCEEDED, text)
            return {(source.path, True)}
        path = source.forward_dead_letters_to if route.dead else source.forward_to
        refusal = self._refusal(path, message, copy)
        if refusal is not None:
            place = self._namespace.transfer(source)
            self._bury(
                place, _new(message, message.payload), refusal, _first_reason(route, message)
            )
            reached = (place.path, True)
        else:
            copy = copy.forwarded(source.path if route.dead else None)
            if route.dead:
                copy = stored.with_reasons(copy, message.reason or "", message.description or "")
            new = _new(message, copy.pack(), expiring=not route.dead)
            target = self._namespace.get(path)
            self._engine.send(target.path, [new])
            reached = (target.path, False)
        self._engine.complete(source.path, lease, dead_letter=route.dead)
        return {reached}

    def _refusal(self, path: str, message: Leased, copy: stored.StoredMessage) -> Refusal | None:
        """Return why the target of a route refuses a message, or None if it accepts it."""
        if copy.hops >= MAX_HOPS:  # a dead letter; others became dead letters of their queue
            text = f"forwarded {MAX_HOPS} times; the next queue was {path}"
            return Refusal(Cause("", HOPS_EXCEEDED), text, text)
        target = self._namespace.find(path)
        refusal = closed(path, target)
        if refusal is not None or target is None:
            return refusal
        size = len(copy.annotations) + len(copy.bare)
        return refused(self._namespace, target, message.session, size)

    def _bury(self, place: Entity, message: NewMessage, refusal: Refusal, first: str = "") -> None:
        description = (refusal.description + first)[: stored.MAX_REASON]
        self._engine.send_dead(place.path, message, refusal.cause.reason, description)


def _new(message: Leased, payload: bytes, *, expiring: bool = True) -> NewMessage:
    expires = message.expires_at if expiring else None
    return NewMessage(payload, message.message_id, message.session, None, expires)


def _first_reason(route: _Route, message: Leased) -> str:
    """Return what the description of a refused dead letter adds: why it was one before."""
    if not route.dead:
        return ""
    first = ": ".join(text for text in (message.reason, message.description) if text)
    return f" It was a dead letter before: {first or 'without a reason'}"
