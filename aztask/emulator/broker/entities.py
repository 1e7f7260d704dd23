"""Queues, topics, subscriptions and their rules, as values.

Rules
1. Durations are seconds; None means unlimited. The defaults are the service's.
2. `kept` holds what the service stores and returns but what has no effect here.
3. Names are compared without regard to case, and shown as they were created.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from aztask.emulator.broker.filters import Filter, TrueFilter, filter_from, filter_record
from aztask.errors import ConfigurationError

MIB = 1024 * 1024
MIN_LOCK_SECONDS = 0.1  # the service asks for 5 s; tests of lapsed locks are quicker here
MAX_LOCK_SECONDS = 300.0
MAX_DUPLICATE_WINDOW = 7 * 86400.0
MAX_NAME = 260
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9_])?\Z")
_SHORT_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9_])?\Z")
MAX_SHORT_NAME = 50
SUBSCRIPTIONS = "/Subscriptions/"
DEFAULT_RULE = "$Default"


class Kind(Enum):
    """What an entity is."""

    QUEUE = "queue"
    TOPIC = "topic"
    SUBSCRIPTION = "subscription"


class Status(Enum):
    """What may be done with an entity; the service's words."""

    ACTIVE = "Active"
    DISABLED = "Disabled"
    SEND_DISABLED = "SendDisabled"
    RECEIVE_DISABLED = "ReceiveDisabled"

    @property
    def sends(self) -> bool:
        """Whether messages are accepted."""
        return self in (Status.ACTIVE, Status.RECEIVE_DISABLED)

    @property
    def receives(self) -> bool:
        """Whether messages are handed out."""
        return self in (Status.ACTIVE, Status.SEND_DISABLED)


@dataclass(frozen=True, slots=True)
class SubscriptionRule:
    """A subscription takes the messages that one of its rules' filters matches."""

    name: str
    filter: Filter
    created: float = 0.0


@dataclass(frozen=True, slots=True)
class Entity:
    """A queue, topic or subscription; the last one's path is topic/Subscriptions/name.

    lock_seconds, time_to_live, duplicate_window: seconds; duplicate_window is 0 when switched off.
    created, updated: UTC epoch seconds. kept: see rule 2.
    """

    path: str
    kind: Kind = Kind.QUEUE
    lock_seconds: float = 60.0
    max_deliveries: int = 10
    time_to_live: float | None = None
    dead_letter_expired: bool = False
    dead_letter_filter_errors: bool = True
    duplicate_window: float = 0.0
    sessions: bool = False
    forward_to: str = ""
    forward_dead_letters_to: str = ""
    max_message_bytes: int = MIB
    status: Status = Status.ACTIVE
    rules: tuple[SubscriptionRule, ...] = ()
    created: float = 0.0
    updated: float = 0.0
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What the entity is found by."""
        return self.path.lower()

    @property
    def topic(self) -> str:
        """The topic of a subscription."""
        return self.path.split(SUBSCRIPTIONS)[0]

    @property
    def name(self) -> str:
        """The name: the last part of a subscription's path."""
        return self.path.rsplit(SUBSCRIPTIONS, 1)[-1]

    @property
    def stores(self) -> bool:
        """Whether receivers attach to it."""
        return self.kind is not Kind.TOPIC


def check(entity: Entity) -> Entity:
    """The entity, when the service would take it. Raises ConfigurationError with the rule."""
    _check_name(entity)
    if not MIN_LOCK_SECONDS <= entity.lock_seconds <= MAX_LOCK_SECONDS:
        raise ConfigurationError(
            f"{entity.path}: a lock duration of {entity.lock_seconds:g} s; {MIN_LOCK_SECONDS:g} s"
            f" to {MAX_LOCK_SECONDS:g} s are allowed"
        )
    if not 1 <= entity.max_deliveries <= 2_000:
        raise ConfigurationError(f"{entity.path}: MaxDeliveryCount must be 1 to 2000")
    check_window(entity.path, entity.duplicate_window)
    if entity.time_to_live is not None and entity.time_to_live <= 0:
        raise ConfigurationError(f"{entity.path}: the time to live must be positive")
    return entity


def check_window(path: str, seconds: float) -> None:
    """Raise ConfigurationError where the service remembers no message id for so long."""
    if seconds > MAX_DUPLICATE_WINDOW:
        raise ConfigurationError(
            f"{path}: a duplicate detection window of {seconds:g} s; at most 7 days"
        )


def with_default_rule(entity: Entity) -> Entity:
    """A new subscription takes everything, unless it comes with rules of its own."""
    if entity.kind is not Kind.SUBSCRIPTION or entity.rules:
        return entity
    return replace(entity, rules=(SubscriptionRule(DEFAULT_RULE, TrueFilter(), entity.created),))


def _check_name(entity: Entity) -> None:
    if entity.kind is Kind.SUBSCRIPTION:
        fits = len(entity.name) <= MAX_SHORT_NAME and bool(_SHORT_NAME.match(entity.name))
        rule = f"1 to {MAX_SHORT_NAME} letters, digits, '.', '-' and '_'"
    else:
        fits = len(entity.path) <= MAX_NAME and bool(_NAME.match(entity.path))
        fits = fits and "//" not in entity.path and "/subscriptions/" not in entity.key
        rule = f"1 to {MAX_NAME} letters, digits, '.', '-', '_' and '/'"
    if not fits:
        raise ConfigurationError(
            f"{entity.name[:80]!r} is not a {entity.kind.value} name: {rule},"
            " beginning and ending with a letter or digit"
        )


def to_json(entity: Entity) -> str:
    """A document that `from_json` turns back into an equal entity."""
    document = asdict(replace(entity, rules=()))
    document["kind"], document["status"] = entity.kind.value, entity.status.value
    document["rules"] = [
        {"name": rule.name, "created": rule.created, "filter": filter_record(rule.filter)}
        for rule in entity.rules
    ]
    return json.dumps(document)


def from_json(text: str) -> Entity:
    """The entity of a document that `to_json` wrote."""
    document: dict[str, Any] = json.loads(text)
    document["kind"], document["status"] = Kind(document["kind"]), Status(document["status"])
    document["rules"] = tuple(
        SubscriptionRule(rule["name"], filter_from(rule["filter"]), rule["created"])
        for rule in document["rules"]
    )
    return Entity(**document)
