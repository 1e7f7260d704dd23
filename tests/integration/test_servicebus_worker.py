"""Real workers on Service Bus (the emulator, over TCP): kills, clones, checkpoints, clocks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bus import bus_site
from harness import Site, wait_until
from ledger_app import chunks, flaky, rejecting, retry_later, snoozing, work
from test_kills import killed_at_each_step

from aztask.queues.base import QueueOptions
from aztask.stores.records.base import State
from aztask.testing import RunningEmulator, emulator

LEASE = 2.0
ARGUMENTS = ("-Q", "default", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")
DETECTING = QueueOptions(lease=LEASE, duplicate_window=600.0)
PLAIN = QueueOptions(lease=LEASE)


@pytest.fixture
def site(bus: RunningEmulator, tmp_path: Path) -> Iterator[Site]:
    with bus_site(tmp_path / "site", bus, PLAIN) as made:
        yield made


def left(site: Site) -> int:
    """Messages that are anywhere but in the dead letters."""
    stats = site.app().broker.stats("default")
    return (stats.active or 0) + (stats.scheduled or 0)


def test_killed_at_each_step(site: Site) -> None:
    killed_at_each_step(site, left, *ARGUMENTS)


@pytest.mark.parametrize("options", [DETECTING, PLAIN], ids=["detection", "no detection"])
def test_killed_between_the_clone_and_the_completion(
    options: QueueOptions, bus: RunningEmulator, tmp_path: Path
) -> None:
    """Duplicate detection on: one run of the retry. Off: at most two, and one recorded outcome."""
    with bus_site(tmp_path / "site", bus, options) as site:
        app = site.app()
        app.send(flaky.name, ["a", 1], task_id="a")
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT="cloned:KILL")
        assert first.wait() == -signal.SIGKILL, first.log
        second = site.worker(*ARGUMENTS)
        assert app.result("a").get(timeout=20) == 1
        wait_until(lambda: left(site) == 0, LEASE + 10, "all is settled")
        assert site.counts("start")["a"] == 2, "the first run and its retry"
        ends = site.counts("end")["a"]
        assert ends == 1 if options is DETECTING else 1 <= ends <= 2
        states = [record.state for record in app.results.history("a")]
        assert states == [State.RETRYING, State.SUCCEEDED]
        assert second.stop() == 0, second.log


@pytest.mark.parametrize("step", ["ran", "recorded"])
def test_frozen_past_the_lease_and_thawed(site: Site, step: str) -> None:
    app = site.app()
    app.send(work.name, ["a"], task_id="a")
    first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:STOP")
    wait_until(first.stopped, 20, "the first worker freezes")
    second = site.worker(*ARGUMENTS)
    wait_until(lambda: left(site) == 0, 20, "the second worker settles it")
    first.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert [record.state for record in app.results.history("a")] == [State.SUCCEEDED]
    app.send(work.name, ["b"], task_id="b")
    assert app.result("b").get(timeout=15) == "b"
    assert first.stop() == 0, first.log
    assert second.stop() == 0, second.log


def test_snoozes_retries_a_dead_letter_and_its_replay_within_the_window(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    """None of them is taken for a duplicate: hop and generation make their ids differ."""
    with bus_site(tmp_path / "site", bus, DETECTING) as site:
        app = site.app()
        worker = site.worker(*ARGUMENTS)
        assert app.send(snoozing.name, ["s", 3]).get(timeout=20) == 3
        assert app.send(flaky.name, ["f", 3]).get(timeout=20) == 3
        assert site.counts("start") == {"s": 4, "f": 4}
        app.send(rejecting.name, ["x", "no good"], task_id="x")
        wait_until(lambda: app.broker.peek("default", dead_letter=True), 10, "it is dead")
        (dead,) = app.broker.peek("default", dead_letter=True)
        assert dead.dead_letter_reason == "no good"
        app.send(rejecting.name, ["x", "no good"], task_id="x", force=True)
        wait_until(lambda: site.counts("start")["x"] == 2, 10, "it runs again")
        assert worker.stop() == 0, worker.log


def test_a_checkpoint_survives_the_worker(site: Site) -> None:
    app = site.app()
    app.send(chunks.name, ["c", 6], task_id="c")
    first = site.worker(*ARGUMENTS)
    wait_until(lambda: site.lines("chunk5", "c"), 20, "it is done")
    assert app.result("c").get(timeout=10) == [0, 1, 2, 3, 4, 5]
    app.send(chunks.name, ["d", 6, 3], task_id="d")
    assert app.result("d").get(timeout=20) == [0, 1, 2, 3, 4, 5]
    assert site.counts("chunk0")["d"] == 1, "the retry goes on from its checkpoint"
    assert first.stop() == 0, first.log


def test_a_task_ten_locks_long_runs_once(site: Site) -> None:
    app = site.app()
    worker = site.worker(*ARGUMENTS)
    assert app.send(work.name, ["long", 10 * LEASE]).get(timeout=20 + 10 * LEASE) == "long"
    wait_until(lambda: left(site) == 0, 10, "it is settled")
    assert site.counts("start")["long"] == 1
    assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("offset", [3600.0, -3600.0], ids=["ahead", "behind"])
def test_the_services_clock_an_hour_off(offset: float, tmp_path: Path) -> None:
    """Leases do not care, and delays are as long as was asked for."""
    with (
        emulator(clock_offset=offset) as bus,
        bus_site(tmp_path / "site", bus, PLAIN) as site,
    ):
        app = site.app()
        worker = site.worker(*ARGUMENTS)
        sent_at = time.time()
        delayed = app.task(name=work.name)(work.function).with_options(delay=2.0).delay("d")
        retried = app.send(retry_later.name, ["r", 2.0])
        assert delayed.get(timeout=20) == "d"
        assert retried.get(timeout=20) >= sent_at + 2.0
        (start,) = site.lines("start", "d")
        assert 1.5 <= start.at - sent_at <= 6.0
        assert app.send(work.name, ["long", 2 * LEASE]).get(timeout=20) == "long"
        wait_until(lambda: left(site) == 0, 10, "all is settled")
        assert site.counts("start") == {"d": 1, "r": 2, "long": 1}
        assert worker.stop() == 0, worker.log


def test_another_lease_than_the_queues_is_refused(site: Site) -> None:
    worker = site.worker("-Q", "default", "--lease", "9s", "--max-lease", "60s")
    assert worker.wait() == 4, worker.log
    assert "its lease is fixed" in worker.log


def test_sigterm_gives_back_what_has_not_started_uncounted(site: Site) -> None:
    app = site.app()
    first = site.worker("-Q", "default", "-c", "1", *ARGUMENTS[4:], "--prefetch", "5")
    app.send(work.name, ["slow", 3.0], task_id="slow")
    wait_until(lambda: site.lines("start", "slow"), 20, "it runs")
    for number in range(4):
        app.send(work.name, [str(number)], task_id=str(number))
    time.sleep(0.5)
    assert first.stop() == 0, first.log
    assert {each.delivery_count for each in app.broker.peek("default")} == {0}
    second = site.worker(*ARGUMENTS)
    for number in range(4):
        assert app.result(str(number)).get(timeout=20) == str(number)
    assert second.stop() == 0, second.log
