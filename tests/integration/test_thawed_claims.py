"""A worker that freezes between receive and claim, and thaws when a newer delivery may run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bus import bus_site
from harness import Site, Worker, holds_a_write_lock, site_in, wait_until
from ledger_app import steps

from aztask.queues.base import QueueOptions
from aztask.stores.records.base import State
from aztask.testing import emulator

LEASE = 2.0
RUN_SECONDS = 5.0
ARGUMENTS = ("-c", "1", "--lease", f"{LEASE}s", "--max-lease", "60s")
STEPS = ("received", "checked")
"""Before the lease is checked at the claim, and right behind that check."""


@pytest.fixture(params=["one file", "two files", "service bus"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param != "service bus":
        with site_in(tmp_path / "site", joint=request.param == "one file") as made:
            yield made
        return
    options = QueueOptions(lease=LEASE, max_deliveries=10)
    with emulator() as bus, bus_site(tmp_path / "site", bus, options) as made:
        yield made


def frozen(site: Site, step: str) -> Worker:
    """A worker that is frozen at `step` of the delivery of the task ``t``."""
    worker = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:STOP")
    wait_until(site.app().results.workers, 120, "it is up and has written that")
    site.app().send(steps.name, ["t", RUN_SECONDS], task_id="t")
    wait_until(worker.stopped, 120, "it freezes")
    assert not holds_a_write_lock(site)
    return worker


def ran_once(site: Site, *workers: Worker) -> None:
    """The task has run once, its start was counted once, and its message is settled."""
    assert site.app().result("t").get(timeout=120) == "t"
    wait_until(lambda: site.app().broker.stats("default").living == 0, 60, "it is settled")
    assert [line.key for line in site.lines("start")] == ["t"]
    assert [line.key for line in site.lines("stopped")] == ["t"]
    (run,) = site.app().results.history("t")
    assert (run.state, run.starts) == (State.SUCCEEDED, 1)
    for worker in workers:
        assert worker.stop(60) == 0, worker.log
        assert "Traceback" not in worker.log


@pytest.mark.parametrize("step", STEPS)
def test_a_thawed_worker_does_not_take_over_from_a_newer_delivery(site: Site, step: str) -> None:
    first = frozen(site, step)
    second = site.worker(*ARGUMENTS)
    wait_until(lambda: site.lines("start", "t"), 120, "the newer delivery runs")
    first.signal(signal.SIGCONT)
    ran_once(site, first, second)
    (run,) = site.app().results.history("t")
    assert run.worker in second.log
    assert "taken over" not in second.log
    assert "is interrupted" not in second.log


def test_a_thawed_worker_claims_nothing_once_its_lease_has_ended(site: Site) -> None:
    """No other worker has the message yet: it returns, and the first delivery counts no start."""
    worker = frozen(site, "received")
    time.sleep(LEASE + 0.5)
    worker.signal(signal.SIGCONT)
    ran_once(site, worker)
