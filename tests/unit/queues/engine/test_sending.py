"""Sending: numbers, duplicates, schedules and their cancelling."""

import pytest

from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.engine import DUPLICATE, Database, Engine, NewMessage, StoredSettings
from aztask.queues.engine.queues import _CANCEL_ID
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

    def payloads(self):
        return [each.payload for each in self.engine.peek("q")]


@pytest.fixture
def make():
    made = []

    def new(**settings):
        made.append(Bench(**settings))
        return made[-1]

    yield new
    for bench in made:
        bench.database.close()


@pytest.mark.parametrize("count", [1, 2, 25, 130])
def test_numbers_rise_with_the_order_of_the_messages(make, count):
    bench = make()
    numbers = bench.send(*[NewMessage(b"%d" % n) for n in range(count)])
    assert numbers == sorted(set(numbers))
    assert [each.seq for each in bench.engine.peek("q", limit=200)] == numbers


@pytest.mark.parametrize("count", [1, 2])
def test_a_message_without_a_session_is_refused_with_its_whole_batch(make, count):
    bench = make(sessions=True)
    messages = [NewMessage(b"x", session="a")] * (count - 1)
    with pytest.raises(ConfigurationError, match="has sessions"):
        bench.send(*messages, NewMessage(b"y"))
    assert bench.payloads() == []


def test_an_id_is_stored_once_within_the_window(make):
    bench = make(duplicate_window=60.0)
    first, second = bench.send(NewMessage(b"a", "m"), NewMessage(b"b", "m"))
    assert first != DUPLICATE and second == DUPLICATE
    bench.engine.purge("q")
    assert bench.send(NewMessage(b"c", "m")) == [DUPLICATE], "whatever became of the first"
    bench.now += 60.0
    assert bench.send(NewMessage(b"d", "m")) != [DUPLICATE]


def test_messages_without_an_id_are_no_duplicates(make):
    bench = make(duplicate_window=60.0)
    assert DUPLICATE not in bench.send(NewMessage(b"a"), NewMessage(b"a"))


def test_a_schedule_is_cancelled_until_it_is_due(make):
    bench = make()
    due, later = bench.send(NewMessage(b"a", due=1005.0), NewMessage(b"b", due=1010.0))
    bench.now = 1005.0
    assert bench.engine.cancel_scheduled("q", [due, later, 999]) == [later]


def test_schedules_are_cancelled_by_message_id(make):
    bench = make()
    bench.send(*[NewMessage(b"x", name, due=1005.0) for name in ("a", "a", "b")])
    bench.send(NewMessage(b"x", "a"))
    assert bench.engine.cancel_scheduled_ids("q", ["a", "c"]) == ["a", "a"]
    assert bench.engine.stats("q")[:3] == (1, 0, 1)


def test_nothing_is_sent_to_a_queue_that_is_not_there(make):
    bench = make()
    for messages in ([], [NewMessage(b"x")], [NewMessage(b"x")] * 2):
        with pytest.raises(QueueNotFound):
            bench.engine.send("missing", messages)


def test_cancelling_by_id_reads_only_the_messages_of_that_id(make):
    """In a queue with many timers, each cancellation would read all of them."""
    with make().database.read() as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {_CANCEL_ID}", (1, 0.0, "a")).fetchall()
    assert "(box=? AND message_id=?)" in str(plan[0][-1])
