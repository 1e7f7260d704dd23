"""Subscription filters: true, false, correlation and SQL, over a message's properties.

As the service documents: a correlation filter matches if all properties that it names are equal, a
SQL filter if its expression is true. NULL is not true.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import UUID

from aztask.emulator.amqp import sections
from aztask.emulator.amqp.encode import Described, Symbol, Timestamp
from aztask.emulator.amqp.sections import Sections
from aztask.emulator.broker.sql import Expression, NameLookup, parse_expression
from aztask.errors import ConfigurationError

TIMESPAN = Symbol("com.microsoft:timespan")
"""The descriptor of a duration in ticks of 100 ns, as the service's own clients encode it."""

SYSTEM_FIELDS = {
    "MessageId": sections.MESSAGE_ID,
    "To": sections.TO,
    "Label": sections.SUBJECT,
    "Subject": sections.SUBJECT,
    "ReplyTo": sections.REPLY_TO,
    "CorrelationId": sections.CORRELATION_ID,
    "ContentType": sections.CONTENT_TYPE,
    "SessionId": sections.GROUP_ID,
    "ReplyToSessionId": sections.REPLY_TO_GROUP,
}
_BY_LOWER_NAME = {name.lower(): index for name, index in SYSTEM_FIELDS.items()}


def system_property(message: Sections, name: str) -> Any:
    """Return a system property by its service name, without regard to case; None if absent."""
    index = _BY_LOWER_NAME.get(name.lower())
    return None if index is None else message.property(index)


def user_property(message: Sections, name: str) -> Any:
    """Return an application property; the same case wins over another case. None if absent."""
    properties = message.application_properties
    if name in properties:
        return properties[name]
    lowered = name.lower()
    return next((v for k, v in properties.items() if str(k).lower() == lowered), None)


@dataclass(frozen=True, slots=True)
class TrueFilter:
    """A filter that matches every message."""

    def matches(self, _message: Sections) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class FalseFilter:
    """A filter that matches no message."""

    def matches(self, _message: Sections) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class CorrelationFilter:
    """A filter that compares properties for equality.

    system: texts by the service's name of a system property. properties: application properties.
    """

    system: dict[str, str] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)

    def matches(self, message: Sections) -> bool:
        """Return whether all named properties are equal."""
        return all(
            _text(system_property(message, name)) == value for name, value in self.system.items()
        ) and all(
            _equal(user_property(message, name), value) for name, value in self.properties.items()
        )


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """An expression in the service's SQL dialect, with parameters (``@name``)."""

    text: str
    parameters: dict[str, Any] = field(default_factory=dict)
    expression: Expression = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Parse the expression. Raises ConfigurationError if that fails."""
        object.__setattr__(self, "expression", parse_expression(self.text))

    def matches(self, message: Sections) -> bool:
        """Return whether the expression is true."""
        names = NameLookup(
            lambda name: system_property(message, name),
            lambda name: user_property(message, name),
            self.parameters,
        )
        return self.expression(names) is True


Filter: TypeAlias = TrueFilter | FalseFilter | CorrelationFilter | SqlFilter


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(value, str) or isinstance(expected, str):
        return _text(value) == _text(expected)
    return value is not None and bool(value == expected)


def filter_record(rule_filter: Filter) -> dict[str, Any]:
    """Return plain data from which `filter_from` makes an equal filter.

    Raises ConfigurationError for a value that a filter cannot have.
    """
    match rule_filter:
        case CorrelationFilter(system, properties):
            return {"kind": "correlation", "system": system, "properties": _records(properties)}
        case SqlFilter(text, parameters):
            return {"kind": "sql", "text": text, "parameters": _records(parameters)}
        case FalseFilter():
            return {"kind": "false"}
        case TrueFilter():
            return {"kind": "true"}


def filter_from(record: dict[str, Any]) -> Filter:
    """Return the filter of a record that `filter_record` made."""
    match record["kind"]:
        case "correlation":
            return CorrelationFilter(record["system"], _values(record["properties"]))
        case "sql":
            return SqlFilter(record["text"], _values(record["parameters"]))
        case "false":
            return FalseFilter()
        case _:
            return TrueFilter()


def _records(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _record(value) for name, value in values.items()}


def _record(value: Any) -> Any:
    """Return a value as JSON data; a type that JSON lacks becomes an object {type: value}."""
    match value:
        case Timestamp():
            return {"timestamp": int(value)}
        case Described(descriptor=descriptor, value=int(ticks)) if descriptor == TIMESPAN:
            return {"timespan": ticks}
        case UUID():
            return {"uuid": str(value)}
        case bytes():
            return {"binary": value.hex()}
        case None | bool() | int() | float() | str():
            return value
    raise ConfigurationError(f"a filter cannot compare with a {type(value).__name__}")


def _values(records: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(record) for name, record in records.items()}


def _value(record: Any) -> Any:
    match record:
        case {"timestamp": milliseconds}:
            return Timestamp(milliseconds)
        case {"timespan": ticks}:
            return Described(TIMESPAN, ticks)
        case {"uuid": text}:
            return UUID(text)
        case {"binary": text}:
            return bytes.fromhex(text)
    return record
