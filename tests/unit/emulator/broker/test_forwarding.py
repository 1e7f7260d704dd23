"""Forwarding between entities."""

from __future__ import annotations

from itertools import pairwise

from emulatorbench import message

from aztask.emulator.amqp.sections import cut
from aztask.emulator.broker import stored
from aztask.emulator.broker.entities import Kind, Status, SubscriptionRule
from aztask.emulator.broker.filters import SqlFilter


def active(bench, *paths):
    return [bench.engine.stats(path).active for path in paths]


def run(bench):
    bench.broker.forwarder.queues_changed()
    return bench.broker.forwarder.run()


def test_a_topic_copies_to_the_subscriptions_whose_rules_match(bench):
    bench.create("t", kind=Kind.TOPIC)
    some = (SubscriptionRule("r", SqlFilter("n = 1")),)
    bench.create("t/Subscriptions/all", kind=Kind.SUBSCRIPTION)
    bench.create("t/Subscriptions/some", kind=Kind.SUBSCRIPTION, rules=some)
    bench.put("t", message(n=1), message(n=2))
    assert run(bench) == {"t/Subscriptions/all", "t/Subscriptions/some"}
    assert active(bench, "t", "t/Subscriptions/all", "t/Subscriptions/some") == [0, 2, 1]


def test_a_message_passes_several_queues_in_one_run(bench):
    bench.create("c")
    bench.create("b", forward_to="c")
    bench.create("a", forward_to="b")
    bench.put("a", message())
    assert run(bench) == {"b", "c"}
    (found,) = bench.engine.peek("c", 0, 1)
    assert stored.unpack(found.payload).hops == 2


def test_past_the_limit_of_hops_a_message_is_dead_lettered(bench):
    names = ["q0", "q1", "q2", "q3", "q4", "q5"]
    bench.create(names[-1])
    for name, target in reversed(list(pairwise(names))):
        bench.create(name, forward_to=target)
    bench.put("q0", message())
    run(bench)
    assert active(bench, *names) == [0] * 6
    (dead,) = bench.engine.peek("q4", 0, 1, dead_letter=True)
    assert dead.reason == "MaxTransferHopCountExceeded"


def test_messages_wait_for_a_target_that_accepts_none(bench):
    target = bench.create("b", status=Status.SEND_DISABLED)
    bench.create("a", forward_to="b")
    bench.put("a", message())
    assert run(bench) == set()
    assert active(bench, "a", "b") == [1, 0]
    bench.namespace.update(type(target)("b"))
    bench.now += 1
    assert bench.broker.forwarder.due()
    bench.broker.forwarder.run()
    assert active(bench, "a", "b") == [0, 1]


def test_forwarded_dead_letters_carry_their_reasons_and_their_source(bench):
    bench.create("graveyard")
    bench.create("a", forward_dead_letters_to="graveyard")
    bench.put("a", message())
    (lease,) = bench.engine.receive("a", 1)
    bench.engine.dead_letter("a", [(lease.seq, lease.token)], "bad", "very bad")
    run(bench)
    (found,) = bench.engine.peek("graveyard", 0, 1)
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
