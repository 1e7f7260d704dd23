"""The object that all parts of the broker share."""

from __future__ import annotations

from emulatorbench import message


def test_a_change_of_a_queue_reaches_its_receivers_and_those_of_its_dead_letters(bench):
    bench.create("q")
    client = bench.client()
    client.attach(receive=True)
    client.attach(receive=True, handle=1, address="q/$DeadLetterQueue")
    client.flow(5)
    client.flow(5, handle=1)
    client.frames()
    bench.put("q", message(b"a"), message(b"b"))
    (lease,) = bench.engine.receive("q", 1)
    bench.engine.dead_letter("q", [(lease.seq, lease.token)], "reason", "text")
    bench.broker.queue_changed("q")
    bench.broker.committer.plan_flush()
    assert sorted(each.handle for each in client.frames()) == [0, 1]


def test_the_offset_between_the_clocks(bench):
    assert bench.broker.lock_token_offset() == 0.0
