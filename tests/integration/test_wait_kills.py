"""A worker that dies at any point of a task's wait, and another one that goes on after it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bus import bus_site
from everyplace import PLACES, site_at
from harness import Site, site_in, wait_until
from ledger_app import approval, sleeper
from strategies import left
from test_servicebus_worker import DETECTING, PLAIN
from test_step_kills import actions

from aztask.stores.records.base import State
from aztask.testing import RunningEmulator

LEASE = 2.0
SLEEP = 0.6
ARGUMENTS = (
    *("-Q", "default", "--pool", "processes", "-c", "2"),
    *("--lease", f"{LEASE}s", "--max-lease", "60s"),
)
KILLED = (
    "step-ran:KILL:2",
    "step-recorded:KILL:2",
    "recorded:KILL",
    "settled:KILL",
    "claimed:KILL:2",
)
"""Before and after the record of the wake time, of the parked run, and of its settlement; and when
the run that it wakes has begun."""


@pytest.fixture(params=PLACES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site_at(request, tmp_path / "site") as made:
        yield made


def assert_gone_on(site: Site, key: str) -> None:
    """Each action happened once, the end is recorded once, and nothing is left."""
    app = site.app()
    assert app.result(key).get(timeout=40) == [f"{key}-{name}" for name in ("one", "two", "three")]
    wait_until(lambda: left(site) == 0, LEASE + 15, "all is settled")
    states = [run.state for run in app.results.history(key)]
    assert states[-1] is State.SUCCEEDED
    assert set(states[:-1]) == {State.SNOOZED}
    assert app.broker.stats("default").dead == 0


@pytest.mark.parametrize("failpoint", KILLED)
def test_killed_around_a_sleep(site: Site, failpoint: str) -> None:
    app = site.app()
    app.send(sleeper.name, ["a", SLEEP], task_id="a")
    first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=failpoint)
    assert first.wait() == -signal.SIGKILL, first.log
    second = site.worker(*ARGUMENTS)
    assert_gone_on(site, "a")
    assert set(actions(site).values()) == {1}, "a recorded step never runs again"
    assert len(site.app().results.history("a")) <= 3, "at most one hop for each wait"
    assert second.stop() == 0, second.log


@pytest.mark.parametrize("failpoint", ["timed:KILL", "parked:KILL"])
@pytest.mark.parametrize("options", [DETECTING, PLAIN], ids=["detection", "no detection"])
def test_killed_between_the_wake_up_and_the_completion(
    options: object, failpoint: str, bus: RunningEmulator, tmp_path: Path
) -> None:
    """If its number is not in the row, the redelivery sends it again: one of both makes the hop."""
    with bus_site(tmp_path / "site", bus, options) as site:  # type: ignore[arg-type]
        site.app().send(sleeper.name, ["a", SLEEP], task_id="a")
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=failpoint)
        assert first.wait() == -signal.SIGKILL, first.log
        second = site.worker(*ARGUMENTS)
        assert_gone_on(site, "a")
        assert set(actions(site).values()) == {1}
        struck = second.log.count("lease lost, this run")  # on a machine that is too busy
        assert site.counts("start")["a"] <= 3 + struck, f"a late copy runs nothing: {second.log}"
        assert second.stop() == 0, second.log


def test_burst_waits_for_a_task_that_sleeps(tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=True) as site:
        app = site.app()
        app.send(sleeper.name, ["a", SLEEP], task_id="a")
        worker = site.worker(*ARGUMENTS, "--burst")
        assert worker.wait() == 0, worker.log
        assert app.result("a").successful()


def test_burst_waits_for_a_task_that_no_queue_shows(tmp_path: Path) -> None:
    """Its timer is gone: the row of the wait alone says that the task is open."""
    with site_in(tmp_path / "site", joint=False) as site:
        app = site.app()
        app.send(approval.name, ["a", 600.0], task_id="a")
        worker = site.worker(*ARGUMENTS, "--burst")
        store = app.sends.signals.store
        assert store is not None
        wait_until(lambda: store.parked("a") is not None and left(site) == 1, 20, "it waits")
        app.broker.purge("default")
        time.sleep(2.0)
        assert worker.process.poll() is None, "the worker has ended"
        assert worker.log.count("--burst ends after them") == 1
        app.result("a").signal("approved", "yes")
        assert worker.wait() == 0, worker.log
        assert app.result("a").get(timeout=0) == ["yes"]
