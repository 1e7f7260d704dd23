"""The process that forks a worker's pool: what it shares, what it does not, and what if it dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import Site, Worker, living_pool_processes, pool_processes, wait_until
from ledger_app import work

IMPORTED = """
import os
from ledger_app import app
with open("imported", "a") as file:
    print(os.getpid(), file=file)
"""
BUSY = """
import threading, time
from ledger_app import app
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
opened = open("opened", "w")
"""
KILLING = """
import os, signal
from ledger_app import app
for child in open(f"/proc/self/task/{os.getpid()}/children").read().split():
    os.kill(int(child), signal.SIGKILL)
    open("killed", "x")
"""
PROGRAMS = """
import multiprocessing, os, signal, subprocess, time
from ledger_app import app
@app.task
def program(name):
    program = subprocess.Popen(["sleep", "60"])
    program.send_signal(getattr(signal, name))
    return program.wait()
def sleeps(ready):
    ready.send("ready")
    for _ in range(1200):
        time.sleep(0.05)  # a signal between Python's last look and a sleep is noticed after it
@app.task
def process(name):
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=sleeps, args=(sending,))
    process.start()
    receiving.recv()  # a signal that comes earlier is one of the pool's process, which ignores it
    os.kill(process.pid, getattr(signal, name))
    process.join()
    return process.exitcode
"""
AGENT = """
import sys, threading, time
if {"worker", "aztask.worker.pool.forkserver"} & set(sys.orig_argv):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""

OF_SERVER = pytest.mark.fork_server("there is no server: each process is a new interpreter")


def run_all(site: Site, *keys: str) -> None:
    """Have the tasks of these keys run, and wait for each of them."""
    for key in keys:
        site.app().send(work.name, [key], task_id=key)
    for key in keys:
        assert site.app().result(key).get(timeout=30) == key


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def fork_server(worker: Worker) -> int:
    """The worker's child of that name: what it has just forked bears its name for a moment."""
    named = pool_processes(worker.site.folder, "aztask-fork")
    (server,) = (pid for pid in named if parent_of(pid) == worker.process.pid)
    return server


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def opened_by(pid: int) -> dict[int, str]:
    """{descriptor: its file}."""
    found = {int(each.name): str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return {number: path for number, path in found.items() if path.startswith("/")}


@OF_SERVER
def test_pool_processes_are_forked_and_each_imports_the_app_itself(site: Site) -> None:
    (site.folder / "imports_app.py").write_text(IMPORTED)
    site.module = "imports_app"
    worker = site.worker("-c", "3")
    wait_until(lambda: len(pool_processes(site.folder)) == 3, 20, "the pool is there")
    server = fork_server(worker)
    assert command_of(server) == command_of(worker.process.pid)  # a copy of it
    assert {parent_of(pid) for pid in pool_processes(site.folder)} == {server}
    run_all(site, "a", "b", "c")
    expected = {worker.process.pid, *pool_processes(site.folder)}
    imported = (site.folder / "imported").read_text
    wait_until(lambda: len(imported().split()) == len(expected), 20, "each has imported it")
    assert sorted(map(int, imported().split())) == sorted(expected)
    assert worker.stop() == 0


@OF_SERVER
@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_a_killed_server_takes_its_pool_with_it_and_nothing_is_lost(site: Site, pool: str) -> None:
    worker = site.worker("-c", "2", "--pool", pool)
    for key in ("a", "b"):
        site.app().send(work.name, [key, 1.0], task_id=key)
    wait_until(lambda: len(site.lines("start")) == 2, 20, "both run")
    before = pool_processes(site.folder)
    server = fork_server(worker)
    os.kill(server, signal.SIGKILL)
    for key in ("a", "b"):
        assert site.app().result(key).get(timeout=30) == key
    living = pool_processes(site.folder)
    assert living
    assert not set(living) & set(before)
    assert "ended together with the pool's fork server" in worker.log
    server = fork_server(worker)
    assert b"aztask.worker.pool.forkserver" in command_of(server)  # a copy would have locks in it
    assert worker.stop() == 0


@OF_SERVER
def test_a_stopped_server_is_resumed_when_it_is_needed(site: Site) -> None:
    """It cannot report that a pool process died, nor start another one: the worker would hang."""
    worker = site.worker("-c", "1")
    run_all(site, "a")
    server = fork_server(worker)
    os.kill(server, signal.SIGSTOP)
    (child,) = pool_processes(site.folder)
    os.kill(child, signal.SIGKILL)
    run_all(site, "b")
    assert "the pool's fork server does not answer, it is resumed (SIGCONT)" in worker.log
    assert fork_server(worker) == server
    assert worker.stop() == 0


@OF_SERVER
def test_a_server_that_is_killed_before_it_forked_anything_is_replaced(site: Site) -> None:
    """While the worker imports the app: nothing looks at the server then."""
    (site.folder / "killing_app.py").write_text(KILLING)
    site.module = "killing_app"
    worker = site.worker("-c", "2")
    run_all(site, "a", "b")
    assert (site.folder / "killed").exists()
    assert "a pool process cannot start" in worker.log
    server = fork_server(worker)
    assert b"aztask.worker.pool.forkserver" in command_of(server)
    assert Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text() == (
        f"{server} "  # the dead one was waited for
    )
    assert worker.stop() == 0


@OF_SERVER
def test_beside_the_threads_of_others_a_pool_process_is_a_new_interpreter(site: Site) -> None:
    """An agent that the interpreter loads by itself may have threads: no fork has their locks."""
    (site.folder / "sitecustomize.py").write_text(AGENT)
    path = os.pathsep.join([str(site.folder), site.environment["PYTHONPATH"]])
    worker = site.worker("-c", "2", PYTHONPATH=path)
    run_all(site, "a", "b", "c")
    server = fork_server(worker)
    for pid in pool_processes(site.folder):
        assert b"aztask.worker.pool.poolprocess" in command_of(pid)
        assert parent_of(pid) == server
    assert worker.stop() == 0


@OF_SERVER
def test_the_server_has_nothing_of_the_apps(site: Site) -> None:
    """No thread and no file: a fork would copy them."""
    (site.folder / "busy_app.py").write_text(BUSY)
    site.module = "busy_app"
    worker = site.worker("-c", "1")
    run_all(site, "a")
    server = fork_server(worker)
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    assert opened_by(server) == {0: "/dev/null", 1: str(worker.log_path), 2: str(worker.log_path)}
    assert str(site.folder / "opened") in opened_by(worker.process.pid).values()
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


def test_a_killed_worker_leaves_no_process_and_no_file(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("temporary")
    worker = site.worker("-c", "2", TMPDIR=str(folder))
    large = "large" * 20_000  # more than a packet holds
    run_all(site, "a")
    site.app().send(work.name, [large], task_id="c")
    assert site.app().result("c").get(timeout=30) == large
    site.app().send(work.name, ["b", 60.0], task_id="b")
    wait_until(lambda: len(site.lines("start", "b")) == 1, 20, "it runs")
    worker.kill()
    wait_until(lambda: not living_pool_processes(site.folder), 5, "all of it ends with the worker")
    assert list(folder.iterdir()) == []
