"""Reads and writes the service's descriptions of rules."""

from __future__ import annotations

import datetime
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aztask.emulator.admin.atom import CONNECT, INSTANCE, SCHEMA, children, instant, local, tag
from aztask.emulator.amqp.encode import Described, Timestamp
from aztask.emulator.broker.entities import DEFAULT_RULE, SubscriptionRule
from aztask.emulator.broker.filters import (
    TIMESPAN,
    CorrelationFilter,
    FalseFilter,
    Filter,
    SqlFilter,
    TrueFilter,
)
from aztask.emulator.durations import format_duration, parse_duration
from aztask.errors import ConfigurationError

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
    action = parts.get("Action")
    if action is not None and (_text(children(action).get("SqlExpression"))):
        raise ConfigurationError("rule actions are not run here: create the rule without one")
    stated = _text(parts.get("Name"))
    return SubscriptionRule(name or stated or DEFAULT_RULE, _filter(parts.get("Filter")))


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
        if kind in ("int", "long", "short", "byte"):
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
        f'<Action i:type="EmptyRuleAction"/>{tag("CreatedAt", instant(rule.created))}'
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


def _sql(kind: str, text: str, parameters: dict[str, Any]) -> str:
    return (
        f'<Filter i:type="{kind}">{tag("SqlExpression", text)}'
        f"{tag('CompatibilityLevel', _SQL_LEVEL)}{_pairs('Parameters', parameters)}</Filter>"
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
            return "long", str(value)
        case float():
            return "double", str(value)
    return "string", str(value)
