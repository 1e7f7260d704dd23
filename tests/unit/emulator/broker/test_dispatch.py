"""Distribution of messages to consumers."""

from __future__ import annotations

import pytest
from emulatorbench import message

from aztask.emulator.broker import dispatch
from aztask.emulator.broker.dispatch import MessageSource
from aztask.queues.engine import NewMessage


class Taker:
    """A consumer with unlimited credit, or with as much as `credit`."""

    def __init__(self, queue, credit=1000, *, dead=False):
        self.source, self.delete, self.credit = MessageSource(queue, dead), True, credit
        self.batches, self.drained = [], 0

    def capacity(self):
        return self.credit

    def take(self, engine, limit):
        return engine.receive(self.source.queue, limit, dead_letter=self.source.dead, delete=True)

    def deliver(self, messages, offset):
        self.credit -= len(messages)
        self.batches.append(len(messages))

    def exhausted(self):
        self.drained += 1


@pytest.fixture
def join(bench):
    def make(*args, **options):
        taker = Taker(*args, **options)
        bench.broker.dispatcher.join(taker)
        return taker

    bench.create("q")
    return make


def test_a_consumer_gets_all_messages_and_then_its_drain_is_answered(bench, join):
    taker = join("q")
    bench.put("q", *[message()] * 3)
    bench.broker.dispatcher.wake(taker.source)
    bench.turn()
    assert (taker.batches, taker.drained) == ([3], 1)


def test_consumers_take_turns(bench, join, monkeypatch):
    monkeypatch.setattr(dispatch, "BATCH_MESSAGES", 2)
    one, two = join("q"), join("q")
    bench.put("q", *[message()] * 8)
    bench.broker.dispatcher.wake(one.source)
    bench.turn()
    assert one.batches == two.batches == [2, 2]


def test_batches_are_limited_in_bytes_by_the_messages_before(bench, join, monkeypatch):
    taker = join("q")
    monkeypatch.setattr(dispatch, "BATCH_BYTES", 1000)
    bench.put("q", message(bytes(400)))
    bench.broker.dispatcher.wake(taker.source)
    bench.turn()
    bench.put("q", *[message(bytes(400))] * 4)
    bench.broker.dispatcher.wake(taker.source)
    bench.turn()
    assert taker.batches[:3] == [1, 2, 2]


def test_a_tick_delivers_a_message_that_fell_due(bench, join):
    taker = join("q")
    bench.put("q", message())
    bench.engine.receive("q", 1, 30.0)
    bench.broker.dispatcher.tick()
    bench.turn()
    assert taker.batches == []
    bench.now += 31
    bench.broker.dispatcher.tick()
    bench.turn()
    assert taker.batches == [1]


def test_a_tick_finds_messages_that_became_dead_letters(bench, join):
    bench.create("mortal", time_to_live=5.0, dead_letter_expired=True)
    taker = join("mortal", dead=True)
    bench.put("mortal", message())
    bench.now += 6
    bench.broker.dispatcher.tick()
    bench.turn()
    assert taker.batches == [1]


def test_a_consumer_that_left_gets_nothing(bench, join):
    taker = join("q")
    assert bench.broker.dispatcher.consumers("q") == [taker]
    bench.broker.dispatcher.leave(taker)
    bench.broker.dispatcher.leave(taker)
    bench.put("q", message())
    bench.broker.dispatcher.wake(taker.source)
    bench.broker.queue_changed("q")
    bench.turn()
    assert taker.batches == []
    assert bench.broker.dispatcher.consumers("q") == []


def test_a_deleted_queue_harms_no_other(bench, join):
    bench.create("doomed")
    gone, taker = join("doomed"), join("q")
    bench.put("q", message())
    bench.namespace.delete("doomed")
    for each in (gone, taker):
        bench.broker.dispatcher.wake(each.source)
    bench.broker.dispatcher.tick()
    bench.turn()
    assert (gone.batches, taker.batches) == ([], [1])


def unreadable():
    """What the file of a later release may have."""
    return NewMessage(b"\xff" * 40, "id", None, None, None)


def test_a_message_that_cannot_be_read_harms_no_other_queue(bench, caplog):
    for name in ("broken", "q"):
        bench.create(name)
        bench.put(name, message())
    bench.engine.send("broken", [unreadable()])
    bench.put("broken", message())
    clients = {}
    for name in ("broken", "q"):
        clients[name] = bench.client()
        clients[name].attach(receive=True, address=name)
        clients[name].flow(10)
    assert len(clients["q"].receive(10)) == 1
    assert len(clients["broken"].receive(10)) == 2
    assert [record.name for record in caplog.records] == ["aztask.emulator.broker.consumer"]


def test_a_source_that_fails_is_left_alone_for_a_while(bench, join, caplog):
    bench.create("broken")
    broken, healthy = join("broken"), join("q")
    broken.take = lambda engine, limit: {}["a bug"]
    for _ in range(3):
        bench.put("broken", message())
        bench.put("q", message())
        for taker in (broken, healthy):
            bench.broker.dispatcher.wake(taker.source)
        bench.broker.dispatcher.tick()
        bench.turn()
    assert healthy.batches == [1, 1, 1]
    assert len(caplog.records) == 1
    del broken.take
    bench.now += dispatch.BROKEN_SECONDS
    bench.broker.dispatcher.tick()
    bench.turn()
    assert broken.batches == [3]


def test_one_turn_takes_limited_bytes_and_the_rest_follows(bench, join, monkeypatch):
    monkeypatch.setattr(dispatch, "TURN_BYTES", 1000)
    takers = []
    for number in range(5):
        name = f"q{number}"
        bench.create(name)
        bench.put(name, message(bytes(900)))
        takers.append(join(name))
        bench.broker.dispatcher.wake(takers[-1].source)
    bench.broker.committer.flush()
    assert sum(len(taker.batches) for taker in takers) == 2
    bench.turn()
    assert [taker.batches for taker in takers] == [[1]] * 5


def test_a_first_batch_is_small_because_its_messages_may_be_large(bench, join):
    taker = join("q")
    bench.put("q", *[message()] * 50)
    bench.broker.dispatcher.wake(taker.source)
    bench.turn()
    assert taker.batches == [dispatch.FIRST_BATCH, 50 - dispatch.FIRST_BATCH]
