"""Priorities: real workers take tasks from the queues of a priority by weight, on every broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from azurite import Azurite
from bus import bus_site
from harness import Site, site_in, wait_until
from ledger_app import flaky, rejecting, work
from priority_app import PRIORITIES
from storage import storage_site

from aztask.errors import QueueNotFound
from aztask.limits.control import Controls, Scope
from aztask.operate.deadletters.letters import Selection
from aztask.operate.deadletters.view import DeadLetters
from aztask.queues.base import QueueOptions
from aztask.stores.records.controls import controls_of
from aztask.testing import RunningEmulator

MODULE = "priority_app"
ONE = ("-c", "1", "--pool", "threads")
LEASE = 5.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_in(tmp_path / "site", module=MODULE) as made:
        made.app().queue("default", priorities=PRIORITIES)
        yield made


def send(site: Site, priority: str, count: int, seconds: float = 0.0) -> None:
    for number in range(count):
        site.app().send(work.name, [f"{priority}{number}", seconds], priority=priority)


def started(site: Site) -> list[str]:
    """The priorities of the tasks that have started, in order."""
    return [line.key.rstrip("0123456789") for line in site.lines("start")]


def check_shares(site: Site, *arguments: str, count: int = 40) -> None:
    """Two queues have tasks, and a worker takes 4 to 1; when one is empty, the other goes on."""
    send(site, "high", count)
    send(site, "low", count)
    worker = site.worker(*ONE, "--prefetch", "0", *arguments)
    wait_until(lambda: len(site.lines("end")) == 2 * count, 60, "all have run")
    assert worker.stop() == 0, worker.log
    both = started(site)[:count]
    assert 0.65 <= both.count("high") / count <= 0.95, both
    assert "low" in both[:12], "it does not starve"
    assert set(started(site)[-count // 2 :]) == {"low"}


def test_a_worker_takes_tasks_by_the_declared_weights(site: Site) -> None:
    check_shares(site)


def test_weights_on_the_command_line_need_no_declaration(site: Site) -> None:
    site.module = "ledger_app"
    check_shares(site, "-Q", "default-high:4,default-low:1")
    assert "queues default-high:4, default-low:1" in site.workers[0].log


def test_a_worker_takes_tasks_by_weight_on_service_bus(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    with bus_site(tmp_path / "site", bus, QueueOptions(lease=LEASE)) as site:
        site.module, app = MODULE, site.app()
        app.queue("default", priorities=PRIORITIES, lease=LEASE)
        for queue in set(app.broker.listing().queues) & {"default-high", "default-low"}:
            app.broker.delete(queue)
        with pytest.raises(QueueNotFound, match="aztask queues create default-high"):
            app.send(work.name, ["a"], priority="high")
        for queue in app.priority_queues("default"):
            app.broker.declare(queue, app.queue_options(queue))
        check_shares(site, "--lease", f"{LEASE}s", count=25)


def test_a_worker_takes_tasks_by_weight_from_storage_queues(
    azurite: Azurite, tmp_path: Path
) -> None:
    with storage_site(tmp_path / "site", azurite) as site:
        site.module, app = MODULE, site.app()
        app.queue("default", priorities=PRIORITIES)
        with pytest.raises(QueueNotFound, match="aztask queues create default-high"):
            app.send(work.name, ["a"], priority="high")
        for queue in app.priority_queues("default"):
            app.broker.declare(queue, app.queue_options(queue))
        check_shares(site, count=25)


def test_a_message_of_a_high_priority_passes_those_that_were_prefetched(site: Site) -> None:
    send(site, "low", 40, 0.1)
    worker = site.worker(*ONE, "--prefetch", "40")
    wait_until(lambda: len(started(site)) >= 3, 20, "it has begun")
    site.app().send(work.name, ["high0"], priority="high").get(timeout=20)
    assert len(started(site)) < 25, "it did not wait for those in hand"
    worker.kill()


def test_retries_put_offs_and_replays_keep_the_priority(site: Site) -> None:
    app = site.app()
    store = controls_of(app.results)
    assert store is not None
    pauses = Controls(store)
    pauses.pause(Scope.TASK, [flaky.name], time.time())
    site.extra = {"LEDGER_PAUSE": "0.3"}
    worker = site.worker(*ONE)
    retried = app.send(flaky.name, ["a", 2], priority="high")
    wait_until(lambda: (app.broker.stats("default-high").scheduled or 0) == 1, 20, "it is put off")
    pauses.resume_all()
    assert retried.get(timeout=20) == 2
    assert {run.queue for run in app.results.history(retried.id)} == {"default-high"}
    app.send(rejecting.name, ["b", "no"], priority="low", task_id="b")
    wait_until(lambda: app.broker.stats("default-low").dead == 1, 20, "it is dead-lettered")
    assert worker.stop() == 0, worker.log
    assert DeadLetters(app, "default-low").replay(Selection(task=rejecting.name)).done == 1
    assert app.broker.stats("default-low").active == 1
    assert app.broker.stats("default").living == 0


def test_a_worker_that_leaves_a_priority_out_says_so(site: Site) -> None:
    worker = site.worker(*ONE, "-Q", "default,default-low", "--burst")
    assert worker.wait() == 0
    assert "does not serve default-high" in worker.log
    assert "add it to -Q" in worker.log


def test_weights_bound_the_sessions_that_are_served(tmp_path: Path) -> None:
    with site_in(tmp_path / "site", module="priority_session_app") as site:
        app = site.app()
        app.queue("orders", sessions=True, lease=5.0, priorities={"low": 1})
        for queue in app.priority_queues("orders"):
            app.broker.declare(queue, app.queue_options(queue))
        for number in range(8):
            for name in range(10):
                for priority in ("normal", "low"):
                    where = {"queue": "orders", "session": f"{priority}-{name}"}
                    app.send("sessions.step", [number, 0.05], priority=priority, **where)
        worker = site.worker("-c", "5", "--pool", "threads", "--prefetch", "0")
        wait_until(lambda: len(site.lines("end")) == 160, 60, "all have run")
        assert worker.stop() == 0, worker.log
        low = [line.key.startswith("low-") for line in site.lines("start")[:60]]
        assert 5 <= sum(low) <= 25, "about one of five"
