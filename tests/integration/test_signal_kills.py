"""Signals to a task that waits, and what dies around them: its worker, or the signaller."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from everyplace import PLACES, site_at
from harness import Site, site_in, wait_until
from ledger_app import approval, long_flow
from strategies import left
from test_step_kills import actions
from test_wait_kills import ARGUMENTS, LEASE

from aztask import SignalRefused
from aztask.queues.base import shared_transaction
from aztask.stores.records.base import State

LONG = 600.0
SIGNALLER = (
    "import sys; from ledger_app import app; app.result('a').signal('approved', sys.argv[1])"
)


@pytest.fixture(params=PLACES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site_at(request, tmp_path / "site") as made:
        yield made


def signaller(site: Site, value: str, failpoint: str = "") -> int:
    """Send a signal from a process of its own; returns how it ended."""
    command = [sys.executable, "-c", SIGNALLER, value]
    environment = {**site.environment, **({"AZTASK_FAILPOINT": failpoint} if failpoint else {})}
    return subprocess.run(command, env=environment, check=False).returncode


def parked(site: Site) -> bool:
    record = site.app().results.get("a")
    return record is not None and record.outcome is not None and record.outcome.parked


def waits(site: Site) -> bool:
    """Whether the row of the wait is there, which comes after the outcome: a signal may wake it."""
    store = site.app().sends.signals.store
    assert store is not None
    return store.read("a").parked is not None


def started(site: Site) -> bool:
    return site.counts("start")["a"] > 0


def assert_ended(site: Site, found: list[str], hops: int) -> None:
    """Each action happened once, the end is recorded once, and no wake-up is left."""
    app = site.app()
    assert app.result("a").get(timeout=40) == found
    states = [run.state for run in app.results.history("a")]
    assert states[-1] is State.SUCCEEDED
    assert set(states[:-1]) <= {State.SNOOZED}
    assert len(states) <= hops
    assert set(actions(site).values()) == {1}, "a recorded step never runs again"
    assert app.broker.stats("default").dead == 0
    store = app.sends.signals.store
    assert store is not None
    wait_until(lambda: store.read("a").parked is None, 5, "its row goes after its end is recorded")


@pytest.mark.parametrize(
    "failpoint",
    [
        "step-ran:KILL:2",  # the wait's row is not written
        "step-recorded:KILL:2",  # it is
        "recorded:KILL",
        "parked:KILL",
        "settled:KILL",
        "claimed:KILL:2",  # awake
        "step-recorded:KILL:3",  # the signal is taken, its row is there
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_worker_dies_around_a_wait(site: Site, failpoint: str, when: str) -> None:
    """The signal is sent before the death, as soon as the task has started, or after it."""
    app = site.app()
    app.send(approval.name, ["a", LONG], task_id="a")
    if when == "before":
        assert signaller(site, "yes") == 0
    awake = failpoint in ("claimed:KILL:2", "step-recorded:KILL:3")
    if when == "before" and failpoint not in ("step-recorded:KILL:2", "step-ran:KILL:2"):
        pytest.skip("a signal that is there before the wait parks nothing")
    first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=failpoint)
    if awake:
        wait_until(lambda: parked(site), 20, "it waits")
        assert signaller(site, "yes") == 0
    assert first.wait() == -signal.SIGKILL, first.log
    if when == "after" and not awake:
        assert signaller(site, "yes") == 0
    second = site.worker(*ARGUMENTS)
    assert_ended(site, ["yes"], hops=3)
    assert second.stop() == 0, second.log


@pytest.mark.parametrize("failpoint", ["signalled:KILL", "woken:KILL", ""])
def test_the_signaller_dies(site: Site, failpoint: str) -> None:
    """Housekeeping does its work, within five seconds."""
    site.app().send(approval.name, ["a", LONG], task_id="a")
    worker = site.worker(*ARGUMENTS)
    wait_until(lambda: waits(site), 20, "it waits")
    assert signaller(site, "yes", failpoint) == (-signal.SIGKILL if failpoint else 0)
    app = site.app()
    if failpoint and shared_transaction(app.broker, app.results) is not None:
        store = app.sends.signals.store
        assert store is not None and store.read("a").signals == [], "one transaction: no signal"
        assert signaller(site, "yes") == 0
    wait_until(lambda: site.app().result("a").ready(), 8, "it goes on")
    assert_ended(site, ["yes"], hops=2)
    if not failpoint and site.app().broker.capabilities.cancel_scheduled:
        wait_until(lambda: left(site) == 0, 5, "its timer is cancelled")
    assert worker.stop() == 0, worker.log


@pytest.mark.parametrize(
    "site", ["two files", "storage", "detection", "no detection"], indirect=True
)
@pytest.mark.parametrize("dies", [False, True])
def test_cancelled_between_the_outcome_and_the_row_of_a_wait(site: Site, dies: bool) -> None:
    """The cancellation finds no row, so the worker that writes the row looks for it."""
    site.app().send(approval.name, ["a", LONG], task_id="a")
    first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT="recorded:STOP")
    wait_until(first.stopped, 20, "its end is recorded")
    assert parked(site)
    assert site.app().result("a").cancel()
    first.signal(signal.SIGKILL if dies else signal.SIGCONT)
    worker = site.worker(*ARGUMENTS) if dies else first
    wait_until(lambda: len(site.app().results.history("a")) == 2, LEASE + 15, "it is awake")
    wait_until(lambda: left(site) == 0, LEASE + 15, "all is settled")
    assert site.app().results.history("a")[-1].state is State.CANCELLED
    assert site.counts("start")["a"] == 1, "its function did not run again"
    assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("site", ["detection", "no detection"], indirect=True)
def test_a_timer_is_cancelled_without_a_search(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a queue with many messages the search would take minutes."""
    app = site.app()
    app.send(approval.name, ["a", LONG], task_id="a")
    worker = site.worker(*ARGUMENTS)
    wait_until(lambda: left(site) == 1 and parked(site), 20, "its timer waits")
    store = app.sends.signals.store
    assert store is not None
    wait_until(lambda: (run := store.parked("a")) is not None and run.timer > 0, 5, "has a number")
    for name in ("cancel_scheduled", "peek"):
        monkeypatch.setattr(app.broker, name, lambda *_, **__: pytest.fail("it searches"))
    app.result("a").signal("approved", "yes")
    monkeypatch.undo()
    assert app.result("a").get(timeout=20) == ["yes"]
    wait_until(lambda: left(site) == 0, 5, "its timer is cancelled")
    assert worker.stop() == 0, worker.log


def test_two_signals_at_once_are_for_two_waits(site: Site) -> None:
    site.app().send(approval.name, ["a", LONG, 2], task_id="a")
    worker = site.worker(*ARGUMENTS)
    wait_until(lambda: parked(site), 20, "it waits")
    command = [sys.executable, "-c", SIGNALLER]
    both = [
        subprocess.Popen([*command, value], env=site.environment) for value in ("left", "right")
    ]
    assert [each.wait() for each in both] == [0, 0]
    wait_until(lambda: site.app().result("a").ready(), 20, "it goes on")
    found = site.app().result("a").get(timeout=0)
    assert sorted(found) == ["left", "right"]
    assert_ended(site, found, hops=4)
    assert worker.stop() == 0, worker.log


def test_a_signal_with_the_timeout(site: Site) -> None:
    """Whichever comes first: the signal is for the first wait, or for the second one."""
    timeout = 1.5
    site.app().send(approval.name, ["a", timeout, 2], task_id="a")
    worker = site.worker(*ARGUMENTS)
    wait_until(lambda: parked(site), 20, "it waits")
    record = site.app().results.get("a")
    assert record is not None and record.due_again is not None
    clock = site.app().sends.signals
    wait_until(lambda: clock.now() >= record.due_again - 0.05, 10, "the time ends")
    site.app().result("a").signal("approved", "yes")
    found = site.app().result("a").get(timeout=40)
    assert found in (["yes", "late"], ["late", "yes"])
    assert_ended(site, found, hops=5)
    assert worker.stop() == 0, worker.log


def test_two_workers_and_a_burst_of_signals(tmp_path: Path) -> None:
    """Many tasks on two workers: each takes its own signals, in their order."""
    with site_in(tmp_path / "site", joint=False) as site:
        app = site.app()
        for number in range(20):
            app.send(approval.name, [f"k{number}", LONG, 3], task_id=f"k{number}")
        workers = [site.worker(*ARGUMENTS) for _ in range(2)]
        for value in (1, 2, 3):
            for number in range(20):
                app.result(f"k{number}").signal("approved", value)
        for number in range(20):
            assert app.result(f"k{number}").get(timeout=LEASE + 40) == [1, 2, 3]
        assert set(actions(site).values()) == {1}
        for worker in workers:
            assert worker.stop() == 0, worker.log


# Not at every second claim: where two messages come together, no worker would settle the first.
@pytest.mark.parametrize("failpoint", ["step-ran:KILL:2", "step-recorded:KILL"])
@pytest.mark.parametrize("site", ["two files", "storage", "detection"], indirect=True)
def test_a_worker_dies_after_every_line_of_a_flow(site: Site, failpoint: str) -> None:
    """One worker after the other dies a line later than the one before."""
    app = site.app()
    app.send(long_flow.name, ["a"], task_id="a")
    due = ["first", "second"]
    died = 0
    while not app.result("a").ready():
        assert died < 25, "each worker gets at least one line further"
        worker = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=failpoint)
        while worker.process.poll() is None and not app.result("a").ready():
            if due and parked(site):
                with suppress(SignalRefused):
                    app.result("a").signal(due[0], due[0])
                    due.pop(0)
                    time.sleep(0.2)
            time.sleep(0.05)
        died += worker.process.poll() is not None
        if app.result("a").ready():
            worker.process.kill()
            worker.process.wait()
    assert died >= 3
    last = site.worker(*ARGUMENTS)
    ends = [f"a-{name}" for name in ("one", "two", "three", "four", "five")]
    found = app.result("a").get(timeout=20)
    assert found == [ends[0], "first", ends[1], "a-child", ends[2], "second", *ends[3:]]
    states = [run.state for run in app.results.history("a")]
    assert states.count(State.SUCCEEDED) == 1
    made = actions(site)
    assert len(made) == 5, "a step that ran twice had the same key"
    if failpoint != "step-ran:KILL:2":
        assert sum(made.values()) <= 5 + died, "only the step that ran at a kill may run again"
    wait_until(lambda: app.broker.stats("default").dead == 0, 5, "nothing is dead")
    assert last.stop() == 0, last.log
