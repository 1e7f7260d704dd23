"""Queues, topics and subscriptions as values."""

from __future__ import annotations

import json

import pytest

from aztask.emulator.broker.entities import (
    Entity,
    EntityKind,
    SubscriptionRule,
    Tier,
    check,
    from_json,
    to_json,
)
from aztask.emulator.broker.filters import CorrelationFilter, RuleAction, SqlFilter, TrueFilter
from aztask.errors import ConfigurationError


@pytest.mark.parametrize(
    "entity",
    [
        Entity(""),
        Entity("a" * 261),
        Entity("/a"),
        Entity("a//b"),
        Entity("a b"),
        Entity("a\n"),
        Entity("$cbs"),
        Entity("a/$management"),
        Entity("t/Subscriptions/a b", EntityKind.SUBSCRIPTION),
        Entity("t/Subscriptions/" + "a" * 51, EntityKind.SUBSCRIPTION),
        Entity("q", lock_seconds=301),
        Entity("q", lock_seconds=0),
        Entity("q", max_deliveries=0),
        Entity("q", time_to_live=0),
    ],
)
def test_invalid_entities(entity):
    with pytest.raises(ConfigurationError):
        check(entity)


def test_entities_are_kept_as_text():
    rules = (
        SubscriptionRule("a", SqlFilter("x = 1"), action=RuleAction("SET y = 1")),
        SubscriptionRule("b", CorrelationFilter({"Label": "l"})),
    )
    entity = Entity(
        "t/Subscriptions/s", EntityKind.SUBSCRIPTION, time_to_live=5.0, rules=rules, kept={"A": "b"}
    )
    assert from_json(to_json(entity)) == entity


def test_files_without_actions_and_idle_times_are_read():
    text = to_json(Entity("t/Subscriptions/s", EntityKind.SUBSCRIPTION, rules=(named("r"),)))
    old = json.loads(text)
    del old["auto_delete"], old["rules"][0]["action"]
    assert to_json(from_json(json.dumps(old))) == text


def named(name):
    return SubscriptionRule(name, TrueFilter())


@pytest.mark.parametrize("name", ["$Default", "a" * 50, "with space", "ümlaut"])
def test_names_of_rules(name):
    check(Entity("t/Subscriptions/s", EntityKind.SUBSCRIPTION, rules=(named(name),)))


@pytest.mark.parametrize("name", ["", "a" * 51, "a/b", "a?", "a\n"])
def test_invalid_names_of_rules(name):
    with pytest.raises(ConfigurationError, match="rule name"):
        check(Entity("t/Subscriptions/s", EntityKind.SUBSCRIPTION, rules=(named(name),)))


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lock_seconds": 4.9}, "5 s to 300 s"),
        ({"lock_seconds": 301.0}, "5 s to 300 s"),
        ({"duplicate_window": 19.0}, "20 s to 604800 s"),
        ({"time_to_live": 0.5}, "1 s or more"),
        ({"auto_delete": 299.0}, "300 s or more"),
        ({"max_deliveries": 2**31}, "1 to 2147483647"),
        ({"max_message_bytes": 101 * 1024 * 1024}, "are allowed"),
        ({"max_message_bytes": 255 * 1024}, "are allowed"),
    ],
)
def test_a_tier_has_the_limits_of_the_service(tier, settings, said):
    with pytest.raises(ConfigurationError, match=said):
        check(Entity("q", **settings), tier)


def test_a_tier_has_its_sizes_of_messages():
    assert check(Entity("q"), Tier.STANDARD).max_message_bytes == 256 * 1024
    assert check(Entity("q"), Tier.PREMIUM).max_message_bytes == 1024 * 1024
    large = Entity("q", max_message_bytes=100 * 1024 * 1024)
    assert check(large, Tier.PREMIUM) == large
    with pytest.raises(ConfigurationError, match="in the Standard tier 256 to 256"):
        check(large, Tier.STANDARD)


@pytest.mark.parametrize("size", [1024 * 1024, 1023 * 1024])
def test_the_standard_tier_lets_no_size_be_set(size):
    with pytest.raises(ConfigurationError, match="256 to 256"):
        check(Entity("q", max_message_bytes=size), Tier.STANDARD)


def test_without_a_tier_tests_are_fast():
    assert check(Entity("q")).max_message_bytes == 1024 * 1024
    check(Entity("q", lock_seconds=0.1, duplicate_window=0.5, time_to_live=0.1, auto_delete=0.2))
    check(Entity("q", max_deliveries=2**31 - 1))


@pytest.mark.parametrize("name", ["a", "A/b", "0", "a.b-c_d", "a" * 260])
def test_names_of_queues(name):
    assert check(Entity(name)).path == name


@pytest.mark.parametrize(
    "name", ["", "a" * 261, "a//b", "_a", "-a", "a-", "a.", "a/", "a b", "a?", "a\\b", "ä", "$a"]
)
def test_names_of_queues_that_the_service_refuses(name):
    with pytest.raises(ConfigurationError, match="is not a queue name"):
        check(Entity(name))
