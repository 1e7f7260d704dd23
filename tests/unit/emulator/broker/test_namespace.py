"""The entities of a namespace, in memory and in the file."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulatorbench import Bench, message

from aztask.emulator.broker.entities import Entity, EntityKind, SubscriptionRule
from aztask.emulator.broker.filters import FalseFilter, TrueFilter
from aztask.emulator.broker.namespace import EntityExists
from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.engine import NewMessage


def test_entities_are_found_without_regard_to_case(bench):
    made = bench.create("Orders")
    assert bench.namespace.find("oRDERS") == made
    assert (made.path, made.created) == ("Orders", bench.now)
    with pytest.raises(EntityExists):
        bench.create("orders")
    with pytest.raises(QueueNotFound):
        bench.namespace.get("missing")


def test_entities_are_sorted_and_selected_by_kind(bench):
    bench.create("t", kind=EntityKind.TOPIC)
    bench.create("t/Subscriptions/b", kind=EntityKind.SUBSCRIPTION)
    bench.create("t/Subscriptions/a", kind=EntityKind.SUBSCRIPTION)
    bench.create("a")
    topic = bench.namespace.get("t")
    assert [each.name for each in bench.namespace.subscriptions(topic)] == ["a", "b"]
    assert [each.path for each in bench.namespace.all(EntityKind.QUEUE)] == ["a"]
    assert len(bench.namespace.all()) == 4


def test_a_subscription_needs_a_topic_and_gets_a_rule(bench):
    bench.create("q")
    with pytest.raises(QueueNotFound):
        bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    with pytest.raises(ConfigurationError, match="not a topic"):
        bench.create("q/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    bench.create("t", kind=EntityKind.TOPIC)
    made = bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    assert [(rule.name, rule.filter) for rule in made.rules] == [("$Default", TrueFilter())]


def test_an_update_keeps_the_messages_and_changes_the_engine(bench):
    made = bench.create("q", lock_seconds=10)
    bench.put("q", message())
    revision = bench.namespace.revision
    bench.now += 5
    changed = bench.namespace.update(replace(made, lock_seconds=20))
    assert (changed.created, changed.updated) == (bench.now - 5, bench.now)
    assert bench.namespace.revision > revision
    (lease,) = bench.engine.receive("q", 1)
    assert lease.lease_until == bench.now + 20


@pytest.mark.parametrize(
    "change", [{"sessions": True}, {"kind": EntityKind.TOPIC}, {"duplicate_window": 60.0}]
)
def test_some_settings_cannot_change(bench, change):
    made = bench.create("q")
    with pytest.raises(ConfigurationError, match="create it anew"):
        bench.namespace.update(replace(made, **change))


def test_forwarding_needs_a_target_that_accepts_messages(bench):
    bench.create("t", kind=EntityKind.TOPIC)
    bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    with pytest.raises(QueueNotFound):
        bench.create("q", forward_to="missing")
    with pytest.raises(ConfigurationError, match="forward to its topic"):
        bench.create("q", forward_dead_letters_to="t/Subscriptions/s")


def test_a_topic_is_deleted_with_its_subscriptions(bench):
    bench.create("t", kind=EntityKind.TOPIC)
    bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    assert [each.path for each in bench.namespace.delete("T")] == ["t", "t/Subscriptions/s"]
    assert bench.namespace.all() == []
    with pytest.raises(QueueNotFound):
        bench.engine.stats("t/Subscriptions/s")


def test_ensure_creates_or_updates(bench):
    assert bench.namespace.ensure(Entity("q")).max_deliveries == 10
    assert bench.namespace.ensure(Entity("q", max_deliveries=3)).max_deliveries == 3


def test_rules_are_added_replaced_and_removed(bench):
    bench.create("t", kind=EntityKind.TOPIC)
    path = bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION).path
    bench.namespace.add_rule(path, SubscriptionRule("More", TrueFilter()))
    with pytest.raises(EntityExists):
        bench.namespace.add_rule(path, SubscriptionRule("more", TrueFilter()))
    bench.namespace.replace_rule(path, SubscriptionRule("$default", FalseFilter()))
    rules = bench.namespace.get(path).rules
    assert [(rule.name, rule.filter) for rule in rules] == [
        ("$Default", FalseFilter()),
        ("More", TrueFilter()),
    ]
    bench.namespace.remove_rule(path, "MORE")
    assert len(bench.namespace.get(path).rules) == 1
    with pytest.raises(QueueNotFound):
        bench.namespace.remove_rule(path, "more")


def test_entities_survive_a_restart(tmp_path):
    data = str(tmp_path / "bus.db")
    bench = Bench(data=data)
    made = bench.create("q", lock_seconds=10)
    bench.emulator.database.close()
    bench = Bench(data=data)
    assert bench.namespace.all() == [made]
    bench.emulator.database.close()


def test_an_entity_is_idle_when_nobody_has_used_it_for_long(bench):
    bench.create("kept")
    bench.create("q", auto_delete=60.0)
    bench.create("from", forward_to="q")
    assert bench.namespace.idle() == []
    bench.now += 59
    bench.put("from", message())
    bench.broker.forwarder.queues_changed()
    bench.broker.forwarder.run()
    bench.now += 59
    assert bench.namespace.idle() == []
    client = bench.client()
    client.attach(receive=False)
    for _ in range(3):
        bench.now += 59
        client.handler.note_use()
        assert bench.namespace.idle() == []
    client.detach(0)
    bench.now += 60
    assert bench.namespace.idle() == ["q"]


def test_a_topic_is_in_use_while_a_subscription_is(bench):
    bench.create("t", kind=EntityKind.TOPIC, auto_delete=60.0)
    bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    bench.now += 50
    bench.namespace.note_use("t/subscriptions/S")
    bench.now += 50
    assert bench.namespace.idle() == []
    bench.now += 10
    assert bench.namespace.idle() == ["t"]


def test_scheduled_messages_and_updates_keep_an_entity(bench):
    entity = bench.create("q", auto_delete=60.0)
    bench.engine.send("q", [NewMessage(b"", "id", None, bench.now + 100, None)])
    bench.now += 61
    assert bench.namespace.idle() == []
    bench.now += 61
    bench.engine.receive("q", 1, delete=True)
    bench.namespace.update(entity)
    assert bench.namespace.idle() == []
    bench.now += 61
    assert bench.namespace.idle() == ["q"]
