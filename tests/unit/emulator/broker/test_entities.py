"""Queues, topics and subscriptions as values."""

from __future__ import annotations

import pytest

from aztask.emulator.broker.entities import (
    Entity,
    EntityKind,
    SubscriptionRule,
    check,
    from_json,
    to_json,
)
from aztask.emulator.broker.filters import CorrelationFilter, SqlFilter
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
        SubscriptionRule("a", SqlFilter("x = 1")),
        SubscriptionRule("b", CorrelationFilter({"Label": "l"})),
    )
    entity = Entity(
        "t/Subscriptions/s", EntityKind.SUBSCRIPTION, time_to_live=5.0, rules=rules, kept={"A": "b"}
    )
    assert from_json(to_json(entity)) == entity
