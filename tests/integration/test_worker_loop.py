"""Faults in the worker's own loop: one of the loop ends it, one of a delivery stays with it.

And what the loop does about a pool process that no longer works.
"""

from __future__ import annotations

import os
import signal

import pytest
from faulty_app import STEPS
from harness import Site, Worker, pool_processes, wait_until
from ledger_app import work
from test_probes import HTTP, asked, url_of

LONG_LEASE = ("--lease", "300s")
"""What is not given back does not come back within the test."""

NEIGHBOURS = [f"n{number}" for number in range(6)]


@pytest.fixture
def faulty(site: Site) -> Site:
    site.module = "faulty_app"
    return site


@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_an_error_of_the_loop_ends_the_worker_and_gives_everything_back(
    faulty: Site, pool: str
) -> None:
    app = faulty.app()
    trip = faulty.folder / "trip"
    running = app.send(work.name, ["running", 600.0], task_id="running")
    for key in NEIGHBOURS:
        app.send(work.name, [key], task_id=key)
    options = ("-Q", "default", "-c", "1", "--pool", pool, *LONG_LEASE)
    worker = faulty.worker(*options, FAULTY_LOOP=str(trip))
    wait_until(lambda: faulty.lines("start", "running"), 30, "a task runs")
    wait_until(lambda: app.broker.stats("default").leased != 1, 30, "others wait in the worker")
    trip.touch()
    assert worker.wait(60) == 1, worker.log
    assert "the worker ends, its loop has failed: trip" in worker.log
    assert "Traceback" in worker.log
    assert "faulty_app.Injected: trip" in worker.log
    assert app.broker.stats("default").leased == 0, "all deliveries were given back"
    wait_until(lambda: not pool_processes(faulty.folder), 10, "no task runs on")
    assert running.cancel()
    second = faulty.worker(*options, "--burst")
    assert second.wait(60) == 0, second.log
    assert [app.result(key).get(timeout=5) for key in NEIGHBOURS] == NEIGHBOURS
    assert faulty.counts("end") == dict.fromkeys(NEIGHBOURS, 1)


def test_a_start_before_an_error_of_the_loop_counts(faulty: Site) -> None:
    app = faulty.app()
    trip = faulty.folder / "trip"
    app.send("ledger.waits_once", ["a"], task_id="a")
    app.send(work.name, ["b"], task_id="b")
    options = ("-Q", "default", "-c", "1", *LONG_LEASE)
    worker = faulty.worker(*options, FAULTY_LOOP=str(trip))
    wait_until(lambda: faulty.lines("start", "a"), 30, "it runs")
    trip.touch()
    assert worker.wait(60) == 1, worker.log
    second = faulty.worker(*options, "--burst")
    assert second.wait(60) == 0, second.log
    starts = {}
    for key in "ab":
        assert app.result(key).get(timeout=5) == key
        record = app.results.get(key)
        assert record is not None
        starts[key] = record.starts
    assert starts == {"a": 2, "b": 1}


@pytest.mark.parametrize("step", STEPS)
def test_an_error_of_one_delivery_is_confined_to_it(faulty: Site, step: str) -> None:
    app = faulty.app()
    for key in [*NEIGHBOURS[:3], "bad", *NEIGHBOURS[3:]]:
        app.send(work.name, [key], task_id=key)
    worker = faulty.worker("-Q", "default", "-c", "2", "--lease", "3s", FAULTY_STEP=step)
    assert [app.result(key).get(timeout=30) for key in NEIGHBOURS] == NEIGHBOURS
    assert app.result("bad").get(timeout=30) == "bad", "its message comes back"
    assert worker.process.poll() is None
    assert worker.stop() == 0, worker.log
    assert worker.log.count("failed unexpectedly, it is left to its lease and redelivered") == 1
    assert worker.log.count("Traceback") == 1, worker.log
    assert f"faulty_app.Injected: {step}" in worker.log
    runs = faulty.counts("end")
    assert runs.pop("bad") == (2 if step == "answered" else 1)
    assert runs == dict.fromkeys(NEIGHBOURS, 1), "nothing else was redelivered"
    stats = app.broker.stats("default")
    assert stats.active == stats.leased == stats.dead == 0


def test_a_stopped_pool_process_is_shown_and_replaced_when_it_has_work(faulty: Site) -> None:
    worker = faulty.worker("-Q", "default", "-c", "1", *LONG_LEASE, *HTTP, FAULTY_SILENCE="2")
    url = url_of(worker)
    app = faulty.app()
    assert app.send(work.name, ["before"]).get(timeout=30) == "before"
    (stopped,) = pool_processes(faulty.folder)
    os.kill(stopped, signal.SIGSTOP)
    named = "part pool processes fails since 2"
    wait_until(lambda: named in asked(f"{url}/readyz")[1], 30, "it is shown")
    assert f"pool process {stopped} has not answered" in asked(f"{url}/readyz")[1]
    assert pool_processes(faulty.folder) == [stopped], "and no more: it has no work"
    assert app.send(work.name, ["after"]).get(timeout=30) == "after"
    assert f"pool process {stopped} is replaced: it was given tasks and ran none" in worker.log
    assert faulty.counts("start") == {"before": 1, "after": 1}
    assert stopped not in pool_processes(faulty.folder)
    wait_until(lambda: asked(f"{url}/readyz") == (200, "ok\n"), 30, "all works again")
    _ends(worker)


def test_a_pool_process_whose_task_holds_the_interpreter_is_shown_alone(faulty: Site) -> None:
    """Its task has not reached its time limit: it is not ended."""
    worker = faulty.worker("-Q", "default", "-c", "1", *LONG_LEASE, *HTTP, FAULTY_SILENCE="1")
    url = url_of(worker)
    sent = faulty.app().send("ledger.hold_gil", ["held", 6.0, "sleep"])
    wait_until(lambda: "pool processes" in asked(f"{url}/readyz")[1], 30, "it is shown")
    sent.get(timeout=60)
    assert "is replaced" not in worker.log
    assert len(faulty.lines("start", "held")) == 1
    wait_until(lambda: asked(f"{url}/readyz") == (200, "ok\n"), 30, "it answers again")
    _ends(worker)


def _ends(worker: Worker) -> None:
    assert worker.stop() == 0, worker.log
