"""The portable shell: a worker without forks, and nothing of it that outlives a kill."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from harness import ROOT, Site, Worker, wait_until
from ledger_app import work

from aztask.support import failpoint

HOLDING = """
import ctypes, time
from ledger_app import app, note
@app.task
def hold(key):
    note("start", key)
    ctypes.PyDLL(None).sleep(60)  # the interpreter is held: no other thread runs a line
@app.task
async def swapped(left, right):
    return [right, left]
@app.task
def long(size):
    return "x" * size
@app.task
def spin(key):
    note("start", key)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass
"""
OF_BOTH = ("pool-link", "pool-set-up", "pool-imported", "pool-ready")
OF_SERVER = ("pool-server", "pool-asked")
STEPS = [("0", each) for each in (*OF_SERVER, *OF_BOTH)] + [
    ("1", each) for each in failpoint.STEPS if each.startswith("pool-") and each not in OF_SERVER
]
SHELLS = {"0": "forked", "1": "portable"}
"""{the value of AZTASK_PORTABLE: the shell}"""


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where workers make their private folders."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture
def portable(site: Site, temporary: Path) -> Site:
    """A site whose workers have the portable shell."""
    (site.folder / "holding_app.py").write_text(HOLDING)
    site.module = "holding_app"
    site.extra |= {"AZTASK_PORTABLE": "1", "TMPDIR": str(temporary)}
    return site


def processes_of(site: Site) -> dict[int, str]:
    """{process: command} of all that has this site's environment: workers, pools and watchers."""
    mark = f"LEDGER={site.folder}/ledger".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(entry.name)] = command
        except OSError:
            continue
    return found


def named(site: Site, part: str) -> list[int]:
    return [pid for pid, command in processes_of(site).items() if part in command]


def watcher_of(site: Site) -> int:
    (pid,) = named(site, "watcher.py")
    return pid


def nothing_is_left(site: Site, temporary: Path) -> None:
    wait_until(lambda: not processes_of(site), 10, "all of it ends with the worker")
    wait_until(lambda: not list(temporary.iterdir()), 10, "its folder is removed")


def holds(site: Site, worker: Worker, key: str = "held") -> None:
    """Have a task of the worker hold its interpreter."""
    site.app().send("ledger.hold", [key], task_id=key)
    wait_until(lambda: site.lines("start", key), 20, f"it runs: {worker.log}")


@pytest.mark.parametrize("pool", ["processes", "threads", "asyncio"])
def test_tasks_run_in_new_interpreters_and_the_worker_ends_well(
    portable: Site, temporary: Path, pool: str
) -> None:
    app = portable.app()
    large = "large" * 20_000  # more than a packet holds
    for key in ("a", "b", "c", large):
        app.send(work.name, [key], task_id=key[:9])
    app.send("ledger.swapped", [1, 2], task_id="swapped")
    app.send("ledger.long", [300_000], task_id="long")
    worker = portable.worker("-c", "2", "--pool", pool)
    assert [app.result(key[:9]).get(timeout=30) for key in ("a", "b", "c")] == ["a", "b", "c"]
    assert app.result("swapped").get(timeout=30) == [2, 1]
    assert app.result("long").get(timeout=30) == "x" * 300_000
    assert app.result(large[:9]).get(timeout=30) == large
    wait_until(lambda: named(portable, "portablelink"), 5, "they are new interpreters")
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(folder.rglob("value-*")), "files of large values go when they are read"
    assert worker.stop() == 0, worker.log
    nothing_is_left(portable, temporary)


@pytest.mark.parametrize(("shell", "step"), STEPS)
def test_a_worker_that_is_killed_at_a_step_of_its_start_leaves_nothing(
    portable: Site, temporary: Path, shell: str, step: str
) -> None:
    portable.extra["AZTASK_PORTABLE"] = shell
    worker = portable.worker("-c", "2", AZTASK_FAILPOINT=f"{step}:KILL")
    assert worker.wait() == -signal.SIGKILL, worker.log
    nothing_is_left(portable, temporary)


def test_the_architecture_page_numbers_these_steps() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    numbered = re.findall(r"^\d+\. .*\(`(pool-[a-z-]+)`\)\.$", page, re.MULTILINE)
    assert sorted(numbered) == sorted(step for _, step in STEPS)


@pytest.mark.parametrize("shell", SHELLS, ids=SHELLS.get)
@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_a_pool_whose_task_holds_the_interpreter_ends_with_its_worker(
    portable: Site, temporary: Path, pool: str, shell: str
) -> None:
    portable.extra["AZTASK_PORTABLE"] = shell
    worker = portable.worker("-c", "2", "--pool", pool)
    holds(portable, worker)
    worker.kill()
    nothing_is_left(portable, temporary)


def test_a_watching_process_that_is_killed_is_replaced_and_knows_all(
    portable: Site, temporary: Path
) -> None:
    worker = portable.worker("-c", "1")
    holds(portable, worker)
    first = watcher_of(portable)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "another one does now" in worker.log, 10, "it is missed and replaced")
    assert watcher_of(portable) != first
    worker.kill()
    nothing_is_left(portable, temporary)


def test_a_signal_to_every_process_is_the_workers(portable: Site, temporary: Path) -> None:
    """A service manager sends SIGTERM to all: the task that runs still ends."""
    worker = portable.worker("-c", "1")
    app = portable.app()
    app.send(work.name, ["a", 1.0], task_id="a")
    wait_until(lambda: portable.lines("start", "a"), 20, "it runs")
    for pid in processes_of(portable):
        os.kill(pid, signal.SIGTERM)
    assert worker.wait() == 0, worker.log
    assert app.result("a").get(timeout=1) == "a"
    nothing_is_left(portable, temporary)


def test_a_killed_pool_process_is_replaced_and_what_it_had_not_begun_runs_once(
    portable: Site, temporary: Path
) -> None:
    app = portable.app()
    worker = portable.worker("-c", "1")
    quick = [f"quick-{number}" for number in range(200)]
    for key in quick[:100]:
        app.send(work.name, [key], task_id=key)
    for key in quick[:100]:  # from now on the worker sends ahead
        assert app.result(key).get(timeout=30) == key
    holds(portable, worker)
    for key in quick[100:]:
        app.send(work.name, [key], task_id=key)
    (process,) = named(portable, "portablelink")
    os.kill(process, signal.SIGKILL)
    for key in quick[100:]:
        assert app.result(key).get(timeout=30) == key
    assert set(portable.counts("end").values()) == {1}
    worker.kill()  # the first task is tried again, and holds its process again
    nothing_is_left(portable, temporary)


@pytest.mark.parametrize("task", ["hold", "spin"])
def test_a_task_past_its_time_limit_is_stopped_or_killed(
    portable: Site, temporary: Path, task: str
) -> None:
    source = (portable.folder / "holding_app.py").read_text()
    source = source.replace("@app.task\n", "@app.task(time_limit=1)\n")
    (portable.folder / "holding_app.py").write_text(source)
    worker = portable.worker("-c", "1")
    app = portable.app()
    app.send(f"ledger.{task}", ["a"], task_id="a")
    app.send(work.name, ["b"], task_id="b")
    assert app.result("b").get(timeout=40) == "b", worker.log
    wait_until(lambda: "TimeLimitExceeded" in worker.log, 20, worker.log)
    assert worker.stop() == 0
    nothing_is_left(portable, temporary)
