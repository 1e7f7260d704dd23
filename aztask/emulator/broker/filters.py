"""Subscription filters: true, false, correlation and SQL, over a message's properties; and actions.

As the service documents: a correlation filter matches if all properties that it names are equal, a
SQL filter if its expression is true. NULL is not true. An action changes the copy of a message that
a subscription gets.

Values are equal if they are of one type: 5 is not "5", and true is not 1. Integers and real numbers
of every width are one type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import UUID

from aztask.emulator.amqp import sections
from aztask.emulator.amqp.encode import Described, Int32, Symbol, Timestamp
from aztask.emulator.amqp.sections import Sections
from aztask.emulator.broker.sql import (
    MAX_INTEGER,
    ActionStatement,
    Expression,
    NameLookup,
    parse_action,
    parse_expression,
)
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


REMOVED: Final = object()
"""The value of an application property that an action removes."""
_INT32 = range(-(2**31), 2**31)


class RuleMessage:
    """A message as rules see it, and the changes that an action made.

    message: its sections. broker: the values of `sql.OF_THE_BROKER`; a missing one is NULL.
    fields: the changed fields of its properties section, by index. properties: the changed
    application properties; `REMOVED` for one that is gone.
    """

    def __init__(self, message: Sections, broker: Mapping[str, Any] | None = None) -> None:
        self.message = message
        self.broker = broker or {}
        self.fields: dict[int, Any] = {}
        self.properties: dict[str, Any] = {}

    def system(self, name: str) -> Any:
        """Return a system property by the service's name; None if it is absent."""
        index = SYSTEM_FIELDS.get(name)
        if index is None:
            return self.broker.get(name)
        return self.fields[index] if index in self.fields else self.message.property(index)

    def user(self, name: str) -> Any:
        """Return an application property; None if it is absent."""
        name = self._spelled(name)
        value = self.properties.get(name, self.message.application_properties.get(name))
        return None if value is REMOVED else value

    def _spelled(self, name: str) -> str:
        """Return the name as the message has it; the same case wins over another case."""
        known = (self.properties, self.message.application_properties)
        if any(name in each for each in known):
            return name
        lowered = name.lower()
        same = (str(key) for each in known for key in each if str(key).lower() == lowered)
        return next(same, name)

    def set(self, system: bool, name: str, value: Any) -> None:
        """Change a property; None removes a system property."""
        if system:
            text = value if value is None or isinstance(value, str) else str(value)
            self.fields[SYSTEM_FIELDS[name]] = text
        elif value is REMOVED:
            self.properties[self._spelled(name)] = REMOVED
        else:
            self.properties[self._spelled(name)] = _converted(value, self.user(name))


def _converted(value: Any, old: Any) -> Any:
    """Return a new value in the type of the old one, if it can be converted.

    The service documents that SET converts "if possible", and not how.
    """
    if value is None or type(value) is type(old):
        return value
    converted = value
    with contextlib.suppress(ValueError, OverflowError):
        match old:
            case str():
                converted = str(value).lower() if isinstance(value, bool) else str(value)
            case bool() if str(value).lower() in ("true", "false"):
                converted = str(value).lower() == "true"
            case Int32() if type(value) in (int, str) and int(value) in _INT32:
                converted = Int32(value)
            case int() if type(old) is int and isinstance(value, (int, str)):
                converted = int(value) if abs(int(value)) <= MAX_INTEGER else value
            case float() if isinstance(value, (int, str)):
                converted = float(value)
    return converted


@dataclass(frozen=True, slots=True)
class TrueFilter:
    """A filter that matches every message."""

    def matches(self, _message: RuleMessage) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class FalseFilter:
    """A filter that matches no message."""

    def matches(self, _message: RuleMessage) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class CorrelationFilter:
    """A filter that compares properties for equality.

    system: texts by the service's name of a system property. properties: application properties.
    """

    system: dict[str, str] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a filter without a property. Raises ConfigurationError."""
        if not self.system and not self.properties:
            raise ConfigurationError(
                "a correlation filter without a property fits all messages: name one, or use a"
                " true filter"
            )

    def matches(self, message: RuleMessage) -> bool:
        """Return whether all named properties are equal."""
        return all(
            _text(message.system(name)) == value for name, value in self.system.items()
        ) and all(_equal(message.user(name), value) for name, value in self.properties.items())


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """An expression in the service's SQL dialect, with parameters (``@name``)."""

    text: str
    parameters: dict[str, Any] = field(default_factory=dict)
    expression: Expression = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Parse the expression. Raises ConfigurationError if that fails."""
        object.__setattr__(self, "expression", parse_expression(self.text))

    def matches(self, message: RuleMessage) -> bool:
        """Return whether the expression is true. Raises SqlFault."""
        return self.expression(_lookup(message, self.parameters)) is True


def _lookup(message: RuleMessage, parameters: Mapping[str, Any]) -> NameLookup:
    return NameLookup(message.system, message.user, parameters)


Filter: TypeAlias = TrueFilter | FalseFilter | CorrelationFilter | SqlFilter


@dataclass(frozen=True, slots=True)
class RuleAction:
    """Statements in the service's SQL dialect that change a message, with parameters."""

    text: str
    parameters: dict[str, Any] = field(default_factory=dict)
    statements: list[ActionStatement] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Parse the statements. Raises ConfigurationError if that fails."""
        object.__setattr__(self, "statements", parse_action(self.text))

    def run(self, message: RuleMessage) -> None:
        """Change the message, one statement after the other. Raises SqlFault."""
        names = _lookup(message, self.parameters)
        for system, name, expression in self.statements:
            gone = None if system else REMOVED
            message.set(system, name, gone if expression is None else expression(names))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _equal(value: Any, expected: Any) -> bool:
    if value is None or _kind(value) is not _kind(expected):
        return False
    return bool(value == expected)


def _kind(value: Any) -> type:
    """Return the type that values are compared in."""
    if isinstance(value, str):
        return str  # symbols, too
    return float if type(value) in (int, Int32) else type(value)


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


def action_record(action: RuleAction | None) -> dict[str, Any] | None:
    """Return plain data from which `action_from` makes an equal action."""
    if action is None:
        return None
    return {"text": action.text, "parameters": _records(action.parameters)}


def action_from(record: dict[str, Any] | None) -> RuleAction | None:
    """Return the action of a record that `action_record` made."""
    if record is None:
        return None
    return RuleAction(record["text"], _values(record["parameters"]))


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
        case Int32():
            return {"int": int(value)}
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
        case {"int": number}:
            return Int32(number)
        case {"binary": text}:
            return bytes.fromhex(text)
    return record
