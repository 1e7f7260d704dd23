"""The local result store's own: how it clears very many rows, and what SQLite lets into them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aztask.message.envelope import Envelope
from aztask.queues.engine import Database
from aztask.settlement import Complete
from aztask.stores.records.base import (
    Finish,
    Outcome,
    Owned,
    RunKey,
    RunRecord,
    Start,
    State,
    Unreadable,
    WorkerRecord,
)
from aztask.stores.records.deadindex import IndexedDeadLetter
from aztask.stores.records.local.runowners import PURGE_WINDOW
from aztask.stores.records.local.store import _STEPS, LocalResults


@pytest.fixture
def results(tmp_path: Path) -> Iterator[LocalResults]:
    database = Database(str(tmp_path / "results.db"))
    yield LocalResults(database)
    database.close()


def a_start(owner: str, position: int, key: RunKey) -> Start:
    return Start(key, "shop.resize", "default", position, owner, "worker", 1000.0)


def ended(at: float) -> Outcome:
    return Outcome(State.SUCCEEDED, Complete(), b"\x01", at=at, duration=0.5)


def test_purging_clears_what_is_old_over_many_windows_and_leaves_the_rest(
    results: LocalResults,
) -> None:
    count = 2 * PURGE_WINDOW + 100
    keys = [RunKey(f"t{n}") for n in range(count)]
    results.start([a_start("one", n, key) for n, key in enumerate(keys)])
    old = keys[: PURGE_WINDOW + 50]
    results.record([Finish(key, "one", ended(10.0)) for key in old])
    results.record([Finish(key, "one", ended(100.0)) for key in keys[len(old) : -1]])
    assert results.purge(50.0) == len(old)
    assert results.purge(50.0) == 0
    assert results.get(keys[-1].task_id) is not None, "what has not ended is never cleared"
    assert len(results.recent(limit=count)) == count - len(old)


@pytest.fixture
def database(tmp_path: Path, results: LocalResults) -> Iterator[sqlite3.Connection]:
    """The same file, as any other program has it."""
    with closing(sqlite3.connect(tmp_path / "results.db", isolation_level=None)) as connection:
        yield connection


NOT_UTF8 = "CAST(x'61ff' AS TEXT)"


@pytest.mark.parametrize("value", ["'next'", "x'00'", "2.5", "-1", str(2**62), NOT_UTF8])
@pytest.mark.parametrize("column", ["generation", "hop"])
def test_a_row_whose_own_key_is_damaged_is_the_row_of_no_message(
    results: LocalResults, database: sqlite3.Connection, column: str, value: str
) -> None:
    """It is never taken for the latest run, which a replay counts on from."""
    results.start([a_start("one", 1, RunKey("a")), a_start("one", 2, RunKey("b"))])
    database.execute(f"UPDATE runs SET {column} = {value}")
    assert results.start([a_start("one", 1, RunKey("a"))]) == [Owned(1)]
    record = results.get("a")
    assert record is not None
    assert (record.key, record.damage) == (RunKey("a"), "")
    alone = results.get("b")
    assert alone is not None
    assert (alone.key, alone.state) == (RunKey("b"), State.UNREADABLE)
    assert sorted(run.damage == "" for run in results.history("a")) == [False, True]
    assert len(results.recent()) == 3
    assert results.forget("b")


def test_text_that_is_not_utf8_anywhere_hides_no_other_row(
    results: LocalResults, database: sqlite3.Connection
) -> None:
    """Python's module would give up the whole query for it."""
    results.start([a_start("one", n, RunKey(f"t{n}")) for n in range(3)])
    database.execute(f"UPDATE runs SET task_id = {NOT_UTF8} WHERE task_id = 't1'")
    assert [run.key.task_id for run in results.recent()] == ["t2", "?", "t0"]
    for name in ("w0", "w1", "w2"):
        results.heartbeat(WorkerRecord(name, 1.0, 2.0, (), 0, 0))
    database.execute(f"UPDATE workers SET name = {NOT_UTF8} WHERE name = 'w1'")
    assert [worker.name for worker in results.workers()] == ["w0", "w2", "?"]
    results.cancel("t0", 1.0, running=True)
    database.execute(f"INSERT INTO cancellations VALUES ({NOT_UTF8}, 1.0, 1)")
    assert results.to_stop(["t0", "t2"]) == ["t0"]
    letters = [
        IndexedDeadLetter("q", Envelope(b"x", message_id=f"m{n}"), "r", "", 1.0, 1)
        for n in range(3)
    ]
    results.dead_index.note(letters)
    database.execute(f"UPDATE dead_index SET key = {NOT_UTF8} WHERE key = 'm1'")
    assert [bool(each.damage) for each in results.dead_index.notes("q")] == [
        False,
        True,
        False,
    ]
    assert results.dead_index.keep_only("q", {"m0", "m2"}, 5.0) == 1
    assert len(list(results.dead_index.notes("q"))) == 2


def test_the_number_of_a_damaged_row_goes_with_it(
    results: LocalResults, database: sqlite3.Connection
) -> None:
    """SQLite gives it to the next row, which is not damaged. Older releases delete rows, too."""
    results.start([a_start("one", 1, RunKey("a"))])
    database.execute("UPDATE runs SET starts = 'many'")
    (answer,) = results.start([a_start("two", 1, RunKey("a"))])
    assert isinstance(answer, Unreadable)
    assert database.execute("SELECT count(*) FROM damaged_runs").fetchone() == (1,)
    database.execute("DELETE FROM runs")
    assert database.execute("SELECT count(*) FROM damaged_runs").fetchone() == (0,)
    assert results.start([a_start("three", 1, RunKey("a"))]) == [Owned(1)]
    assert results.start([a_start("four", 1, RunKey("a"))]) == [Owned(2)]


def test_a_row_that_was_repaired_is_back_when_its_number_is_taken_off_the_list(
    results: LocalResults, database: sqlite3.Connection
) -> None:
    results.start([a_start("one", 1, RunKey("a"))])
    database.execute("UPDATE runs SET starts = 'many'")
    results.start([a_start("two", 1, RunKey("a"))])
    database.execute("UPDATE runs SET starts = 1")
    assert isinstance(results.start([a_start("three", 1, RunKey("a"))])[0], Unreadable)
    database.execute("DELETE FROM damaged_runs")
    assert results.start([a_start("four", 1, RunKey("a"))]) == [Owned(2)]


def test_waiting_lasts_until_something_changes(results: LocalResults) -> None:
    """Not only until the next look: who waits for a result would look all the time."""
    seen = results.wait_changed(-1, 0.0)
    writer = threading.Timer(0.3, lambda: results.start([a_start("w", 1, RunKey("late"))]))
    writer.start()
    assert results.wait_changed(seen, 30.0) != seen
    writer.join()
    assert results.get("late") is not None


def test_a_purge_ends_at_the_first_window_without_anything_old(
    results: LocalResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are in the order of their first starts: behind it nothing is old, or next to nothing."""
    monkeypatch.setattr("aztask.stores.records.local.runowners.PURGE_WINDOW", 2)
    for name, at in (("a", 1.0), ("b", 1.0), ("c", 9.0), ("d", 9.0), ("e", 1.0)):
        results.start([a_start(name, 1, RunKey(name))])
        results.record([Finish(RunKey(name), name, ended(at))])
    assert results.purge(5.0) == 2
    assert [run.key.task_id for run in results.recent()] == ["e", "d", "c"]


def test_runs_that_wait_for_their_messages_do_not_keep_older_ones_from_being_purged(
    results: LocalResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aztask.stores.records.local.runowners.PURGE_WINDOW", 2)
    for name in ("a", "b", "c", "d"):
        results.expect([RunRecord(RunKey(name), "t", "q", State.PENDING, due=9.0)])
    results.start([a_start("e", 1, RunKey("e"))])
    results.record([Finish(RunKey("e"), "e", ended(1.0))])
    assert results.purge(5.0) == 1
    assert [run.key.task_id for run in results.recent()] == ["d", "c", "b", "a"]
    assert results.purge(10.0) == 4


def test_the_pending_runs_of_an_older_release_count_as_due_now(tmp_path: Path) -> None:
    path = str(tmp_path / "old.db")
    with closing(Database(path)) as database:
        database.migrate("results", _STEPS[:3])
        with database.transaction() as connection:
            connection.execute(
                "INSERT INTO runs (task_id, generation, hop, task, queue, worker, starts, state) "
                "VALUES ('a', 0, 0, 't', 'q', '', 0, 'pending')"
            )
    with closing(Database(path)) as database:
        results, now = LocalResults(database), time.time()
        assert results.purge(now - 60.0) == 0
        assert results.get("a") is not None
        assert results.purge(now + 60.0) == 1


def test_a_wait_without_a_change_casts_no_doubt_on_the_watch(
    results: LocalResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a doubt, every wait would check the file more often."""
    doubts: list[bool] = []
    monkeypatch.setattr(results._database.watch, "doubt", lambda: doubts.append(True))
    seen = results.wait_changed(-1, 0.0)
    doubts.clear()
    for _ in range(3):
        assert results.wait_changed(seen, 0.05) == seen
    assert doubts == []
