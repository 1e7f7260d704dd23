"""Queues, topics, subscriptions and their rules, as values.

Rules
1. Durations are in seconds; None means unlimited. The defaults are the service's.
2. `kept` holds the properties that the service returns but that have no effect here.
3. Names are compared without regard to case, and shown as they were created.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any
from urllib.parse import unquote, urlsplit

from aztask.emulator.broker.filters import Filter, TrueFilter, filter_from, filter_record
from aztask.errors import ConfigurationError

MIB = 1024 * 1024
MIN_LOCK_SECONDS = 0.1  # 5 s on the service; shorter here, for fast tests of expired locks
MAX_LOCK_SECONDS = 300.0
MAX_DUPLICATE_WINDOW = 7 * 86400.0
MAX_NAME = 260
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9_])?\Z")
_SHORT_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9_])?\Z")
MAX_SHORT_NAME = 50
SUBSCRIPTIONS = "/Subscriptions/"
DEFAULT_RULE = "$Default"


class EntityKind(Enum):
    """The three kinds of entities."""

    QUEUE = "queue"
    TOPIC = "topic"
    SUBSCRIPTION = "subscription"


class Status(Enum):
    """The operations that an entity allows, by the service's names."""

    ACTIVE = "Active"
    DISABLED = "Disabled"
    SEND_DISABLED = "SendDisabled"
    RECEIVE_DISABLED = "ReceiveDisabled"

    @property
    def sends(self) -> bool:
        """Whether the entity accepts messages."""
        return self in (Status.ACTIVE, Status.RECEIVE_DISABLED)

    @property
    def receives(self) -> bool:
        """Whether the entity delivers messages."""
        return self in (Status.ACTIVE, Status.SEND_DISABLED)


@dataclass(frozen=True, slots=True)
class SubscriptionRule:
    """A named filter: a subscription takes the messages that match one of its rules.

    created: UTC epoch seconds.
    """

    name: str
    filter: Filter
    created: float = 0.0


@dataclass(frozen=True, slots=True)
class Entity:
    """A queue, topic or subscription.

    path: the name; topic/Subscriptions/name for a subscription.
    lock_seconds, time_to_live, duplicate_window: seconds; duplicate_window 0 switches it off.
    created, updated: UTC epoch seconds.
    kept: see rule 2.
    """

    path: str
    kind: EntityKind = EntityKind.QUEUE
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
        """The path in lower case, for lookups and comparisons."""
        return self.path.lower()

    @property
    def topic(self) -> str:
        """The path of a subscription's topic."""
        return self.path.split(SUBSCRIPTIONS)[0]

    @property
    def name(self) -> str:
        """The name: the last part of a subscription's path."""
        return self.path.rsplit(SUBSCRIPTIONS, 1)[-1]

    @property
    def stores(self) -> bool:
        """Whether receivers can attach to the entity."""
        return self.kind is not EntityKind.TOPIC


def check(entity: Entity) -> Entity:
    """Return the entity if the service would accept it. Raises ConfigurationError otherwise."""
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
    """Raise ConfigurationError if a duplicate detection window is longer than 7 days."""
    if seconds > MAX_DUPLICATE_WINDOW:
        raise ConfigurationError(
            f"{path}: a duplicate detection window of {seconds:g} s; at most 7 days"
        )


def with_default_rule(entity: Entity) -> Entity:
    """Return the entity; a subscription without rules gets one that matches everything."""
    if entity.kind is not EntityKind.SUBSCRIPTION or entity.rules:
        return entity
    return replace(entity, rules=(SubscriptionRule(DEFAULT_RULE, TrueFilter(), entity.created),))


def _check_name(entity: Entity) -> None:
    if entity.kind is EntityKind.SUBSCRIPTION:
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
    """Return a JSON document from which `from_json` makes an equal entity."""
    document = asdict(replace(entity, rules=()))
    document["kind"], document["status"] = entity.kind.value, entity.status.value
    document["rules"] = [
        {"name": rule.name, "created": rule.created, "filter": filter_record(rule.filter)}
        for rule in entity.rules
    ]
    return json.dumps(document)


def from_json(text: str) -> Entity:
    """Return the entity of a document that `to_json` wrote."""
    document: dict[str, Any] = json.loads(text)
    document["kind"], document["status"] = EntityKind(document["kind"]), Status(document["status"])
    document["rules"] = tuple(
        SubscriptionRule(rule["name"], filter_from(rule["filter"]), rule["created"])
        for rule in document["rules"]
    )
    return Entity(**document)


# -- Addresses -------------------------------------------------------------------------------------
#
# Addresses: the text in a terminus names an entity or one of its nodes.
#
# * ``<entity>`` or ``<topic>/Subscriptions/<name>``
# * the same followed by ``/$DeadLetterQueue`` or ``/$Transfer/$DeadLetterQueue``
# * any of these followed by ``/$management``
# * ``$cbs``
#
# Each may follow ``amqp://host/``, ``amqps://host/`` or ``sb://host/``.

CBS = "$cbs"
MANAGEMENT = "/$management"
DEAD_LETTERS = "/$deadletterqueue"
TRANSFER = "/$transfer"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address.

    entity: the entity's path. dead: its dead letters. transfer: its transfer dead letters.
    management: its management node. cbs: the token node.
    """

    entity: str
    dead: bool = False
    transfer: bool = False
    management: bool = False
    cbs: bool = False

    @property
    def claimed(self) -> str:
        """The path that a token must cover.

        It includes the dead letters, because SDKs put a token for these alone to receive them.
        """
        return self.entity + TRANSFER * self.transfer + DEAD_LETTERS * self.dead


def parse_address(text: str) -> Address:
    """Parse an address. Any text is valid: it may name an entity that does not exist."""
    path = urlsplit(text).path if "://" in text else text
    path = unquote(path).strip("/")
    if path.lower() == CBS:
        return Address("", cbs=True)
    path, management = _without(path, MANAGEMENT)
    if path.lower() == MANAGEMENT[1:]:
        return Address("", management=True)
    path, dead = _without(path, DEAD_LETTERS)
    path, transfer = _without(path, TRANSFER) if dead else (path, False)
    return Address(path, dead, transfer, management)


def _without(path: str, suffix: str) -> tuple[str, bool]:
    if path.lower().endswith(suffix):
        return path[: -len(suffix)], True
    return path, False
