"""The configuration file: the JSON of Microsoft's emulator, as its documentation describes it.

``{"UserConfig": {"Namespaces": [{"Name", "Queues": [...], "Topics": [...]}]}}``. There must be one
namespace. Comments may be in it, as in the files that Microsoft publishes. A property that is not
known is ignored with a warning: it may be one that changes nothing here, or a typo.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aztask.emulator.broker.access import Rule
from aztask.emulator.broker.entities import (
    SUBSCRIPTIONS,
    Entity,
    EntityKind,
    SubscriptionRule,
    Tier,
)
from aztask.emulator.broker.entra import EntraTokens
from aztask.emulator.broker.filters import (
    CorrelationFilter,
    Filter,
    RuleAction,
    SqlFilter,
    TrueFilter,
)
from aztask.emulator.faults import NO_FAULTS, Faults
from aztask.errors import ConfigurationError, did_you_mean

# -- Durations -------------------------------------------------------------------------------------
#
# ISO 8601 durations, as the service writes them: ``P14DT3H``, ``PT1M30.5S``.

MAX_DURATION = 922_337_203_685.0
"""Seconds of .NET's largest TimeSpan, with which the service writes "never"."""

_PATTERN = re.compile(
    r"P(?:(?P<weeks>\d+(?:\.\d+)?)W)?(?:(?P<days>\d+(?:\.\d+)?)D)?"
    r"(?:T(?:(?P<hours>\d+(?:\.\d+)?)H)?(?:(?P<minutes>\d+(?:\.\d+)?)M)?"
    r"(?:(?P<seconds>\d+(?:\.\d+)?)S)?)?\Z"
)
_SECONDS = {"weeks": 604800.0, "days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration, at most `MAX_DURATION`. Raises ConfigurationError."""
    found = _PATTERN.match(text.strip())
    if found is None or not any(found.groups()):
        raise ConfigurationError(f"{text[:60]!r} is not a duration such as PT1M or P14D")
    total = sum(float(value) * _SECONDS[name] for name, value in found.groupdict("0").items())
    return min(total, MAX_DURATION)


def format_duration(seconds: float | None) -> str:
    """Write a duration of `seconds`; None is the service's "never"."""
    if seconds is None or seconds >= MAX_DURATION:
        return "P10675199DT2H48M5.4775807S"
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(hours, "H"), (minutes, "M"), (round(rest, 7), "S")]
    time = "".join(f"{value:.15g}{unit}" for value, unit in parts if value)
    date = f"{days:.0f}D" if days else ""
    return f"P{date}{'T' + time if time else ''}" if date or time else "PT0S"


# -- The configuration file ------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_TEXT = r'("(?:[^"\\]|\\.)*")'
_TEXT_OR_COMMENT = re.compile(_TEXT + r"|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TEXT_OR_LAST_COMMA = re.compile(_TEXT + r"|,(?=\s*[\]}])", re.DOTALL)
_DEFAULT_WINDOW = 600.0
_DURATIONS = {"LockDuration": "lock_seconds", "DefaultMessageTimeToLive": "time_to_live"}
_PLAIN = {
    "MaxDeliveryCount": ("max_deliveries", int),
    "RequiresSession": ("sessions", bool),
    "DeadLetteringOnMessageExpiration": ("dead_letter_expired", bool),
    "DeadLetteringOnFilterEvaluationExceptions": ("dead_letter_filter_errors", bool),
    "ForwardTo": ("forward_to", str),
    "ForwardDeadLetteredMessagesTo": ("forward_dead_letters_to", str),
}
_DUPLICATES = ("RequiresDuplicateDetection", "DuplicateDetectionHistoryTimeWindow")
_KNOWN = [*_DURATIONS, *_PLAIN, *_DUPLICATES]
_PARTS = ("Name", "Properties")
_SYSTEM = (
    *("ContentType", "CorrelationId", "Label", "MessageId", "ReplyTo", "ReplyToSessionId"),
    *("SessionId", "To"),
)


def read_config(path: Path) -> list[Entity]:
    """Read the entities of a configuration file, sorted so that they can be created in order.

    Raises ConfigurationError with the file and the place of the mistake.
    """
    try:
        text = _TEXT_OR_COMMENT.sub(r"\1", path.read_text("utf-8-sig"))
        document = json.loads(_TEXT_OR_LAST_COMMA.sub(r"\1", text))
        json.dumps(document, ensure_ascii=False).encode()  # a lone surrogate cannot be stored
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: cannot be read as JSON: {error}") from error
    try:
        return entities_of(document)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def entities_of(document: Any) -> list[Entity]:
    """Return the entities of a parsed configuration file. Raises ConfigurationError."""
    _warn("the file", document, ("$schema", "UserConfig"))
    settings = _part(document, "UserConfig", dict)
    _warn("UserConfig", settings, ("Namespaces", "Logging"))
    namespaces = _part(settings, "Namespaces", list)
    if len(namespaces) != 1:
        raise ConfigurationError(f"Namespaces has {len(namespaces)} entries; exactly one is used")
    namespace = namespaces[0]
    _warn("the namespace", namespace, ("Name", "Queues", "Topics"))
    entities = []
    for item in _part(namespace, "Queues", list):
        _warn(_name(item), item, _PARTS)
        entities.append(_entity(item, _name(item), EntityKind.QUEUE))
    for topic in _part(namespace, "Topics", list):
        _warn(_name(topic), topic, (*_PARTS, "Subscriptions"))
        entities.append(_entity(topic, _name(topic), EntityKind.TOPIC))
        entities += _subscriptions(topic)
    return list(_in_order(entities))


def _in_order(entities: list[Entity]) -> Iterator[Entity]:
    """The target of a forwarding comes before its source, a topic before its subscriptions.

    What forwards in a circle stays as it is: creating it says what is wrong.
    """
    while entities:
        later = {entity.path.lower() for entity in entities}
        now = [entity for entity in entities if later.isdisjoint(_needs(entity))] or entities
        yield from now
        entities = [entity for entity in entities if entity not in now]


def _needs(entity: Entity) -> Iterator[str]:
    topic = [entity.path.split(SUBSCRIPTIONS)[0]] if entity.kind is EntityKind.SUBSCRIPTION else []
    targets = [entity.forward_to, entity.forward_dead_letters_to, *topic]
    return (target.lower() for target in targets if target)


def _subscriptions(topic: Any) -> Iterator[Entity]:
    for item in _part(topic, "Subscriptions", list):
        path = f"{_name(topic)}{SUBSCRIPTIONS}{_name(item)}"
        _warn(path, item, (*_PARTS, "Rules"))
        rules = tuple(_rule(path, rule) for rule in _part(item, "Rules", list))
        yield _entity(item, path, EntityKind.SUBSCRIPTION, rules)


def _part(value: Any, name: str, kind: type) -> Any:
    if not isinstance(value, dict):
        raise ConfigurationError(f"an object is expected around {name!r}")
    part = value.get(name)
    if part is None:
        return kind()
    if not isinstance(part, kind):
        raise ConfigurationError(f"{name!r} must be {'a list' if kind is list else 'an object'}")
    return part


def _warn(where: str, item: Any, known: Sequence[str]) -> None:
    """Log the keys of an object that are not read: each is without effect here, or a typo."""
    for name in item if isinstance(item, dict) else ():
        if name not in known:
            logger.warning("%s: %r is ignored.%s", where, name, did_you_mean(name, list(known)))


def _name(item: Any) -> str:
    name = item.get("Name") if isinstance(item, dict) else None
    if not isinstance(name, str):
        raise ConfigurationError("every queue, topic, subscription and rule needs a 'Name'")
    return name


def _entity(
    item: Any, path: str, kind: EntityKind, rules: tuple[SubscriptionRule, ...] = ()
) -> Entity:
    properties = _part(item, "Properties", dict)
    _warn(path, properties, _KNOWN)
    values: dict[str, Any] = {}
    for name, attribute in _DURATIONS.items():
        if properties.get(name) is not None:
            seconds = parse_duration(_typed(path, name, properties[name], str))
            values[attribute] = seconds if seconds < MAX_DURATION else None
    for name, (attribute, kind_of_value) in _PLAIN.items():
        if properties.get(name) is not None:
            values[attribute] = _typed(path, name, properties[name], kind_of_value)
    if properties.get(_DUPLICATES[0]):
        window = properties.get(_DUPLICATES[1])
        values["duplicate_window"] = parse_duration(str(window)) if window else _DEFAULT_WINDOW
    return Entity(path, kind, rules=rules, **values)


def _typed(path: str, name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigurationError(f"{path}: {name} must be {kind.__name__}, not {value!r}")
    return value


def _rule(path: str, item: Any) -> SubscriptionRule:
    where = f"{path}, rule {_name(item)}"
    _warn(where, item, _PARTS)
    properties = _part(item, "Properties", dict)
    _warn(where, properties, ("FilterType", "SqlFilter", "CorrelationFilter", "Action"))
    text = _sql(where, properties, "Action")
    try:
        action = RuleAction(text) if text else None
        return SubscriptionRule(_name(item), _filter(where, properties), action=action)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _sql(where: str, properties: dict[str, Any], name: str) -> str:
    part = _part(properties, name, dict)
    _warn(f"{where}, {name}", part, ("SqlExpression",))
    text: str = _typed(where, "SqlExpression", part.get("SqlExpression") or "", str)
    return text


def _filter(where: str, properties: dict[str, Any]) -> Filter:
    given = [name for name in ("Sql", "Correlation") if properties.get(f"{name}Filter") is not None]
    kind = properties.get("FilterType") or next(iter(given), None)
    if given not in ([], [kind]):
        raise ConfigurationError(f"FilterType is {kind}, not {' and '.join(given)}")
    if kind == "Sql":
        return SqlFilter(_sql(where, properties, "SqlFilter"))
    if kind == "Correlation":
        named = _part(properties, "CorrelationFilter", dict)
        unknown = sorted(set(named) - set(_SYSTEM) - {"Properties"})
        if unknown:
            hint = did_you_mean(unknown[0], list(_SYSTEM))
            raise ConfigurationError(f"unknown correlation property {unknown[0]!r}.{hint}")
        system = {name: str(named[name]) for name in _SYSTEM if named.get(name) is not None}
        return CorrelationFilter(system, dict(_part(named, "Properties", dict)))
    if kind in (None, "True"):
        return TrueFilter()
    raise ConfigurationError(f"FilterType must be Sql or Correlation, not {kind!r}")


# -- The options -----------------------------------------------------------------------------------
#
# The options of an emulator, checked and in one value.

AMQP_PORT = 5672
AMQPS_PORT = 5671  # SDKs use it for TLS, whatever port the connection string names
ADMIN_PORT = 5300
KEY_NAME = "RootManageSharedAccessKey"
LOCAL_KEY = "SAS_KEY_VALUE"
"""The key in connection strings when none is needed, because SDKs require one."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an emulator. Raises ConfigurationError for an invalid combination.

    host: the address to listen on.
    port, admin_port: 0 takes a free one; with admin_port None there is no administration API.
    data: the file that stores everything, None for memory.
    shared_access_key: required if `host` is not a loopback address.
    rules: further keys, by name, with fewer permissions.
    entra: what verifies tokens of Entra ID; without it, none counts where a key is required.
    clock_offset: seconds by which the emulator's clock is ahead.
    tls: serve both ports over TLS.
    certificate: the directory of the certificate's PEM files; None for a temporary one.
    config: a configuration file, see `aztask.emulator.config`.
    queues: created at the start if they are missing.
    tier: a tier of the service, whose limits then hold for entities and messages.
    faults: what goes wrong on purpose.
    """

    host: str = "127.0.0.1"
    port: int = AMQP_PORT
    admin_port: int | None = ADMIN_PORT
    data: str | None = None
    shared_access_key: str | None = None
    rules: Mapping[str, Rule] = field(default_factory=dict)
    entra: EntraTokens | None = None
    clock_offset: float = 0.0
    tls: bool = False
    certificate: Path | None = None
    config: Path | None = None
    queues: tuple[str, ...] = ()
    tier: Tier | None = None
    faults: Faults = NO_FAULTS

    def __post_init__(self) -> None:
        if self.rules and not self.shared_access_key:
            raise ConfigurationError("further keys (rules) need a main key: set shared_access_key")
        for name in ("port", "admin_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigurationError(f"{name} {port} is not a port: 0 to 65535")
        if not self.shared_access_key and not is_loopback(self.host):
            raise ConfigurationError(
                f"listening on {self.host!r} admits other machines: set a shared access key"
                " (AZTASK_EMULATOR_SHARED_ACCESS_KEY) or use 127.0.0.1"
            )

    def __repr__(self) -> str:
        """Show the main options, never the key."""
        key = "***" if self.shared_access_key else None
        return f"Options({self.host}:{self.port}, admin {self.admin_port}, key {key})"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connection_string(host: str, port: int, key: str | None, *, emulator: bool = True) -> str:
    """Return a connection string for SDKs.

    emulator: plain TCP on `port`; without it, SDKs use TLS on port 5671.
    """
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host  # noqa: S104  # shown, not bound
    text = (
        f"Endpoint=sb://{shown}:{port};SharedAccessKeyName={KEY_NAME};"
        f"SharedAccessKey={key or LOCAL_KEY}"
    )
    return f"{text};UseDevelopmentEmulator=true" if emulator else text
