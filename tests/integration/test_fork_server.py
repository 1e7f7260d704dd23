"""The process that forks a worker's pool: what it shares, what it does not, and what if it dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import Site, living_pool_processes, pool_processes, wait_until
from ledger_app import work

IMPORTED = """
import os
from ledger_app import app
with open("imported", "a") as file:
    print(os.getpid(), file=file)
"""
PROGRAMS = """
import multiprocessing, os, signal, subprocess, time
from ledger_app import app
@app.task
def program(name):
    program = subprocess.Popen(["sleep", "60"])
    program.send_signal(getattr(signal, name))
    return program.wait()
@app.task
def process(name):
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    time.sleep(0.2)
    os.kill(process.pid, getattr(signal, name))
    process.join()
    return process.exitcode
"""
AGENT = """
import sys, threading, time
if "aztask.worker.pool.forkserver" in sys.orig_argv:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


def run_all(site: Site, *keys: str) -> None:
    """Have the tasks of these keys run, and wait for each of them."""
    for key in keys:
        site.app().send(work.name, [key], task_id=key)
    for key in keys:
        assert site.app().result(key).get(timeout=30) == key


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_pool_processes_are_forked_and_each_imports_the_app_itself(site: Site) -> None:
    (site.folder / "imports_app.py").write_text(IMPORTED)
    site.module = "imports_app"
    worker = site.worker("-c", "3")
    wait_until(lambda: len(pool_processes(site.folder)) == 3, 20, "the pool is there")
    (server,) = pool_processes(site.folder, "aztask-fork")
    assert parent_of(server) == worker.process.pid
    assert {parent_of(pid) for pid in pool_processes(site.folder)} == {server}
    run_all(site, "a", "b", "c")
    imported = (site.folder / "imported").read_text().split()
    expected = {worker.process.pid, *pool_processes(site.folder)}
    assert sorted(map(int, imported)) == sorted(expected)
    assert worker.stop() == 0


@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_a_killed_server_takes_its_pool_with_it_and_nothing_is_lost(site: Site, pool: str) -> None:
    worker = site.worker("-c", "2", "--pool", pool)
    for key in ("a", "b"):
        site.app().send(work.name, [key, 1.0], task_id=key)
    wait_until(lambda: len(site.lines("start")) == 2, 20, "both run")
    before = pool_processes(site.folder)
    (server,) = pool_processes(site.folder, "aztask-fork")
    os.kill(server, signal.SIGKILL)
    for key in ("a", "b"):
        assert site.app().result(key).get(timeout=30) == key
    living = pool_processes(site.folder)
    assert living
    assert not set(living) & set(before)
    assert "ended together with the pool's fork server" in worker.log
    assert worker.stop() == 0


def test_beside_the_threads_of_others_a_pool_process_is_a_new_interpreter(site: Site) -> None:
    """An agent that the interpreter loads by itself may have threads: no fork has their locks."""
    (site.folder / "sitecustomize.py").write_text(AGENT)
    path = os.pathsep.join([str(site.folder), site.environment["PYTHONPATH"]])
    worker = site.worker("-c", "2", PYTHONPATH=path)
    run_all(site, "a", "b", "c")
    (server,) = pool_processes(site.folder, "aztask-fork")
    for pid in pool_processes(site.folder):
        assert b"aztask.worker.pool.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert parent_of(pid) == server
    assert worker.stop() == 0


def test_the_server_has_no_thread_of_its_own(site: Site) -> None:
    worker = site.worker("-c", "1")
    run_all(site, "a")
    (server,) = pool_processes(site.folder, "aztask-fork")
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    assert worker.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_a_signal_to_all_processes_is_the_workers(site: Site, pool: str, number: int) -> None:
    """systemd sends SIGTERM to every process of a service, a terminal SIGINT."""
    worker = site.worker("-c", "2", "--pool", pool)
    site.app().send(work.name, ["a", 1.5], task_id="a")
    wait_until(lambda: len(site.lines("start")) == 1, 20, "it runs")
    for pid in living_pool_processes(site.folder):
        os.kill(pid, number)
    worker.signal(number)
    assert worker.wait() == 0
    assert site.app().result("a").get(timeout=1) == "a"
    assert site.counts("start") == {"a": 1}


@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_what_a_task_starts_can_be_ended(site: Site, pool: str) -> None:
    (site.folder / "programs_app.py").write_text(PROGRAMS)
    site.module = "programs_app"
    worker = site.worker("-c", "1", "--pool", pool)
    expected = {
        ("program", "SIGTERM"): -signal.SIGTERM,
        ("program", "SIGINT"): -signal.SIGINT,
        ("process", "SIGTERM"): -signal.SIGTERM,
        ("process", "SIGINT"): 1,  # KeyboardInterrupt
    }
    for (kind, name), code in expected.items():
        site.app().send(f"ledger.{kind}", [name], task_id=f"{kind}-{name}")
        assert site.app().result(f"{kind}-{name}").get(timeout=30) == code
    assert worker.stop() == 0


def test_a_killed_worker_leaves_no_process(site: Site) -> None:
    worker = site.worker("-c", "2")
    run_all(site, "a")
    site.app().send(work.name, ["b", 60.0], task_id="b")
    wait_until(lambda: len(site.lines("start", "b")) == 1, 20, "it runs")
    worker.kill()
    wait_until(lambda: not living_pool_processes(site.folder), 5, "all of it ends with the worker")
