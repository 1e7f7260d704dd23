"""The service's descriptions of entities."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from aztask.emulator.admin.descriptions import (
    CONNECT,
    INSTANCE,
    NAMES,
    EntitySnapshot,
    children,
    created_from,
    description,
    description_of,
    updated_from,
)
from aztask.emulator.broker.entities import Entity, EntityKind, Status
from aztask.emulator.broker.filters import FalseFilter
from aztask.errors import ConfigurationError
from aztask.queues.engine import Counts

COUNTS = Counts(active=1, leased=2, scheduled=3, deferred=4, dead=5)


def element(inner="", kind=EntityKind.QUEUE):
    name = NAMES[kind]
    text = f'<{name} xmlns="{CONNECT}" xmlns:i="{INSTANCE}">{inner}</{name}>'
    return description(text.encode(), name)


def written(entity):
    shown = EntitySnapshot(entity, COUNTS, 2, "sb://host", (3, 1))
    return ElementTree.fromstring(description_of(shown))


FULL = Entity(
    "q",
    lock_seconds=30.0,
    max_deliveries=3,
    time_to_live=5.5,
    dead_letter_expired=True,
    duplicate_window=20.0,
    sessions=True,
    forward_to="other",
    forward_dead_letters_to="graveyard",
    max_message_bytes=2048 * 1024,
    status=Status.SEND_DISABLED,
    kept={"UserMetadata": "mine", "MaxSizeInMegabytes": "5"},
)


@pytest.mark.parametrize("entity", [FULL, Entity("q")], ids=["full", "plain"])
def test_a_queue_is_read_back_as_it_was_written(entity):
    again = created_from(written(entity), "q", EntityKind.QUEUE)
    assert again.kept.items() >= entity.kept.items()
    for name in Entity.__dataclass_fields__:
        if name != "kept":
            assert getattr(again, name) == getattr(entity, name), name


def test_counts():
    parts = children(written(Entity("q")))
    counts = {name: int(part.text) for name, part in children(parts["CountDetails"]).items()}
    assert parts["MessageCount"].text == "15"
    assert counts == {
        "ActiveMessageCount": 7,
        "DeadLetterMessageCount": 5,
        "ScheduledMessageCount": 3,
        "TransferMessageCount": 0,
        "TransferDeadLetterMessageCount": 0,
    }


def test_a_topic_counts_its_subscriptions_and_their_filters():
    parts = children(written(Entity("t", EntityKind.TOPIC)))
    found = [
        parts[name].text
        for name in ("SubscriptionCount", "SqlFilterCount", "CorrelationFilterCount")
    ]
    assert found == ["2", "3", "1"]


def test_a_new_subscription_may_bring_its_first_rule():
    parts = '<Filter i:type="FalseFilter"/><Name>r</Name>'
    rule = f"<DefaultRuleDescription>{parts}</DefaultRuleDescription>"
    entity = created_from(
        element(rule, EntityKind.SUBSCRIPTION), "t/Subscriptions/s", EntityKind.SUBSCRIPTION
    )
    assert [(each.name, each.filter) for each in entity.rules] == [("r", FalseFilter())]


def test_an_update_resets_absent_properties_and_keeps_fixed_ones():
    changed = updated_from(element("<MaxDeliveryCount>7</MaxDeliveryCount>"), FULL)
    assert (changed.max_deliveries, changed.lock_seconds, changed.forward_to) == (7, 60.0, "")
    assert changed.sessions
    assert changed.duplicate_window > 0


def test_a_forwarding_target_may_be_a_url():
    entity = created_from(
        element("<ForwardTo>https://host:1/a%20b/</ForwardTo>"), "q", EntityKind.QUEUE
    )
    assert entity.forward_to == "a b"


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ("<LockDuration>soon</LockDuration>", "PT1M"),
        ("<MaxDeliveryCount>many</MaxDeliveryCount>", "MaxDeliveryCount"),
        ("<Status>Sleeping</Status>", "is not a status"),
        (
            "<DuplicateDetectionHistoryTimeWindow>P8D</DuplicateDetectionHistoryTimeWindow>",
            "to 604800 s",
        ),
    ],
)
def test_bad_values_are_explained(inner, said):
    with pytest.raises(ConfigurationError, match=said):
        created_from(element(inner), "q", EntityKind.QUEUE)
