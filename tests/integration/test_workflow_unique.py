"""Unique tasks in workflows, with workers and senders that die between any two steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from azurite import account_of, running, storing
from bus import bus_site
from harness import Site, site_in, wait_until
from unique_app import LARGE, VALUES

from aztask.queues.base import QueueOptions
from aztask.stores.records.base import Provisioned, State
from aztask.testing import emulator

LEASE = 1.5
ARGUMENTS = ("--pool", "threads", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")
FAST = {"LEDGER_GRAPH_SECONDS": "1.0"}
SHORT = "CHAOS_TASKS" not in os.environ
STEPS = ["unique-taken", "claimed", "recorded", "bit-set", "followed", "settled"]


def send(
    site: Site, failpoint: str = "", holders: str = "hold_keys()", graph: str = "conflicts()"
) -> int:
    """Take the keys, then start the workflow in a process of its own; returns its exit code."""
    program = "from unique_app import *\n"
    for code, step in (
        (holders, ""),
        (f"{graph}.delay(workflow_id='w')", failpoint),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program + code],
            env={**site.environment, "AZTASK_FAILPOINT": step},
            cwd=site.folder,
            timeout=60,
            check=False,
        )
    return done.returncode


def ended_right(site: Site) -> None:
    """Every conflict ended its member as the page says, and nothing ran that should not."""
    app = site.app()
    result = app.workflows.result("w")
    assert result.get(timeout=180) == VALUES
    for member in result.members():
        (run,) = app.results.history(member.id)  # type: ignore[union-attr]
        assert run.state.final
    failed = [(each.error_type, each.state) for each in result.failures]
    assert failed == []
    states = {each.id: str(each.state) for each in result.members()}
    assert sorted(states.values()).count("cancelled") == 1
    assert sorted(states.values()).count("failed") == 1
    (dead,) = app.broker.peek("default", dead_letter=True, limit=9)
    assert app.results.get(dead.envelope.headers["id"]).state is State.FAILED  # type: ignore
    wait_until(lambda: not app.results.workflows.open_workflows(5), 40, "it is closed")  # type: ignore


def prepare(site: Site) -> None:
    results = site.app().results
    assert isinstance(results, Provisioned)
    results.create()
    site.app().broker.declare("default")


@pytest.mark.parametrize("joint", [False] if SHORT else [False, True])
@pytest.mark.parametrize("step", ["unique-taken", "recorded"] if SHORT else STEPS)
def test_a_worker_is_killed_at_each_step(step: str, joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=joint, module="unique_app", extra=FAST) as site:
        assert send(site) == 0
        for nth in (1, 2, 3):
            worker = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL:{nth}")
            wait_until(
                lambda one=worker: (
                    one.process.poll() is not None or site.app().workflows.result("w").ready()
                ),
                90,
                "it is killed, or all is done",
            )
            if worker.process.poll() is None:
                break
            assert worker.wait(90) == -signal.SIGKILL, worker.log
        last = site.worker(*ARGUMENTS)
        ended_right(site)
        assert set(site.counts("end").values()) <= {1, 2, 3, 4}
        assert last.stop() == 0, last.log


def test_a_worker_is_killed_after_it_has_copied_a_large_result(tmp_path: Path) -> None:
    """The copy that no record names does no harm; the member gets a copy of its own."""
    extra = {**FAST, "LEDGER_OPTIONS": '{"payload_threshold": 1000}'}
    with site_in(tmp_path / "site", joint=False, module="unique_app", extra=extra) as site:
        holder = "large.with_options(delay=1.0, task_id='holder').delay('k')"
        assert send(site, holders=holder, graph="adopting()") == 0
        worker = site.worker(*ARGUMENTS, AZTASK_FAILPOINT="copied:KILL")
        assert worker.wait(90) == -signal.SIGKILL, worker.log
        app = site.app()
        stored = app.payloads.store.list  # type: ignore[union-attr]
        assert len(list(stored())) == 2, "the holder's result, and the copy of the dead worker"
        last = site.worker(*ARGUMENTS)
        result = app.workflows.result("w")
        assert result.get(timeout=90) == ["k" * LARGE]
        assert site.counts("end") == {"k": 1}, "the member adopted; it did not run"
        assert len(list(stored())) == 3
        app.result("holder").forget()
        assert result.get(timeout=0) == ["k" * LARGE]
        assert last.stop() == 0, last.log


@pytest.mark.parametrize("step", ["graph-root"] if SHORT else ["graph-root", "followed"])
def test_housekeeping_sends_what_a_dead_sender_left(step: str, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=False, module="unique_app", extra=FAST) as site:
        assert send(site, f"{step}:KILL") == -signal.SIGKILL
        worker = site.worker(*ARGUMENTS)
        ended_right(site)
        assert worker.stop() == 0, worker.log


def test_conflicts_on_storage_queues_and_tables(tmp_path: Path) -> None:
    with storing(tmp_path) as stores, running(tmp_path / "queue") as queues:
        text = account_of(queues, *stores)
        with site_in(
            tmp_path / "site", broker=text, results=text, module="unique_app", extra=dict(FAST)
        ) as site:
            prepare(site)
            assert send(site) == 0
            worker = site.worker(*ARGUMENTS)
            ended_right(site)
            assert worker.stop() == 0, worker.log


def test_conflicts_on_service_bus(tmp_path: Path) -> None:
    with emulator() as bus, bus_site(tmp_path / "site", bus, QueueOptions(lease=5.0)) as site:
        site.module = "unique_app"
        site.extra.update(FAST)
        assert send(site) == 0
        worker = site.worker(*ARGUMENTS[:4], "--lease", "5s")
        ended_right(site)
        assert worker.stop() == 0, worker.log
