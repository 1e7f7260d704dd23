"""A worker that dies or freezes at each step of a delivery's life, and another that takes over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import (
    Site,
    holds_a_write_lock,
    pool_processes,
    serving_pool_processes,
    site_in,
    wait_until,
)
from ledger_app import steps, work

from aztask.errors import TaskCancelled
from aztask.stores.records.base import State

LEASE = 1.5
STEPS = ["received", "claimed", "sent", "ran", "recorded", "settled"]
ARGUMENTS = ("--pool", "processes", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")


def runs_allowed(step: str, *, joint: bool) -> tuple[int, int]:
    """(least, most) ends of the task when its worker is killed at `step`."""
    if step in ("received", "claimed"):
        return 1, 1
    if step == "sent":
        return 1, 2  # the pool process may or may not have been faster than the signal
    if step == "ran":
        return 2, 2
    if step == "recorded":
        # one transaction with the settlement: killed before its end, nothing was recorded
        return (2, 2) if joint else (1, 1)
    return 1, 1


def killed_at_each_step(site: Site, left: Callable[[Site], int], *arguments: str) -> None:
    """On a service: nothing is lost, and a recorded outcome is not run again.

    left: how many messages there still are.
    """
    app = site.app()
    for step in STEPS:
        app.send(work.name, [step], task_id=step)
        first = site.worker(*arguments, AZTASK_FAILPOINT=f"{step}:KILL")
        assert first.wait() == -signal.SIGKILL, first.log
        second = site.worker(*arguments)
        assert app.result(step).get(timeout=20) == step
        wait_until(lambda: left(site) == 0, 10, "all is settled")
        least, most = runs_allowed(step, joint=False)
        assert least <= site.counts("end").get(step, 0) <= most, step
        assert [record.state for record in app.results.history(step)] == [State.SUCCEEDED]
        assert second.stop() == 0, second.log


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_each_step(step: str, joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=joint) as site:
        app = site.app()
        site_send(site, "a")
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL")
        assert first.wait() == -signal.SIGKILL
        killed_at = time.time()
        before = set(pool_processes(site.folder))
        second = site.worker(*ARGUMENTS)
        wait_until(
            lambda: set(serving_pool_processes(site.folder)) - before, 30, "the second one serves"
        )
        up_at = time.time()
        assert app.result("a").get(timeout=15) == "a"
        least, most = runs_allowed(step, joint=joint)
        assert least <= site.counts("end").get("a", 0) <= most
        restarts = [line.at for line in site.lines("start", "a") if line.at > killed_at]
        for at in restarts:
            # a second to come up, more where the machine is busy
            assert at - max(killed_at, up_at - 1.0) <= LEASE + 1.0
        wait_until(lambda: is_settled(site), LEASE + 5, "the message is gone")
        records = app.results.history("a")
        assert [record.state for record in records] == [State.SUCCEEDED]
        assert second.stop() == 0, second.log


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
@pytest.mark.parametrize("step", STEPS)
def test_frozen_past_the_lease_and_thawed(step: str, joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=joint) as site:
        app = site.app()
        site_send(site, "a")
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:STOP")
        wait_until(first.stopped, 15, "the first worker freezes")
        if holds_a_write_lock(site):
            # frozen inside a transaction (of this step, or of its heartbeat): the others wait
            time.sleep(LEASE + 0.5)
            first.signal(signal.SIGCONT)
        second = site.worker(*ARGUMENTS)
        assert app.result("a").get(timeout=15) == "a"
        wait_until(lambda: app.broker.stats("default").leased == 0, 10, "all is settled")
        first.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert [record.state for record in app.results.history("a")] == [State.SUCCEEDED]
        assert 1 <= site.counts("end")["a"] <= 2
        site_send(site, "b")
        assert app.result("b").get(timeout=15) == "b"
        assert first.stop() == 0, first.log
        assert second.stop() == 0, second.log
        assert app.broker.stats("default").active == 0


def test_a_thawed_worker_says_that_it_lost(split_site: Site) -> None:
    """It ran to the end while frozen out; it neither records nor settles, and tells."""
    app = split_site.app()
    site_send(split_site, "a")
    first = split_site.worker(*ARGUMENTS, AZTASK_FAILPOINT="sent:STOP")
    wait_until(first.stopped, 15, "the first worker freezes")
    wait_until(lambda: split_site.counts("end").get("a") == 1, 5, "its pool process ends the task")
    second = split_site.worker(*ARGUMENTS)
    wait_until(lambda: split_site.counts("end").get("a") == 2, 15, "the second worker runs it")
    assert app.result("a").get(timeout=5) == "a"
    (record,) = app.results.history("a")
    owner = record.worker
    first.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert app.results.history("a")[0].worker == owner
    assert first.stop() == 0
    assert second.stop() == 0
    assert "lost" in first.log
    events = "".join(path.read_text() for path in split_site.events.rglob("*.jsonl"))
    assert '"event":"lease_lost"' in events
    assert events.count('"event":"succeeded"') == 1


def test_ten_restarts_while_a_message_waits_prefetched(site: Site) -> None:
    """Neither a SIGTERM nor a SIGKILL of the worker counts against what it only prefetched."""
    app = site.app()
    site_send(site, "long", seconds=3600)
    site_send(site, "waiting")
    arguments = (*ARGUMENTS[:2], "-c", "1", *ARGUMENTS[4:], "--prefetch", "5")
    for round_number in range(10):
        worker = site.worker(*arguments, "--shutdown-timeout", "0.1s")
        begun = round_number + 1
        wait_until(lambda n=begun: len(site.lines("start", "long")) >= n, 15, "the long task runs")
        wait_until(lambda: app.broker.stats("default").leased == 2, 5, "both are held")
        if round_number % 2:
            worker.kill()
            worker.wait()
        else:
            worker.stop()
    assert not site.lines("start", "waiting")
    assert app.broker.stats("default").dead == 0
    app.results.cancel("long", time.time())
    site.worker(*arguments)
    assert app.result("waiting").get(timeout=15) == "waiting"


def test_pool_processes_end_with_their_worker(site: Site) -> None:
    site_send(site, "a", seconds=60)
    worker = site.worker(*ARGUMENTS)
    wait_until(lambda: site.lines("start", "a"), 15, "the task runs")
    pid = site.lines("start", "a")[0].pid
    worker.kill()
    worker.wait()
    wait_until(lambda: not alive(pid), 3, "the pool process ends")


def is_settled(site: Site) -> bool:
    """Whether nothing is left in the queue, nor in its dead letters."""
    stats = site.app().broker.stats("default")
    return (stats.active, stats.leased, stats.scheduled, stats.dead) == (0, 0, 0, 0)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
@pytest.mark.parametrize("step", ["stopping", "recorded", "settled"])
def test_killed_while_it_stops_a_cancelled_run(step: str, joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=joint) as site:
        app = site.app()
        app.send(steps.name, ["a", 60.0], task_id="a")
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL")
        wait_until(lambda: site.lines("start", "a"), 20, "it runs")
        assert app.result("a").cancel(running=True)
        assert first.wait() == -signal.SIGKILL
        second = site.worker(*ARGUMENTS)
        with pytest.raises(TaskCancelled):
            app.result("a").get(timeout=20)
        wait_until(lambda: is_settled(site), LEASE + 5, "the message is gone")
        assert len(site.lines("start", "a")) == 1
        assert [record.state for record in app.results.history("a")] == [State.CANCELLED]
        assert second.stop() == 0, second.log


def site_send(site: Site, key: str, **options: float) -> None:
    """Send the task `work` under the task id `key`."""
    site.app().send(work.name, [key], dict(options), task_id=key)
