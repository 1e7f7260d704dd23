"""Forwarding: topics to their subscriptions, queues to queues, dead letters to queues.

Rules
1. A message is moved in one transaction: it is in the old place or in the new one, never in both.
2. A message is forwarded at most `MAX_HOPS` times (the service's limit), then dead-lettered.
3. What the target refuses goes to the transfer dead letters of its source, with the reason
   (`acceptance` has the causes). A dead letter that is forwarded tells its first reason as well.
4. What a subscription of a topic cannot take becomes a dead letter of that subscription, as on the
   service; the other subscriptions get their copies.
   Every rule is evaluated before any copy is stored, so that a fault leaves none without it.
5. All matching rules without an action give a subscription one copy together. Each matching rule
   with an action gives it one more, with the rule's name in the property `RULE_NAME`.
6. A message that cannot be moved for an unexpected reason, as when it cannot be read, goes to the
   transfer dead letters of its source, with an entry in the log. The others are moved.
7. One run makes about `COPIES_PER_RUN` copies. The rest follows in the next turn, so that a cycle
   of topics, which multiplies its messages at each hop, lets others in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from aztask.emulator.amqp import (
    MESSAGE_SIZE_EXCEEDED,
    NOT_ALLOWED,
    NOT_FOUND,
    AmqpError,
    encode,
    sections,
)
from aztask.emulator.amqp.encode import Described, Timestamp
from aztask.emulator.broker import stored
from aztask.emulator.broker.conditions import ENTITY_DISABLED
from aztask.emulator.broker.entities import Entity, EntityKind, SubscriptionRule
from aztask.emulator.broker.filters import REMOVED, TIMESPAN, RuleMessage
from aztask.emulator.broker.namespace import Namespace
from aztask.emulator.broker.sql import SqlFault
from aztask.errors import AztaskError
from aztask.queues.engine import Engine, Leased, NewMessage, number_of
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

log = logging.getLogger(__name__)
MAX_KEY = 128  # characters of a message id and of a session id
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


def refused(entity: Entity, session: str | None, size: int) -> Refusal | None:
    """Return why an open entity refuses this message, or None if it accepts it.

    size: the bytes of the encoded message.
    """
    if size > entity.max_message_bytes:
        text = (
            f"a message of {size} bytes; {entity.path!r} accepts at most {entity.max_message_bytes}"
        )
        return Refusal(TOO_LARGE, text, text)
    if session is None and entity.sessions and entity.kind is not _TOPIC:
        return sessionless(f"{entity.path!r} requires sessions: set the message's session id")
    return None


def sessionless(error: str) -> Refusal:
    """Return the refusal of a message without a session id."""
    return Refusal(NO_SESSION, error, _NO_SESSION_TEXT)


# -- Forwarding ------------------------------------------------------------------------------------


MAX_HOPS = 4
BATCH = 100
BATCHES_PER_RUN = 10
COPIES_PER_RUN = 5000
CHECK_EVERY = 0.1  # seconds between two checks for new dead letters
_LEASE_SECONDS = 60.0
HOPS_EXCEEDED = "MaxTransferHopCountExceeded"
INTERNAL = "InternalError"
FILTER_FAILED = "FilterException"
RULE_NAME = "RuleName"

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
        self._copies = 0  # made in this run
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
        self._copies = 0
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
            if self._copies > COPIES_PER_RUN:
                self.pending = True
                break
            messages = self._engine.receive(
                source.path, BATCH, _LEASE_SECONDS, dead_letter=route.dead
            )
            for message in messages:
                reached |= self._moved(route, message)
            if len(messages) < BATCH:
                break
        else:
            self.pending = True
        return reached

    def _moved(self, route: _Route, message: Leased) -> set[Place]:
        """Move one message; what its move fails for is logged (rule 6)."""
        try:
            if route.source.kind is EntityKind.TOPIC and not route.dead:
                return self._fan_out(route.source, message)
            return self._forward(route, message)
        except AztaskError:  # the store's: it concerns all messages
            raise
        except Exception as error:
            log.exception("%s: forwarding failed after a bug of the emulator", route.source.path)
            place = self._namespace.transfer(route.source)
            refusal = Refusal(Cause("", INTERNAL), "", f"{type(error).__name__}, see the log")
            self._bury(place, _new(message, message.payload), refusal)
            lease = [(message.seq, message.token)]
            self._engine.complete(route.source.path, lease, dead_letter=route.dead)
            return {(place.path, True)}

    def _fan_out(self, topic: Entity, message: Leased) -> set[Place]:
        """Give each subscription with a matching rule its copies (rules 4 and 5)."""
        facts = _Facts(message)
        reached: set[Place] = set()
        found = [(target, *facts.copies(target)) for target in self._namespace.subscriptions(topic)]
        self._copies += len(found)
        for target, copies, faults in found:
            for copy in copies:
                refusal = disabled(target)
                if target.sessions and copy.session is None:
                    refusal = refusal or sessionless("")
                if refusal is None:
                    self._namespace.note_use(target.path)
                    self._send(target, copy)
                else:
                    self._bury(target, copy, refusal)
                reached.add((target.path, refusal is not None))
            if faults and target.dead_letter_filter_errors:
                text = "; ".join(faults)
                refusal = Refusal(Cause("", FILTER_FAILED), text, text)
                self._bury(target, _new(message, message.payload), refusal)
                reached.add((target.path, True))
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
            copy = copy.numbered(number_of(message.seq))
            copy = copy.forwarded(source.path if route.dead else None)
            if route.dead:
                copy = stored.with_reasons(copy, message.reason or "", message.description or "")
            new = _new(message, copy.pack(), expiring=not route.dead)
            target = self._namespace.get(path)
            self._namespace.note_use(target.path)
            self._send(target, new)
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
        return refused(target, message.session, size)

    def _send(self, target: Entity, message: NewMessage) -> None:
        if self._namespace.partitioned(target):
            message = stored.in_partition(message)
        self._engine.send(target.path, [message])

    def _bury(self, place: Entity, message: NewMessage, refusal: Refusal, first: str = "") -> None:
        description = (refusal.description + first)[: stored.MAX_REASON]
        self._engine.send_dead(place.path, message, refusal.cause.reason, description)


class _Facts:
    """A message on its way through a topic, as the rules of the subscriptions see it."""

    def __init__(self, message: Leased) -> None:
        self._message = message
        self._stored = stored.unpack(message.payload).numbered(number_of(message.seq))
        self._bare = sections.cut(self._stored.bare)
        self._broker = self._of_the_broker()

    def _of_the_broker(self) -> dict[str, Any]:
        message, ttl = self._message, self._stored.ttl
        number = number_of(message.seq)
        annotations = dict(stored.annotations_of(self._stored))
        expires = message.expires_at
        return {
            "DeliveryCount": 0,
            "EnqueuedSequenceNumber": annotations.get(stored.FIRST_NUMBER, number),
            "EnqueuedTimeUtc": Timestamp(message.enqueued_at * 1000),
            "ExpiresAtUtc": None if expires is None else Timestamp(expires * 1000),
            "PartitionKey": annotations.get(stored.PARTITION_KEY),
            "ScheduledEnqueueTimeUtc": annotations.get(stored.SCHEDULED_TIME),
            "DeadLetterSource": annotations.get(stored.DEAD_LETTER_SOURCE),
            "ViaPartitionKey": annotations.get(stored.VIA_PARTITION_KEY),
            "SequenceNumber": number,
            "State": "Active",
            "TimeToLive": None if ttl == stored.NO_TTL else Described(TIMESPAN, ttl * 10_000),
        }

    def copies(self, target: Entity) -> tuple[list[NewMessage], list[str]]:
        """Return the copies that a subscription gets, and the faults of its rules."""
        faults: list[str] = []
        matching = list(self._matching(target, faults))
        copies = []
        if any(rule.action is None for rule in matching):
            copies.append(_new(self._message, self._stored.pack()))
        for rule in matching:
            try:
                copies += [self._acted(rule)] if rule.action is not None else []
            except (SqlFault, AmqpError) as fault:
                faults.append(f"the action of the rule {rule.name}: {fault}")
        return copies, faults

    def _matching(self, target: Entity, faults: list[str]) -> Iterator[SubscriptionRule]:
        seen = RuleMessage(self._bare, self._broker)
        for rule in target.rules:
            try:
                if rule.filter.matches(seen):
                    yield rule
            except SqlFault as fault:
                faults.append(f"the filter of the rule {rule.name}: {fault}")

    def _acted(self, rule: SubscriptionRule) -> NewMessage:
        """Return the copy that a rule with an action makes.

        Raises SqlFault, or AmqpError for a copy that the service would not take.
        """
        changed = RuleMessage(self._bare, self._broker)
        if rule.action is not None:
            rule.action.run(changed)
        changed.set(False, RULE_NAME, rule.name)
        fields = {index: encode.simple(value) for index, value in changed.fields.items()}
        copy = stored.with_fields(self._stored, fields) if fields else self._stored
        removed = {name for name, value in changed.properties.items() if value is REMOVED}
        given = {name: v for name, v in changed.properties.items() if name not in removed}
        copy = stored.with_bare(copy, stored.with_properties(copy.bare, given, removed))
        sections.check_properties(sections.cut(copy.bare))
        new = _new(self._message, copy.pack())
        names = ((sections.MESSAGE_ID, "message_id"), (sections.GROUP_ID, "session"))
        values = {name: changed.fields[i] for i, name in names if i in changed.fields}
        for name, value in values.items():
            if value is not None and len(value) > MAX_KEY:
                raise SqlFault(f"a {name} of {len(value)} characters; {MAX_KEY} are allowed")
        return new._replace(**values)


def _new(message: Leased, payload: bytes, *, expiring: bool = True) -> NewMessage:
    expires = message.expires_at if expiring else None
    return NewMessage(payload, message.message_id, message.session, None, expires)


def _first_reason(route: _Route, message: Leased) -> str:
    """Return what the description of a refused dead letter adds: why it was one before."""
    if not route.dead:
        return ""
    first = ": ".join(text for text in (message.reason, message.description) if text)
    return f" It was a dead letter before: {first or 'without a reason'}"
