"""Reads and writes the service's descriptions of queues, topics and subscriptions.

Rules
1. Properties without effect here (sizes, partitions, metadata, authorization rules) are stored as
   text and returned unchanged. Unsupported settings that would change behaviour are refused.
2. An update replaces the complete description, as on the service: an absent property gets its
   default. Three things stay: sessions and duplicate detection, which cannot be changed, and the
   rules of a subscription, which have requests of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

from aztask.emulator.admin.atom import CONNECT, COUNTS, INSTANCE, children, instant, tag
from aztask.emulator.admin.rules import rule_from
from aztask.emulator.broker.entities import Entity, Kind, Status, check_window
from aztask.emulator.durations import MAX_DURATION, format_duration, parse_duration
from aztask.errors import ConfigurationError
from aztask.queues.engine import Counts

NAMES = {
    Kind.QUEUE: "QueueDescription",
    Kind.TOPIC: "TopicDescription",
    Kind.SUBSCRIPTION: "SubscriptionDescription",
}
_WINDOW = "DuplicateDetectionHistoryTimeWindow"
_DEFAULT_WINDOW = 600.0
_KEPT = (
    *("MaxSizeInMegabytes", "EnableBatchedOperations", "UserMetadata", "AutoDeleteOnIdle"),
    *("EnablePartitioning", "EnableExpress", "SupportOrdering", "AuthorizationRules"),
    "FilteringMessagesBeforePublishing",
)
_DEFAULTS = {
    "MaxSizeInMegabytes": "1024",
    "EnableBatchedOperations": "true",
    "AutoDeleteOnIdle": format_duration(None),
    "EnablePartitioning": "false",
    "EnableExpress": "false",
    "SupportOrdering": "true",
}


@dataclass(frozen=True, slots=True)
class EntitySnapshot:
    """An entity and its counts at one moment.

    counts: of its messages. subscriptions: the number of a topic's subscriptions. base:
    ``sb://host``. filters: the numbers of SQL and of correlation filters of a topic's
    subscriptions. transfer_dead: the number of its transfer dead letters.
    """

    entity: Entity
    counts: Counts
    subscriptions: int
    base: str
    filters: tuple[int, int]
    transfer_dead: int = 0


def _flag(text: str) -> bool:
    return text.strip().lower() in ("true", "1")


def _unlimited(text: str) -> float | None:
    seconds = parse_duration(text)
    return None if seconds >= MAX_DURATION else seconds


def _status(text: str) -> Status:
    try:
        return Status(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not a status: {[s.value for s in Status]}") from None


def _target(text: str) -> str:
    """Return the entity of a forwarding target, which clients send as a name or as a URL."""
    return unquote(urlsplit(text).path if "://" in text else text).strip("/")


_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    "LockDuration": ("lock_seconds", parse_duration),
    "MaxDeliveryCount": ("max_deliveries", int),
    "DefaultMessageTimeToLive": ("time_to_live", _unlimited),
    "DeadLetteringOnMessageExpiration": ("dead_letter_expired", _flag),
    "DeadLetteringOnFilterEvaluationExceptions": ("dead_letter_filter_errors", _flag),
    "RequiresSession": ("sessions", _flag),
    "ForwardTo": ("forward_to", _target),
    "ForwardDeadLetteredMessagesTo": ("forward_dead_letters_to", _target),
    "Status": ("status", _status),
    "MaxMessageSizeInKilobytes": ("max_message_bytes", lambda text: int(text) * 1024),
}


def created_from(element: ElementTree.Element, path: str, kind: Kind) -> Entity:
    """Return the new entity that a description asks for. Raises ConfigurationError."""
    entity = _entity(element, Entity(path, kind))
    rule = children(element).get("DefaultRuleDescription")
    return entity if rule is None else replace(entity, rules=(rule_from(rule),))


def updated_from(element: ElementTree.Element, existing: Entity) -> Entity:
    """Return an existing entity as updated by a description. Raises ConfigurationError."""
    fixed = Entity(
        existing.path,
        existing.kind,
        sessions=existing.sessions,
        duplicate_window=existing.duplicate_window,
        rules=existing.rules,
    )
    return _entity(element, fixed)


def _entity(element: ElementTree.Element, base: Entity) -> Entity:
    """Return `base` with the properties of a description."""
    values: dict[str, Any] = {}
    kept: dict[str, str] = {}
    parts = children(element)
    for name, part in parts.items():
        text = part.text or ""
        if name in _READ:
            attribute, convert = _READ[name]
            try:
                values[attribute] = convert(text)
            except ValueError as error:
                raise ConfigurationError(f"{name}: {error}") from None
        elif name in _KEPT:
            kept[name] = _inner(part) if len(part) else text
    detects = base.duplicate_window > 0
    if "RequiresDuplicateDetection" in parts:
        detects = _flag(parts["RequiresDuplicateDetection"].text or "")
    window = parts[_WINDOW].text if _WINDOW in parts else None
    seconds = (parse_duration(window) if window else 0.0) or _DEFAULT_WINDOW
    check_window(base.path, seconds)
    if window and not detects:
        kept[_WINDOW] = window
    return replace(base, kept=kept, duplicate_window=seconds if detects else 0.0, **values)


def _inner(element: ElementTree.Element) -> str:
    """Return the element's children as XML text, unchanged."""
    return "".join(ElementTree.tostring(child, "unicode") for child in element)


def description_of(shown: EntitySnapshot) -> str:
    """Return the description of an entity, in XML."""
    entity = shown.entity
    name = NAMES[entity.kind]
    write = {Kind.QUEUE: _queue, Kind.TOPIC: _topic, Kind.SUBSCRIPTION: _subscription}
    body = "".join(write[entity.kind](shown))
    return f'<{name} xmlns="{CONNECT}" xmlns:i="{INSTANCE}">{body}</{name}>'


def _queue(shown: EntitySnapshot) -> list[str]:
    entity = shown.entity
    return [
        tag("LockDuration", format_duration(entity.lock_seconds)),
        *_some(entity, "MaxSizeInMegabytes"),
        *_duplicates(entity),
        tag("RequiresSession", _word(entity.sessions)),
        tag("DefaultMessageTimeToLive", format_duration(entity.time_to_live)),
        tag("DeadLetteringOnMessageExpiration", _word(entity.dead_letter_expired)),
        tag("MaxDeliveryCount", str(entity.max_deliveries)),
        *_some(entity, "EnableBatchedOperations"),
        tag("SizeInBytes", "0"),
        tag("MessageCount", str(sum(shown.counts))),
        tag("IsAnonymousAccessible", "false"),
        *_some(entity, "AuthorizationRules"),
        tag("Status", entity.status.value),
        *_forward(shown, "ForwardTo", entity.forward_to),
        *_some(entity, "UserMetadata"),
        *_times(entity),
        *_some(entity, "SupportOrdering"),
        _counts(shown),
        *_some(entity, "AutoDeleteOnIdle", "EnablePartitioning"),
        tag("EntityAvailabilityStatus", "Available"),
        *_forward(shown, "ForwardDeadLetteredMessagesTo", entity.forward_dead_letters_to),
        *_some(entity, "EnableExpress"),
        tag("MaxMessageSizeInKilobytes", str(entity.max_message_bytes // 1024)),
    ]


def _topic(shown: EntitySnapshot) -> list[str]:
    entity = shown.entity
    return [
        tag("DefaultMessageTimeToLive", format_duration(entity.time_to_live)),
        *_some(entity, "MaxSizeInMegabytes"),
        *_duplicates(entity),
        *_some(entity, "EnableBatchedOperations"),
        tag("SizeInBytes", "0"),
        tag("IsAnonymousAccessible", "false"),
        *_some(entity, "AuthorizationRules"),
        tag("Status", entity.status.value),
        *_some(entity, "UserMetadata"),
        *_times(entity),
        *_some(entity, "SupportOrdering"),
        _counts(shown),
        tag("SubscriptionCount", str(shown.subscriptions)),
        *_filter_counts(shown),
        *_some(entity, "AutoDeleteOnIdle", "EnablePartitioning"),
        tag("EntityAvailabilityStatus", "Available"),
        *_some(entity, "EnableExpress"),
        tag("MaxMessageSizeInKilobytes", str(entity.max_message_bytes // 1024)),
    ]


def _subscription(shown: EntitySnapshot) -> list[str]:
    entity = shown.entity
    return [
        tag("LockDuration", format_duration(entity.lock_seconds)),
        tag("RequiresSession", _word(entity.sessions)),
        tag("DefaultMessageTimeToLive", format_duration(entity.time_to_live)),
        tag("DeadLetteringOnMessageExpiration", _word(entity.dead_letter_expired)),
        tag("DeadLetteringOnFilterEvaluationExceptions", _word(entity.dead_letter_filter_errors)),
        tag("MessageCount", str(sum(shown.counts))),
        tag("MaxDeliveryCount", str(entity.max_deliveries)),
        *_some(entity, "EnableBatchedOperations"),
        tag("Status", entity.status.value),
        *_forward(shown, "ForwardTo", entity.forward_to),
        *_times(entity),
        _counts(shown),
        *_some(entity, "UserMetadata"),
        *_forward(shown, "ForwardDeadLetteredMessagesTo", entity.forward_dead_letters_to),
        *_some(entity, "AutoDeleteOnIdle"),
        tag("EntityAvailabilityStatus", "Available"),
    ]


def _filter_counts(shown: EntitySnapshot) -> list[str]:
    sql, correlation = shown.filters
    return [tag("SqlFilterCount", str(sql)), tag("CorrelationFilterCount", str(correlation))]


def _word(value: bool) -> str:
    return "true" if value else "false"


def _duplicates(entity: Entity) -> list[str]:
    window = format_duration(entity.duplicate_window or _DEFAULT_WINDOW)
    return [
        tag("RequiresDuplicateDetection", _word(entity.duplicate_window > 0)),
        tag(_WINDOW, entity.kept.get(_WINDOW, window)),
    ]


def _times(entity: Entity) -> list[str]:
    return [
        tag("CreatedAt", instant(entity.created)),
        tag("UpdatedAt", instant(entity.updated)),
        tag("AccessedAt", instant(entity.updated)),
    ]


def _forward(shown: EntitySnapshot, name: str, path: str) -> list[str]:
    return [tag(name, f"{shown.base}/{path}")] if path else []


def _counts(shown: EntitySnapshot) -> str:
    counts = shown.counts
    numbers = {
        "ActiveMessageCount": counts.active + counts.leased + counts.deferred,
        "DeadLetterMessageCount": counts.dead,
        "ScheduledMessageCount": counts.scheduled,
        "TransferMessageCount": 0,
        "TransferDeadLetterMessageCount": shown.transfer_dead,
    }
    inside = "".join(f"<d:{name}>{number}</d:{name}>" for name, number in numbers.items())
    return f'<CountDetails xmlns:d="{COUNTS}">{inside}</CountDetails>'


def _some(entity: Entity, *names: str) -> list[str]:
    """Return elements for properties without effect here: as stored, or their defaults."""
    texts = {name: entity.kept.get(name, _DEFAULTS.get(name)) for name in names}
    return [
        f"<{name}>{text}</{name}>" if name == "AuthorizationRules" else tag(name, text)
        for name, text in texts.items()
        if text is not None
    ]
