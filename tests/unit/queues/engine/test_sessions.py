"""Sessions of the engine at their exact boundaries, on clocks that stand still."""

from __future__ import annotations

import pytest

from aztask.errors import ConfigurationError, LeaseLost
from aztask.queues.engine import Database, Engine, NewMessage, StoredSettings
from aztask.support.clock import Clock

NOW = 1000.0
LEASE = 10.0
WORDS = ("a", "b", "c")


class Time:
    """Two clocks, far apart."""

    now = NOW
    ahead = 500_000.0

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
    settings = StoredSettings(sessions=True, lease_seconds=LEASE, max_deliveries=3)
    engine.create_queue("s", settings)
    engine.create_queue("other", settings)
    engine.create_queue("plain")
    yield engine
    database.close()


def send(engine, *sessions, queue="s", **properties):
    engine.send(queue, [NewMessage(b"x", session=name, **properties) for name in sessions])


def leases(received):
    return [(message.seq, message.token) for message in received]


def rows(engine, columns, queue="s"):
    with engine.database.read() as connection:
        box = engine.queue_table.load(queue).id
        return connection.execute(
            f"SELECT {columns} FROM messages WHERE box = ? ORDER BY seq", (box,)
        ).fetchall()


def held_sessions(engine, queue="s"):
    with engine.database.read() as connection:
        box = engine.queue_table.load(queue).id
        return connection.execute(
            "SELECT session, token, until FROM sessions WHERE box = ? ORDER BY session", (box,)
        ).fetchall()


# -- accepting ---------------------------------------------------------------------------------


def test_a_named_session_may_be_empty_and_is_held_for_the_queues_lease(engine, time):
    lease = engine.accept_session("s", "a")
    assert (lease.session, lease.until) == ("a", NOW + LEASE)
    assert len(lease.token) == 32
    assert engine.accept_session("s", "b", 30.0).until == NOW + 30.0
    assert engine.accept_session("s", "c").token != lease.token


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize(("left", "accepted"), [(0.001, False), (0.0, True), (-1.0, True)])
def test_a_session_is_held_until_its_end_and_not_at_it(engine, time, name, left, accepted):
    send(engine, "a")
    first = engine.accept_session("s", "a")
    time.now += LEASE - left
    second = engine.accept_session("s", name)
    assert (second is not None) is accepted
    if accepted:
        assert second.token != first.token
        assert second.until == time.now + LEASE
        assert engine.renew_session("s", first) is None


def test_a_held_session_stays_with_its_holder(engine):
    send(engine, "a")
    first = engine.accept_session("s", "a")
    assert engine.accept_session("s", "a") is None
    assert engine.accept_session("s") is None
    assert len(engine.receive("s", 1, session=first)) == 1


def test_the_same_name_in_another_queue_is_another_session(engine):
    send(engine, "a")
    send(engine, "a", queue="other")
    here, there = engine.accept_session("s"), engine.accept_session("other")
    assert (here.session, there.session) == ("a", "a")
    assert engine.renew_session("other", here) is None
    assert not engine.release_session("other", here)
    with pytest.raises(LeaseLost):
        engine.receive("other", 1, session=here)
    assert len(engine.receive("s", 1, session=here)) == 1


def test_without_anything_to_receive_there_is_no_next_session(engine, time):
    assert engine.accept_session("s") is None
    send(engine, "a", queue="other")
    assert engine.accept_session("s") is None
    send(engine, "a", due=time.wall + 5.0)
    assert engine.accept_session("s") is None
    time.now += 5.0
    assert engine.accept_session("s").session == "a"


def test_a_session_whose_messages_are_all_leased_or_deferred_is_not_next(engine):
    send(engine, "a")
    lease = engine.accept_session("s")
    engine.defer("s", leases(engine.receive("s", 1, session=lease)))
    engine.release_session("s", lease)
    assert engine.accept_session("s") is None


def test_sessions_take_turns_in_each_queue_and_none_is_passed_over(engine):
    for queue in ("s", "other"):
        send(engine, *WORDS, queue=queue)
    seen = []
    for queue in ("s", "other", "s", "s", "other", "s"):
        lease = engine.accept_session(queue)
        seen.append((queue, lease.session))
        engine.release_session(queue, lease)
    assert seen == [
        ("s", "a"), ("other", "a"), ("s", "b"), ("s", "c"), ("other", "b"), ("s", "a"),
    ]  # fmt: skip


@pytest.mark.parametrize("names", [("A", "B"), ("0", "1"), ("é", "ü")])
def test_whatever_their_names_sessions_come_round_again(engine, names):
    send(engine, *names)
    seen = []
    for _ in range(4):
        lease = engine.accept_session("s")
        seen.append(lease.session)
        engine.release_session("s", lease)
    assert seen == [*names, *names]


def test_held_sessions_are_passed_over(engine):
    send(engine, *WORDS)
    engine.accept_session("s", "a")
    assert engine.accept_session("s").session == "b"
    assert engine.accept_session("s").session == "c"
    assert engine.accept_session("s") is None


def test_a_session_that_was_lost_gives_back_what_was_leased_in_it_and_counts_it(engine, time):
    send(engine, "a", "a", "b")
    lost = engine.accept_session("s", "a")
    other = engine.accept_session("s", "b", 600.0)
    stale = leases(engine.receive("s", 2, session=lost))
    (kept,) = leases(engine.receive("s", 1, session=other))
    time.now += LEASE
    again = engine.accept_session("s", "a")
    got = engine.receive("s", 5, session=again)
    assert [each.delivery_count for each in got] == [2, 2]
    assert engine.complete("s", stale) == [False, False]
    assert engine.complete("s", [kept]) == [True]


def test_what_was_lost_too_often_becomes_a_dead_letter(engine, time):
    send(engine, "a", "a")
    for count in (1, 2, 3):
        lease = engine.accept_session("s", "a")
        (first,) = engine.receive("s", 1, session=lease)
        assert first.delivery_count == count
        time.now += LEASE
    engine.sweeper.swept[1] = (
        time.now
    )  # another look has just swept: accepting must do it by itself
    lease = engine.accept_session("s", "a")
    (second,) = engine.receive("s", 5, session=lease)
    assert second.seq == first.seq + 1
    (dead,) = engine.peek("s", dead_letter=True)
    assert (dead.seq, dead.reason) == (first.seq, "MaxDeliveryCountExceeded")


def test_a_session_taken_anew_before_a_sweep_gives_back_and_buries_by_itself(engine, time):
    """Its lease was released elsewhere meanwhile, while one message stayed leased."""
    engine.update_queue("s", StoredSettings(sessions=True, lease_seconds=LEASE, max_deliveries=1))
    send(engine, "a", "b")
    lease = engine.accept_session("s", "a", 1.0)
    engine.receive("s", 1, session=lease)
    other = engine.accept_session("s", "b", 600.0)
    engine.receive("s", 1, session=other)
    with engine.database.statement() as connection:  # the message's lease outlives the session's
        connection.execute("UPDATE messages SET moment = ? WHERE session = 'a'", (NOW + 500.0,))
    time.now += 1.0
    assert engine.accept_session("s", "a") is not None
    assert [each.session for each in engine.peek("s", dead_letter=True)] == ["a"]
    assert rows(engine, "session, state") == [("b", 1)]
    engine.update_queue("s", StoredSettings(sessions=True, lease_seconds=LEASE, max_deliveries=9))
    with engine.database.statement() as connection:
        connection.execute("UPDATE sessions SET until = 0 WHERE session = 'b'")
    assert engine.accept_session("s", "b") is not None
    assert rows(engine, "session, state, token, moment") == [("b", 0, None, None)]


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.accept_session("plain"),
        lambda engine: engine.accept_session("plain", "a"),
        lambda engine: engine.sessions("plain"),
        lambda engine: engine.renew_session("plain", engine.accept_session("s", "a")),
        lambda engine: engine.release_session("plain", engine.accept_session("s", "a")),
        lambda engine: engine.receive("plain", 1, session=engine.accept_session("s", "a")),
        lambda engine: engine.get_session_state("plain", engine.accept_session("s", "a")),
        lambda engine: engine.set_session_state("plain", engine.accept_session("s", "a"), b""),
    ],
)
def test_a_queue_without_sessions_has_none(engine, use):
    with pytest.raises(ConfigurationError, match="'plain' has no sessions"):
        use(engine)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_length_that_cannot_be_is_refused(engine, seconds):
    lease = engine.accept_session("s", "a")
    for ask in (
        lambda: engine.accept_session("s", "b", seconds),
        lambda: engine.renew_session("s", lease, seconds),
    ):
        with pytest.raises(ConfigurationError, match="above 0"):
            ask()


# -- renewing ----------------------------------------------------------------------------------


def test_a_renewal_moves_the_end_of_the_session_and_of_what_is_leased_in_it(engine, time):
    send(engine, "a", "a", "b")
    lease, other = engine.accept_session("s", "a"), engine.accept_session("s", "b")
    engine.receive("s", 1, session=lease)
    engine.receive("s", 1, session=other)
    time.now += 4.0
    renewed = engine.renew_session("s", lease, 30.0)
    assert renewed == lease._replace(until=NOW + 34.0)
    assert rows(engine, "moment") == [(NOW + 34.0,), (None,), (NOW + LEASE,)]
    assert engine.renew_session("s", renewed).until == time.now + LEASE
    assert [each[2] for each in held_sessions(engine)] == [NOW + 14.0, NOW + LEASE]


@pytest.mark.parametrize(("left", "renewed"), [(0.001, True), (0.0, False)])
def test_a_session_is_renewed_until_its_end_and_not_at_it(engine, time, left, renewed):
    send(engine, "a")
    lease = engine.accept_session("s", "a")
    engine.receive("s", 1, session=lease)
    time.now += LEASE - left
    assert (engine.renew_session("s", lease) is not None) is renewed
    assert rows(engine, "moment") == [(time.now + LEASE if renewed else NOW + LEASE,)]


@pytest.mark.parametrize("changed", [{"session": "b"}, {"token": "0" * 32}])
def test_only_the_holder_renews_releases_receives_and_keeps_state(engine, changed):
    send(engine, "a", "b")
    lease = engine.accept_session("s", "a")
    engine.accept_session("s", "b")
    engine.receive("s", 1, session=lease)
    wrong = lease._replace(**changed)
    before = (rows(engine, "*"), held_sessions(engine))
    assert engine.renew_session("s", wrong, 99.0) is None
    assert engine.release_session("s", wrong) is False
    for use in (
        lambda: engine.receive("s", 1, session=wrong),
        lambda: engine.get_session_state("s", wrong),
        lambda: engine.set_session_state("s", wrong, b"x"),
    ):
        with pytest.raises(LeaseLost, match=f"session '{wrong.session}' of queue 's' has ended"):
            use()
    assert (rows(engine, "*"), held_sessions(engine)) == before


def test_a_session_of_the_same_name_elsewhere_keeps_its_messages_and_their_leases(engine, time):
    leases_of = {}
    for queue in ("s", "other"):
        send(engine, "a", queue=queue)
        leases_of[queue] = engine.accept_session(queue, "a", 60.0)
        engine.receive(queue, 1, session=leases_of[queue])
    before = rows(engine, "*", "other")
    engine.renew_session("s", leases_of["s"], 99.0)
    engine.release_session("s", leases_of["s"])
    engine.accept_session("s", "a")
    assert rows(engine, "*", "other") == before


@pytest.mark.parametrize(("left", "held"), [(0.001, True), (0.0, False)])
def test_at_its_end_a_session_is_neither_released_nor_used(engine, time, left, held):
    send(engine, "a", "a")
    lease = engine.accept_session("s", "a")
    engine.receive("s", 1, session=lease)
    time.now += LEASE - left
    if held:
        assert len(engine.receive("s", 1, session=lease)) == 1
        engine.set_session_state("s", lease, b"x")
        assert engine.get_session_state("s", lease) == b"x"
    else:
        for use in (
            lambda: engine.receive("s", 1, session=lease),
            lambda: engine.set_session_state("s", lease, b"x"),
            lambda: engine.get_session_state("s", lease),
        ):
            with pytest.raises(LeaseLost):
                use()
    assert engine.release_session("s", lease) is held


# -- giving back -------------------------------------------------------------------------------


def test_a_released_session_is_free_and_its_messages_are_back_uncounted(engine):
    send(engine, "a", "a", "b")
    lease, other = engine.accept_session("s", "a"), engine.accept_session("s", "b")
    stale = leases(engine.receive("s", 1, session=lease))
    engine.receive("s", 1, session=other)
    assert engine.release_session("s", lease) is True
    assert rows(engine, "session, state, deliveries, moment IS NULL, token IS NULL") == [
        ("a", 0, 0, 1, 1), ("a", 0, 0, 1, 1), ("b", 1, 1, 0, 0),
    ]  # fmt: skip
    assert engine.complete("s", stale) == [False]
    assert engine.release_session("s", lease) is False
    assert engine.accept_session("s", "a") is not None
    assert engine.accept_session("s", "b") is None


def test_a_deferred_message_of_a_released_session_is_deferred_again(engine):
    send(engine, "a")
    lease = engine.accept_session("s", "a")
    (message,) = engine.receive("s", 1, session=lease)
    engine.defer("s", leases([message]))
    assert len(engine.receive_deferred("s", [message.seq])) == 1
    engine.release_session("s", lease)
    assert rows(engine, "state, deliveries") == [(3, 1)]


def test_a_release_never_counts_below_zero(engine):
    send(engine, "a")
    lease = engine.accept_session("s", "a")
    engine.receive("s", 1, session=lease)
    with engine.database.statement() as connection:
        connection.execute("UPDATE messages SET deliveries = 0")
    engine.release_session("s", lease)
    assert rows(engine, "deliveries") == [(0,)]


def test_what_is_left_of_a_session_without_state_is_forgotten_and_with_state_it_is_not(
    engine, time
):
    with_state = engine.accept_session("s", "kept")
    engine.set_session_state("s", with_state, b"page 7")
    engine.accept_session("s", "lapsed", 1.0)
    held = engine.accept_session("s", "held", 600.0)
    engine.accept_session("other", "elsewhere", 1.0)
    time.now += 1.0
    engine.release_session("s", with_state)
    assert held_sessions(engine) == [("held", held.token, NOW + 600.0), ("kept", None, time.now)]
    assert len(held_sessions(engine, "other")) == 1


# -- receiving ---------------------------------------------------------------------------------


def test_a_sessions_own_messages_come_in_order_under_its_lease(engine, time):
    engine.send(
        "s",
        [NewMessage(b"%d" % n, session=name) for n, name in enumerate(("a", "b", "a", "a"))],
    )
    lease = engine.accept_session("s", "a")
    time.now += 3.0
    first = engine.receive("s", 2, session=lease)
    assert [each.payload for each in first] == [b"0", b"2"]
    assert {each.lease_until for each in first} == {NOW + LEASE}
    assert {each.session for each in first} == {"a"}
    assert [each.payload for each in engine.receive("s", 2, session=lease)] == [b"3"]


def test_received_and_deleted_in_a_session(engine):
    send(engine, "a", "b")
    lease = engine.accept_session("s", "a")
    (got,) = engine.receive("s", 5, session=lease, delete=True)
    assert (got.token, got.delivery_count) == ("", 1)
    assert rows(engine, "session") == [("b",)]


@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize(("left", "comes"), [(0.001, 1), (0.0, 0)])
def test_a_message_of_a_session_expires_at_its_very_instant(engine, time, delete, left, comes):
    send(engine, "a", expires_at=time.wall + 5.0)
    lease = engine.accept_session("s", "a")
    time.now += 5.0 - left
    engine.sweeper.swept[1] = (
        time.now
    )  # another look has just swept: the statement itself must judge
    assert len(engine.receive("s", 1, session=lease, delete=delete)) == comes


def test_how_often_a_look_sweeps_is_the_callers_choice(engine, time):
    patient = Engine(engine.database, clock=time.clock(), sweep_seconds=5.0)
    lease = patient.accept_session("s", "a")
    send(engine, "a", due=time.wall + 1.0)
    time.now += 4.999
    assert patient.receive("s", 1, session=lease) == []
    time.now += 0.002
    assert len(patient.receive("s", 1, session=lease)) == 1


def test_what_falls_due_in_a_session_is_found_by_the_next_look(engine, time):
    lease = engine.accept_session("s", "a")
    send(engine, "a", due=time.wall + 5.0)
    assert engine.receive("s", 1, session=lease) == []
    time.now += 5.0
    assert len(engine.receive("s", 1, session=lease)) == 1


def test_under_load_not_every_look_sweeps(engine, time):
    lease = engine.accept_session("s", "a")
    send(engine, "a", due=time.wall + 0.01)
    time.now += 0.019
    assert engine.receive("s", 1, session=lease) == []
    time.now += 0.002
    assert len(engine.receive("s", 1, session=lease)) == 1


# -- state -------------------------------------------------------------------------------------


def test_state_belongs_to_one_session_of_one_queue(engine):
    a, b = engine.accept_session("s", "a"), engine.accept_session("s", "b")
    elsewhere = engine.accept_session("other", "a")
    engine.set_session_state("s", a, b"1")
    assert engine.get_session_state("s", a) == b"1"
    assert engine.get_session_state("s", b) is None
    assert engine.get_session_state("other", elsewhere) is None
    engine.set_session_state("s", a, b"")
    assert engine.get_session_state("s", a) == b""
    engine.set_session_state("s", a, None)
    assert engine.get_session_state("s", a) is None


def test_sessions_are_listed_by_messages_or_by_state(engine):
    send(engine, "b", "a", "a")
    engine.accept_session("s", "without")
    send(engine, "z", queue="other")
    for name in ("d", "c"):
        engine.set_session_state("s", engine.accept_session("s", name), b"x")
    assert engine.sessions("s") == ["a", "b"]
    assert engine.sessions("s", with_state=True) == ["c", "d"]
    assert engine.sessions("other") == ["z"]
    assert engine.sessions("other", with_state=True) == []


def test_dead_letters_of_a_session_are_listed_with_it_no_more(engine):
    send(engine, "a")
    lease = engine.accept_session("s", "a")
    engine.dead_letter("s", leases(engine.receive("s", 1, session=lease)), "why")
    assert engine.sessions("s") == []
