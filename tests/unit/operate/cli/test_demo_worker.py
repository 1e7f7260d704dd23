"""The demo's worker process: its environment, its end, its errors."""

import os
import signal
import subprocess
import sys

import pytest

from aztask.operate.cli.demo import DemoWorker
from aztask.operate.cli.failures import CommandFailed


def process(worker, code):
    """Have `worker` run Python code in place of a worker."""
    worker._process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    return worker._process


@pytest.fixture
def worker(tmp_path):
    return DemoWorker(tmp_path, "local:///demo.db")


def test_settings_of_the_users_own_apps_are_dropped(worker, tmp_path, monkeypatch):
    monkeypatch.setenv("AZTASK_BROKER", "servicebus://shop")
    monkeypatch.setenv("AZTASK_WORKER_CONCURRENCY", "1")
    monkeypatch.setenv("AZTASK_DEBUG", "1")
    environment = worker._environment()
    assert environment["AZTASK_BROKER"] == "local:///demo.db"
    assert environment["AZTASK_EVENTS"] == str(tmp_path / "events")
    assert "AZTASK_WORKER_CONCURRENCY" not in environment
    assert environment["AZTASK_DEBUG"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_no_process_is_left_behind(worker):
    with worker:
        child = process(worker, "print('on', flush=True); import time; time.sleep(60)")
        assert child.stdout.readline() == b"on\n"
        assert worker.runs()
    assert child.wait(0) == -signal.SIGTERM
    child.stdout.close()


def test_a_worker_that_ignores_sigterm_is_killed(worker, monkeypatch):
    monkeypatch.setattr("aztask.operate.cli.demo.PATIENCE_SECONDS", 0.1)
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('on', flush=True)\ntime.sleep(60)"
    )
    with worker:
        child = process(worker, code)
        assert child.stdout.readline() == b"on\n"
    assert child.wait(0) == -signal.SIGKILL
    child.stdout.close()


@pytest.mark.parametrize(
    ("log", "words"), [("first\nlast line\n", "last line"), ("", "its log is empty")]
)
def test_a_worker_that_fails_is_an_error_with_its_last_line(worker, tmp_path, log, words):
    (tmp_path / "worker.log").write_text(log)
    with worker:
        child = process(worker, "raise SystemExit(3)")
        child.wait(30)
        with pytest.raises(CommandFailed, match=f"worker ended with exit code 3: {words}"):
            worker.runs()
    child.stdout.close()


def test_a_worker_that_has_ended_well_does_not_run(worker):
    with worker:
        child = process(worker, "pass")
        child.wait(30)
        assert not worker.runs()
    child.stdout.close()
