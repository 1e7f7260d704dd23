"""Once its worker has ended, the watching process ends what it was told of, and nothing else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from aztask.worker.pool.watcher import WatchingProcess

WORKER = """
import os, subprocess, sys
from aztask.worker.pool.watcher import WatchingProcess
watching = WatchingProcess()
folder = watching.make_folder()
(folder / "value").write_text("large")
sleep = ["sleep", "300"]
watched, ended = (subprocess.Popen(sleep, start_new_session=True, stdout=-3) for _ in range(2))
for each in (watched, ended):
    watching.watch(each)
ended.kill()
ended.wait()
watching.forget(ended.pid)
if sys.argv[1] == "inherited":  # something else keeps the worker's end of the pipe open
    os.set_inheritable(watching._process.stdin.fileno(), True)
    subprocess.Popen(sleep, close_fds=False, stdout=subprocess.DEVNULL)
print(folder, watched.pid, watching._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker(tmp_path, request):
    started = subprocess.Popen(
        [sys.executable, "-c", WORKER, request.param],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    yield started
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()


def lives(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("worker", ["alone", "inherited"], indirect=True)
def test_what_it_watches_ends_with_its_worker(worker):
    folder, *pids = worker.stdout.readline().split()
    watched, watcher = map(int, pids)
    assert lives(watched)
    os.kill(watcher, signal.SIGTERM)  # a service manager's, for all processes
    worker.kill()
    wait_until(lambda: not lives(watched), 15, "the pool process ends")
    wait_until(lambda: not Path(folder).exists(), 15, "the folder is removed")
    wait_until(lambda: not lives(watcher), 15, "it ends")


def test_one_that_is_closed_takes_the_folder_along(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watching = WatchingProcess()
    folder = watching.make_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    watching.close()
    assert not folder.exists()
    assert not lives(watching._process.pid)


def test_one_that_has_died_is_replaced_and_told_everything(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watching = WatchingProcess()
    folder = watching.make_folder()
    pool = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        watching.watch(pool)
        watching._process.kill()
        watching._process.wait()
        watching.check()
        assert "another one does now" in caplog.text
        watching._process.stdin.close()  # as when the worker dies
        assert pool.wait(15) == -signal.SIGKILL
        wait_until(lambda: not folder.exists(), 15, "the folder is removed")
    finally:
        pool.kill()
        watching.close()
