"""``$management`` operations on a subscription's rules: add, remove, enumerate.

The descriptors are those of the service's request-response protocol
(learn.microsoft.com, "AMQP 1.0 in Azure Service Bus: request-response-based operations").
"""

from __future__ import annotations

from typing import Any

from aztask.emulator.amqp import encode
from aztask.emulator.amqp.errors import NOT_ALLOWED, NOT_IMPLEMENTED, AmqpError
from aztask.emulator.amqp.types import Described, undescribed
from aztask.emulator.broker.conditions import ARGUMENT_ERROR
from aztask.emulator.broker.entities import Entity, Kind, SubscriptionRule
from aztask.emulator.broker.filters import (
    CorrelationFilter,
    FalseFilter,
    Filter,
    SqlFilter,
    TrueFilter,
)
from aztask.emulator.broker.namespace import Namespace

_RULE, _EMPTY_ACTION = 0x0000013700000004, 0x0000013700000005
_SQL, _TRUE, _FALSE, _CORRELATION = (0x0000001370000000 + code for code in (6, 7, 8, 9))
_CORRELATION_NAMES = {
    "correlation-id": "CorrelationId",
    "message-id": "MessageId",
    "to": "To",
    "reply-to": "ReplyTo",
    "label": "Label",
    "session-id": "SessionId",
    "reply-to-session-id": "ReplyToSessionId",
    "content-type": "ContentType",
}

RULE_OPERATIONS = frozenset(
    f"com.microsoft:{name}" for name in ("add-rule", "remove-rule", "enumerate-rules")
)


def rule_operation(
    namespace: Namespace, entity: Entity, operation: str, body: dict[str, Any]
) -> tuple[int, bytes]:
    """Run one operation at once; return status and body. Raises AmqpError, AztaskError."""
    if entity.kind is not Kind.SUBSCRIPTION:
        raise AmqpError(NOT_ALLOWED, f"{entity.path!r} is not a subscription: it has no rules")
    if operation.endswith("enumerate-rules"):
        return _enumerate(entity, body)
    name = body.get("rule-name")
    if not isinstance(name, str) or not name:
        raise AmqpError(ARGUMENT_ERROR, "'rule-name' must be a string")
    if operation.endswith("remove-rule"):
        namespace.remove_rule(entity.path, name)
    else:
        namespace.add_rule(
            entity.path, SubscriptionRule(name, _filter(body.get("rule-description")))
        )
    return 200, encode.NULL


def _filter(description: Any) -> Filter:
    description = undescribed(description)
    if not isinstance(description, dict):
        raise AmqpError(ARGUMENT_ERROR, "'rule-description' must be a map")
    action = undescribed(description.get("sql-rule-action"))
    if isinstance(action, dict) and action.get("expression"):
        raise AmqpError(NOT_IMPLEMENTED, "rule actions are not run here: use a rule without one")
    sql = undescribed(description.get("sql-filter"))
    if isinstance(sql, dict):
        return SqlFilter(str(sql.get("expression", "")))
    correlation = undescribed(description.get("correlation-filter"))
    if isinstance(correlation, dict):
        system = {
            ours: str(correlation[theirs])
            for theirs, ours in _CORRELATION_NAMES.items()
            if correlation.get(theirs) is not None
        }
        properties = correlation.get("properties")
        return CorrelationFilter(
            system, {str(k): v for k, v in properties.items()} if properties else {}
        )
    if "false-filter" in description:
        return FalseFilter()
    return TrueFilter()


def _enumerate(entity: Entity, body: dict[str, Any]) -> tuple[int, bytes]:
    skip = body.get("skip")
    top = body.get("top")
    start = skip if isinstance(skip, int) and skip > 0 else 0
    count = top if isinstance(top, int) and top > 0 else len(entity.rules)
    rules = entity.rules[start : start + count]
    if not rules:
        return 204, encode.NULL
    described = [
        encode.map_of([(encode.string("rule-description"), _description(rule))]) for rule in rules
    ]
    return 200, encode.map_of([(encode.string("rules"), encode.list_of(described))])


def _long_described(code: int, items: list[bytes]) -> bytes:
    return b"\x00" + encode.ulong(code) + encode.list_of(items)


def _description(rule: SubscriptionRule) -> bytes:
    return _long_described(
        _RULE,
        [
            _encoded(rule.filter),
            _long_described(_EMPTY_ACTION, []),
            encode.string(rule.name),
            encode.timestamp(int(rule.created * 1000)),
        ],
    )


def _value(value: Any) -> bytes:
    if isinstance(value, Described):
        return b"\x00" + encode.symbol(value.descriptor) + encode.long(value.value)
    return encode.simple(value)


def _encoded(rule_filter: Filter) -> bytes:
    match rule_filter:
        case SqlFilter(text, _):
            return _long_described(_SQL, [encode.string(text), encode.int32(20)])
        case CorrelationFilter(system, properties):
            values = [
                encode.string(system[name]) if name in system else encode.NULL
                for name in _CORRELATION_NAMES.values()
            ]
            pairs = [(encode.string(name), _value(v)) for name, v in properties.items()]
            return _long_described(_CORRELATION, [*values, encode.map_of(pairs)])
        case FalseFilter():
            return _long_described(_FALSE, [])
        case TrueFilter():
            return _long_described(_TRUE, [])
