"""Queues of the engine: their settings, what deleting takes along, and leases of earlier boots."""

from __future__ import annotations

import pytest

from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.engine import DUPLICATE, Database, Engine, NewMessage, StoredSettings
from aztask.support.clock import Clock

SESSIONS = StoredSettings(sessions=True, max_deliveries=2)


@pytest.fixture
def database(tmp_path):
    database = Database(str(tmp_path / "queues.db"))
    yield database
    database.close()


def opened(database):
    return Engine(database, clock=Clock(monotonic=lambda: 1000.0, wall=lambda: 9000.0))


@pytest.fixture
def engine(database):
    return opened(database)


@pytest.fixture
def other(database):
    """As another process would have it."""
    elsewhere = Database(database.path)
    yield opened(elsewhere)
    elsewhere.close()


def leases(received):
    return [(message.seq, message.token) for message in received]


def test_a_queues_settings_where_nothing_was_said(engine):
    engine.create_queue("q")
    assert engine.queue("q") == StoredSettings(60.0, 100, 0.0, None, False, False)


def test_settings_are_kept_as_they_were_given(engine, other):
    settings = StoredSettings(5.0, 7, 30.0, 600.0, True, True)
    assert engine.create_queue("q", settings) is True
    assert other.queue("q") == settings
    assert engine.create_queue("q") is False
    assert engine.queue("q") == settings


def test_an_update_changes_one_queue_from_now_on(engine, other):
    for name in ("a", "b"):
        engine.create_queue(name)
        other.send(name, [NewMessage(b"x")])
    engine.update_queue("a", StoredSettings(lease_seconds=5.0))
    assert engine.receive("a", 1)[0].lease_until == 1005.0
    assert engine.receive("b", 1)[0].lease_until == 1060.0
    assert (engine.queue("a").lease_seconds, engine.queue("b").lease_seconds) == (5.0, 60.0)


@pytest.mark.parametrize("by", ["itself", "another"])
def test_every_update_counts_at_the_next_use_however_many_there_were(engine, other, by):
    """What is remembered of a queue carries a revision, which never comes twice."""
    engine.create_queue("q")
    updater = engine if by == "itself" else other
    engine.send("q", [NewMessage(b"warm", "w")])
    engine.receive("q", 1)
    for n in range(1, 4):
        updater.update_queue("q", StoredSettings(lease_seconds=10.0 * n, duplicate_window=60.0))
        sent = [engine.send("q", [NewMessage(b"x", f"id-{n}")])[0] for _ in range(2)]
        assert sent[1] == DUPLICATE
        updater.update_queue("q", StoredSettings(lease_seconds=10.0 * n + 1.0))
        engine.send("q", [NewMessage(b"y", f"id-{n}")])
        if by == "itself":
            assert engine.receive("q", 1)[0].lease_until == 1000.0 + 10.0 * n + 1.0
        assert engine.queue("q").lease_seconds == 10.0 * n + 1.0


@pytest.mark.parametrize("missing", ["missing", "\udcff"])
def test_what_is_not_there_cannot_be_updated_or_deleted(engine, missing):
    engine.create_queue("?")  # what a lone surrogate would be written as
    engine.create_queue("q")
    for use in (
        lambda: engine.update_queue(missing, StoredSettings()),
        lambda: engine.delete_queue(missing),
        lambda: engine.queue(missing),
    ):
        with pytest.raises(QueueNotFound, match="aztask queues create"):
            use()
    assert engine.queues() == ["?", "q"]


def test_the_kind_of_a_queue_stays_and_the_error_says_which_it_is(engine):
    engine.create_queue("plain")
    engine.create_queue("ordered", SESSIONS)
    with pytest.raises(ConfigurationError, match="'plain' was created without sessions"):
        engine.update_queue("plain", SESSIONS)
    with pytest.raises(ConfigurationError, match="'ordered' was created with sessions"):
        engine.update_queue("ordered", StoredSettings())
    assert engine.queue("plain").sessions is False


def test_a_queue_without_a_name_is_refused(engine):
    with pytest.raises(ConfigurationError, match="a queue needs a name"):
        engine.create_queue("")
    assert engine.queues() == []


def test_queues_are_listed_by_name(engine):
    assert engine.queues() == []
    for name in ("b", "c", "a"):
        engine.create_queue(name)
    assert engine.queues() == ["a", "b", "c"]


def fill(engine, name):
    """Something of everything that a queue can hold."""
    engine.create_queue(name, StoredSettings(sessions=True, duplicate_window=60.0))
    engine.send(name, [NewMessage(b"%d" % n, f"id-{n}", session="a") for n in range(3)])
    session = engine.accept_session(name, "a")
    engine.set_session_state(name, session, b"state")
    engine.dead_letter(name, leases(engine.receive(name, 1, session=session)), "why")


def rows(engine, table):
    column = "id" if table == "queues" else "box"
    with engine.database.read() as connection:
        return sorted(box for (box,) in connection.execute(f"SELECT {column} FROM {table}"))


def test_deleting_a_queue_takes_all_that_is_its_own_and_nothing_else(engine):
    for name in ("kept", "gone"):
        fill(engine, name)
    kept, gone = engine.queue_table.load("kept").id, engine.queue_table.load("gone").id
    assert rows(engine, "messages") == sorted([kept, kept, -kept, gone, gone, -gone])
    assert rows(engine, "seen") == [kept] * 3 + [gone] * 3
    engine.delete_queue("gone")
    assert rows(engine, "messages") == [-kept, kept, kept]
    assert rows(engine, "seen") == [kept] * 3
    assert rows(engine, "sessions") == [kept]
    assert rows(engine, "queues") == [kept]
    with pytest.raises(QueueNotFound):
        engine.send("gone", [NewMessage(b"x", session="a")])
    assert engine.stats("kept") == (2, 0, 0, 0, 1)


@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_queue_that_was_found_to_be_gone_is_not_remembered(engine, other, by):
    engine.create_queue("q")
    engine.send("q", [NewMessage(b"x")])
    held = leases(engine.receive("q", 1))
    (engine if by == "itself" else other).delete_queue("q")
    if by == "another":
        with pytest.raises(QueueNotFound):
            engine.queue("q")
    with pytest.raises(QueueNotFound):
        engine.complete("q", held)


def test_a_queue_of_the_same_name_is_a_new_one(engine):
    fill(engine, "q")
    former = engine.queue_table.load("q").id
    engine.delete_queue("q")
    engine.create_queue("q", StoredSettings(lease_seconds=5.0))
    assert engine.queue_table.load("q").id != former
    assert engine.stats("q") == (0, 0, 0, 0, 0)
    engine.send("q", [NewMessage(b"x", "id-0")])
    assert engine.receive("q", 1)[0].lease_until == 1005.0


def test_a_queue_made_anew_elsewhere_is_used_with_its_new_settings(engine, other):
    engine.create_queue("q", StoredSettings(lease_seconds=5.0))
    other.send("q", [NewMessage(b"x")])
    engine.delete_queue("q")
    engine.create_queue("q", StoredSettings(lease_seconds=7.0))
    other.create_queue("q")
    other.send("q", [NewMessage(b"y")])
    assert other.receive("q", 1)[0].lease_until == 1007.0


def boot_again(engine, database, times=1):
    for n in range(times):
        with database.statement() as connection:
            connection.execute("UPDATE boots SET boot = ?", (f"an earlier one {n}",))
        engine = opened(database)
    return engine


def test_leases_of_an_earlier_boot_are_void_and_count(engine, database):
    engine.create_queue("q", StoredSettings(max_deliveries=2))
    engine.create_queue("s", SESSIONS)
    engine.send("q", [NewMessage(b"once"), NewMessage(b"twice")])
    held = leases(engine.receive("q", 2, 1e6))
    engine.abandon("q", held[1:])
    held[1:] = leases(engine.receive("q", 1, 1e6))
    engine.send("s", [NewMessage(b"x", session="a")])
    session = engine.accept_session("s", "a", 1e6)
    engine.receive("s", 1, session=session)
    engine.set_session_state("s", session, b"state")
    again = boot_again(engine, database)
    assert again.complete("q", held) == [False, False]
    assert [each.payload for each in again.receive("q", 5)] == [b"once"]
    (dead,) = again.peek("q", dead_letter=True)
    assert (dead.payload, dead.reason) == (b"twice", "MaxDeliveryCountExceeded")
    with database.read() as connection:
        assert connection.execute("SELECT token, until FROM sessions").fetchall() == [(None, 0.0)]
    session = again.accept_session("s", "a")
    assert again.get_session_state("s", session) == b"state"
    assert again.receive("s", 1, session=session)[0].delivery_count == 2


def test_leases_of_this_boot_stay_however_often_the_file_is_opened(engine, database):
    engine.create_queue("q")
    engine.send("q", [NewMessage(b"x"), NewMessage(b"y")])
    engine = boot_again(engine, database, 2)
    with database.read() as connection:
        assert len(connection.execute("SELECT boot FROM boots").fetchall()) == 1
    held = leases(engine.receive("q", 2, 1e6))
    again = opened(database)
    assert again.receive("q", 1) == []
    assert again.complete("q", held) == [True, True]


def test_a_deferred_message_of_an_earlier_boot_is_deferred_again(engine, database):
    engine.create_queue("q")
    engine.send("q", [NewMessage(b"x")])
    (lease,) = leases(engine.receive("q", 1))
    engine.defer("q", [lease])
    engine.receive_deferred("q", [lease[0]], 1e6)
    again = boot_again(engine, database)
    assert again.stats("q") == (0, 0, 0, 1, 0)
