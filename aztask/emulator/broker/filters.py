"""Subscription filters: true, false, correlation and SQL, over a message's properties.

A correlation filter matches when every property it names is equal; a SQL filter when its expression
is true (NULL counts as not true), as the service documents both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import UUID

from aztask.emulator.amqp import sections
from aztask.emulator.amqp.sections import Sections
from aztask.emulator.amqp.types import Described, Symbol, Timestamp
from aztask.emulator.broker.sql import Expression, NameLookup, parse_expression
from aztask.errors import ConfigurationError

TIMESPAN = Symbol("com.microsoft:timespan")
"""Describes a duration in ticks of 100 ns, as the service's own clients encode it."""

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
    """A system property by its service name, without regard to case; None where absent."""
    index = _BY_LOWER_NAME.get(name.lower())
    return None if index is None else message.property(index)


def user_property(message: Sections, name: str) -> Any:
    """An application property; an exact match goes before one in another case."""
    properties = message.application_properties
    if name in properties:
        return properties[name]
    lowered = name.lower()
    return next((v for k, v in properties.items() if str(k).lower() == lowered), None)


@dataclass(frozen=True, slots=True)
class TrueFilter:
    """Every message."""

    def matches(self, _message: Sections) -> bool:
        """True."""
        return True


@dataclass(frozen=True, slots=True)
class FalseFilter:
    """No message."""

    def matches(self, _message: Sections) -> bool:
        """False."""
        return False


@dataclass(frozen=True, slots=True)
class CorrelationFilter:
    """system: service names to texts. properties: application properties."""

    system: dict[str, str] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)

    def matches(self, message: Sections) -> bool:
        """Whether every named property is equal."""
        return all(
            _text(system_property(message, name)) == wanted for name, wanted in self.system.items()
        ) and all(
            _equal(user_property(message, name), wanted) for name, wanted in self.properties.items()
        )


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """An expression in the service's SQL dialect, with parameters (``@name``)."""

    text: str
    parameters: dict[str, Any] = field(default_factory=dict)
    expression: Expression = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ConfigurationError where the expression is not understood."""
        object.__setattr__(self, "expression", parse_expression(self.text))

    def matches(self, message: Sections) -> bool:
        """Whether the expression is true."""
        names = NameLookup(
            lambda name: system_property(message, name),
            lambda name: user_property(message, name),
            self.parameters,
        )
        return self.expression(names) is True


Filter: TypeAlias = TrueFilter | FalseFilter | CorrelationFilter | SqlFilter


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) or isinstance(wanted, str):
        return _text(value) == _text(wanted)
    return value is not None and bool(value == wanted)


def filter_record(rule_filter: Filter) -> dict[str, Any]:
    """Plain data that `filter_from` turns back into an equal filter.

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
    """The filter of a record."""
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
    """JSON for a value: types that JSON lacks are an object of one member, the type."""
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
