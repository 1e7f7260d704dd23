"""Workers and senders that die between any two steps of a workflow: it ends, and ends right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from graphs import VALUES
from graphsenders import send_in_process
from harness import Site, site_in, wait_until

from aztask.errors import TaskFailed
from aztask.stores.records.base import State
from aztask.workflows.result import WorkflowResult

LEASE = 1.5
ARGUMENTS = ("--pool", "processes", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")
FAST = {"LEDGER_GRAPH_SECONDS": "1.0"}
WORKER_STEPS = ["recorded", "bit-set", "followed", "ended", "settled"]
SHORT = "CHAOS_TASKS" not in os.environ
"""The default run takes one graph and one way of storing it; tox -e chaos takes all."""

GRAPHS = ["nested"] if SHORT else ["chord", "chain", "nested"]
JOINTS = [False] if SHORT else [False, True]
NAMED = ["two files", "one file"]
SENDER_STEPS = ["graph-parts", "graph-root", "followed", "graph-sent"]


def result_of(site: Site, workflow: str = "w") -> WorkflowResult:
    return site.app().workflows.result(workflow)


def is_settled(site: Site) -> bool:
    stats = site.app().broker.stats("default")
    return (stats.active, stats.leased, stats.scheduled) == (0, 0, 0)


def ended_right(site: Site, name: str) -> None:
    """The value is right, the body was recorded once, and nothing is left."""
    assert result_of(site).get(timeout=90) == VALUES[name]
    assert result_of(site).state == "succeeded"
    progress = result_of(site).progress
    assert (progress.done, progress.failed) == (progress.total, 0)
    for member in result_of(site).members():
        (run,) = site.app().results.history(member.id)
        assert run.state is State.SUCCEEDED
    wait_until(lambda: is_settled(site), LEASE + 30, "all messages are settled")
    wait_until(lambda: not site.app().results.workflows.open_workflows(5), 40, "it is closed")


@pytest.mark.parametrize("joint", JOINTS, ids=NAMED[: len(JOINTS)])
@pytest.mark.parametrize("step", WORKER_STEPS)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_worker_is_killed_at_each_step(step: str, name: str, joint: bool, tmp_path: Path) -> None:
    """Several times, at the first, the second and later passes of that step."""
    with site_in(tmp_path / "site", joint=joint, extra=FAST) as site:
        assert send_in_process(site, f"graph_of({name!r}).delay(workflow_id='w')") == 0
        for nth in (1, 2, 3):
            worker = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL:{nth}")
            wait_until(
                lambda one=worker: one.process.poll() is not None or result_of(site).ready(),
                90,
                "it is killed, or all is done",
            )
            if worker.process.poll() is None:
                break
            assert worker.wait(90) == -signal.SIGKILL, worker.log
        last = site.worker(*ARGUMENTS)
        ended_right(site, name)
        if joint:
            assert set(site.counts("end").values()) <= {1, 2, 3, 4}
        assert last.stop() == 0, last.log


@pytest.mark.parametrize("joint", JOINTS, ids=NAMED[: len(JOINTS)])
@pytest.mark.parametrize("step", SENDER_STEPS)
def test_a_sender_is_killed_at_each_step(step: str, joint: bool, tmp_path: Path) -> None:
    """Before the root nothing has started; after it, workers finish the start."""
    with site_in(tmp_path / "site", joint=joint, extra=FAST) as site:
        code = "graph_of('nested').delay(workflow_id='w')"
        assert send_in_process(site, code, f"{step}:KILL") == -signal.SIGKILL
        app = site.app()
        worker = site.worker(*ARGUMENTS)
        if joint or step == "graph-parts":
            assert result_of(site).state == "pending"
            if not joint:
                wait_until(
                    lambda: not app.results.workflows.open_workflows(5), 60, "its parts are swept"
                )
            assert not site.lines("start")
            assert send_in_process(site, code) == 0
        ended_right(site, "nested")
        assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
def test_a_replayed_member_resumes_the_workflow(joint: bool, tmp_path: Path) -> None:
    """Its late redelivery of generation 0 changes nothing; the handler ran once."""
    with site_in(tmp_path / "site", joint=joint, extra=FAST) as site:
        path = tmp_path / "file"
        code = (
            "from ledger_app import *\n"
            f"chord([work.s('a'), fail_unless.s('b', {str(path)!r})], gather.s('body'),"
            " on_error=gather.s('alarm')).delay(workflow_id='w')"
        )
        assert send_in_process(site, code) == 0
        worker = site.worker(*ARGUMENTS)
        with pytest.raises(TaskFailed, match=r"b has no file yet.*task w\.3"):
            result_of(site).get(timeout=90)
        assert [each.node for each in result_of(site).failures] == [3]
        wait_until(lambda: site.counts("end").get("alarm"), 40, "the handler ran")
        assert not site.lines("start", "body")
        path.touch()
        resumed = run_command(site, "workflow", "resume", "w")
        assert resumed == "resumed 1 task of w\n"
        wait_until(lambda: result_of(site).state == "succeeded", 90, "it is resumed")
        assert result_of(site).get(timeout=1) == ["a", "b"]
        assert (site.counts("end")["body"], site.counts("end")["alarm"]) == (1, 1)
        assert worker.stop() == 0, worker.log


def run_command(site: Site, *arguments: str) -> str:
    """What a command prints; it succeeds."""
    return subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "ledger_app", *arguments],
        env=site.environment,
        cwd=site.folder,
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def purge(site: Site) -> None:
    site.app().broker.purge("default")


def forget_all(site: Site) -> None:
    site.app().broker.purge("default")
    for number in range(8):
        site.app().result(f"w.{number}").forget()


@pytest.mark.parametrize("joint", JOINTS, ids=NAMED[: len(JOINTS)])
@pytest.mark.parametrize("vanish", [purge] if SHORT else [purge, forget_all])
def test_members_whose_messages_are_gone_fail(
    vanish: Callable[[Site], None], joint: bool, tmp_path: Path
) -> None:
    with site_in(tmp_path / "site", joint=joint, extra=FAST) as site:
        assert send_in_process(site, "graph_of('chord').delay(workflow_id='w')") == 0
        vanish(site)
        worker = site.worker(*ARGUMENTS)
        with pytest.raises(TaskFailed, match="member-lost"):
            result_of(site).get(timeout=90)
        assert len(result_of(site).failures) == 5
        assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("joint", JOINTS, ids=NAMED[: len(JOINTS)])
def test_a_cancelled_workflow_ends_without_its_body(joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=joint, extra=FAST) as site:
        assert send_in_process(site, "graph_of('chord').delay(workflow_id='w')") == 0
        assert result_of(site).cancel()
        worker = site.worker(*ARGUMENTS)
        wait_until(lambda: result_of(site).ready(), 90, "it ends")
        assert result_of(site).state == "cancelled"
        assert not result_of(site).cancel()
        assert not site.lines("start")
        wait_until(lambda: is_settled(site), 40, "its messages are gone")
        assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("joint", JOINTS, ids=NAMED[: len(JOINTS)])
def test_expired_members_fail_and_can_be_handed_to_the_body(joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=joint, extra=FAST) as site:
        code = (
            "from ledger_app import *\n"
            "chord([work.s('a'), work.s('b').with_options(expires=0.01)], kinds.s(),"
            " return_errors=True).delay(workflow_id='w')"
        )
        assert send_in_process(site, code) == 0
        time.sleep(0.1)
        worker = site.worker(*ARGUMENTS)
        assert result_of(site).get(timeout=90) == ["a", "TaskExpired"]
        assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("joint", JOINTS, ids=NAMED[: len(JOINTS)])
@pytest.mark.parametrize(
    "step", ["sent", "recorded"] if SHORT else ["sent", "recorded", "followed"]
)
def test_an_at_most_once_member_is_never_waited_for_without_end(
    step: str, joint: bool, tmp_path: Path
) -> None:
    """Killed while it runs it is lost, killed after its record its bit is set by housekeeping."""
    with site_in(tmp_path / "site", joint=joint, extra=FAST) as site:
        code = (
            "from ledger_app import *\n"
            "chain(once.s('a', 0.2), gather.s('body')).delay(workflow_id='w')"
        )
        assert send_in_process(site, code) == 0
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL")
        assert first.wait(90) == -signal.SIGKILL, first.log
        second = site.worker(*ARGUMENTS)
        wait_until(lambda: result_of(site).ready(), 90, "it ends")
        recorded = site.app().results.get("w.1").state is State.SUCCEEDED
        assert result_of(site).state == ("succeeded" if recorded else "failed")
        assert site.counts("end").get("body", 0) == int(recorded)
        assert second.stop() == 0, second.log
