"""Being told of writes to a file: by the kernel, to several threads, and not at all."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aztask.queues.engine import Database, Waiter, Watch
from aztask.queues.engine import watch as watch_module

LONG = 30.0
WRITING = "import sys; open(sys.argv[1], 'ab').write(b'x')"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path


def never() -> bool:
    return False


def opened(file: Path) -> Watch:
    """One that looks already, and knows of no write."""
    watch = Watch(str(file))
    watch.wait(lambda: watch.writes > 0, LONG)
    return watch


def wait_for_write(watch: Watch) -> None:
    writes = watch.writes
    watch.wait(lambda: watch.writes != writes, LONG)


def started(*targets: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(LONG / 2)
        assert not thread.is_alive()


def looking(watch: Watch) -> bool:
    return watch._looking


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def test_a_write_of_another_process_is_told(file: Path) -> None:
    watch = opened(file)
    threads = started(lambda: wait_for_write(watch))
    until(lambda: looking(watch))
    subprocess.run([sys.executable, "-c", WRITING, str(file)], check=True)
    join(threads)


def test_a_write_between_two_waits_is_told_too(file: Path) -> None:
    watch = opened(file)
    writes = watch.writes
    file.write_bytes(b"x")
    began = time.monotonic()
    watch.wait(lambda: watch.writes != writes, LONG)
    assert time.monotonic() - began < LONG / 2


def test_all_that_wait_are_told(file: Path) -> None:
    watch = opened(file)
    threads = started(*[lambda: wait_for_write(watch)] * 5)
    until(lambda: looking(watch))
    time.sleep(0.05)
    file.write_bytes(b"x")
    join(threads)


def test_when_the_one_that_looks_leaves_another_one_looks(file: Path) -> None:
    watch = opened(file)
    leave = threading.Event()
    first = started(lambda: watch.wait(leave.is_set, LONG))
    until(lambda: looking(watch))
    second = started(lambda: wait_for_write(watch))
    time.sleep(0.05)
    leave.set()
    watch.wake()
    join(first)
    file.write_bytes(b"x")
    join(second)


def test_an_error_raised_in_the_one_that_looks_is_no_harm_to_the_others(file: Path) -> None:
    """As a time limit raises it in a task that waits for a result."""
    watch = opened(file)
    raised: list[type[BaseException]] = []

    def interrupted() -> None:
        try:
            watch.wait(never, LONG)
        except InterruptedError as error:
            raised.append(type(error))

    first = started(interrupted)
    until(lambda: looking(watch))
    second = started(lambda: wait_for_write(watch))
    time.sleep(0.05)
    identity = ctypes.c_ulong(first[0].ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(InterruptedError))
    watch.wake()
    join(first)
    assert raised == [InterruptedError]
    file.write_bytes(b"x")
    join(second)


def test_a_wake_ends_rests_and_waits_whose_time_has_come(file: Path) -> None:
    watch = opened(file)
    done = threading.Event()
    threads = started(
        lambda: watch.rest(done.is_set, LONG),
        lambda: watch.wait(done.is_set, LONG),
        lambda: watch.wait(done.is_set, LONG),
    )
    until(lambda: looking(watch))
    done.set()
    watch.wake()
    join(threads)


def test_a_write_ends_no_rest(file: Path) -> None:
    watch = opened(file)
    file.write_bytes(b"x")
    began = time.monotonic()
    watch.rest(never, 0.05)
    assert time.monotonic() - began >= 0.05


def test_closing_ends_every_wait_and_lets_go_of_the_file(file: Path) -> None:
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    watch = opened(file)
    threads = started(lambda: watch.wait(never, LONG), lambda: watch.wait(never, LONG))
    until(lambda: looking(watch))
    watch.close()
    join(threads)
    watch.wait(never, LONG)
    watch.rest(never, LONG)
    watch.close()
    assert len(list(descriptors.iterdir())) == before


@pytest.mark.parametrize("path", [None, "missing/file"])
def test_where_nothing_can_be_watched_it_does_not_work_and_waits_end(path: str | None) -> None:
    watch = Watch(path)
    watch.wait(never, 0.01)
    assert not watch.works
    threads = started(lambda: watch.wait(never, 0.05))
    join(threads)
    watch.close()


def test_no_watch_left_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(path: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(watch_module, "_watching", exhausted)
    watch = Watch(str(file))
    watch.wait(never, 0.01)
    assert not watch.works


def test_who_misses_writes_is_not_believed_until_it_tells_of_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "TRUST_SECONDS", 0.0)
    watch = opened(file)
    database = Database(str(tmp_path / "other.db"))  # whose log is not what is watched
    waiter = Waiter(watch, rest=0.001, blind=0.002)
    waiter.wait(0.05)
    waiter.wait(0.05)
    database.migrate("test", ["CREATE TABLE t (i)"])
    waiter.found_change()
    assert not watch.works
    file.write_bytes(b"x")
    monkeypatch.undo()
    waiter.found_change()
    assert watch.works


def test_while_another_thread_looks_a_doubt_is_heard_too(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "TRUST_SECONDS", 0.0)
    watch = opened(file)
    threads = started(lambda: watch.wait(lambda: not watch.works, LONG))
    until(lambda: looking(watch))
    watch.doubt()
    join(threads)
