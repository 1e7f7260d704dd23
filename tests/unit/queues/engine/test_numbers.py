"""Numbered queues: each counts its messages from 1 without gaps, and gives no number twice."""

from __future__ import annotations

import random
import sqlite3

import pytest

from aztask.errors import ConfigurationError
from aztask.queues.engine import (
    DUPLICATE,
    FIRST_SEQ,
    Database,
    Engine,
    NewMessage,
    StoredSettings,
    number_of,
)
from aztask.queues.engine.messages import MAX_NUMBERED_ID, PARTITIONS, first_seq, seq_in
from aztask.support.clock import Clock


class Time:
    """A clock that the test sets."""

    def __init__(self):
        self.now = 1000.0
        self.clock = Clock(monotonic=lambda: self.now, wall=lambda: self.now)


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def engine(time):
    database = Database(":memory:")
    engine = Engine(database, clock=time.clock, sweep_seconds=0.0)
    engine.create_queue("a", numbered=True)
    engine.create_queue("b", numbered=True)
    engine.create_queue("plain")
    yield engine
    database.close()


def numbers(seqs):
    return [number_of(seq) for seq in seqs]


def in_queue(engine, queue, **options):
    return numbers(message.seq for message in engine.peek(queue, **options))


def in_partition(partition, number):
    return (partition << 48) + number


def beginning(engine, number):
    return engine.seq_of("a", number)


X = NewMessage(b"x")


def test_each_queue_counts_its_own_messages(engine):
    assert numbers(engine.send("a", [X])) == [1]
    assert numbers(engine.send("b", [X] * 3)) == [1, 2, 3]
    assert engine.send("plain", [X, X]) == [1, 2]
    assert numbers(engine.send("a", [X] * 250)) == list(range(2, 252))
    assert in_queue(engine, "b") == [1, 2, 3]


def test_a_number_is_not_given_again_and_a_receive_is_in_their_order(engine):
    engine.send("a", [X] * 3)
    got = engine.receive("a", 3)
    assert numbers(message.seq for message in got) == [1, 2, 3]
    assert all(engine.complete("a", [(message.seq, message.token) for message in got]))
    assert numbers(engine.send("a", [X])) == [4]


def test_nothing_that_failed_leaves_a_gap(engine):
    with pytest.raises(RuntimeError), engine.database.transaction():
        engine.send("a", [X] * 2)
        engine.send("a", [X])
        raise RuntimeError("the process dies before the commit")
    assert numbers(engine.send("a", [X])) == [1]


def test_a_dropped_duplicate_takes_no_number(engine):
    engine.create_queue("once", StoredSettings(duplicate_window=60.0), numbered=True)
    one, two = NewMessage(b"1", "one"), NewMessage(b"2", "two")
    assert numbers(engine.send("once", [one, one, two])) == [1, DUPLICATE, 2]
    assert numbers(engine.send("once", [two])) == [DUPLICATE]
    assert numbers(engine.send("once", [NewMessage(b"3", "three")])) == [3]


def test_a_scheduled_message_gets_a_new_number_when_it_is_due(engine, time):
    late, soon = X._replace(due=1020.0, partition=5), X._replace(due=1010.0)
    (first, second) = engine.send("a", [late, soon])
    assert numbers([second]) == [1]
    assert number_of(first) == in_partition(5, 1)
    engine.send("a", [X])
    time.now = 1030.0
    assert in_queue(engine, "a") == [2, 3, in_partition(5, 2)]
    assert numbers(engine.send("a", [X])) == [4]


def test_scheduled_messages_of_several_partitions_are_due_together(engine, time):
    due = [X._replace(due=1010.0 - n, partition=n % 3) for n in range(6)]
    engine.send("a", due)
    engine.send("a", [X._replace(partition=2)] * 2)
    time.now = 1030.0
    expected = [in_partition(part, n) for part, n in ((0, 3), (0, 4), (1, 3), (1, 4))]
    assert in_queue(engine, "a")[:4] == expected
    assert in_queue(engine, "a")[4:] == [in_partition(2, n) for n in (3, 4, 5, 6)]
    more = engine.send("a", [X._replace(partition=part) for part in range(3)])
    assert numbers(more) == [in_partition(part, n) for part, n in ((0, 5), (1, 5), (2, 7))]


def test_a_queue_with_numbers_of_the_file_is_swept_as_ever(engine, time):
    engine.send("plain", [X._replace(due=1010.0)])
    engine.send("plain", [X])
    time.now = 1030.0
    assert in_queue(engine, "plain") == [2, 3]


def test_a_scheduled_message_is_cancelled_and_a_deferred_one_received_by_number(engine):
    engine.send("b", [X])
    engine.send("a", [X._replace(due=2000.0), X])
    assert numbers(engine.cancel_scheduled("a", [engine.seq_of("a", 1)])) == [1]
    assert engine.cancel_scheduled("a", [engine.seq_of("a", 1)]) == []
    (message,) = engine.receive("a", 1)
    engine.defer("a", [(message.seq, message.token)])
    assert engine.receive_deferred("a", [engine.seq_of("a", 1)]) == []
    assert engine.receive_deferred("b", [engine.seq_of("a", 2)]) == []
    assert numbers(m.seq for m in engine.receive_deferred("a", [engine.seq_of("a", 2)])) == [2]


def test_a_dead_letter_keeps_its_number_and_one_that_was_born_dead_takes_the_next(engine):
    engine.send("a", [X] * 2)
    (message,) = engine.receive("a", 1)
    engine.dead_letter("a", [(message.seq, message.token)], "why")
    assert number_of(engine.send_dead("a", X, "why", "")) == 3
    assert in_queue(engine, "a", dead_letter=True) == [1, 3]
    assert in_queue(engine, "a") == [2]
    assert engine.send_dead("plain", X, "why", "") == 1


def test_a_peek_begins_at_a_number(engine):
    engine.send("a", [X] * 5)
    assert in_queue(engine, "a", from_seq=beginning(engine, 4)) == [4, 5]
    for start in (-1, 0, 1):
        assert in_queue(engine, "a", from_seq=beginning(engine, start)) == [1, 2, 3, 4, 5]
    for end in (6, 1 << 47, (1 << 63) - 1):
        assert in_queue(engine, "a", from_seq=beginning(engine, end)) == []


def test_pages_of_messages_in_partitions_show_each_message_once(engine):
    seeded = random.Random(3)
    sent = [X._replace(partition=seeded.randint(0, PARTITIONS)) for _ in range(40)]
    given = numbers(engine.send("a", sent))
    assert [number >> 48 for number in given] == [message.partition for message in sent]
    for partition in {message.partition for message in sent}:
        own = [number & (1 << 48) - 1 for number in given if number >> 48 == partition]
        assert own == list(range(1, len(own) + 1))
    for number in given:
        assert in_queue(engine, "a", from_seq=beginning(engine, number), limit=1) == [number]
    found, start = [], 0
    while page := in_queue(engine, "a", from_seq=beginning(engine, start), limit=7):
        found += page
        start = page[-1] + 1
    assert found == sorted(given)


def test_a_receive_takes_turns_between_partitions_and_keeps_the_order_in_each(engine):
    sent = [X._replace(payload=b"%d" % n, partition=1 + (n > 2)) for n in range(6)]
    engine.send("a", sent)
    got = engine.receive("a", 6)
    assert [message.payload for message in got] == [b"0", b"3", b"1", b"4", b"2", b"5"]


def test_one_message_and_reserved_numbers_count_in_their_partition(engine):
    one = X._replace(partition=1)
    assert numbers(engine.send("a", [one])) == [in_partition(1, 1)]
    reserved = engine.reserve("a", [one, X, one])
    assert numbers(reserved) == [in_partition(1, 2), 1, in_partition(1, 3)]
    engine.send("a", [one, X, one], numbers=reserved)
    assert number_of(engine.send_dead("a", one, "why", "")) == in_partition(1, 4)
    assert in_queue(engine, "a") == [1, *(in_partition(1, n) for n in (1, 2, 3))]


def test_a_file_that_counted_all_partitions_together_gives_no_number_twice(tmp_path):
    path = str(tmp_path / "bus.db")
    database = Database(path)
    engine = Engine(database)
    engine.create_queue("a", numbered=True)
    engine.create_queue("b", numbered=True)
    engine.send("b", [X] * 3)
    with database.statement() as connection:
        connection.execute("DROP TABLE partitions")
        connection.execute("DELETE FROM components WHERE component = 'partitions'")
        connection.execute("UPDATE numbered SET last = 7")
    seq = engine.seq_of("a", in_partition(4, 7))
    with database.statement() as connection:
        row = "(seq, box, state, enqueued_at, message_id, payload)"
        connection.execute(f"INSERT INTO messages {row} VALUES (?, 1, 0, 1.0, '', x'00')", (seq,))
    database.close()
    database = Database(path)
    engine = Engine(database)
    messages = [X._replace(partition=part) for part in (4, 5)]
    assert numbers(engine.send("a", messages)) == [in_partition(4, 8), in_partition(5, 8)]
    assert numbers(engine.send("b", messages)) == [in_partition(4, 1), in_partition(5, 1)]
    database.close()


def test_a_queue_that_was_made_anew_begins_at_1(engine):
    engine.send("a", [X, X, X._replace(partition=3)])
    engine.delete_queue("a")
    assert engine.create_queue("a", numbered=True)
    assert numbers(engine.send("a", [X, X._replace(partition=3)])) == [1, in_partition(3, 1)]
    with engine.database.read() as connection:
        assert connection.execute("SELECT count(*) FROM numbered").fetchone() == (2,)


def test_changed_settings_are_noticed_by_the_next_send(engine):
    engine.send("a", [X])
    other = Engine(engine.database, clock=engine.clock)
    other.update_queue("a", StoredSettings(duplicate_window=60.0))
    one = NewMessage(b"1", "one")
    assert numbers(engine.send("a", [one]) + engine.send("a", [one])) == [2, DUPLICATE]


def test_the_numbers_survive_a_restart_and_are_shared_by_processes(tmp_path):
    path = str(tmp_path / "bus.db")
    first, second = Database(path), Database(path)
    one, two = Engine(first), Engine(second)
    one.create_queue("a", numbered=True)
    given = [number_of(engine.send("a", [X])[0]) for _ in range(5) for engine in (one, two)]
    assert given == list(range(1, 11))
    for message in one.receive("a", 10):
        one.complete("a", [(message.seq, message.token)])
    first.close()
    second.close()
    again = Database(path)
    assert numbers(Engine(again).send("a", [X])) == [11]
    again.close()


_BEFORE = (
    "INSERT INTO messages (state, moment, enqueued_at, expires_at, message_id, session, payload, "
    "box) SELECT ?, ?, 1.0, NULL, 'old', NULL, x'00', id FROM queues WHERE name = 'a'"
)
"""How the release before stores a message."""


def test_what_an_earlier_release_stores_is_received_and_gets_a_number_later(engine, time):
    engine.send("a", [X])
    with engine.database.statement() as connection:
        connection.execute(_BEFORE, (0, None))
        connection.execute(_BEFORE, (2, 1010.0))
    engine.send("a", [X])
    engine.send("plain", [X])
    got = engine.receive("a", 3)
    assert [message.message_id for message in got] == ["", "", "old"]
    assert engine.release("a", [(message.seq, message.token) for message in got]) == [True] * 3
    engine.adopt()
    assert in_queue(engine, "a") == [1, 2, 3, 4]
    engine.adopt()
    time.now = 1020.0
    assert in_queue(engine, "a") == [1, 2, 3, 5]
    assert numbers(engine.send("a", [X])) == [6]
    assert in_queue(engine, "plain") == [3]


def test_a_queue_of_an_earlier_release_keeps_the_numbers_of_the_file(engine):
    engine.send("plain", [X])
    assert not engine.create_queue("plain", numbered=True)
    assert engine.send("plain", [X]) == [2]
    assert engine.seq_of("plain", 2) == 2


def test_numbers_and_seqs_are_each_others_reverse():
    for queue, number in ((1, 1), (MAX_NUMBERED_ID, (1 << 35) - 1), (7, (31 << 48) + 12)):
        seq = seq_in(queue, number)
        assert FIRST_SEQ < seq < 0
        assert first_seq(queue) < seq < first_seq(queue + 1)
        assert number_of(seq) == number


def test_a_file_that_had_too_many_queues_is_refused(engine):
    with engine.database.statement() as connection:
        connection.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'queues'", (2**23,))
    with pytest.raises(ConfigurationError, match="begin a new file"):
        engine.create_queue("c", numbered=True)
    assert "c" not in engine.queues()


def test_the_release_before_opens_a_file_with_numbered_queues(tmp_path):
    """It refuses a component that it knows with more steps, and passes by one it does not know."""
    database = Database(str(tmp_path / "bus.db"))
    Engine(database).create_queue("a", numbered=True)
    database.close()
    connection = sqlite3.connect(tmp_path / "bus.db")
    versions = dict(connection.execute("SELECT component, version FROM components").fetchall())
    connection.close()
    assert (versions["engine"], versions["numbered"]) == (1, 1)
