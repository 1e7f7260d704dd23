"""The engine's corners that the model and the contract do not reach."""

from __future__ import annotations

import math

import pytest

from aztask.errors import ConfigurationError, LeaseLost, QueueNotFound
from aztask.queues.engine import Database, Engine, NewMessage, StoredSettings
from aztask.support.clock import Clock


class Time:
    now = 1000.0

    def clock(self):
        return Clock(monotonic=lambda: self.now, wall=lambda: self.now)


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def engine(time, tmp_path):
    database = Database(str(tmp_path / "queues.db"))
    engine = Engine(database, clock=time.clock())
    engine.create_queue("q")
    yield engine
    database.close()


@pytest.fixture
def other(engine, time):
    database = Database(engine.database.path)
    yield Engine(database, clock=time.clock())
    database.close()


def leases(received):
    return [(message.seq, message.token) for message in received]


def test_settings_changed_elsewhere_count_at_the_next_send(engine, other):
    other.send("q", [NewMessage(b"before", "a")])
    engine.update_queue("q", StoredSettings(duplicate_window=60.0))
    assert [other.send("q", [NewMessage(b"x", "b")])[0] > 0 for _ in range(2)] == [True, False]
    engine.update_queue("q", StoredSettings(time_to_live=5.0))
    other.send("q", [NewMessage(b"y"), NewMessage(b"z")])
    assert [m.expires_at for m in other.receive("q", 9)[-2:]] == [1005.0, 1005.0]


def test_a_queue_deleted_and_created_elsewhere_is_the_new_one(engine, other):
    other.send("q", [NewMessage(b"old")])
    engine.delete_queue("q")
    with pytest.raises(QueueNotFound):
        other.send("q", [NewMessage(b"lost")])
    with pytest.raises(QueueNotFound):
        other.receive("q", 1)
    engine.create_queue("q")
    engine.send("q", [NewMessage(b"new")])
    assert [m.payload for m in other.receive("q", 5)] == [b"new"]


def test_a_stale_queue_is_found_again_by_receive(engine, other):
    other.send("q", [NewMessage(b"old")])
    engine.delete_queue("q")
    engine.create_queue("q")
    engine.send("q", [NewMessage(b"new")])
    assert [m.payload for m in other.receive("q", 5)] == [b"new"]


def test_leases_of_an_earlier_boot_are_void(engine, time):
    engine.send("q", [NewMessage(b"x")])
    held = engine.receive("q", 1, 1e6)
    with engine.database.statement() as connection:
        connection.execute("UPDATE boots SET boot = 'an earlier one'")
    again = Engine(engine.database, clock=time.clock())
    assert again.complete("q", leases(held)) == [False]
    assert again.receive("q", 1)[0].delivery_count == 2


def test_leases_of_this_boot_stay_when_the_file_is_opened_again(engine, time):
    engine.send("q", [NewMessage(b"x")])
    held = engine.receive("q", 1)
    again = Engine(engine.database, clock=time.clock())
    assert again.receive("q", 1) == []
    assert again.complete("q", leases(held)) == [True]


def test_expired_messages_go_away_unless_the_queue_keeps_them(engine, time):
    engine.send("q", [NewMessage(b"x", expires_at=1005.0)])
    time.now += 5.0
    assert engine.receive("q", 1) == []
    assert engine.stats("q").dead == 0
    engine.update_queue("q", StoredSettings(dead_letter_expired=True))
    engine.send("q", [NewMessage(b"y", expires_at=time.now + 5.0)])
    time.now += 5.0
    assert engine.receive("q", 1) == []
    (dead,) = engine.receive("q", 1, dead_letter=True)
    assert (dead.payload, dead.reason, dead.expires_at) == (b"y", "TTLExpiredException", None)


def test_the_shorter_of_both_expiries_counts_and_begins_when_due(engine):
    engine.update_queue("q", StoredSettings(time_to_live=50.0))
    engine.send("q", [NewMessage(b"a", expires_at=1010.0), NewMessage(b"b", expires_at=2000.0)])
    engine.send("q", [NewMessage(b"c", due=1100.0)])
    assert [m.expires_at for m in engine.peek("q")] == [1010.0, 1050.0, 1150.0]


def test_a_leased_message_does_not_expire_before_its_lease_ends(engine, time):
    engine.send("q", [NewMessage(b"x", expires_at=1005.0)])
    held = engine.receive("q", 1, 60.0)
    time.now += 30.0
    assert engine.stats("q").leased == 1
    assert engine.complete("q", leases(held)) == [True]


def test_a_message_that_falls_due_goes_to_the_end_of_the_line(engine, time):
    (scheduled,) = engine.send("q", [NewMessage(b"later", due=1010.0)])
    engine.send("q", [NewMessage(b"now")])
    time.now = 1010.0
    received = engine.receive("q", 5)
    assert [m.payload for m in received] == [b"now", b"later"]
    assert received[1].seq > received[0].seq > scheduled
    assert received[1].enqueued_at == 1010.0


def test_thousands_falling_due_at_once_come_in_order(engine, time):
    engine.send("q", [NewMessage(b"%d" % n, due=1010.0) for n in range(2500)])
    time.now = 1010.0
    got = []
    while received := engine.receive("q", 400):
        got += [int(m.payload) for m in received]
        time.now += 0.05
    assert got == list(range(2500))


def test_thousands_of_lapsed_leases_come_back_and_the_exhausted_do_not(engine, time):
    engine.update_queue("q", StoredSettings(max_deliveries=2))
    engine.send("q", [NewMessage(b"x")] * 2500)
    assert len(engine.receive("q", 1500, 5.0)) == 1500
    time.now += 5.0
    taken = 0
    while received := engine.receive("q", 500, 5.0):
        taken += len(received)
        time.now += 0.05
        assert all(m.delivery_count <= 2 for m in received)
    assert taken >= 2500
    time.now += 5.0
    while engine.receive("q", 500, 5.0):
        time.now += 5.0
    assert engine.stats("q") == (0, 0, 0, 0, 2500)


def test_pending_says_when_to_look_again(engine, time):
    assert engine.pending("q") == math.inf
    engine.send("q", [NewMessage(b"later", due=1030.0)])
    assert engine.pending("q") == 30.0
    engine.send("q", [NewMessage(b"now")])
    assert engine.pending("q") == 0.0
    engine.receive("q", 1, 10.0)
    assert engine.pending("q") == 10.0
    time.now = 1500.0
    assert engine.pending("q") == 0.0


def test_a_dead_letter_keeps_its_number_and_may_get_another_payload(engine):
    (number,) = engine.send("q", [NewMessage(b"x", "m", expires_at=5000.0)])
    held = engine.receive("q", 1)
    assert engine.dead_letter("q", leases(held), "r", "d", b"y") == [True]
    (dead,) = engine.receive("q", 1, dead_letter=True)
    assert (dead.seq, dead.payload, dead.reason, dead.description) == (number, b"y", "r", "d")
    assert engine.dead_letter("q", leases([dead]), "r2", dead_letter=True) == [True]
    assert engine.peek("q", dead_letter=True)[0].reason == "r2"


def test_a_lease_of_the_dead_letters_is_none_of_the_queue(engine):
    engine.send("q", [NewMessage(b"x")])
    held = leases(engine.receive("q", 1))
    assert engine.complete("q", held, dead_letter=True) == [False]
    engine.create_queue("other")
    assert engine.complete("other", held) == [False]
    assert engine.complete("q", held) == [True]


def test_one_lease_twice_in_a_batch_counts_once(engine):
    engine.send("q", [NewMessage(b"x"), NewMessage(b"y")])
    (x, y) = leases(engine.receive("q", 2))
    assert engine.complete("q", [x, y, x]) == [True, True, False]


def test_a_replacement_without_lease_sends_nothing(engine):
    engine.send("q", [NewMessage(b"x")])
    (lease,) = leases(engine.receive("q", 1))
    clones = [(*lease, NewMessage(b"1")), (lease[0], "0" * 32, NewMessage(b"2"))]
    assert engine.replace("q", clones) == [True, False]
    assert [m.payload for m in engine.peek("q")] == [b"1"]


def test_session_state_outlives_messages_and_needs_the_lease(engine, time):
    engine.create_queue("s", StoredSettings(sessions=True, lease_seconds=10.0))
    lease = engine.accept_session("s", "a")
    assert engine.get_session_state("s", lease) is None
    engine.set_session_state("s", lease, b"page 7")
    assert engine.sessions("s") == []
    assert engine.sessions("s", with_state=True) == ["a"]
    engine.release_session("s", lease)
    with pytest.raises(LeaseLost, match="accept it again"):
        engine.set_session_state("s", lease, b"late")
    lease = engine.accept_session("s", "a")
    assert engine.get_session_state("s", lease) == b"page 7"
    time.now += 10.0
    with pytest.raises(LeaseLost):
        engine.receive("s", 1, session=lease)


def test_giving_a_session_back_does_not_count_and_losing_it_does(engine, time):
    engine.create_queue("s", StoredSettings(sessions=True, lease_seconds=10.0))
    engine.send("s", [NewMessage(b"x", session="a")])
    lease = engine.accept_session("s")
    engine.receive("s", 1, session=lease)
    engine.release_session("s", lease)
    lease = engine.accept_session("s")
    assert engine.receive("s", 1, session=lease)[0].delivery_count == 1
    time.now += 10.0
    lease = engine.accept_session("s")
    assert engine.receive("s", 1, session=lease)[0].delivery_count == 2


def test_sessions_take_turns(engine):
    engine.create_queue("s", StoredSettings(sessions=True))
    engine.send("s", [NewMessage(b"x", session=name) for name in ("a", "b", "c")] * 2)
    seen = []
    for _ in range(4):
        lease = engine.accept_session("s")
        seen.append(lease.session)
        engine.release_session("s", lease)
    assert seen == ["a", "b", "c", "a"]


def test_whether_a_queue_has_sessions_cannot_be_changed(engine):
    with pytest.raises(ConfigurationError, match="cannot be changed"):
        engine.update_queue("q", StoredSettings(sessions=True))


@pytest.mark.parametrize("field", ["lease_seconds", "max_deliveries", "time_to_live"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_settings_that_cannot_be_are_refused(field, value):
    with pytest.raises(ConfigurationError, match=field):
        StoredSettings(**{field: value})


@pytest.mark.parametrize("window", [-1.0, math.nan, math.inf])
def test_a_window_that_cannot_be_is_refused(window):
    with pytest.raises(ConfigurationError, match="duplicate_window"):
        StoredSettings(duplicate_window=window)


def test_nothing_asked_nothing_done(engine):
    assert engine.send("q", []) == []
    assert engine.receive("q", 0) == []
    assert engine.renew("q", []) == []
    assert engine.complete("q", []) == []
    with pytest.raises(QueueNotFound):
        engine.send("missing", [])
    with pytest.raises(ConfigurationError):
        engine.create_queue("")


def test_large_payloads_survive_every_step(engine, time):
    payload = bytes(range(256)) * 4000
    engine.send("q", [NewMessage(payload)])
    for _ in range(2):
        held = engine.receive("q", 1, 10.0)
        assert engine.renew("q", leases(held), 20.0) == [time.now + 20.0]
        engine.abandon("q", leases(held))
    assert engine.peek("q")[0].payload == payload


@pytest.mark.parametrize("size", [2, 19, 20, 21, 100, 137, 241])
def test_batches_of_every_size_are_stored_and_settled_alike(engine, time, size):
    numbers = engine.send("q", [NewMessage(b"%d" % n, f"id{n}") for n in range(size)])
    received = engine.receive("q", size)
    assert [(m.seq, m.payload, m.message_id) for m in received] == [
        (number, b"%d" % n, f"id{n}") for n, number in enumerate(numbers)
    ]
    assert engine.renew("q", leases(received), 30.0) == [time.now + 30.0] * size
    assert engine.release("q", leases(received)) == [True] * size
    received = engine.receive("q", size)
    assert {m.delivery_count for m in received} == {1}
    assert engine.defer("q", leases(received)) == [True] * size
    received = engine.receive_deferred("q", numbers)
    assert engine.dead_letter("q", leases(received), "r", "d") == [True] * size
    received = engine.receive("q", size, dead_letter=True)
    assert [m.payload for m in received] == [b"%d" % n for n in range(size)]
    assert {(m.reason, m.description) for m in received} == {("r", "d")}
    assert engine.complete("q", leases(received), dead_letter=True) == [True] * size


@pytest.mark.parametrize("size", [20, 137])
def test_one_lost_lease_in_a_large_batch_is_told_apart(engine, size):
    engine.send("q", [NewMessage(b"x")] * size)
    held = leases(engine.receive("q", size))
    engine.complete("q", [held[7]])
    swapped = [(held[1][0], held[2][1]), (held[2][0], held[1][1])]
    batch = [held[0], *swapped, *held[3:]]
    expected = [True, False, False, *[True] * (size - 3)]
    expected[7] = False
    assert [end is not None for end in engine.renew("q", batch)] == expected
    assert engine.complete("q", batch) == expected
    assert engine.stats("q").leased == 2


@pytest.mark.parametrize("name", ["missing", "\udcff", "a\0b", "\x1b[31m"])
def test_a_queue_that_cannot_be_there_is_not_found(engine, name):
    for use in (engine.queue, engine.stats, engine.delete_queue, engine.peek):
        with pytest.raises(QueueNotFound) as caught:
            use(name)
        assert str(caught.value).isprintable()
