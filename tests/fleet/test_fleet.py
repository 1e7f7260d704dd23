"""A Celery producer against Celery and aztask workers on one queue, which are killed at random.

500 tasks of every kind: none is lost, and nothing runs that must not. FLEET_SEED=... draws others.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from aztask import App

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 240.0
KILLS = 12
SEND = """
import random
from celery import chain, chord
from fleet_app import *
celery.set_default()
draw = random.Random({seed})
for n in range(150):
    work.delay(n)
for n in range(150, 250):
    work.apply_async((n,), countdown=draw.uniform(0.5, 8))
for n in range(250, 270):
    work.apply_async((n,), expires=200)
for n in range(270, 290):
    work.apply_async((n,), countdown=draw.uniform(3, 6), expires=1)  # these must not run
for n in range(290, 390):
    flaky.delay(n, draw.randint(1, 2))
for n in range(390, 480):
    chain(step.s(0, n), step.s(n), step.si(7, n), step.s(n)).apply_async()
for n in range(480, 500):
    chord([work.si(n) for _ in range(4)], total.s(n)).apply_async()
"""


class Fleet:
    """Workers of both kinds in one folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        address = f"local://{folder}/results.db"
        self.app = App("reader", broker=f"local://{folder}/queues.db", results=address)
        self.environment = {
            **os.environ,
            "PLACE": str(folder),
            "BACKEND": f"aztask+local://{folder}/results.db",
            "RESULTS": address,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
        }
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self, kind: str) -> None:
        command = {
            "celery": ["celery", "-A", "fleet_app:celery", "worker", "-P", "prefork"],
            "aztask": ["aztask", "-A", "fleet_app:app", "worker", "-Q", "celery"],
        }[kind]
        with (self.folder / f"{kind}.log").open("ab") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", *command, "-c", "2"],
                cwd=self.folder,
                env={**self.environment, "KIND": kind},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        worker.kind = kind  # type: ignore[attr-defined]  # which kind takes its place
        self.workers.append(worker)

    def kill_one(self) -> None:
        """Kill a worker with all its processes; another of its kind takes its place."""
        worker = self.workers.pop(self.draw.randrange(len(self.workers)))
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(10)
        self.start(worker.kind)  # type: ignore[attr-defined]

    def notes(self) -> list[list[str]]:
        file = self.folder / "notes"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def close(self) -> None:
        self.app.close()
        for worker in self.workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(10)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    seed = int(os.environ.get("FLEET_SEED", "24"))
    print(f"FLEET_SEED={seed}")
    fleet = Fleet(tmp_path, seed)
    yield fleet
    fleet.close()


def missing(notes: list[list[str]]) -> list[str]:
    """What has not ended yet: a line for each."""
    ended = Counter(" ".join(words[1:]) for words in notes)
    wanted = [f"work {n}" for n in range(270)]
    wanted += [f"flaky {n}" for n in range(290, 390)]
    for n in range(390, 480):
        wanted += [f"step {n} {value}" for value in (0, 1, 7, 8)]
    wanted += [f"work {n}" for n in range(480, 500)]
    wanted += [f"total {n} {4 * n}" for n in range(480, 500)]
    return [each for each in wanted if not ended[each]]


def test_no_task_of_a_mixed_fleet_is_lost(fleet: Fleet) -> None:
    code = SEND.format(seed=fleet.draw.randrange(1000))
    sent = subprocess.run(
        [sys.executable, "-c", code], env=fleet.environment, timeout=120, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    for kind in ("celery", "celery", "aztask", "aztask"):
        fleet.start(kind)
    ends_at = time.monotonic() + SECONDS
    kills = 0
    while left := missing(fleet.notes()):
        assert time.monotonic() < ends_at, f"{len(left)} not ended: {left[:20]}"
        time.sleep(fleet.draw.uniform(0.3, 1.2))
        if kills < KILLS and fleet.notes():
            fleet.kill_one()
            kills += 1
    assert kills >= 3, "the work ended before the kills"
    notes = fleet.notes()
    kinds = Counter(words[0] for words in notes)
    assert kinds["celery"] > 20 and kinds["aztask"] > 20, kinds
    expired = {str(n) for n in range(270, 290)}
    assert not [words for words in notes if words[1] == "work" and words[2] in expired]
    reasons = Counter(
        letter.dead_letter_reason
        for letter in fleet.app.broker.peek("celery", dead_letter=True, limit=500)
    )
    assert set(reasons) <= {"expired"}, reasons
    print(f"{kills} kills, {dict(kinds)} runs, dead letters {dict(reasons)}")
