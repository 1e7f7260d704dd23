"""Forks beside threads that use databases, and files that a child opens again."""

from __future__ import annotations

import ast
import gc
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import aztask
from aztask.errors import BrokerError
from aztask.queues.engine import Database, Engine, NewMessage, forking


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "queues.db")


def opened(path):
    engine = Engine(Database(path))
    engine.create_queue("q")
    return engine


def in_child(function):
    """Run `function` in a forked child; its return value, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(function())
        except BrokerError as error:
            text = f"refused: {error}"
        except Exception as error:  # noqa: BLE001  # the parent's test fails with it
            text = f"failed: {error!r}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 10_000).decode()
    os.waitpid(child, 0)
    os.close(reader)
    return answer


def test_what_a_child_writes_survives_that_its_parent_closes_the_file(path):
    """SQLite knew the file as open and locked, so the child's connection had no lock at all."""
    engine = opened(path)
    asked, answered = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        again = Engine(Database(path))
        again.send("q", [NewMessage(b"x", "one")])
        os.write(answered[1], b"1")
        os.read(asked[0], 1)
        again.send("q", [NewMessage(b"x", "two")])
        os._exit(0)
    os.read(answered[0], 1)
    engine.database.close()
    os.write(asked[1], b"1")
    os.waitpid(child, 0)
    assert [each.message_id for each in opened(path).peek("q")] == ["one", "two"]


def test_a_child_and_its_own_child_open_the_file_again(path):
    engine = opened(path)

    def send(name):
        Engine(Database(path)).send("q", [NewMessage(b"x", name)])
        return "sent"

    assert in_child(lambda: send("child") + in_child(lambda: send("grandchild"))) == "sentsent"
    assert {each.message_id for each in engine.peek("q")} == {"child", "grandchild"}


def test_a_child_of_a_transaction_is_refused_that_file_only(path, tmp_path):
    engine = opened(path)
    with engine.database.transaction():
        answer = in_child(lambda: Database(path))
        other = in_child(lambda: Database(str(tmp_path / "other.db")).file_id())
    assert answer.startswith("refused:") and "inside a transaction" in answer
    assert len(other) == 32
    engine.send("q", [NewMessage(b"x")])
    assert engine.stats("q").active == 1


def test_a_fork_waits_for_threads_that_are_inside(path):
    engine = opened(path)
    inside = threading.Event()

    def use():
        with engine.database.transaction():
            inside.set()
            time.sleep(0.3)

    thread = threading.Thread(target=use)
    thread.start()
    inside.wait(30)
    assert in_child(lambda: Engine(Database(path)).stats("q").active) == "0"
    thread.join()


def test_when_the_wait_takes_too_long_the_child_gets_an_error(path, tmp_path, monkeypatch):
    monkeypatch.setattr(forking, "LONGEST_WAIT", 0.2)
    engine = opened(path)
    inside, done = threading.Event(), threading.Event()

    def use():
        with engine.database.transaction():
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=use)
    thread.start()
    inside.wait(30)
    answer = in_child(lambda: Database(str(tmp_path / "other.db")))
    done.set()
    thread.join()
    assert "start it with spawn" in answer
    engine.send("q", [NewMessage(b"x")])  # the parent goes on
    assert in_child(lambda: Engine(Database(path)).stats("q").active) == "1"


def test_a_thread_that_opens_a_file_inside_a_transaction_blocks_no_fork(path, tmp_path):
    """It holds a lock and waits until files may be opened: the fork must not wait for both."""
    engine = opened(path)
    stop = threading.Event()

    def use():
        number = 0
        while not stop.is_set():
            number += 1
            with engine.database.transaction():
                Database(str(tmp_path / f"other-{number % 3}.db")).close()

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    answers = {in_child(lambda: Engine(Database(path)).stats("q").active) for _ in range(10)}
    stop.set()
    for thread in threads:
        thread.join()
    assert answers == {"0"}
    assert time.monotonic() - began < 10 * forking.LONGEST_WAIT / 2


# -- what the garbage collector ends ---------------------------------------------------------------


def descriptors(path):
    """How many descriptors of this process are open on the file."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += str(each.readlink()) == path
    return found


def test_a_database_that_is_collected_waits_for_no_lock(path, tmp_path):
    """The collector may run in the middle of an open, a close or a fork, on the same thread."""
    forks = forking.FORKS
    for lock in (forks.gate._changed, Database(str(tmp_path / "other.db")).lock):
        database = Database(path)
        with lock:
            del database
    assert forks.gate.inside == 0
    database = Database(path)
    forks.before()
    try:
        del database
    finally:
        forks.parent()


def test_the_file_of_a_collected_database_is_closed_with_the_next_open_or_close(path, tmp_path):
    other = Database(str(tmp_path / "other.db"))
    for reap in (other.close, lambda: Database(str(tmp_path / "third.db")).close()):
        opened(path)
        gc.collect()
        assert descriptors(path) == 1
        reap()
        assert descriptors(path) == 0


def test_a_child_closes_no_database_that_its_parent_collected(path, tmp_path):
    """As rule 4 says; and what the child writes survives, as with a database that is in use."""
    engine = opened(path)
    kept = Engine(Database(path))
    del engine
    gc.collect()

    def child():
        Database(str(tmp_path / "other.db")).close()
        inherited = descriptors(path)
        Engine(Database(path)).send("q", [NewMessage(b"x", "child")])
        return inherited, descriptors(path)

    assert in_child(child) == "(2, 1)"
    kept.database.close()
    assert [each.message_id for each in opened(path).peek("q")] == ["child"]


def test_what_is_collected_calls_nothing_that_waits():
    """Every finalizer of the package, found by code: a new one needs a test like those above."""
    found = {}
    for source in sorted(Path(aztask.__file__).parent.rglob("*.py")):
        for each in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(each, ast.ClassDef):
                for method in each.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__del__":
                        found[each.name] = ast.unparse(method.body[-1])
    assert found == {
        "Database": "if self._connection is not None:\n"
        "    FORKS.collect(self.path, self._connection)",
        "Watch": "self._let_go()",  # closes two descriptors
    }
