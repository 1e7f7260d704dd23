"""`async def` tasks in real workers: one event loop for each process, in every pool."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Site, site_in, wait_until

from aztask.errors import TaskCancelled, TaskFailed
from aztask.stores.events.sink import read_events

POOLS = ["processes", "threads", "asyncio"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site whose workers run the tasks of `async_app`."""
    with site_in(tmp_path / "site", module="async_app:app") as made:
        yield made


def send(site: Site, task: str, key: str, *arguments: object, **options: object) -> None:
    site.app().send(f"ledger.{task}", [key, *arguments], task_id=key, **options)


def start(site: Site, pool: str, *more: str, slots: int = 4):
    return site.worker("-Q", "default", "--pool", pool, "-c", str(slots), *more)


@pytest.fixture
def server() -> Iterator[str]:
    """An HTTP server that keeps connections alive and answers after a moment."""
    loop = asyncio.new_event_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            await asyncio.sleep(0.05)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    listening = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"

    async def close() -> None:
        listening.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.mark.parametrize("pool", POOLS)
def test_one_client_is_shared_by_all_tasks_of_a_process(site: Site, pool: str, server: str) -> None:
    app = site.app()
    keys = [f"k{number}" for number in range(40)]
    processes = 2 if pool == "processes" else 1
    worker = start(site, pool, slots=2 if pool == "processes" else 20)
    wait_until(
        lambda: site.counts("lifespan-opens")["plain"] == processes, 30, "all processes serve"
    )
    for key in keys:
        send(site, "fetch", key, server)
    values = [app.result(key).get(timeout=30).split() for key in keys]
    assert [value[:2] for value in values] == [[key, "ok"] for key in keys]
    assert len({value[2] for value in values}) <= processes
    assert worker.stop() == 0, worker.log
    opened, closed = site.counts("lifespan-opens"), site.counts("lifespan-closes")
    assert opened == closed
    assert opened["async"] == opened["plain"] == processes


@pytest.mark.parametrize("pool", POOLS)
def test_context_variables_of_lifespans_are_seen_by_every_task(site: Site, pool: str) -> None:
    """In every thread, and whatever the tasks before have set."""
    app = site.app()
    keys = [f"k{number}" for number in range(12)]
    for number, key in enumerate(keys):
        send(site, "seen_later" if number % 2 else "seen", key)
    worker = start(site, pool, slots=2 if pool == "processes" else 4)
    values = [app.result(key).get(timeout=30) for key in keys]
    assert values == [["async", "plain"]] * len(keys)
    assert worker.stop() == 0, worker.log


def test_a_thousand_tasks_sleep_in_one_process_under_renewed_leases(site: Site) -> None:
    """`benchmarks/coroutines.py` measures how soon they start and what they cost."""
    app = site.app()
    keys = [f"k{number}" for number in range(1000)]
    for key in keys:
        send(site, "nap", key, 4.0)
    worker = start(site, "asyncio", "--lease", "2s", slots=1000)
    wait_until(lambda: len(site.lines("start")) == 1000, 30, "all have started")
    assert not site.lines("end"), "all of them sleep at the same time"
    assert [app.result(key).get(timeout=60) for key in keys] == keys
    assert len({line.pid for line in site.lines("start")}) == 1
    assert set(site.counts("start").values()) == {1}
    assert worker.stop() == 0, worker.log
    kinds = [event.event for event in read_events(site.events)]
    assert "lease_lost" not in kinds
    assert kinds.count("renewed") >= 2000


def test_a_blocked_loop_loses_no_lease_and_is_named_in_the_log(site: Site) -> None:
    """Thirteen leases long: the worker renews, and the loop has no part in it."""
    app = site.app()
    send(site, "nap", "beside", 0.3)
    send(site, "block", "blocks", 4.0)
    first = start(site, "asyncio", "--lease", "300ms")
    wait_until(lambda: site.lines("start", "blocks"), 20, "it blocks")
    second = start(site, "asyncio", "--lease", "300ms")
    assert app.result("blocks").get(timeout=30) == "blocks"
    assert app.result("beside").get(timeout=30) == "beside"
    assert site.counts("start") == {"beside": 1, "blocks": 1}
    assert first.stop() == second.stop() == 0
    assert "lost" not in first.log + second.log
    assert "task ledger.block blocks blocks the event loop, for 1." in first.log
    assert "async_app.py:" in first.log
    assert "in block;" in first.log


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("how", ["await", "block"])
def test_the_soft_limit_reaches_a_coroutine(site: Site, pool: str, how: str) -> None:
    app = site.app()
    send(site, "soft_later", "soft", how)
    start(site, pool)
    with pytest.raises(TaskFailed) as failure:
        app.result("soft").get(timeout=20)
    assert failure.value.error_type == "TimeLimitExceeded"
    assert "in soft_later" in failure.value.traceback
    assert site.counts("cleanup") == {"soft": 1}


@pytest.mark.parametrize("pool", ["threads", "asyncio"])
def test_a_cancelled_run_leaves_its_task_group(site: Site, pool: str) -> None:
    app = site.app()
    send(site, "group", "one")
    send(site, "nap", "other", 3.0)
    worker = start(site, pool)
    wait_until(lambda: len(site.lines("start")) == 2, 20, "both run")
    assert app.result("one").cancel(running=True)
    with pytest.raises(TaskCancelled):
        app.result("one").get(timeout=20)
    assert site.counts("CancelledError") == {"one": 1}
    assert app.result("other").get(timeout=20) == "other"
    assert site.counts("start") == {"one": 1, "other": 1}
    assert worker.stop() == 0, worker.log


def test_the_hard_limit_gives_the_other_coroutines_back(site: Site) -> None:
    app = site.app()
    send(site, "ignores", "stuck")
    send(site, "nap", "beside", 1.5)
    start(site, "asyncio")
    with pytest.raises(TaskFailed) as failure:
        app.result("stuck").get(timeout=20)
    assert failure.value.error_type == "TimeLimitExceeded"
    assert app.result("beside").get(timeout=20) == "beside"
    assert [record.key.hop for record in app.results.history("beside")] == [0]


@pytest.mark.parametrize("pool", POOLS)
def test_a_coroutine_checkpoints_and_extends_without_blocking_the_loop(
    site: Site, pool: str
) -> None:
    send(site, "saves_later", "saves")
    start(site, pool, "--lease", "5s")
    assert site.app().result("saves").get(timeout=20) == [{"page": 7}, True]


def test_plain_functions_run_in_threads_of_the_asyncio_pool(site: Site) -> None:
    app = site.app()
    for number in range(3):
        send(site, "work", f"plain{number}", 1.0)
    send(site, "nap", "nap", 0.5)
    send(site, "endless", "endless")
    worker = start(site, "asyncio", slots=8)
    assert app.result("nap").get(timeout=20) == "nap"
    assert [app.result(f"plain{n}").get(timeout=20) for n in range(3)] == [
        f"plain{n}" for n in range(3)
    ]
    with pytest.raises(TaskFailed):
        app.result("endless").get(timeout=30)
    assert worker.stop() == 0, worker.log


def test_a_lifespan_that_cannot_open_is_named_and_tried_again(site: Site) -> None:
    folder = site.folder
    (folder / "broken.py").write_text(
        "import pathlib\n"
        "from aztask import App\n"
        "app = App('ledger', broker='local://', results='local://')\n"
        "@app.lifespan\n"
        "async def opens():\n"
        f"    if not pathlib.Path({str(folder / 'there')!r}).exists():\n"
        "        raise OSError('no database')\n"
        "    yield\n"
        "@app.task\n"
        "async def add(a, b): return a + b\n"
    )
    site.module = "broken:app"
    site.extra |= {"AZTASK_BROKER": site.broker, "PYTHONPATH": os.fspath(folder)}
    site.extra["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    worker = site.worker("--pool", "asyncio")
    text = "a pool process cannot open a lifespan of the app: OSError: no database"
    wait_until(lambda: text in worker.log, 20, "the log names it")
    (folder / "there").touch()
    wait_until((folder / ".aztask").exists, 20, "its queue exists")
    assert worker.stop() == 0, worker.log
