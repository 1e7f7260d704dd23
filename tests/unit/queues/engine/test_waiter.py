"""One thread's waits: after a write, beside a busy writer, and where nothing reports writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from aztask.queues.engine import Database, Waiter
from aztask.queues.engine import watch as waiter_module
from aztask.queues.engine.watch import LONGEST, SETTLING

LONG = 30.0
REST = 0.25


class Watched:
    """A watch whose waits are noted and take their time on a clock of the test's own.

    works: whether it reports writes. writes_in: seconds of waiting until the next write.
    """

    def __init__(self, *, works: bool = True) -> None:
        self.now = 1000.0
        self.works = works
        self.writes = 0
        self.writes_in: float | None = None
        self.waits: list[float] = []
        self.rests: list[float] = []
        self.doubts = 0

    def monotonic(self) -> float:
        return self.now

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        self.waits.append(seconds)
        if not done() and self.works and self.writes_in is not None and self.writes_in <= seconds:
            self.now += self.writes_in
            self.writes, self.writes_in = self.writes + 1, None
        elif not done():
            self.now += seconds

    def rest(self, done: Callable[[], bool], seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds

    def doubt(self) -> None:
        self.doubts += 1


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Watched, Waiter]]:
    def new(**options: bool) -> tuple[Watched, Waiter]:
        watch = Watched(**options)
        fake = SimpleNamespace(monotonic=watch.monotonic)
        monkeypatch.setattr(waiter_module, "time", fake)
        return watch, Waiter(watch, rest=REST, blind=2 * REST)  # type: ignore[arg-type]

    return new


def test_without_a_write_the_waits_grow_to_the_longest(make) -> None:
    watch, waiter = make()
    for _ in range(4):
        waiter.wait(LONG)
    assert watch.waits == [REST, LONGEST, LONGEST, LONGEST]


def test_no_wait_is_longer_than_was_asked_for(make) -> None:
    watch, waiter = make()
    waiter.wait(0.1)
    assert watch.waits == [0.1]


def test_a_write_ends_the_wait_and_short_waits_follow_until_it_is_seen(make) -> None:
    watch, waiter = make()
    watch.writes_in = 0.1
    waiter.wait(LONG)
    assert watch.now == pytest.approx(1000.1 + SETTLING)
    assert watch.rests == [SETTLING]
    waiter.wait(LONG)
    assert watch.rests[1] == pytest.approx(2 * SETTLING), "no write ends this wait"
    waiter.found_change()
    began = watch.now
    waiter.wait(LONG)
    assert watch.now - began >= REST - 3 * SETTLING


def test_a_change_that_no_write_reported_is_doubted(make) -> None:
    watch, waiter = make()
    waiter.wait(LONG)
    waiter.found_change()
    assert watch.doubts == 1
    watch.writes_in = 0.1
    waiter.wait(LONG)
    waiter.found_change()
    assert watch.doubts == 1


def test_where_writes_are_not_reported_waits_stay_short(make) -> None:
    watch, waiter = make(works=False)
    for _ in range(4):
        waiter.wait(LONG)
    assert watch.waits == [REST, 2 * REST, 2 * REST, 2 * REST]


def started(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_a_quiet_database_is_seldom_looked_at_and_a_write_is_seen_soon(tmp_path: Path) -> None:
    path = str(tmp_path / "q.db")
    database, other = Database(path), Database(path)
    other.migrate("test", ["CREATE TABLE t (i)"])
    waiter = Waiter(database.watch, rest=0.012, blind=0.012)
    looks, give_up_at = 0, time.monotonic() + 2.0
    while (left := give_up_at - time.monotonic()) > 0:
        waiter.wait(left)
        looks += 1
    assert looks <= 15  # one each 12 ms would be more than a hundred
    seen = database.changes()

    def look_until_seen() -> None:
        while database.changes() == seen:
            waiter.wait(LONG)

    thread = started(look_until_seen)
    until(lambda: database.watch._looking)
    other.change("INSERT INTO t VALUES (?)", (1,))
    thread.join(LONG / 2)
    assert not thread.is_alive()
    database.close()
    other.close()


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def test_beside_a_busy_writer_looks_are_limited(tmp_path: Path) -> None:
    path = str(tmp_path / "q.db")
    database, other = Database(path), Database(path)
    other.migrate("test", ["CREATE TABLE t (i)"])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            other.change("INSERT INTO t VALUES (?)", (1,))
            time.sleep(0.001)

    thread = started(write)
    waiter = Waiter(database.watch, rest=0.05, blind=0.05)
    looks, seen, give_up_at = 0, -1, time.monotonic() + 1.0
    while (left := give_up_at - time.monotonic()) > 0:
        waiter.wait(left)
        looks += 1
        if (now := database.changes()) != seen:
            seen = now
            waiter.found_change()
    stop.set()
    thread.join(LONG / 2)
    assert not thread.is_alive()
    assert looks <= 25  # 20 rests, and what comes at the beginning
