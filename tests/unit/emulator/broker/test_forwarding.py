"""Forwarding between entities."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise

import pytest
from emulatorbench import message

from aztask.emulator.amqp import AmqpError, encode, sections
from aztask.emulator.amqp.sections import cut
from aztask.emulator.broker import forwarding, stored
from aztask.emulator.broker.entities import Entity, EntityKind, Status, SubscriptionRule
from aztask.emulator.broker.filters import RuleAction, SqlFilter
from aztask.emulator.broker.producer import new_message
from aztask.errors import ConfigurationError
from aztask.queues.engine import NewMessage


def active(bench, *paths):
    return [bench.engine.stats(path).active for path in paths]


def run(bench):
    bench.broker.forwarder.queues_changed()
    return bench.broker.forwarder.run()


def test_a_topic_copies_to_the_subscriptions_whose_rules_match(bench):
    bench.create("t", kind=EntityKind.TOPIC)
    some = (SubscriptionRule("r", SqlFilter("n = 1")),)
    bench.create("t/Subscriptions/all", kind=EntityKind.SUBSCRIPTION)
    bench.create("t/Subscriptions/some", kind=EntityKind.SUBSCRIPTION, rules=some)
    bench.put("t", message(n=1), message(n=2))
    assert run(bench) == {("t/Subscriptions/all", False), ("t/Subscriptions/some", False)}
    assert active(bench, "t", "t/Subscriptions/all", "t/Subscriptions/some") == [0, 2, 1]


def test_a_message_passes_several_queues_in_one_run(bench):
    bench.create("c")
    bench.create("b", forward_to="c")
    bench.create("a", forward_to="b")
    bench.put("a", message())
    assert run(bench) == {("b", False), ("c", False)}
    (found,) = bench.engine.peek("c", limit=1)
    assert stored.unpack(found.payload).hops == 2


def test_past_the_limit_of_hops_a_message_is_dead_lettered(bench):
    names = ["q0", "q1", "q2", "q3", "q4", "q5"]
    bench.create(names[-1])
    for name, target in reversed(list(pairwise(names))):
        bench.create(name, forward_to=target)
    bench.put("q0", message())
    run(bench)
    assert active(bench, *names) == [0] * 6
    (dead,) = bench.engine.peek("q4", limit=1, dead_letter=True)
    assert dead.reason == "MaxTransferHopCountExceeded"


def buried(bench, path):
    return bench.engine.peek(path, limit=10, dead_letter=True)


def missing(bench):
    bench.create("b")
    bench.create("a", forward_to="b", forward_dead_letters_to="b")
    bench.namespace.delete("b")
    return message()


def wrong_kind(bench):  # no target of a forwarding is one: it is checked when it is created
    bench.create("t", kind=EntityKind.TOPIC)
    bench.create("b", kind=EntityKind.QUEUE)
    bench.create("a", forward_to="b", forward_dead_letters_to="b")
    bench.namespace._entities["b"] = Entity("b", kind=EntityKind.SUBSCRIPTION)
    return message()


def target(bench, **settings):
    bench.create("b", **settings)
    bench.create("a", forward_to="b", forward_dead_letters_to="b")


def disabled(bench):
    target(bench, status=Status.SEND_DISABLED)
    return message()


def too_large(bench):
    target(bench, max_message_bytes=10)
    return message()


def no_session(bench):
    target(bench, sessions=True)
    return message()


CASES = [missing, wrong_kind, disabled, too_large, no_session]


def cause_of(case):
    return forwarding.CAUSES[case.__name__.replace("_", " ")]


def test_every_cause_has_a_case():
    assert {cause_of(case) for case in CASES} == set(forwarding.CAUSES.values())
    source = inspect.getsource(forwarding)
    assert source.count("Final = Cause(") == len(forwarding.CAUSES)


@pytest.mark.parametrize("case", CASES)
def test_what_the_target_refuses_becomes_a_transfer_dead_letter_of_the_source(bench, case):
    raw = case(bench)
    bench.put("a", raw)
    assert run(bench) == {("a/$Transfer", True)}
    assert active(bench, "a") == [0]
    (dead,) = buried(bench, "a/$Transfer")
    assert dead.reason == cause_of(case).reason
    assert dead.description
    assert stored.unpack(dead.payload).hops == 0
    assert dead.payload.endswith(b"body")
    assert buried(bench, "a") == []


@pytest.mark.parametrize("case", CASES)
def test_a_sender_is_refused_for_the_same_causes(bench, case):
    raw = case(bench)
    with pytest.raises(AmqpError) as caught:
        entity = forwarding.sendable(bench.namespace, "b")
        new_message(entity, raw, bench.now)
    assert caught.value.condition == cause_of(case).condition


@pytest.mark.parametrize("case", CASES)
def test_a_dead_letter_that_the_target_refuses_does_not_vanish(bench, case):
    raw = case(bench)
    entity = bench.namespace.get("a")
    bench.namespace._entities["a"] = replace(entity, forward_to="")
    bench.namespace.revision += 1
    bench.put("a", raw)
    (lease,) = bench.engine.receive("a", 1)
    bench.engine.dead_letter("a", [(lease.seq, lease.token)], "bad", "very bad")
    assert run(bench) == {("a/$Transfer", True)}
    (dead,) = buried(bench, "a/$Transfer")
    assert dead.reason == cause_of(case).reason
    assert dead.description.endswith("It was a dead letter before: bad: very bad")
    assert buried(bench, "a") == []


def test_a_dead_letter_past_the_limit_of_hops_becomes_a_transfer_dead_letter(bench):
    bench.create("a")
    bench.create("b", forward_dead_letters_to="a")
    bench.namespace.update(replace(bench.namespace.get("a"), forward_dead_letters_to="b"))
    bench.put("a", message())
    for turn in range(5):
        queue = "ab"[turn % 2]
        (lease,) = bench.engine.receive(queue, 1)
        bench.engine.dead_letter(queue, [(lease.seq, lease.token)], "bad")
        run(bench)
    (dead,) = buried(bench, "a/$Transfer")
    assert dead.reason == "MaxTransferHopCountExceeded"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sessions": True}, "Session ID is null."),
        ({"status": Status.DISABLED}, "MessagingEntityDisabled"),
    ],
)
def test_what_a_subscription_cannot_take_is_its_dead_letter(bench, settings, reason):
    bench.create("t", kind=EntityKind.TOPIC)
    bench.create("t/Subscriptions/plain", kind=EntityKind.SUBSCRIPTION)
    bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION, **settings)
    bench.put("t", message())
    assert run(bench) == {("t/Subscriptions/plain", False), ("t/Subscriptions/s", True)}
    assert active(bench, "t", "t/Subscriptions/plain", "t/Subscriptions/s") == [0, 1, 0]
    (dead,) = buried(bench, "t/Subscriptions/s")
    assert dead.reason == reason


def ruled(bench, *rules, **settings):
    """A topic with one subscription of these rules, each (filter, action)."""
    bench.create("t", kind=EntityKind.TOPIC)
    made = [
        SubscriptionRule(f"r{number}", SqlFilter(text), action=action and RuleAction(action))
        for number, (text, action) in enumerate(rules)
    ]
    kind = EntityKind.SUBSCRIPTION
    bench.create("t/Subscriptions/s", kind=kind, rules=tuple(made), **settings)


def copies(bench):
    found = []
    for each in bench.engine.peek("t/Subscriptions/s", limit=10):
        one = cut(stored.unpack(each.payload).bare)
        found.append((each, one.application_properties, one.properties))
    return found


def test_each_rule_with_an_action_gives_a_copy_of_its_own(bench):
    ruled(bench, ("n = 1", None), ("n = 1", "SET n = n + 1"), ("1=1", "REMOVE n"), ("1=1", None))
    bench.put("t", message(n=1))
    assert run(bench) == {("t/Subscriptions/s", False)}
    assert [properties for _, properties, _ in copies(bench)] == [
        {"n": 1},
        {"n": 2, "RuleName": "r1"},
        {"RuleName": "r2"},
    ]


def test_an_action_sets_system_properties(bench):
    action = "SET sys.Label = 'new'; SET sys.SessionId = 's'; SET sys.MessageId = 'm'"
    ruled(bench, ("sys.Label = 'old'", action), sessions=True)
    bench.put("t", message(label="old"))
    assert run(bench) == {("t/Subscriptions/s", False)}
    ((row, _, properties),) = copies(bench)
    assert (row.session, row.message_id) == ("s", "m")
    assert (properties[0], properties[3], properties[10]) == ("m", "new", "s")


def test_rules_see_what_the_broker_knows(bench):
    ruled(bench, ("sys.SequenceNumber > 0 AND sys.EnqueuedTimeUtc > 0", "SET n = sys.PartitionKey"))
    annotated = encode.described(
        sections.MESSAGE_ANNOTATIONS,
        encode.map_of([(encode.symbol(stored.PARTITION_KEY), encode.string("key"))]),
    )
    bench.put("t", annotated + message())
    run(bench)
    assert [properties["n"] for _, properties, _ in copies(bench)] == ["key"]


@pytest.mark.parametrize("rule", [("1 / zero = 1", None), ("1=1", "SET n = 1 / zero")])
def test_a_rule_that_fails_makes_a_dead_letter_if_the_subscription_says_so(bench, rule):
    ruled(bench, rule)
    bench.put("t", message(zero=0), message(zero=2))
    run(bench)
    (dead,) = buried(bench, "t/Subscriptions/s")
    assert dead.reason == "FilterException"
    assert "of the rule r0: a division by zero" in dead.description
    silent = replace(bench.namespace.get("t/Subscriptions/s"), dead_letter_filter_errors=False)
    bench.namespace.update(silent)
    bench.put("t", message(zero=0))
    run(bench)
    assert len(buried(bench, "t/Subscriptions/s")) == 1


def test_a_queue_with_sessions_cannot_forward(bench):
    bench.create("b")
    with pytest.raises(ConfigurationError, match="cannot forward"):
        bench.create("a", sessions=True, forward_to="b")


def test_transfer_dead_letters_end_with_their_entity(bench):
    bench.put("a", no_session(bench))
    run(bench)
    assert bench.namespace.transfer_dead(bench.namespace.get("a")) == 1
    bench.namespace.delete("a")
    assert bench.namespace.transfer_dead(bench.create("a")) == 0


def test_forwarded_dead_letters_carry_their_reasons_and_their_source(bench):
    bench.create("graveyard")
    bench.create("a", forward_dead_letters_to="graveyard")
    bench.put("a", message())
    (lease,) = bench.engine.receive("a", 1)
    bench.engine.dead_letter("a", [(lease.seq, lease.token)], "bad", "very bad")
    run(bench)
    (found,) = bench.engine.peek("graveyard", limit=1)
    raw = stored.deliver(found.payload, sequence=1, enqueued_ms=0, delivery_count=0)
    properties = cut(raw).application_properties
    assert properties["DeadLetterReason"] == "bad"
    assert properties["DeadLetterErrorDescription"] == "very bad"
    assert cut(raw).annotations["x-opt-deadletter-source"] == "a"


def test_without_routes_nothing_is_due(bench):
    bench.create("q")
    bench.put("q", message())
    bench.broker.forwarder.queues_changed()
    assert not bench.broker.forwarder.due()
    assert bench.broker.forwarder.run() == set()


def subscribed(bench, *rules):
    """A topic with three subscriptions; the second one has these rules."""
    bench.create("t", kind=EntityKind.TOPIC)
    for name in ("a", "b", "c"):
        own = rules if name == "b" else ()
        bench.create(f"t/Subscriptions/{name}", kind=EntityKind.SUBSCRIPTION, rules=own)
    return [f"t/Subscriptions/{name}" for name in ("a", "b", "c")]


def acting(text):
    return SubscriptionRule("r", SqlFilter("1 = 1"), action=RuleAction(text))


@pytest.mark.parametrize(
    "text",
    [
        "SET sys.SessionId = x + x",
        "SET sys.MessageId = x + x",
        "SET y = x; " + "SET y = y + y; " * 20,
        "SET p1 = x; " + "".join(f"SET p{n} = p{n - 1} + p{n - 1}; " for n in range(2, 12)),
    ],
    ids=["a long session id", "a long message id", "a text that doubles", "64 KB of properties"],
)
def test_an_action_makes_no_message_that_the_service_would_refuse(bench, text):
    names = subscribed(bench, acting(text))
    bench.put("t", message(x="x" * 100))
    run(bench)
    assert active(bench, *names) == [1, 0, 1]
    (dead,) = buried(bench, names[1])
    assert dead.reason == "FilterException"


def test_an_unexpected_fault_of_a_rule_leaves_no_subscription_with_a_part(bench, caplog):
    rule = acting("SET x = 1")
    names = subscribed(bench, rule)
    object.__setattr__(rule.action, "statements", None)  # what no parser makes
    bench.put("t", message())
    assert run(bench) == {("t/$Transfer", True)}
    assert active(bench, "t", *names) == [0, 0, 0, 0]
    (dead,) = buried(bench, "t/$Transfer")
    assert (dead.reason, len(caplog.records)) == ("InternalError", 1)
    bench.namespace.remove_rule(names[1], "r")
    bench.put("t", message())
    run(bench)
    assert active(bench, *names) == [1, 0, 1]


def test_a_message_that_cannot_be_read_stops_no_forwarding(bench, caplog):
    bench.create("b")
    bench.create("a", forward_to="b")
    bench.engine.send("a", [NewMessage(b"\xff" * 40, "id", None, None, None)])
    bench.put("a", message())
    run(bench)
    assert active(bench, "a", "b") == [0, 1]
    assert [dead.reason for dead in buried(bench, "a/$Transfer")] == ["InternalError"]
    assert len(caplog.records) == 1


def test_a_cycle_of_topics_lets_others_in(bench, monkeypatch):
    monkeypatch.setattr(forwarding, "COPIES_PER_RUN", 20)
    monkeypatch.setattr(forwarding, "BATCH", 10)
    bench.create("t", kind=EntityKind.TOPIC)
    for number in range(3):
        name = f"t/Subscriptions/s{number}"
        bench.create(name, kind=EntityKind.SUBSCRIPTION, forward_to="t")
    bench.put("t", *[message()] * 50)
    runs = 0
    bench.broker.forwarder.queues_changed()
    while bench.broker.forwarder.pending:
        bench.broker.forwarder.run()
        runs += 1
    assert runs > 10
    assert sum(bench.engine.stats(f"t/Subscriptions/s{n}").dead for n in range(3)) == 50 * 3**5
