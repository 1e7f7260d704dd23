"""What a stream and a signal cost in Azure Tables: every request is counted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from azurite import account_of, storing

from aztask import App
from aztask.message.message import TaskMessage
from aztask.settlement import Complete
from aztask.steps.emitting import Emission
from aztask.steps.suspension import Parked
from aztask.steps.waits import SIGNALS, ParkedRun, Wait
from aztask.stores.records.base import Finish, Outcome, Provisioned, RunKey, Start, State
from aztask.stores.tables.client import TimeBudget

MESSAGE = TaskMessage("t", "shop.ask", "default", b"")
SECONDS = 4.0
LISTENERS = 10
"""Threads that read, and as many coroutines."""


@contextmanager
def counting() -> Iterator[list[float]]:
    """When each request to the tables was made, in the threads of the block and those it begins."""
    made: list[float] = []
    request = TimeBudget.request

    def counted(self, make, place, role, **options):
        made.append(time.monotonic())
        return request(self, make, place, role, **options)

    with mock.patch.object(TimeBudget, "request", counted):
        yield made


def most_in_a_second(made: list[float]) -> int:
    """The most requests in any second; its clock may differ by 20 ms from that of the pauses."""
    return max((sum(at <= each < at + 0.98 for each in made) for at in made), default=0)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[App]:
    """Queues in a file, results in Azure Tables: only the latter's requests are counted."""
    with storing(tmp_path / "azurite") as stores:
        app = App("shop", broker=f"local://{tmp_path}/queues.db", results=account_of(*stores))
        assert isinstance(app.results, Provisioned)
        app.results.create()
        yield app
        app.close()


def write(app: App, seconds: float, message: TaskMessage = MESSAGE) -> float:
    """Emit 500 parts a second, and wait; returns when the last part was emitted."""
    lease = SimpleNamespace(lost=False)
    with suppress(Parked), Emission(app, message, 1, lease) as stream:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            stream.emit("a word")
            time.sleep(0.002)
        raise Parked("a time", 60.0, 0.0)
    return until


@pytest.mark.parametrize("message", [MESSAGE, replace(MESSAGE, hop=1, continued=True)])
def test_a_writing_task_makes_at_most_ten_requests_a_second(
    shop: App, message: TaskMessage
) -> None:
    """At the end its last parts, and the mark of a run that waits, are written without a pause."""
    with counting() as made:
        last = write(shop, SECONDS, message)
    running = [at for at in made if at < last]
    assert len(running) > 5 * SECONDS
    # The first write asks for the server's clock, and a run that goes on for the newest mark.
    first = 1 + int(message.continued)
    assert most_in_a_second(running[first:]) <= 10
    assert len(made) - len(running) <= 3
    assert len(made) <= 10 * SECONDS + 4


def test_a_signal_writes_one_row_and_reads_once(shop: App) -> None:
    """Of a task that waits; that of another task is looked for, too."""
    signals = shop.sends.signals
    names = [f"t{number}" for number in range(12)]
    for name in names:
        message = TaskMessage(name, "shop.ask", "default", b"\x93\x90\x80\x80").parked()
        waits = (Wait(SIGNALS, ("go",), 2e9),)
        run = ParkedRun(name, "shop.ask", "default", 0, 1, time.time(), 2e9, waits, b"")
        assert not signals.park(run, message)
    shop.result(names[0]).signal("go")  # asks for the server's clock
    before = shop.broker.stats("default").active
    with counting() as made:
        shop.result(names[1]).signal("go")
    assert len(made) == 2
    with counting() as made:
        assert shop.signal_all(names[2:], "go") == {}
    assert len(made) == 2 * len(names[2:])
    assert shop.broker.stats("default").active == before + len(names) - 1
    with counting() as made:
        assert set(shop.signal_all(["unknown"], "go")) == {"unknown"}
    assert len(made) <= 5


def test_the_readers_of_a_process_make_two_requests_a_second_together(shop: App) -> None:
    key = RunKey("t", 0, 0)
    results = shop.results
    assert results is not None
    results.start([Start(key, "shop.ask", "default", 1, "o#1", "w", time.time())])
    seen: list[list[int]] = []

    def read() -> None:
        seen.append([part.number for part in shop.result("t").stream(timeout=60)])

    async def read_all() -> None:
        async def one() -> None:
            stream = shop.result("t").astream(timeout=60)
            seen.append([part.number async for part in stream])

        await asyncio.gather(*(one() for _ in range(LISTENERS)))

    threads = [threading.Thread(target=read, daemon=True) for _ in range(LISTENERS)]
    threads.append(threading.Thread(target=asyncio.run, args=(read_all(),), daemon=True))
    with counting() as made:
        for each in threads:
            each.start()
        time.sleep(SECONDS)  # nothing is there yet
        idle = list(made)
    write(shop, 1.0)
    with counting() as made:
        time.sleep(SECONDS)
        quiet = list(made)
    outcome = Outcome(State.SUCCEEDED, Complete(), shop.codec.encode_value(None), at=time.time())
    results.record([Finish(key, "o#1", outcome)])
    for each in threads:
        each.join(60)
    assert len(seen) == 2 * LISTENERS
    assert all(each == seen[0] and each for each in seen)
    for made in (idle, quiet):
        assert 0 < most_in_a_second(made) <= 2
        assert len(made) <= 2 * SECONDS + 1
