"""Peeking, counting, when to look again, and emptying a queue."""

import pytest

from aztask.errors import QueueNotFound
from aztask.queues.engine import Counts, Database, Engine, NewMessage
from aztask.support.clock import Clock


class Bench:
    def __init__(self):
        self.now = 1000.0
        self.database = Database(":memory:")
        clock = Clock(monotonic=lambda: self.now, wall=lambda: self.now)
        self.engine = Engine(self.database, clock=clock)
        self.engine.create_queue("q")

    def fill(self):
        """One message in each state, and a dead letter."""
        numbers = self.engine.send("q", [NewMessage(b"%d" % n) for n in range(4)])
        for action in ("lease", "defer", "bury"):
            (taken,) = self.engine.receive("q", 1, 30.0)
            lease = [(taken.seq, taken.token)]
            if action == "defer":
                self.engine.defer("q", lease)
            elif action == "bury":
                self.engine.dead_letter("q", lease, "why", "because")
        return [*numbers, *self.engine.send("q", [NewMessage(b"4", due=1020.0)])]


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.database.close()


def test_every_state_is_shown_in_the_order_of_the_numbers(bench):
    numbers = bench.fill()
    found = bench.engine.peek("q")
    assert [each.state for each in found] == ["leased", "deferred", "active", "scheduled"]
    assert [each.seq for each in found] == [n for n in numbers if n != numbers[2]]
    assert (found[0].lease_until, found[3].due) == (1030.0, 1020.0)
    (dead,) = bench.engine.peek("q", dead_letter=True)
    assert (dead.seq, dead.reason, dead.description) == (numbers[2], "why", "because")


def test_pages_begin_at_a_number_and_end_at_the_limit(bench):
    numbers = bench.fill()
    assert [each.seq for each in bench.engine.peek("q", numbers[1], 2)] == [numbers[1], numbers[3]]
    assert bench.engine.peek("q", limit=0) == bench.engine.peek("q", limit=-1) == []


def test_the_counts(bench):
    bench.fill()
    assert bench.engine.stats("q") == Counts(1, 1, 1, 1, 1)


def test_when_to_look_again(bench):
    assert bench.engine.pending("q") == float("inf")
    bench.fill()
    assert bench.engine.pending("q") == 0.0
    bench.engine.receive("q", 1, 60.0)
    assert bench.engine.pending("q") == 20.0
    bench.engine.purge("q")
    assert bench.engine.pending("q") == 30.0
    bench.now = 1031.0
    assert bench.engine.pending("q") == 0.0


def test_a_purge_leaves_what_is_leased_and_the_dead_letters(bench):
    bench.fill()
    assert bench.engine.purge("q") == 3
    assert bench.engine.stats("q") == Counts(0, 1, 0, 0, 1)
    assert bench.engine.purge("q", dead_letter=True) == 1


def test_a_queue_that_is_not_there(bench):
    for call in (bench.engine.peek, bench.engine.stats, bench.engine.pending, bench.engine.purge):
        with pytest.raises(QueueNotFound):
            call("missing")
