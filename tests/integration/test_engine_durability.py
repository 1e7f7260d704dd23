"""What the engine's file survives: kill -9 at any moment, competing processes, a full disk."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import engine_processes
import pytest
from engine_processes import BATCH, QUEUE
from harness import site_in
from ledger_app import work
from waiting import wait_until

import aztask
from aztask import App
from aztask.errors import BrokerUnavailable, ConfigurationError, QueueFull
from aztask.queues.engine import Database, Engine, NewMessage, StoredSettings

ROUNDS = 12


@contextmanager
def process(role: str, path: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `engine_processes`; dead at the end."""
    environment = os.environ | {"PYTHONPATH": str(Path(aztask.__file__).parents[1])}
    command = [sys.executable, engine_processes.__file__, role, str(path), str(log)]
    running = subprocess.Popen(command, env=environment)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def kill_soon_after_start(running: subprocess.Popen[bytes], log: Path, known: int) -> None:
    """Kill it at a random moment of its work, not before it has begun."""
    until = time.monotonic() + 30.0
    while len(lines(log)) == known:
        assert running.poll() is None, "it ended by itself"
        assert time.monotonic() < until, "it did not start"
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, 0.06))
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    # The kernel writes page by page, and a kill between two of them leaves a part of a line.
    text = log.read_text()
    log.write_text(text[: text.rfind("\n") + 1])


def new_queue(path: Path, settings: StoredSettings = StoredSettings()) -> None:
    database = Database(str(path))
    Engine(database).create_queue(QUEUE, settings)
    database.close()


def payloads(path: Path, *, dead_letter: bool = False) -> list[str]:
    database = Database(str(path))
    try:
        found = Engine(database).peek(QUEUE, 0, 10**6, dead_letter=dead_letter)
        return [message.payload.decode() for message in found]
    finally:
        database.close()


def test_no_accepted_message_is_lost_when_its_sender_is_killed(tmp_path):
    path, log = tmp_path / "queues.db", tmp_path / "accepted"
    new_queue(path)
    for _ in range(ROUNDS):
        with process("write", path, log) as running:
            kill_soon_after_start(running, log, len(lines(log)))
        stored = Counter(payloads(path))
        names = {payload.partition("/")[0] for payload in stored}
        assert names >= set(lines(log))
        for payload, count in stored.items():
            assert count == int(payload.partition("/")[2]), "a part of a batch was stored"
        assert len(names - set(lines(log))) <= ROUNDS, "more than one unconfirmed send each"
    assert any(payload.endswith(f"/{BATCH}") for payload in stored)


def test_settlements_are_whole_when_their_process_is_killed(tmp_path):
    path, log = tmp_path / "queues.db", tmp_path / "started"
    new_queue(path, StoredSettings(max_deliveries=10**6))
    database = Database(str(path))
    everything = sorted(f"{number}" for number in range(50))
    Engine(database).send(QUEUE, [NewMessage(payload.encode()) for payload in everything])
    database.close()
    for _ in range(ROUNDS):
        with process("move", path, log) as running:
            kill_soon_after_start(running, log, len(lines(log)))
        found = payloads(path) + payloads(path, dead_letter=True)
        assert sorted(found) == everything


def test_two_processes_share_a_file_and_never_a_message(tmp_path):
    path = tmp_path / "queues.db"
    new_queue(path)
    database = Database(str(path))
    engine = Engine(database)
    everything = [f"{number}" for number in range(600)]
    engine.send(QUEUE, [NewMessage(payload.encode()) for payload in everything])
    logs = [tmp_path / "first", tmp_path / "second"]
    with process("consume", path, logs[0]) as first, process("consume", path, logs[1]) as second:
        assert first.wait(60) == 0
        assert second.wait(60) == 0
    done = [lines(log) for log in logs]
    assert sorted(done[0] + done[1], key=int) == everything
    assert engine.stats(QUEUE) == (0, 0, 0, 0, 0)
    database.close()


def test_a_file_locked_for_too_long_is_unavailable_and_then_works(tmp_path):
    path = tmp_path / "queues.db"
    new_queue(path)
    holder, waiting = Database(str(path)), Database(str(path), busy_seconds=0.05)
    engine = Engine(waiting)
    with holder.transaction(), pytest.raises(BrokerUnavailable, match="locked"):
        engine.send(QUEUE, [NewMessage(b"x")])
    assert len(engine.send(QUEUE, [NewMessage(b"x")])) == 1
    holder.close()
    waiting.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB; mounting one takes root, as in the project's checks."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"this test mounts a small tmpfs and needs root: {done.stderr.strip()}", False)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_refuses_and_loses_nothing(small_disk):
    path = small_disk / "queues.db"
    new_queue(path)
    database = Database(str(path))
    engine = Engine(database)
    accepted = fill(engine, batch=1) + fill(engine, batch=5, start=10**6)
    with pytest.raises(QueueFull, match="free some disk space"):
        engine.send(QUEUE, [NewMessage(b"x" * 100_000)])
    assert sorted(p[:8] for p in payloads_of(engine)) == sorted(accepted)
    database.close()
    assert sorted(p[:8].encode() for p in payloads(path)) == sorted(accepted)


def fill(engine: Engine, batch: int, start: int = 0) -> list[bytes]:
    """Send until there is no room; returns what was accepted."""
    accepted: list[bytes] = []
    for number in range(start, start + 10**5):
        names = [b"%07d%d" % (number, part) for part in range(batch)]
        try:
            engine.send(QUEUE, [NewMessage(name + bytes(900)) for name in names])
        except QueueFull as error:
            assert "\n" not in str(error)
            return accepted
        accepted += names
    raise AssertionError("the disk never became full")


def payloads_of(engine: Engine) -> list[bytes]:
    return [message.payload for message in engine.peek(QUEUE, 0, 10**6)]


def test_after_space_was_freed_everything_works_again(small_disk):
    path, ballast = small_disk / "queues.db", small_disk / "ballast"
    new_queue(path)
    ballast.write_bytes(bytes(500_000))
    database = Database(str(path))
    engine = Engine(database)
    accepted = fill(engine, batch=1)
    assert accepted
    ballast.unlink()
    received = engine.receive(QUEUE, len(accepted), 30.0)
    assert [message.payload[:8] for message in received] == accepted
    assert all(engine.complete(QUEUE, [(m.seq, m.token) for m in received]))
    assert engine.send(QUEUE, [NewMessage(b"after")])
    database.close()
    assert payloads(path) == ["after"]


def test_a_file_that_filled_the_disk_opens_elsewhere(small_disk, tmp_path):
    path = small_disk / "queues.db"
    new_queue(path)
    database = Database(str(path))
    accepted = fill(Engine(database), batch=1)
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", tmp_path / f"copy.db{suffix}")
    database.close()
    assert [p[:8].encode() for p in payloads(tmp_path / "copy.db")] == accepted


@pytest.mark.parametrize("exists", [True, False], ids=["with a queue file", "without one"])
def test_a_worker_that_starts_on_a_full_disk_waits_for_room(small_disk, tmp_path, exists):
    path, ballast = small_disk / "queues.db", small_disk / "ballast"
    with site_in(tmp_path / "site", broker=f"local://{path}", results=f"local://{path}") as site:
        if exists:
            sender = App("ledger", broker=site.broker, results=site.results)
            sender.send(work.name, ["a"], task_id="a")
            sender.close()
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        worker = site.worker("-Q", "default", "-c", "1")
        wait_until(lambda: "the worker cannot start, retry in" in worker.log, 20, "it waits")
        assert "free some disk space" in worker.log
        assert worker.process.poll() is None
        ballast.unlink()
        if not exists:
            site.app().send(work.name, ["a"], task_id="a")
        assert site.app().result("a").get(timeout=30) == "a"
        assert worker.stop() == 0, worker.log


def test_a_read_only_place_is_a_configuration_error(small_disk):
    path = small_disk / "queues.db"
    new_queue(path)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for place in (path, small_disk / "new.db", small_disk / "directory" / "new.db"):
        with pytest.raises(ConfigurationError) as caught:
            Engine(Database(str(place))).send(QUEUE, [NewMessage(b"x")])
        assert str(place) in str(caught.value)
        assert "\n" not in str(caught.value)
