"""A worker as process 1 of a container: in a process namespace of its own."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_until

APP = """
import os, subprocess, time
from aztask import App

app = App("shop", broker="local:///{folder}/queues.db", results="local:///{folder}/queues.db")

@app.task
def leave_orphans(count):
    # Each shell starts a process in the background and ends: its process becomes an orphan.
    for _ in range(count):
        subprocess.run(["sh", "-c", "sleep 0.2 &"], check=True)
    return subprocess.run(["sh", "-c", "exit 7"]).returncode

@app.task
def zombies():
    states = [state(name) for name in os.listdir("/proc") if name.isdigit()]
    return states.count("Z")

def state(pid):
    try:
        return open("/proc/" + pid + "/stat").read().rsplit(")")[1].split()[0]
    except OSError:
        return ""
"""
SLOW = """
import pathlib, time
pathlib.Path('{folder}/importing').touch()
for _ in range(600):  # one long sleep would miss a signal that comes just before it begins
    time.sleep(0.1)
"""


@pytest.fixture
def unshare():
    found = shutil.which("unshare")
    assert found, "install util-linux, for unshare"
    return [found, "--pid", "--fork", "--mount-proc", "--kill-child"]


class Container:
    def __init__(self, folder, unshare):
        self.folder, self._unshare = folder, unshare
        self.log = folder / "log"

    def start(self, *arguments):
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*self._unshare, sys.executable, "-m", "aztask", *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def first_process(self, outer):
        """The id, out here, of process 1 in there."""
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        wait_until(lambda: children.read_text().split(), 20, "process 1 runs")
        return int(children.read_text().split()[0])


@pytest.fixture
def container(tmp_path, unshare):
    (tmp_path / "shop.py").write_text(APP.format(folder=tmp_path))
    return Container(tmp_path, unshare)


def value_of(folder, task_id, name, *args):
    """Send a task of the app and wait for its result, in a process of its own."""
    script = (
        "import json, shop\n"
        f"task = shop.{name}.with_options(task_id={task_id!r})\n"
        f"print(json.dumps(task.delay(*{args!r}).get(timeout=60)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, check=True, timeout=90
    )
    return json.loads(ended.stdout)


def test_orphans_of_tasks_are_reaped_and_exit_codes_stay_with_their_owners(container):
    folder = container.folder
    worker = container.start("worker", "-A", "shop:app", "-c", "1")
    try:
        assert value_of(folder, "a", "leave_orphans", 40) == 7
        time.sleep(1.0)  # until the orphans have ended
        assert value_of(folder, "z", "zombies") == 0
        first = container.first_process(worker)
        subprocess.run(["kill", "-TERM", str(first)], check=True)
        assert worker.wait(30) == 0
        assert "stopped: 2 succeeded" in container.log.read_text()
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize("command", ["worker", "scheduler"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_during_the_import_of_the_app_is_honoured(container, number, command):
    (container.folder / "slow.py").write_text(SLOW.format(folder=container.folder))
    worker = container.start(command, "-A", "slow:app")
    try:
        wait_until((container.folder / "importing").exists, 30, "the app is being imported")
        first = container.first_process(worker)
        subprocess.run(["kill", f"-{number:d}", str(first)], check=True)
        assert worker.wait(20) == 0
        assert "stopped before it had received anything" in container.log.read_text()
    finally:
        worker.kill()
        worker.wait()


def test_the_exit_code_is_that_of_the_worker(container):
    worker = container.start("worker", "-A", "nosuch:app")
    assert worker.wait(30) == 2
