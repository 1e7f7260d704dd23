"""Queues, topics, subscriptions and their rules, as values.

Rules
1. Durations are in seconds; None means unlimited. The defaults are the service's.
2. `kept` holds the properties that the service returns but that have no effect here, except the
   one for partitions.
3. Names are compared without regard to case, and shown as they were created.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any
from urllib.parse import unquote, urlsplit

from aztask.emulator.broker.filters import (
    Filter,
    RuleAction,
    TrueFilter,
    action_from,
    action_record,
    filter_from,
    filter_record,
)
from aztask.errors import ConfigurationError

MIB = 1024 * 1024
KIB = 1024
MIN_LOCK_SECONDS = 0.1  # 5 s in a tier of the service; shorter here, for fast tests of lost locks
MAX_LOCK_SECONDS = 300.0
MAX_DUPLICATE_WINDOW = 7 * 86400.0
MAX_DELIVERIES = 2**31 - 1
MAX_NAME = 260
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9_])?\Z")
_SHORT_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9_])?\Z")
_NOT_IN_RULES = re.compile(r"[/\\@?#*\x00-\x1f\ud800-\udfff]")  # surrogates have no encoding
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


class Tier(Enum):
    """A tier of the service, by its name, whose limits the emulator then has."""

    STANDARD = "Standard"
    PREMIUM = "Premium"

    @property
    def message_bytes(self) -> tuple[int, int]:
        """The least and the largest limit for messages; the least is the one of an entity."""
        return (256 * KIB, 256 * KIB) if self is Tier.STANDARD else (MIB, 100 * MIB)


@dataclass(frozen=True, slots=True)
class SubscriptionRule:
    """A named filter: a subscription takes the messages that match one of its rules.

    created: UTC epoch seconds. action: changes the copies that the rule lets through.
    """

    name: str
    filter: Filter
    created: float = 0.0
    action: RuleAction | None = None


@dataclass(frozen=True, slots=True)
class Entity:
    """A queue, topic or subscription.

    path: the name; topic/Subscriptions/name for a subscription.
    lock_seconds, time_to_live, duplicate_window: seconds; duplicate_window 0 switches it off.
    max_message_bytes: 0 until the entity is created: then that of the tier, or 1 MiB.
    auto_delete: seconds without use after which the service deletes it; None: never.
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
    max_message_bytes: int = 0
    status: Status = Status.ACTIVE
    rules: tuple[SubscriptionRule, ...] = ()
    created: float = 0.0
    updated: float = 0.0
    kept: dict[str, str] = field(default_factory=dict)
    auto_delete: float | None = None

    @property
    def partitioned(self) -> bool:
        """Whether it was created with partitions; ask the topic of a subscription."""
        return self.kept.get("EnablePartitioning", "").strip().lower() == "true"

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


def check(entity: Entity, tier: Tier | None = None) -> Entity:
    """Return the entity if the service would accept it. Raises ConfigurationError otherwise.

    tier: its limits hold as well. Without one, locks may be shorter and messages of any size.
    """
    _check_name(entity)
    for rule in entity.rules:
        check_rule(rule)
    if not 1 <= entity.max_deliveries <= MAX_DELIVERIES:
        raise ConfigurationError(f"{entity.path}: MaxDeliveryCount must be 1 to {MAX_DELIVERIES}")
    least_lock, least_window, least_life, least_idle = _LEAST if tier else _LEAST_HERE
    longest = float("inf")
    for what, seconds, least, most in (
        ("a lock duration", entity.lock_seconds, least_lock, MAX_LOCK_SECONDS),
        (
            *("a duplicate detection window", entity.duplicate_window or MAX_DUPLICATE_WINDOW),
            *(least_window, MAX_DUPLICATE_WINDOW),
        ),
        ("a time to live", entity.time_to_live, least_life, longest),
        ("auto-delete on idle", entity.auto_delete, least_idle, longest),
    ):
        if seconds is not None and not least <= seconds <= most:
            end = f" to {most:g} s" if most < longest else " or more"
            allowed = f"{least:g} s{end} are allowed"
            raise ConfigurationError(f"{entity.path}: {what} of {seconds:g} s; {allowed}")
    if tier is None:
        return replace(entity, max_message_bytes=entity.max_message_bytes or MIB)
    return _of_tier(entity, tier)


_LEAST = (5.0, 20.0, 1.0, 300.0)
"""What the service takes at least, in seconds: lock, window, time to live, auto-delete on idle."""
_LEAST_HERE = (MIN_LOCK_SECONDS, 0.001, 0.001, 0.1)


def _of_tier(entity: Entity, tier: Tier) -> Entity:
    """Return the entity with the message size of the tier. Raises ConfigurationError."""
    least, most = tier.message_bytes
    size = entity.max_message_bytes or least
    if not least <= size <= most:
        raise ConfigurationError(
            f"{entity.path}: MaxMessageSizeInKilobytes of {size // KIB}; in the {tier.value} tier"
            f" {least // KIB} to {most // KIB} are allowed"
        )
    return replace(entity, max_message_bytes=size)


def check_rule(rule: SubscriptionRule) -> None:
    """Raise ConfigurationError unless the service takes the rule's name."""
    if not 0 < len(rule.name) <= MAX_SHORT_NAME or _NOT_IN_RULES.search(rule.name):
        raise ConfigurationError(
            f"{rule.name[:80]!r} is not a rule name: 1 to {MAX_SHORT_NAME} characters, and none of"
            " / \\ @ ? # *"
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
        {
            "name": rule.name,
            "created": rule.created,
            "filter": filter_record(rule.filter),
            "action": action_record(rule.action),
        }
        for rule in entity.rules
    ]
    return json.dumps(document)


def from_json(text: str) -> Entity:
    """Return the entity of a document that `to_json` wrote."""
    document: dict[str, Any] = json.loads(text)
    document["kind"], document["status"] = EntityKind(document["kind"]), Status(document["status"])
    document["rules"] = tuple(
        SubscriptionRule(
            *(rule["name"], filter_from(rule["filter"]), rule["created"]),
            action_from(rule.get("action")),  # files of earlier releases have none
        )
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
