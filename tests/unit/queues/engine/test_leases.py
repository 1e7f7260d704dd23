"""Leases of the engine at their exact boundaries, one by one and in batches."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.engine import Database, Engine, NewMessage, StoredSettings
from aztask.queues.engine.receiving import SWEEP_LIMIT
from aztask.support.clock import Clock

NOW = 1000.0
LEASE = 10.0
SIZES = [1, 2, 19, 20, 21, 100, 137]
"""Of batches: one statement takes one row, 20 or 100."""


class Time:
    """Two clocks that stand still, far apart: what counts on one is not judged by the other."""

    def __init__(self):
        self.now = NOW
        self.ahead = 500_000.0

    def clock(self):
        return Clock(monotonic=lambda: self.now, wall=lambda: self.wall)

    @property
    def wall(self):
        return self.now + self.ahead


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def engine(time):
    database = Database(":memory:")
    engine = Engine(database, clock=time.clock())
    engine.create_queue("q", StoredSettings(lease_seconds=LEASE, max_deliveries=1000))
    engine.create_queue("other", StoredSettings(lease_seconds=LEASE))
    yield engine
    database.close()


def leases(received):
    return [(message.seq, message.token) for message in received]


def held(engine, count=1, seconds=None, **options):
    """Leases of that many new messages."""
    engine.send("q", [NewMessage(b"%d" % n, f"id-{n}") for n in range(count)])
    return leases(engine.receive("q", count, seconds, **options))


def payloads(engine, **options):
    return [message.payload for message in engine.peek("q", limit=1000, **options)]


ACTIONS = {
    "complete": lambda engine, batch: engine.complete("q", batch),
    "abandon": lambda engine, batch: engine.abandon("q", batch),
    "delay": lambda engine, batch: engine.abandon("q", batch, 5.0),
    "release": lambda engine, batch: engine.release("q", batch),
    "defer": lambda engine, batch: engine.defer("q", batch),
    "dead letter": lambda engine, batch: engine.dead_letter("q", batch, "why"),
    "renew": lambda engine, batch: [end is not None for end in engine.renew("q", batch, 20.0)],
    "replace": lambda engine, batch: engine.replace(
        "q", [(*lease, NewMessage(b"clone")) for lease in batch]
    ),
    "update": lambda engine, batch: [
        engine.update("q", *lease, b"new", 20.0) is not None for lease in batch
    ],
}


# -- whose lease it is -------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_stale_token_in_a_batch_touches_nothing_of_the_lease_after_it(engine, time, action, size):
    """The message was received again by another worker, whose lease stays as it is."""
    (stale,) = held(engine, 1, 1.0)
    time.now += 1.0
    (again,) = engine.receive("q", 1, 100.0)
    assert (again.seq, again.delivery_count) == (stale[0], 2)
    batch = held(engine, size - 1, 50.0) if size > 1 else []
    batch.insert(size // 2, stale)
    expected = [lease is not stale for lease in batch]
    assert ACTIONS[action](engine, batch) == expected
    (there,) = engine.peek("q", again.seq, 1)
    assert (there.state, there.payload, there.lease_until) == ("leased", b"0", NOW + 101.0)
    assert engine.complete("q", leases([again])) == [True]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("left", "answer"), [(0.001, True), (0.0, False), (-1.0, False)])
def test_a_lease_holds_until_its_end_and_not_at_it(engine, time, action, size, left, answer):
    batch = held(engine, size, LEASE)
    time.now += LEASE - left
    assert ACTIONS[action](engine, batch) == [answer] * size


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("size", [1, 2, 20])
def test_a_lease_of_another_queue_or_of_the_dead_letters_is_none_here(engine, action, size):
    batch = held(engine, size)
    engine.send("other", [NewMessage(b"x")] * size)
    elsewhere = leases(engine.receive("other", size))
    assert ACTIONS[action](engine, elsewhere) == [False] * size
    engine.dead_letter("q", batch, "why")
    dead = leases(engine.receive("q", size, dead_letter=True))
    assert ACTIONS[action](engine, dead) == [False] * size
    assert engine.complete("other", elsewhere) == [True] * size
    assert engine.complete("q", dead, dead_letter=True) == [True] * size


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("size", [1, 2, 20])
def test_one_number_with_anothers_token_is_no_lease(engine, action, size):
    batch = held(engine, size + 1)
    swapped = [(number, token) for (number, _), (_, token) in pairwise(batch)]
    assert ACTIONS[action](engine, swapped) == [False] * size
    assert {message.state for message in engine.peek("q")} == {"leased"}


@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_done_without_leases(engine, action):
    assert ACTIONS[action](engine, []) == []


def test_a_batch_of_20_000_with_one_stale_member(engine, time):
    (stale,) = held(engine, 1, 1.0)
    time.now += 1.0
    engine.receive("q", 1, 100.0)
    batch = held(engine, 20_000, 100.0)
    batch[777] = stale
    answers = engine.complete("q", batch)
    assert answers.pop(777) is False
    assert answers == [True] * 19_999
    assert engine.stats("q").leased == 2


# -- what an action leaves behind --------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 25])
def test_a_renewal_counts_from_now_whether_it_lengthens_or_shortens(engine, time, size):
    batch = held(engine, size, 10.0)
    time.now += 4.0
    for seconds in (30.0, 2.0):
        assert engine.renew("q", batch, seconds) == [time.now + seconds] * size
        assert {each.lease_until for each in engine.peek("q")} == {time.now + seconds}
    time.now += 1.999
    assert engine.receive("q", 1) == []
    time.now += 0.001
    assert len(engine.receive("q", size)) == size


def test_without_a_length_the_queues_own_counts(engine, time):
    batch = held(engine, 2)
    assert {each.lease_until for each in engine.peek("q")} == {NOW + LEASE}
    time.now += 3.0
    assert engine.renew("q", batch) == [NOW + 3.0 + LEASE] * 2
    assert engine.update("q", *batch[0], b"x") == NOW + 3.0 + LEASE


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_length_that_cannot_be_is_refused(engine, seconds):
    (lease,) = held(engine)
    for ask in (
        lambda: engine.receive("q", 1, seconds),
        lambda: engine.renew("q", [lease], seconds),
        lambda: engine.update("q", *lease, b"x", seconds),
        lambda: engine.receive_deferred("q", [1], seconds),
    ):
        with pytest.raises(ConfigurationError, match="a number of seconds above 0"):
            ask()


def test_the_shortest_length_that_can_be_is_granted(engine):
    (lease,) = held(engine, 1, 1e-6)
    assert engine.renew("q", [lease], 0.5) == [NOW + 0.5]


def test_an_update_replaces_the_payload_and_renews(engine):
    (lease,) = held(engine)
    assert engine.update("q", *lease, b"new", 25.0) == NOW + 25.0
    (there,) = engine.peek("q")
    assert (there.payload, there.lease_until) == (b"new", NOW + 25.0)
    assert engine.complete("q", [lease]) == [True]


@pytest.mark.parametrize("size", [1, 25])
def test_given_back_messages_are_ready_at_once_in_their_old_place(engine, size):
    for action, count in (("abandon", 2), ("release", 2)):
        batch = held(engine, size)
        engine.send("q", [NewMessage(b"later")])
        assert ACTIONS[action](engine, batch) == [True] * size
        again = engine.receive("q", size)
        assert leases(again) != batch
        assert [each.seq for each in again] == [number for number, _ in batch]
        assert {each.delivery_count for each in again} == {count if action == "abandon" else 1}
        engine.complete("q", leases(again))
        engine.purge("q")


def test_a_release_never_counts_below_zero(engine):
    batch = held(engine)
    with engine.database.statement() as connection:
        connection.execute("UPDATE messages SET deliveries = 0")
    engine.release("q", batch)
    assert engine.receive("q", 1)[0].delivery_count == 1


def test_what_is_given_back_or_set_aside_has_no_lease_any_more(engine):
    for action in ("abandon", "delay", "release", "defer", "dead letter"):
        (lease,) = held(engine)
        ACTIONS[action](engine, [lease])
        dead = action == "dead letter"
        with engine.database.read() as connection:
            token, moment = connection.execute(
                "SELECT token, moment FROM messages WHERE seq = ?", (lease[0],)
            ).fetchone()
        assert token is None
        assert (moment is None) == (action != "delay")
        engine.purge("q", dead_letter=dead)
        engine.purge("q")


def test_a_delayed_message_is_due_by_the_wall_clock_at_its_very_instant(engine, time):
    batch = held(engine, 2)
    assert engine.abandon("q", batch, 0.5) == [True, True]
    (first, _) = engine.peek("q")
    assert (first.state, first.due, first.lease_until) == ("scheduled", time.wall + 0.5, None)
    time.now += 0.499
    assert engine.receive("q", 2) == []
    time.now += 0.001
    again = engine.receive("q", 2)
    assert [each.delivery_count for each in again] == [2, 2]
    assert engine.complete("q", batch) == [False, False]


def test_a_delayed_deferred_message_comes_back_as_an_ordinary_one(engine, time):
    (lease,) = held(engine)
    engine.defer("q", [lease])
    (again,) = engine.receive_deferred("q", [lease[0]])
    engine.abandon("q", leases([again]), 5.0)
    time.now += 5.0
    assert len(engine.receive("q", 1)) == 1


def test_the_delivery_limit_is_judged_for_each_member_of_a_batch(engine):
    engine.update_queue("q", StoredSettings(lease_seconds=LEASE, max_deliveries=2))
    for delay in (0.0, 5.0):
        (first,) = held(engine)
        engine.abandon("q", [first])
        engine.send("q", [NewMessage(b"fresh")])
        both = engine.receive("q", 2)
        assert engine.abandon("q", leases(both), delay) == [True, True]
        (dead,) = engine.peek("q", dead_letter=True)
        assert (dead.payload, dead.reason) == (b"0", "MaxDeliveryCountExceeded")
        assert [each.payload for each in engine.peek("q")] == [b"fresh"]
        engine.purge("q")
        engine.purge("q", dead_letter=True)


def test_a_release_at_the_delivery_limit_is_no_failure(engine):
    engine.update_queue("q", StoredSettings(lease_seconds=LEASE, max_deliveries=1))
    for _ in range(3):
        batch = held(engine, 1) if not payloads(engine) else leases(engine.receive("q", 1))
        assert engine.release("q", batch) == [True]
    assert payloads(engine, dead_letter=True) == []


@pytest.mark.parametrize("size", [1, 2, 25])
def test_each_of_a_batch_of_dead_letters_has_reason_description_and_payload(engine, size):
    batch = held(engine, size)
    assert engine.dead_letter("q", batch, "why", "because") == [True] * size
    dead = engine.peek("q", dead_letter=True)
    assert {(each.reason, each.description) for each in dead} == {("why", "because")}
    assert [each.payload for each in dead] == [b"%d" % n for n in range(size)]
    again = leases(engine.receive("q", size, dead_letter=True))
    assert engine.dead_letter("q", again, "new", payload=b"p", dead_letter=True) == [True] * size
    dead = engine.peek("q", dead_letter=True)
    assert {(each.reason, each.description, each.payload) for each in dead} == {("new", "", b"p")}
    assert payloads(engine) == []


def test_a_dead_letter_never_expires_and_cannot_be_exhausted(engine, time):
    engine.update_queue("q", StoredSettings(lease_seconds=LEASE, max_deliveries=1))
    engine.send("q", [NewMessage(b"x", expires_at=time.wall + 5.0)])
    engine.dead_letter("q", leases(engine.receive("q", 1)), "why")
    time.now += 100.0
    for count in (2, 3):
        (dead,) = engine.receive("q", 1, dead_letter=True)
        assert (dead.delivery_count, dead.expires_at) == (count, None)
        assert engine.abandon("q", leases([dead]), dead_letter=True) == [True]


@pytest.mark.parametrize("size", [1, 2, 25])
def test_a_replacement_is_one_for_one_and_a_lost_lease_sends_no_clone(engine, time, size):
    (stale,) = held(engine, 1, 1.0)
    time.now += 1.0
    engine.receive("q", 1, 100.0)
    batch = [*held(engine, size), stale]
    clones = [
        (*lease, NewMessage(b"clone %d" % n, due=time.wall + 5.0)) for n, lease in enumerate(batch)
    ]
    assert engine.replace("q", clones) == [*[True] * size, False]
    waiting = [each for each in engine.peek("q", limit=1000) if each.state == "scheduled"]
    assert [each.payload for each in waiting] == [b"clone %d" % n for n in range(size)]
    assert {each.due for each in waiting} == {time.wall + 5.0}
    assert engine.stats("q").leased == 1


def test_a_replay_out_of_the_dead_letters_is_sent_to_the_queue(engine):
    engine.dead_letter("q", held(engine), "why")
    (lease,) = leases(engine.receive("q", 1, dead_letter=True))
    clone = NewMessage(b"again")
    assert engine.replace("q", [(*lease, clone)]) == [False]
    assert engine.replace("q", [(*lease, clone)], dead_letter=True) == [True]
    assert (payloads(engine), payloads(engine, dead_letter=True)) == ([b"again"], [])


@pytest.mark.parametrize("action", ["complete", "release", "defer", "abandon"])
def test_the_dead_letters_have_their_own_leases(engine, action):
    engine.dead_letter("q", held(engine), "why")
    (lease,) = leases(engine.receive("q", 1, dead_letter=True))
    do = getattr(engine, action)
    assert do("q", [lease]) == [False]
    assert do("q", [lease], dead_letter=True) == [True]
    left = payloads(engine, dead_letter=True)
    assert left == ([] if action == "complete" else [b"0"])
    if action == "defer":
        assert engine.receive("q", 1, dead_letter=True) == []
        assert engine.receive_deferred("q", [lease[0]]) == []
        assert len(engine.receive_deferred("q", [lease[0]], dead_letter=True)) == 1


@pytest.mark.parametrize("how", ["renew", "update"])
def test_leases_of_the_dead_letters_are_renewed_there(engine, how):
    engine.dead_letter("q", held(engine), "why")
    (lease,) = leases(engine.receive("q", 1, dead_letter=True))
    if how == "renew":
        assert engine.renew("q", [lease], 20.0) == [None]
        assert engine.renew("q", [lease], 20.0, dead_letter=True) == [NOW + 20.0]
    else:
        assert engine.update("q", *lease, b"x", 20.0) is None
        assert engine.update("q", *lease, b"x", 20.0, dead_letter=True) == NOW + 20.0


# -- receiving ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_messages_come_in_order_each_under_a_lease_of_its_own(engine, limit):
    engine.send("q", [NewMessage(b"%d" % n) for n in range(5)])
    got = engine.receive("q", limit)
    assert [each.payload for each in got] == [b"%d" % n for n in range(limit)]
    assert len({each.token for each in got}) == limit
    assert all(len(each.token) == 32 for each in got)
    assert {each.lease_until for each in got} == {NOW + LEASE}
    assert {each.delivery_count for each in got} == {1}
    assert [each.payload for each in engine.receive("q", 9)] == [b"%d" % n for n in range(limit, 5)]


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize(("left", "comes"), [(0.001, True), (0.0, False)])
def test_a_message_is_received_until_it_expires_and_not_at_that_instant(
    engine, time, limit, delete, left, comes
):
    engine.send("q", [NewMessage(b"x", expires_at=time.wall + 5.0)])
    engine.receive("other", 1)
    time.now += 5.0 - left
    engine.sweeper.swept[1] = (
        time.now
    )  # another look has just swept: the statement itself must judge
    assert bool(engine.receive("q", limit, delete=delete)) is comes


@pytest.mark.parametrize("limit", [1, 2])
def test_a_message_falls_due_at_its_very_instant(engine, time, limit):
    engine.send("q", [NewMessage(b"x", due=time.wall + 5.0)])
    time.now += 4.999
    assert engine.receive("q", limit) == []
    time.now += 0.001
    assert [each.payload for each in engine.receive("q", limit)] == [b"x"]


@pytest.mark.parametrize("delete", [False, True])
def test_a_lease_that_has_ended_is_received_again_at_that_very_instant(engine, time, delete):
    held(engine)
    time.now += LEASE - 0.001
    assert engine.receive("q", 1, delete=delete) == []
    time.now += 0.001
    (again,) = engine.receive("q", 1, delete=delete)
    assert again.delivery_count == 2


def test_received_and_deleted_it_is_gone(engine):
    engine.send("q", [NewMessage(b"x", "id"), NewMessage(b"y")])
    first, second = engine.receive("q", 2, delete=True)
    assert (first.payload, first.message_id, first.token) == (b"x", "id", "")
    assert (first.delivery_count, second.seq) == (1, first.seq + 1)
    assert payloads(engine) == []


def test_only_the_queues_own_messages_are_received(engine):
    engine.send("other", [NewMessage(b"x")])
    assert engine.receive("q", 5) == []
    assert engine.receive("q", 5, delete=True) == []
    engine.dead_letter("other", leases(engine.receive("other", 1)), "why")
    assert engine.receive("other", 1) == []
    assert engine.receive("q", 1, dead_letter=True) == []
    assert len(engine.receive("other", 1, dead_letter=True)) == 1


def test_a_queue_with_sessions_is_received_through_them_and_its_dead_letters_are_not(engine):
    engine.create_queue("s", StoredSettings(sessions=True))
    engine.send("s", [NewMessage(b"x", session="a")])
    with pytest.raises(ConfigurationError, match="accept one"):
        engine.receive("s", 1)
    session = engine.accept_session("s")
    engine.dead_letter("s", leases(engine.receive("s", 1, session=session)), "why")
    assert len(engine.receive("s", 1, dead_letter=True)) == 1


def test_a_queue_that_was_deleted_is_not_found_by_a_receive(engine):
    engine.receive("q", 1)
    second = Engine(engine.database, clock=engine.clock)
    second.delete_queue("q")
    with pytest.raises(QueueNotFound):
        engine.receive("q", 1)


def test_a_sweep_is_not_due_again_within_a_moment(engine, time):
    """Under load each receive would sweep; before saying that there is nothing it does."""
    engine.send("q", [NewMessage(b"first"), NewMessage(b"due", due=time.wall + 0.01)])
    engine.send("q", [NewMessage(b"second")])
    assert engine.receive("q", 1)[0].payload == b"first"
    time.now += 0.019
    assert [each.payload for each in engine.receive("q", 5)] == [b"second"]
    assert [each.payload for each in engine.receive("q", 5)] == [b"due"]


# -- deferred ----------------------------------------------------------------------------------


def deferred(engine, count=1):
    batch = held(engine, count)
    engine.defer("q", batch)
    return [number for number, _ in batch]


def test_deferred_messages_come_by_number_alone(engine):
    first, second, third = deferred(engine, 3)
    assert engine.receive("q", 5) == []
    got = engine.receive_deferred("q", [third, first, 999], 20.0)
    assert [each.payload for each in got] == [b"2", b"0"]
    assert {each.lease_until for each in got} == {NOW + 20.0}
    assert {each.delivery_count for each in got} == {2}
    assert engine.receive_deferred("q", [first]) == []
    assert engine.receive_deferred("other", [second]) == []
    assert engine.receive_deferred("q", [second], dead_letter=True) == []
    assert engine.complete("q", leases(got)) == [True, True]


def test_a_deferred_message_may_be_received_and_deleted(engine):
    first, second = deferred(engine, 2)
    (got,) = engine.receive_deferred("q", [first], delete=True)
    assert (got.payload, got.token) == (b"0", "")
    assert [each.seq for each in engine.peek("q")] == [second]


def test_a_lapsed_deferred_message_is_deferred_again(engine, time):
    (number,) = deferred(engine)
    engine.receive_deferred("q", [number])
    time.now += LEASE
    assert engine.receive("q", 1) == []
    assert len(engine.receive_deferred("q", [number])) == 1


@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_those_that_wait_in_line_are_found_by_number_only_where_asked(engine, delete, waiting):
    (number,) = engine.send("q", [NewMessage(b"x")])
    got = engine.receive_deferred("q", [number], delete=delete, waiting=waiting)
    assert len(got) == waiting
    (aside,) = deferred(engine) if waiting else [None]
    if waiting:
        assert len(engine.receive_deferred("q", [aside], delete=delete, waiting=True)) == 1


def test_an_ordinary_message_is_not_received_by_its_number(engine):
    assert engine.receive_deferred("q", engine.send("q", [NewMessage(b"x")])) == []


def test_a_lapsed_deferred_message_is_found_without_any_other_look(engine, time):
    (number,) = deferred(engine)
    engine.receive_deferred("q", [number])
    time.now += LEASE
    assert len(engine.receive_deferred("q", [number])) == 1


@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_more_expired_messages_than_one_sweep_takes_are_not_received(engine, time, delete, waiting):
    count = SWEEP_LIMIT + 50
    engine.send("q", [NewMessage(b"x", expires_at=time.wall + 5.0)] * count)
    batch = leases(engine.receive("q", count, 60.0))
    engine.defer("q", batch)
    time.now += 5.0
    numbers = [number for number, _ in batch]
    assert engine.receive_deferred("q", numbers, delete=delete, waiting=waiting) == []


@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize(("left", "comes"), [(0.001, 1), (0.0, 0)])
def test_a_deferred_message_expires_at_its_very_instant(engine, time, delete, waiting, left, comes):
    engine.send("q", [NewMessage(b"x", expires_at=time.wall + 5.0)])
    (lease,) = leases(engine.receive("q", 1))
    engine.defer("q", [lease])
    time.now += 5.0 - left
    got = engine.receive_deferred("q", [lease[0]], delete=delete, waiting=waiting)
    assert len(got) == comes


# -- sessions ----------------------------------------------------------------------------------


def test_in_a_session_a_messages_lease_ends_with_it(engine, time):
    engine.create_queue("s", StoredSettings(sessions=True, lease_seconds=LEASE))
    engine.send("s", [NewMessage(b"x", session="a"), NewMessage(b"y", session="a")])
    session = engine.accept_session("s", "a", 10.0)
    x, y = leases(engine.receive("s", 2, session=session))
    time.now += 2.0
    assert engine.renew("s", [x, (y[0], "0" * 32)], 99.0) == [NOW + 10.0, None]
    assert engine.update("s", *x, b"new", 99.0) == NOW + 10.0
    assert engine.update("s", y[0], "0" * 32, b"new", 99.0) is None
    assert [each.payload for each in engine.peek("s")] == [b"new", b"y"]
    session = engine.renew_session("s", session, 30.0)
    assert engine.renew("s", [x, y]) == [NOW + 32.0] * 2
    time.now += 30.0
    assert engine.renew("s", [x, y]) == [None, None]
    assert engine.complete("s", [x, y]) == [False, False]


def test_dead_letters_of_a_queue_with_sessions_have_leases_of_their_own(engine):
    engine.create_queue("s", StoredSettings(sessions=True, lease_seconds=LEASE))
    engine.send("s", [NewMessage(b"x", session="a")])
    session = engine.accept_session("s", "a")
    engine.dead_letter("s", leases(engine.receive("s", 1, session=session)), "why")
    (dead,) = leases(engine.receive("s", 1, dead_letter=True))
    assert engine.renew("s", [dead], 20.0, dead_letter=True) == [NOW + 20.0]
    assert engine.update("s", *dead, b"new", 30.0, dead_letter=True) == NOW + 30.0
