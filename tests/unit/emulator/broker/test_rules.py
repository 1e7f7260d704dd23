"""The operations on a subscription's rules."""

from __future__ import annotations

import pytest
from amqpwire import decode_exactly

from aztask.emulator.amqp import AmqpError
from aztask.emulator.amqp.encode import Described, Int32, undescribed
from aztask.emulator.broker.entities import EntityKind, SubscriptionRule
from aztask.emulator.broker.filters import (
    CorrelationFilter,
    FalseFilter,
    RuleAction,
    SqlFilter,
    TrueFilter,
)
from aztask.emulator.broker.nodes import rule_operation
from aztask.errors import ConfigurationError

PATH = "t/Subscriptions/s"


@pytest.fixture
def run(bench):
    bench.create("t", kind=EntityKind.TOPIC)
    bench.create("q")
    bench.create(PATH, kind=EntityKind.SUBSCRIPTION)

    def operate(name, path=PATH, **body):
        entity = bench.namespace.get(path)
        named = {key.replace("_", "-"): value for key, value in body.items()}
        return rule_operation(bench.namespace, entity, f"com.microsoft:{name}", named)

    return operate


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ({"sql-filter": {"expression": "a = 1"}}, SqlFilter("a = 1")),
        ({"sql-filter": Described(5, {"expression": "a = 1"})}, SqlFilter("a = 1")),
        (
            {"correlation-filter": {"label": "l", "properties": {"k": 5}}},
            CorrelationFilter({"Label": "l"}, {"k": 5}),
        ),
        ({"false-filter": {}}, FalseFilter()),
        ({"true-filter": {}}, TrueFilter()),
    ],
    ids=range(5),
)
def test_rules_are_added_listed_and_removed(bench, run, description, expected):
    assert run("add-rule", rule_name="r", rule_description=description)[0] == 200
    assert bench.namespace.get(PATH).rules[-1].filter == expected
    status, body = run("enumerate-rules", skip=1)
    (listed,) = decode_exactly(body)["rules"]
    assert (status, undescribed(listed["rule-description"])[2]) == (200, "r")
    run("remove-rule", rule_name="r")
    assert run("enumerate-rules", skip=1)[0] == 204


@pytest.mark.parametrize(
    ("options", "condition"),
    [
        ({"name": "add-rule", "path": "q", "rule_name": "r"}, "amqp:not-allowed"),
        ({"name": "add-rule"}, "com.microsoft:argument-error"),
        ({"name": "add-rule", "rule_name": "r"}, "com.microsoft:argument-error"),
    ],
    ids=range(3),
)
def test_refused_requests(run, options, condition):
    with pytest.raises(AmqpError) as caught:
        run(**options)
    assert caught.value.condition == condition


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ({"sql-filter": {"expression": "1=1"}, "true-filter": {}}, "one filter"),
        ({"correlation-filter": {"lable": "typo"}}, "lable"),
    ],
    ids=range(2),
)
def test_descriptions_that_say_two_things_or_nothing_known(run, description, said):
    with pytest.raises(AmqpError, match=said) as caught:
        run("add-rule", rule_name="r", rule_description=description)
    assert caught.value.condition == "com.microsoft:argument-error"


def test_actions_and_typed_values_are_listed_as_they_were_added(bench, run):
    description = {
        "sql-filter": {"expression": "a = @p", "parameters": {"@p": Int32(5)}},
        "sql-rule-action": {"expression": "SET a = 1"},
    }
    run("add-rule", rule_name="r", rule_description=description)
    rule = bench.namespace.get(PATH).rules[-1]
    assert (rule.filter, rule.action) == (SqlFilter("a = @p", {"@p": 5}), RuleAction("SET a = 1"))
    (listed,) = decode_exactly(run("enumerate-rules", skip=1)[1])["rules"]
    action = undescribed(listed["rule-description"])[1]
    assert (action.descriptor, action.value[0]) == (0x0000013700000006, "SET a = 1")


def test_a_rule_name_that_cannot_be_written_is_refused(bench):
    """The dead letters of a fault have the name in their description."""
    bench.create("t", kind=EntityKind.TOPIC)
    bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    with pytest.raises(ConfigurationError, match="is not a rule name"):
        bench.namespace.add_rule("t/Subscriptions/s", SubscriptionRule("\ud800", TrueFilter()))
