"""The operations on a subscription's rules."""

from __future__ import annotations

import pytest
from amqpwire import decode_exactly

from aztask.emulator.amqp import AmqpError
from aztask.emulator.amqp.encode import Described, undescribed
from aztask.emulator.broker.entities import EntityKind
from aztask.emulator.broker.filters import CorrelationFilter, FalseFilter, SqlFilter, TrueFilter
from aztask.emulator.broker.nodes import rule_operation

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
        (
            {
                "name": "add-rule",
                "rule_name": "r",
                "rule_description": {"sql-rule-action": {"expression": "SET a = 1"}},
            },
            "amqp:not-implemented",
        ),
    ],
    ids=range(4),
)
def test_refused_requests(run, options, condition):
    with pytest.raises(AmqpError) as caught:
        run(**options)
    assert caught.value.condition == condition
