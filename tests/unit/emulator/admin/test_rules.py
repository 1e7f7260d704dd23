"""The service's descriptions of rules."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from aztask.emulator.admin.descriptions import (
    CONNECT,
    INSTANCE,
    children,
    rule_description,
    rule_from,
)
from aztask.emulator.amqp.encode import Described, Int32, Timestamp
from aztask.emulator.broker.entities import SubscriptionRule
from aztask.emulator.broker.filters import (
    TIMESPAN,
    CorrelationFilter,
    FalseFilter,
    RuleAction,
    SqlFilter,
    TrueFilter,
)
from aztask.errors import ConfigurationError

VALUES = {
    "text": "a<b",
    "long": 5,
    "int": Int32(5),
    "double": 0.5,
    "yes": True,
    "moment": Timestamp(1_700_000_000_123),
    "span": Described(TIMESPAN, 15_000_000),
}


def element(inner):
    return ElementTree.fromstring(
        f'<RuleDescription xmlns="{CONNECT}" xmlns:i="{INSTANCE}">{inner}</RuleDescription>'
    )


@pytest.mark.parametrize(
    "rule_filter",
    [
        TrueFilter(),
        FalseFilter(),
        SqlFilter("a < 5", {"@p": 1}),
        CorrelationFilter({"Label": "l", "MessageId": "m"}, VALUES),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rule_is_read_back_as_it_was_written(rule_filter):
    rule = SubscriptionRule("r", rule_filter)
    again = rule_from(ElementTree.fromstring(rule_description(rule)))
    assert again == rule
    if isinstance(rule_filter, CorrelationFilter):
        types = {name: type(value) for name, value in again.filter.properties.items()}
        assert types == {name: type(value) for name, value in VALUES.items()}


def test_an_action_is_read_back_as_it_was_written():
    rule = SubscriptionRule("r", TrueFilter(), action=RuleAction("SET a = @p", {"@p": 5}))
    text = rule_description(rule)
    assert '<Action i:type="SqlRuleAction">' in text
    assert rule_from(ElementTree.fromstring(text)) == rule


def test_types_are_written_with_the_prefix_of_the_service():
    """JavaScript's SDK cuts off five characters: with another prefix it refuses all rules."""
    values = {"n": 5, "i": Int32(6), "t": "x"}
    text = rule_description(SubscriptionRule("r", CorrelationFilter({}, values)))
    assert 'i:type="d6p1:long">5<' in text
    assert 'i:type="d6p1:int">6<' in text
    assert 'i:type="d6p1:string">x<' in text


def test_names():
    named = element("<Name>stated</Name>")
    assert rule_from(named).name == "stated"
    assert rule_from(named, "of the path").name == "of the path"
    assert rule_from(element("")).name == "$Default"
    assert (
        children(ElementTree.fromstring(rule_description(SubscriptionRule("r", TrueFilter()))))[
            "Name"
        ].text
        == "r"
    )


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ('<Filter i:type="MagicFilter"/>', "MagicFilter"),
        ("<Action><SqlExpression>SET a</SqlExpression></Action>", "= is expected"),
        ('<Filter i:type="CorrelationFilter"/>', "fits all"),
        (
            '<Filter i:type="CorrelationFilter"><Properties><KeyValueOfstringanyType>'
            '<Key>k</Key><Value i:type="d:int">x</Value>'
            "</KeyValueOfstringanyType></Properties></Filter>",
            "is not of type int",
        ),
    ],
)
def test_bad_rules_are_explained(inner, said):
    with pytest.raises(ConfigurationError, match=said):
        rule_from(element(inner))
