"""How soon a worker looks again for old results."""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runtimes import Noting, make_runtime

from aztask.errors import BrokerUnavailable, QueueNotFound
from aztask.limits.storeclock import KEPT_SECONDS, StoreClock
from aztask.queues.base import Capabilities, QueueStats
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.payloads.store import MemoryPayloads, PayloadKind
from aztask.stores.records.base import WorkerRecord
from aztask.stores.rows import StoreTime
from aztask.support import chance
from aztask.support.clock import Clock
from aztask.worker.upkeep.housekeeping import (
    AGAIN_SECONDS,
    PAYLOAD_SECONDS,
    PURGE_AGAIN_SECONDS,
    PURGE_SECONDS,
    PURGED_MANY,
    Housekeeping,
)

NO_SIGNALS = SimpleNamespace(signals=SimpleNamespace(parks=False, store=None))
"""Of an app whose tasks do not wait."""


class Idle:
    """A heartbeat of a worker that runs nothing."""

    def record(self, *, stopped: bool = False) -> Any:
        return WorkerRecord("w", 1.0, 2.0, ("q",), 0, 0, stopped)

    def running_ids(self) -> list[str]:
        return []

    def news(self) -> bool:
        return False


class Purging:
    """A result store that says how much it deleted."""

    def __init__(self, deleted: int) -> None:
        self.deleted = deleted
        self.asked: list[float] = []

    def purge(self, before: float) -> int:
        self.asked.append(before)
        return self.deleted

    def heartbeat(self, worker: object) -> None:
        """Nothing to do."""


@pytest.mark.parametrize(
    ("deleted", "pause"),
    [(0, PURGE_SECONDS), (PURGED_MANY - 1, PURGE_SECONDS), (PURGED_MANY, PURGE_AGAIN_SECONDS)],
)
def test_much_that_was_old_brings_the_next_look_forward(
    monkeypatch: pytest.MonkeyPatch, deleted: int, pause: float
) -> None:
    monkeypatch.setattr(chance, "uniform", lambda first, last: last)
    now = [1000.0]
    store = Purging(deleted)
    app: Any = SimpleNamespace(
        results=store,
        payloads=None,
        sends=NO_SIGNALS,
        broker=SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
        settings=SimpleNamespace(result_retention_seconds=50.0, events=None, version=None),
    )
    clock = Clock(monotonic=lambda: now[0], wall=lambda: 2000.0)
    runtime = make_runtime(app, clock=clock, queues=("q",))
    chores, mailbox = Housekeeping(runtime, Idle(), Noting()), runtime.mailbox

    def tick(at: float) -> int:
        now[0] = at
        chores.tick(at)
        while chores.busy:
            mailbox.run()
        return len(store.asked)

    assert tick(1000.0 + PURGE_SECONDS) == 1
    assert store.asked == [1950.0]
    assert tick(1000.0 + PURGE_SECONDS + pause - 0.1) == 1
    assert tick(1000.0 + PURGE_SECONDS + pause) == 2
    chores.stop()


def test_what_is_old_is_known_from_the_stores_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose wall clock is a year ahead deletes nothing early."""
    monkeypatch.setattr(chance, "uniform", lambda first, last: first)
    store = Purging(0)
    app: Any = SimpleNamespace(
        results=store,
        payloads=None,
        sends=NO_SIGNALS,
        broker=SimpleNamespace(capabilities=Capabilities("made up")),
        settings=SimpleNamespace(result_retention_seconds=50.0, events=None, version=None),
    )
    clock = Clock(monotonic=lambda: 1000.0, wall=lambda: 2000.0 + 365 * 86400.0)
    answers: list[StoreTime] = []

    def read() -> StoreTime:
        if not answers:
            raise BrokerUnavailable("the store is away")
        return answers[0]

    known = StoreClock(SimpleNamespace(time=read), clock)  # type: ignore[arg-type]
    runtime = replace(make_runtime(app, clock=known.corrected(), queues=("q",)), store_clock=known)
    chores, mailbox = Housekeeping(runtime, Idle(), Noting()), runtime.mailbox

    def tick(at: float) -> list[float]:
        chores.tick(at)
        while chores.busy:
            mailbox.run()
        return store.asked

    assert tick(1000.0) == tick(1001.0) == []
    answers.append(StoreTime(2000.0, 1000.0, 1000.0))
    assert tick(1001.0 + KEPT_SECONDS) == []
    assert tick(1002.0 + KEPT_SECONDS) == [1950.0]
    chores.stop()


def test_a_new_checkpoint_brings_the_heartbeat_forward_once_a_second() -> None:
    told: list[float] = []
    now = [1000.0]
    store = Purging(0)
    store.heartbeat = lambda worker: told.append(now[0])  # type: ignore[method-assign]
    app: Any = SimpleNamespace(
        results=store,
        payloads=None,
        sends=NO_SIGNALS,
        broker=SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
        settings=SimpleNamespace(result_retention_seconds=50.0, events=None, version=None),
    )
    runtime = make_runtime(app, clock=Clock(monotonic=lambda: now[0]), queues=("q",))
    beating = Idle()
    chores, mailbox = Housekeeping(runtime, beating, Noting()), runtime.mailbox

    def run(until: float) -> list[float]:
        told.clear()
        while now[0] < until:
            chores.tick(now[0])
            while chores.busy:
                mailbox.run()
            now[0] = round(now[0] + 0.1, 1)
        return told

    assert run(1011.0) == [1000.0, 1005.0, 1010.0]
    beating.news = lambda: True  # type: ignore[method-assign]
    found = run(1016.0)
    assert len(found) == 5
    assert min(after - before for before, after in itertools.pairwise(found)) >= 1.0
    beating.news = lambda: False  # type: ignore[method-assign]
    assert len(run(1026.0)) == 2
    chores.stop()


def test_a_chore_of_minutes_delays_no_heartbeat() -> None:
    """Other workers end the at-most-once runs of a worker that falls silent."""
    told: list[float] = []
    now = [1000.0]
    store, busy, enough = Purging(0), threading.Semaphore(0), threading.Event()
    store.heartbeat = lambda worker: told.append(now[0])  # type: ignore[method-assign]
    app: Any = SimpleNamespace(
        results=store,
        payloads=None,
        sends=NO_SIGNALS,
        broker=SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
        settings=SimpleNamespace(result_retention_seconds=50.0, events=None, version=None),
    )
    runtime = make_runtime(app, clock=Clock(monotonic=lambda: now[0]), queues=("q",))
    chores = Housekeeping(runtime, Idle(), Noting())

    def long_chore() -> None:
        busy.release()
        enough.wait(20)

    for lane in (chores._lane, chores._deletions):
        lane.submit("long", long_chore)
        assert busy.acquire(timeout=20)
    for _ in range(4):
        chores.tick(now[0])
        while len(chores._beats):
            runtime.mailbox.run()
        now[0] += 5.0
    assert told == [1000.0, 1005.0, 1010.0, 1015.0]
    enough.set()
    chores.stop()


def test_a_deletion_of_minutes_delays_no_other_chore() -> None:
    """Tasks wait for those: to be cancelled, to be woken, to find their unique key free."""
    asked: list[Any] = []
    store: Any = Purging(0)
    enough = threading.Event()
    store.to_stop = lambda ids: asked.append(ids) or ()
    store.purge = lambda before: enough.wait(20) and 0
    app: Any = SimpleNamespace(
        results=store,
        payloads=None,
        sends=NO_SIGNALS,
        broker=SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
        settings=SimpleNamespace(result_retention_seconds=50.0, events=None, version=None),
    )
    runtime = make_runtime(app, queues=("q",))
    heartbeat = Idle()
    heartbeat.running_ids = lambda: ["a"]  # type: ignore[method-assign]
    chores = Housekeeping(runtime, heartbeat, Noting())
    chores._purge_at = 0.0
    for _ in range(2):
        chores.tick(chores._clock.monotonic())
        while len(chores._lane):
            runtime.mailbox.run()
        chores._cancelled_at = 0.0
    assert asked == [["a"]] * 2
    assert len(chores._deletions) == 1, "the purge goes on"
    enough.set()
    chores.stop()


def test_workers_that_live_for_a_few_seconds_purge_too() -> None:
    """Nothing else would delete old results where each worker ends within a minute."""
    purges = 0
    for _ in range(200):
        now, store = [1000.0], Purging(0)
        app: Any = SimpleNamespace(
            results=store,
            payloads=None,
            sends=NO_SIGNALS,
            broker=SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
            settings=SimpleNamespace(result_retention_seconds=50.0, events=None, version=None),
        )
        clock = Clock(monotonic=lambda now=now: now[0], wall=lambda: 2000.0)  # type: ignore[misc]
        runtime = make_runtime(app, clock=clock, queues=("q",))
        chores = Housekeeping(runtime, Idle(), Noting())
        now[0] += PURGE_SECONDS / 2
        chores.tick(now[0])
        chores.stop()
        purges += len(store.asked)
    assert 50 <= purges <= 150, "about every second worker that lives for half of the minute"


@pytest.mark.parametrize("results", [None, Purging(0)])
def test_a_worker_deletes_old_event_files(tmp_path: Path, results: Any) -> None:
    """With and without a result store."""
    path = tmp_path / "date=1970-01-01" / "hour=00" / "w-1.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    os.utime(path, (1000.0, 1000.0))
    app: Any = SimpleNamespace(
        results=results,
        sends=NO_SIGNALS,
        payloads=None,
        broker=SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
        settings=SimpleNamespace(
            result_retention_seconds=50.0,
            events=str(tmp_path),
            events_container=None,
            events_retention_seconds=500.0,
            version=None,
        ),
    )
    clock = Clock(monotonic=lambda: 1000.0, wall=lambda: 1600.0)
    chores = Housekeeping(make_runtime(app, clock=clock, queues=("q",)), Idle(), Noting())
    chores.tick(1000.0 + PURGE_SECONDS)
    chores.stop()
    assert not path.exists()


def test_results_and_values_that_have_ended_are_removed_hourly() -> None:
    store = MemoryPayloads()
    payloads = Payloads(lambda: store, threshold=1, checkpoint_threshold=1, result_threshold=1)
    app: Any = SimpleNamespace(
        results=None,
        payloads=payloads,
        broker=SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
        settings=SimpleNamespace(result_retention_seconds=50.0, events=None, version=None),
    )
    chores = Housekeeping(make_runtime(app, queues=("q",)), Idle(), Noting())
    now = time.monotonic() + PURGE_SECONDS
    for at, left in ((now, 0), (now + 60, 1), (now + PAYLOAD_SECONDS, 0)):
        payloads.keep(PayloadKind.RESULT, b"x", 1000.0)
        chores.tick(at)
        while chores.busy:
            chores._mailbox.run()
        assert len(store.stored) == left
    chores.stop()


def test_a_queue_that_does_not_exist_counts_as_empty() -> None:
    counts = {"empty": 0, "full": 3}

    def stats(queue: str) -> QueueStats:
        if queue not in counts:
            raise QueueNotFound(queue)
        return QueueStats(queue, counts[queue], 0, 0, 0, 0)

    def drained(*queues: str) -> bool:
        capabilities = Capabilities("made up", remote=False)
        broker = SimpleNamespace(capabilities=capabilities, stats=stats)
        app: Any = SimpleNamespace(
            results=None,
            payloads=None,
            sends=NO_SIGNALS,
            broker=broker,
            settings=SimpleNamespace(events=None, version=None),
        )
        chores = Housekeeping(make_runtime(app, queues=queues), Idle(), Noting())
        found = chores.drained()
        chores.stop()
        return found

    assert drained("missing", "empty")
    assert not drained("missing", "full")


def test_a_chore_that_fails_is_named_until_it_succeeds_and_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app: Any = SimpleNamespace(
        results=None,
        payloads=None,
        broker=SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
        settings=SimpleNamespace(result_retention_seconds=50.0, events=None, version=None),
    )
    now = [1000.0]
    clock = Clock(monotonic=lambda: now[0], wall=lambda: 1600.0)
    chores = Housekeeping(make_runtime(app, clock=clock, queues=("q",)), Idle(), Noting())
    part, done, broken = chores._lane.part, [], [True]

    def sometimes() -> None:
        if broken[0]:
            raise TypeError("a row that no release writes")
        done.append("sometimes")

    def wait() -> None:
        while chores.busy:
            chores._mailbox.run()

    for _ in range(2):
        chores._submit("sometimes", sometimes)
        chores._submit("other", lambda: done.append("other"))
        wait()
    (failure,) = part.failures
    assert (failure.part, done) == ("chore sometimes", ["other", "other"])
    assert caplog.text.count("Traceback") == 1
    broken[0] = False
    now[0] += AGAIN_SECONDS
    chores.tick(now[0])
    wait()
    assert done[-1] == "sometimes", "it is tried again before its own time"
    assert part.failures == []
    chores.stop()
