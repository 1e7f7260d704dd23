"""A job over many dead letters: its process and the worker are killed again and again.

``JOBS_LETTERS=100000 python -m pytest tests/integration/test_jobs.py`` takes a hundred thousand.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from harness import Site
from neighbour import neighbour_of
from waiting import wait_until

from aztask.operate.deadletters import DeadLetters
from aztask.operate.jobrunner import make_job
from aztask.operate.jobs import job
from aztask.operate.requests import prepare
from aztask.settlement import DeadLetter

LETTERS = int(os.environ.get("JOBS_LETTERS", "1500"))
VALUES = {"queue": "default", "all": "yes"}


def bury(site: Site, count: int) -> None:
    """So many dead letters of a task that notes each of its runs."""
    app = site.app()
    app.broker.declare("default")
    for number in range(count):
        app.send("ledger.work", [f"k{number}"], task_id=f"k{number}")
    receiver = app.broker.receiver("default", lease=60.0)
    left = count
    while left:
        some = receiver.receive(200, 1.0)
        receiver.settle([(each, DeadLetter("rejected", "no stock")) for each in some])
        left -= len(some)
    receiver.close()


def runner(site: Site) -> subprocess.Popen[bytes]:
    """A process of `aztask jobs run` whose lease is short, so that the next one goes on soon."""
    code = (
        "import sys; from aztask.operate import jobrunner; jobrunner.LEASE_SECONDS = 2.0;"
        " jobrunner.LOOK_SECONDS = 0.2; jobrunner.NOTED_EVERY = 0.1;"
        " from aztask.operate.cli.main import run;"
        f" sys.exit(run(['jobs', 'run', '-A', '{site.module}']))"
    )
    return subprocess.Popen([sys.executable, "-c", code], env=site.environment, cwd=site.folder)


@pytest.mark.kills
@pytest.mark.parametrize("joint", [True, False], ids=["joint", "apart"])
def test_each_dead_letter_gets_one_new_generation_whatever_is_killed(
    tmp_path: Path, joint: bool
) -> None:
    site = Site(tmp_path, joint=joint)
    drawn = random.Random(7)
    app = site.app()
    process = None
    try:
        with neighbour_of(site):
            bury(site, LETTERS)
            action = prepare(app, "replay", VALUES)
            assert action.count == LETTERS
            key = make_job(action, "replay", VALUES, by="ann", via="page")
            kills = 0
            process, worker = runner(site), site.worker("-c", "2")
            until = time.monotonic() + 300 + LETTERS / 50
            while job(app, key).state == "open":
                assert time.monotonic() < until, job(app, key)
                time.sleep(drawn.uniform(0.5, 1.5) if kills < 6 else 0.2)
                if kills < 6 and job(app, key).state == "open":
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    worker.kill()
                    worker.process.wait()
                    kills += 1
                    process, worker = runner(site), site.worker("-c", "2")
            ended = job(app, key)
            assert (ended.state, ended.done) == ("done", LETTERS), ended
            assert kills >= 2, "it was over before it was killed; use more letters"
            wait_until(
                lambda: len(site.counts("end")) == LETTERS, 120 + LETTERS / 50, "all have run"
            )
            wait_until(lambda: app.broker.stats("default").living == 0, 60, "the queue is empty")
            assert list(DeadLetters(app, "default").list(10)) == []
            found = Counter()
            for number in range(LETTERS):
                run = app.results.get(f"k{number}") if app.results is not None else None
                assert run is not None
                found[(run.key.generation, run.state.value)] += 1
            assert found == {(1, "succeeded"): LETTERS}
    finally:
        if process is not None:
            process.kill()
            process.wait()
        site.close()
