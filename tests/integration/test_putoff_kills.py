"""Workers that die between the clone of a put-off and the completion of its original."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from bus import bus_site
from harness import Site, wait_until
from ledger_app import work
from test_pausing import SOON, controls
from test_servicebus_worker import ARGUMENTS, DETECTING, LEASE, PLAIN, left

from aztask.limits.control import Scope
from aztask.queues.base import QueueOptions
from aztask.stores.records.base import State
from aztask.testing import RunningEmulator


@pytest.mark.parametrize("options", [DETECTING, PLAIN], ids=["detection", "no detection"])
def test_killed_between_the_clone_and_the_completion(
    options: QueueOptions, bus: RunningEmulator, tmp_path: Path
) -> None:
    """Both copies are in the queue, and both come while it is paused: the task runs once."""
    with bus_site(tmp_path / "site", bus, options) as site:
        site.extra.update(SOON)
        app, paused = site.app(), controls(site)
        paused.pause(Scope.TASK, [work.name], time.time())
        app.send(work.name, ["a"], task_id="a")
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT="cloned:KILL")
        assert first.wait() == -signal.SIGKILL, first.log
        second = site.worker(*ARGUMENTS)
        time.sleep(LEASE + 1.0)
        paused.resume_all()
        _ran_once(site)
        assert second.stop() == 0, second.log


def test_killed_with_a_start_row_of_an_earlier_delivery(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    """It was started once before: the copy that comes first gets the row, the other one nothing."""
    with bus_site(tmp_path / "site", bus, PLAIN) as site:
        site.extra.update(SOON)
        app, paused = site.app(), controls(site)
        app.send(work.name, ["a"], task_id="a")
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT="claimed:KILL")
        assert first.wait() == -signal.SIGKILL, first.log
        paused.pause(Scope.TASK, [work.name], time.time())
        second = site.worker(*ARGUMENTS, AZTASK_FAILPOINT="cloned:KILL")
        assert second.wait() == -signal.SIGKILL, second.log
        third = site.worker(*ARGUMENTS)
        time.sleep(LEASE + 1.0)
        paused.resume_all()
        _ran_once(site)
        assert third.stop() == 0, third.log


def _ran_once(site: Site) -> None:
    app = site.app()
    assert app.result("a").get(timeout=20) == "a"
    wait_until(lambda: left(site) == 0, LEASE + 10, "all is settled")
    assert site.counts("start")["a"] == 1
    (run,) = app.results.history("a")
    assert (run.state, run.key.hop) == (State.SUCCEEDED, 0)
    assert app.broker.stats("default").dead == 0
