"""A pool process that its task broke is replaced, the task fails once, and a burst ends."""

from __future__ import annotations

import pytest
from harness import Site

from aztask import TaskFailed

POOLS = ("processes", "threads", "asyncio")


def burst(site: Site, pool: str, task: str) -> str:
    site.module = "broken_pool_app"
    app = site.app()
    app.send(f"broken.{task}", task_id="bad")
    for number in range(4):
        app.send("broken.plain", [number], task_id=f"plain-{number}")
    worker = site.worker("-Q", "default", "-c", "2", "--pool", pool, "--burst")
    assert worker.wait(60) == 0, worker.log
    return worker.log


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("task", ["closes", "closes_on_the_loop"])
def test_a_task_that_closes_all_descriptors_fails_once(site: Site, pool: str, task: str) -> None:
    log = burst(site, pool, task)
    with pytest.raises(TaskFailed, match="WorkerCrashed"):
        site.app().result("bad").get(timeout=5)
    assert len(log.splitlines()) < 200, "and it is not logged without end"


@pytest.mark.parametrize("pool", POOLS)
def test_a_trace_function_that_a_task_leaves_stops_no_slot(site: Site, pool: str) -> None:
    burst(site, pool, "traced")
    assert site.app().result("bad").get(timeout=5) == 1
    assert [site.app().result(f"plain-{n}").get(timeout=5) for n in range(4)] == [0, 1, 2, 3]
