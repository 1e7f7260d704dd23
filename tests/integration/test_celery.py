"""An unchanged Celery app on an aztask broker: real workers, a real kill."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from aztask.brokers.local.broker import LocalBroker
from aztask.engine import Database
from aztask.message.envelope import Envelope

APP = """
    import os, time
    from celery import Celery
    from aztask import transport

    transport.register()
    app = Celery("celery_app", broker="aztask://")
    app.conf.update(
        broker_transport_options={"broker": os.environ["BROKER"], "lease": 1.5},
        task_acks_late=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=2,
        worker_proc_alive_timeout=30,
    )

    def note(line):
        with open(os.environ["NOTES"], "a") as file:
            file.write(line + chr(10))

    @app.task
    def add(left, right):
        note(f"add {left + right}")

    @app.task
    def slow(number, seconds):
        note(f"start {number}")
        time.sleep(seconds)
        note(f"slow {number}")

    @app.task(bind=True, max_retries=2, default_retry_delay=0.2)
    def flaky(self):
        note(f"flaky {self.request.retries}")
        if self.request.retries < 2:
            raise self.retry()
"""


class Site:
    """A folder with the app, its queues and the notes of its tasks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes_file = folder / "notes"
        (folder / "celery_app.py").write_text(textwrap.dedent(APP))
        self.environment = {
            **os.environ,
            "BROKER": f"local://{folder}/queues.db",
            "NOTES": str(self.notes_file),
            "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])]),
        }
        self.broker = LocalBroker(Database(str(folder / "queues.db")))
        self.processes: list[subprocess.Popen[bytes]] = []

    def worker(self, pool: str) -> subprocess.Popen[bytes]:
        command = ["-m", "celery", "-A", "celery_app", "worker", "-c", "2", "-P", pool]
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def send(self, code: str) -> None:
        subprocess.run(
            [sys.executable, "-c", f"from celery_app import *\n{code}"],
            env=self.environment,
            check=True,
            timeout=30,
        )

    def notes(self) -> list[str]:
        return self.notes_file.read_text().split("\n")[:-1] if self.notes_file.exists() else []

    def until(self, check, seconds=40.0):
        ends_at = time.monotonic() + seconds
        while not check():
            log = (self.folder / "worker.log").read_text()[-3000:]
            assert time.monotonic() < ends_at, f"not in time; {self.notes()}\n{log}"
            time.sleep(0.05)

    def counts(self):
        stats = self.broker.stats("celery")
        return (stats.active, stats.leased, stats.scheduled, stats.dead)


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    for process in site.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def test_a_celery_worker_runs_retries_and_renews_and_never_sees_garbage(site):
    site.broker.send("celery", [Envelope(b"\xc1garbage")])
    site.send(
        "for n in range(20): add.delay(n, 0)\n"
        "slow.delay(1, 4.0)\n"  # much longer than the lease
        "flaky.delay()\n"
        "add.apply_async((100, 0), countdown=2)"
    )
    assert site.counts()[2] == 1, "the countdown lies in the broker"
    site.worker("prefork")
    site.until(lambda: "slow 1" in site.notes() and "add 100" in site.notes())
    site.until(lambda: site.counts() == (0, 0, 0, 1))
    others = ["add 100", "start 1", "slow 1", "flaky 0", "flaky 1", "flaky 2"]
    assert sorted(site.notes()) == sorted([*(f"add {n}" for n in range(20)), *others])
    assert site.broker.peek("celery", dead_letter=True)[0].dead_letter_reason == "undecodable"


def test_a_celery_worker_that_is_killed_loses_nothing(site):
    site.send("for n in range(6): slow.delay(n, 1.0)")
    first = site.worker("threads")
    site.until(lambda: any(note.startswith("start") for note in site.notes()))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(10)
    assert site.counts()[1] > 0, "what it held is still leased"
    site.worker("threads")
    site.until(lambda: site.counts() == (0, 0, 0, 0))
    assert {note for note in site.notes() if note.startswith("slow")} == {
        f"slow {n}" for n in range(6)
    }
