"""Coroutines that send and wait: on every broker, with a real worker, and few threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from azurite import Azurite
from bus import bus_site
from harness import Site, site_in
from ledger_app import flaky, work
from storage import storage_site

from aztask import as_completed
from aztask.errors import TaskFailed
from aztask.queues.base import QueueOptions
from aztask.testing import RunningEmulator

CALLS = 150


@pytest.fixture(params=["local", "Storage queue", "Service Bus"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A site on each broker, one after the other."""
    azurite: Callable[[], Azurite] = lambda: request.getfixturevalue("azurite")  # noqa: E731
    bus: Callable[[], RunningEmulator] = lambda: request.getfixturevalue("bus")  # noqa: E731
    if request.param == "local":
        made = site_in(tmp_path / "site")
    elif request.param == "Storage queue":
        made = storage_site(tmp_path / "site", azurite())
    else:
        made = bus_site(tmp_path / "site", bus(), QueueOptions(lease=30.0))
    with made as opened:
        yield opened


def test_many_send_and_wait_without_a_thread_each(site: Site) -> None:
    app = site.app()
    before = threading.active_count()

    async def main() -> tuple[list[str], int, list[str]]:
        sends = (app.asend(work.name, [f"k{n}"], task_id=f"k{n}") for n in range(CALLS))
        results = await asyncio.gather(*sends)
        failing = await app.asend(flaky.name, ["hopeless", 99], task_id="hopeless")
        waiting = [asyncio.create_task(result.aget(timeout=60)) for result in results]
        await asyncio.sleep(0)
        threads = threading.active_count()
        values = await asyncio.gather(*waiting)
        with pytest.raises(TaskFailed, match="of hopeless"):
            await failing.aget(timeout=60)
        ended = [result.id async for result in as_completed([*results, failing], timeout=60)]
        return values, threads, ended

    site.worker("-Q", "default", "--pool", "threads", "-c", "8", "--lease", "30s")
    values, threads, ended = asyncio.run(main())
    assert values == [f"k{n}" for n in range(CALLS)]
    assert sorted(ended) == sorted([*(f"k{n}" for n in range(CALLS)), "hopeless"])
    assert threads - before <= 20, "threads of sends, results and the broker's own"
