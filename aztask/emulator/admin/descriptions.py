"""Reads and writes the service's descriptions of queues, topics and subscriptions.

Rules
1. Properties without effect here (sizes, partitions, metadata, authorization rules) are stored as
   text and returned unchanged. Unsupported settings that would change behaviour are refused.
2. An update replaces the complete description, as on the service: an absent property gets its
   default. Three things stay: sessions and duplicate detection, which cannot be changed, and the
   rules of a subscription, which have requests of their own.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from aztask.emulator.amqp.encode import Described, Int32, Timestamp
from aztask.emulator.broker.entities import (
    DEFAULT_RULE,
    Entity,
    EntityKind,
    Status,
    SubscriptionRule,
    check,
)
from aztask.emulator.broker.filters import (
    TIMESPAN,
    CorrelationFilter,
    FalseFilter,
    Filter,
    RuleAction,
    SqlFilter,
    TrueFilter,
)
from aztask.emulator.config import MAX_DURATION, format_duration, parse_duration
from aztask.errors import ConfigurationError
from aztask.queues.engine import Counts

# -- Atom ------------------------------------------------------------------------------------------
#
# Atom feeds and entries with the service's descriptions (RFC 4287 and the service's schema).

ATOM = "http://www.w3.org/2005/Atom"
CONNECT = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
COUNTS = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
INSTANCE = "http://www.w3.org/2001/XMLSchema-instance"
SCHEMA = "http://www.w3.org/2001/XMLSchema"


def tag(name: str, text: str) -> str:
    """Return an XML element without attributes, its text escaped."""
    return f"<{name}>{escape(text)}</{name}>"


def instant(seconds: float) -> str:
    """Return UTC epoch seconds as an xsd:dateTime."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def entry(url: str, title: str, times: tuple[float, float], content: str) -> str:
    """Return an entry.

    times: of publication and of update, UTC epoch seconds. content: a description in XML.
    """
    return (
        f'<entry xmlns="{ATOM}"><id>{escape(url)}</id>'
        f'<title type="text">{escape(title)}</title>'
        f"<published>{instant(times[0])}</published><updated>{instant(times[1])}</updated>"
        f'<author><name>aztask</name></author><link rel="self" href={quoteattr(url)}/>'
        f'<content type="application/xml">{content}</content></entry>'
    )


def feed(url: str, title: str, now: float, entries: Iterable[str], following: str | None) -> str:
    """Return a feed. following: the URL of the next page, None on the last one."""
    further = f'<link rel="next" href={quoteattr(following)}/>' if following else ""
    return (
        f'<feed xmlns="{ATOM}"><title type="text">{escape(title)}</title><id>{escape(url)}</id>'
        f'<updated>{instant(now)}</updated><link rel="self" href={quoteattr(url)}/>{further}'
        f"{''.join(entries)}</feed>"
    )


def error(status: int, detail: str) -> str:
    """Return the document of a response with a status of 400 or above."""
    return f"<Error>{tag('Code', str(status))}{tag('Detail', detail)}</Error>"


def description(body: bytes, name: str) -> ElementTree.Element:
    """Return the element `name` of a request's entry. Raises ConfigurationError.

    Document type and entity declarations are refused, because they can blow up a parser.
    """
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise ConfigurationError("the request's XML must not declare anything")
    try:
        root = ElementTree.fromstring(body)  # noqa: S314  # declarations are refused above
    except ElementTree.ParseError as failure:
        raise ConfigurationError(f"the request is not XML: {failure}") from None
    found = (
        root if local(root) == name else next((e for e in root.iter() if local(e) == name), None)
    )
    if found is None:
        raise ConfigurationError(f"the request has no {name}")
    return found


def local(element: ElementTree.Element) -> str:
    """Return an element's name without its namespace, which differs between clients."""
    return element.tag.rsplit("}", 1)[-1]


def children(element: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """Return the element's children by local name."""
    return {local(child): child for child in element}


# -- Queues, topics and subscriptions --------------------------------------------------------------


NAMES = {
    EntityKind.QUEUE: "QueueDescription",
    EntityKind.TOPIC: "TopicDescription",
    EntityKind.SUBSCRIPTION: "SubscriptionDescription",
}
_WINDOW = "DuplicateDetectionHistoryTimeWindow"
_DEFAULT_WINDOW = 600.0
_KEPT = (
    *("MaxSizeInMegabytes", "EnableBatchedOperations", "UserMetadata"),
    *("EnablePartitioning", "EnableExpress", "SupportOrdering", "AuthorizationRules"),
    "FilteringMessagesBeforePublishing",
)
_DEFAULTS = {
    "MaxSizeInMegabytes": "1024",
    "EnableBatchedOperations": "true",
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
    "AutoDeleteOnIdle": ("auto_delete", _unlimited),
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


def created_from(element: ElementTree.Element, path: str, kind: EntityKind) -> Entity:
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
    check(replace(base, duplicate_window=seconds))
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
    write = {
        EntityKind.QUEUE: _queue,
        EntityKind.TOPIC: _topic,
        EntityKind.SUBSCRIPTION: _subscription,
    }
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
        _idle(entity),
        *_some(entity, "EnablePartitioning"),
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
        _idle(entity),
        *_some(entity, "EnablePartitioning"),
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
        _idle(entity),
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


def _idle(entity: Entity) -> str:
    return tag("AutoDeleteOnIdle", format_duration(entity.auto_delete))


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


# -- Rules -----------------------------------------------------------------------------------------
#
# Reads and writes the service's descriptions of rules.

_TYPE = f"{{{INSTANCE}}}type"
_SYSTEM = (
    *("CorrelationId", "MessageId", "To", "ReplyTo", "Label", "SessionId"),
    *("ReplyToSessionId", "ContentType"),
)
_SQL_LEVEL = "20"
_TICKS = 10_000_000  # .NET's ticks per second


def rule_from(element: ElementTree.Element, name: str = "") -> SubscriptionRule:
    """Return the rule of a description. Raises ConfigurationError.

    name: from the request's path; wins over the name in the description.
    """
    parts = children(element)
    stated = _text(parts.get("Name"))
    return SubscriptionRule(
        name or stated or DEFAULT_RULE,
        _filter(parts.get("Filter")),
        action=_action(parts.get("Action")),
    )


def _action(element: ElementTree.Element | None) -> RuleAction | None:
    parts = {} if element is None else children(element)
    text = _text(parts.get("SqlExpression"))
    return RuleAction(text, _values(parts.get("Parameters"))) if text else None


def _text(element: ElementTree.Element | None) -> str:
    return "" if element is None else element.text or ""


def _filter(element: ElementTree.Element | None) -> Filter:
    if element is None:
        return TrueFilter()
    kind = element.get(_TYPE, "").rsplit(":", 1)[-1]
    parts = children(element)
    match kind:
        case "TrueFilter":
            return TrueFilter()
        case "FalseFilter":
            return FalseFilter()
        case "SqlFilter":
            return SqlFilter(_text(parts.get("SqlExpression")), _values(parts.get("Parameters")))
        case "CorrelationFilter":
            system = {name: _text(parts[name]) for name in _SYSTEM if _text(parts.get(name))}
            return CorrelationFilter(system, _values(parts.get("Properties")))
    raise ConfigurationError(f"an unknown filter {kind!r}")


def _values(element: ElementTree.Element | None) -> dict[str, Any]:
    values = {}
    for pair in element if element is not None else ():
        parts = children(pair)
        if local(pair) == "KeyValueOfstringanyType" and {"Key", "Value"} <= parts.keys():
            values[_text(parts["Key"])] = _value(parts["Value"])
    return values


def _value(element: ElementTree.Element) -> Any:
    kind = element.get(_TYPE, "").rsplit(":", 1)[-1]
    text = element.text or ""
    try:
        if kind in ("int", "short", "byte", "unsignedByte", "unsignedShort"):
            return _int32(text)
        if kind in ("long", "unsignedInt", "unsignedLong"):
            return int(text)
        if kind in ("double", "float", "decimal"):
            return float(text)
        if kind == "dateTime":
            return _timestamp(text)
        if kind == "duration":
            return Described(TIMESPAN, round(parse_duration(text) * _TICKS))
    except ValueError:
        raise ConfigurationError(f"{text[:40]!r} is not of type {kind}") from None
    return text.lower() == "true" if kind == "boolean" else text


def _int32(text: str) -> Int32:
    number = int(text)
    if not -(2**31) <= number < 2**31:
        raise ValueError(text)
    return Int32(number)


def _timestamp(text: str) -> Timestamp:
    """Read an xsd:dateTime; without a time zone it is UTC, as on the service."""
    moment = datetime.datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return Timestamp(round(moment.timestamp() * 1000))


def rule_description(rule: SubscriptionRule) -> str:
    """Return the description of a rule, in XML."""
    return (
        f'<RuleDescription xmlns="{CONNECT}" xmlns:i="{INSTANCE}">{_written(rule.filter)}'
        f"{_written_action(rule.action)}{tag('CreatedAt', instant(rule.created))}"
        f"{tag('Name', rule.name)}</RuleDescription>"
    )


def _written(rule_filter: Filter) -> str:
    match rule_filter:
        case CorrelationFilter(system, properties):
            parts = [tag(name, system[name]) for name in _SYSTEM if name in system]
            pairs = _pairs("Properties", properties)
            return f'<Filter i:type="CorrelationFilter">{"".join(parts)}{pairs}</Filter>'
        case SqlFilter(text, parameters):
            return _sql("SqlFilter", text, parameters)
        case FalseFilter():
            return _sql("FalseFilter", "1=0", {})
        case TrueFilter():
            return _sql("TrueFilter", "1=1", {})


def _written_action(action: RuleAction | None) -> str:
    if action is None:
        return '<Action i:type="EmptyRuleAction"/>'
    return _sql("SqlRuleAction", action.text, action.parameters, "Action")


def _sql(kind: str, text: str, parameters: dict[str, Any], name: str = "Filter") -> str:
    return (
        f'<{name} i:type="{kind}">{tag("SqlExpression", text)}'
        f"{tag('CompatibilityLevel', _SQL_LEVEL)}{_pairs('Parameters', parameters)}</{name}>"
    )


def _pairs(name: str, values: dict[str, Any]) -> str:
    if not values:
        return ""
    pairs = []
    for key, value in values.items():
        kind, text = _typed(value)
        pairs.append(
            f"<KeyValueOfstringanyType>{tag('Key', key)}"
            # The service's prefix: JavaScript's SDK cuts off five characters.
            f'<Value xmlns:d6p1="{SCHEMA}" i:type="d6p1:{kind}">{escape(text)}</Value>'
            "</KeyValueOfstringanyType>"
        )
    return f"<{name}>{''.join(pairs)}</{name}>"


def _typed(value: Any) -> tuple[str, str]:
    """Return the XML schema type of a value, and its text."""
    match value:
        case bool():
            return "boolean", str(value).lower()
        case Timestamp():
            return "dateTime", instant(value / 1000).removesuffix("Z")
        case Described():
            return "duration", format_duration(value.value / _TICKS)
        case int():
            return "int" if isinstance(value, Int32) else "long", str(value)
        case float():
            return "double", str(value)
    return "string", str(value)
