"""What time does to messages, and how often that is asked."""

import pytest

from aztask.queues.engine import (
    DELIVERIES_EXCEEDED,
    TIME_TO_LIVE_EXPIRED,
    Database,
    Engine,
    NewMessage,
    StoredSettings,
)
from aztask.queues.engine.receiving import SWEEP_LIMIT, SWEEP_SECONDS
from aztask.support.clock import Clock


class Bench:
    def __init__(self, **settings):
        self.now = 1000.0
        self.database = Database(":memory:")
        clock = Clock(monotonic=lambda: self.now, wall=lambda: self.now)
        self.engine = Engine(self.database, clock=clock)
        self.engine.create_queue("q", StoredSettings(**settings))

    def send(self, *messages):
        return self.engine.send("q", messages)

    def dead(self):
        return [(each.payload, each.reason) for each in self.engine.peek("q", dead_letter=True)]


@pytest.fixture
def make():
    made = []

    def new(**settings):
        made.append(Bench(**settings))
        return made[-1]

    yield new
    for bench in made:
        bench.database.close()


def test_a_message_that_falls_due_gets_a_new_number(make):
    bench = make()
    (number,) = bench.send(NewMessage(b"later", due=1010.0))
    bench.send(NewMessage(b"now"))
    bench.now = 1010.0
    found = bench.engine.peek("q")
    assert [each.payload for each in found] == [b"now", b"later"]
    assert found[1].seq != number and found[1].enqueued_at == 1010.0


def test_a_lapsed_lease_gives_the_message_back_and_the_last_one_buries_it(make):
    bench = make(max_deliveries=2)
    bench.send(NewMessage(b"x"))
    for _ in range(2):
        assert len(bench.engine.receive("q", 1, 5.0)) == 1
        bench.now += 5.0
    assert bench.engine.receive("q", 1, 5.0) == []
    assert bench.dead() == [(b"x", DELIVERIES_EXCEEDED)]


@pytest.mark.parametrize("keep", [True, False])
def test_expired_messages_are_removed_or_buried(make, keep):
    bench = make(time_to_live=10.0, dead_letter_expired=keep)
    bench.send(NewMessage(b"x"))
    bench.now += 10.0
    assert bench.engine.receive("q", 1) == []
    assert bench.dead() == ([(b"x", TIME_TO_LIVE_EXPIRED)] if keep else [])
    assert bench.engine.stats("q").active == 0


def test_one_sweep_moves_a_limited_number(make):
    bench = make()
    bench.send(*[NewMessage(b"x", due=1005.0)] * (SWEEP_LIMIT + 1))
    bench.now = 1005.0
    assert bench.engine.stats("q")[:3] == (SWEEP_LIMIT, 0, 1)
    assert bench.engine.stats("q")[:3] == (SWEEP_LIMIT + 1, 0, 0)


def test_a_busy_receiver_sweeps_once_in_a_while(make):
    bench = make()
    bench.send(NewMessage(b"a"), NewMessage(b"b"), NewMessage(b"c", due=1000.0 + SWEEP_SECONDS / 2))
    bench.engine.receive("q", 1)
    bench.now += SWEEP_SECONDS / 2
    bench.engine.receive("q", 1)
    assert bench.engine.pending("q") == 0.0
    (last,) = bench.engine.receive("q", 1)
    assert last.payload == b"c", "a receive that finds nothing sweeps before it says so"
