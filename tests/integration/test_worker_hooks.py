"""Hooks in real workers: around workers, pool processes and runs, and listening to events."""

from __future__ import annotations

import pytest
from harness import Site, wait_until
from ledger_app import flaky, set_variable

from aztask.errors import TaskFailed


@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_hooks_run_around_what_they_name(site: Site, pool: str) -> None:
    site.extra["LEDGER_HOOKS"] = "1"
    app = site.app()
    tenants = iter(["acme", "banned", "umbrella", "acme"])

    @app.around_send
    def tenant(sending):
        sending.headers["tenant"] = next(tenants)
        yield

    app.send("ledger.tenant", ["a"], task_id="a")
    app.send("ledger.tenant", ["b"], task_id="b")
    app.send("ledger.tenant_later", ["c"], task_id="c")
    app.send(flaky.name, ["d", 1], task_id="d")
    worker = site.worker("-Q", "default", "-c", "2", "--pool", pool)
    assert app.result("a").get(timeout=20) == "acme"
    assert app.result("c").get(timeout=20) == "umbrella", "also where the task is asynchronous"
    assert app.result("d").get(timeout=20) == 1, "a retry carries the headers"
    with pytest.raises(TaskFailed, match="may not run anything"):
        app.result("b").get(timeout=20)
    wait_until(lambda: site.counts("heard-failed") == {"b": 1}, 5, "the last event was heard")
    size = 2 if pool == "processes" else 1
    wait_until(lambda: len(site.lines("process-begins")) == size, 20, "the whole pool has started")
    assert worker.stop() == 0, worker.log
    assert site.counts("run-begins") == {"a": 1, "c": 1, "d": 2}
    assert site.counts("run-ends") == {"a": 1, "c": 1, "d": 2}
    assert site.counts("run-failed") == {"d": 1}
    assert site.counts("heard-succeeded") == {"a": 1, "c": 1, "d": 1}
    assert site.counts("heard-resubmitted") == {"b": 3, "d": 1}
    begins, ends = site.lines("worker-begins"), site.lines("worker-ends")
    assert [line.pid for line in begins] == [line.pid for line in ends] == [worker.process.pid]
    processes = {line.pid for line in site.lines("process-begins")}
    assert len(processes) == size
    assert {line.pid for line in site.lines("process-ends")} == processes
    assert begins[0].at <= min(line.at for line in site.lines("process-begins"))


@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_context_variables_of_a_run_are_gone_with_it(site: Site, pool: str) -> None:
    app = site.app()
    for task_id in ("a", "b", "c"):
        app.send(set_variable.name, [task_id], task_id=task_id)
    worker = site.worker("-Q", "default", "-c", "1", "--pool", pool, "--burst")
    assert worker.process.wait(30) == 0, worker.log
    assert [app.result(task_id).get(timeout=1) for task_id in ("a", "b", "c")] == ["", "", ""]
