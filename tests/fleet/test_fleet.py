"""A Celery producer against Celery and aztask workers on one queue, which are killed at random.

500 tasks of every kind: none is lost, and nothing runs that must not. FLEET_SEED=... draws others.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleetprocesses import Fleet, seed_of_run

from aztask import App

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


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(
        tmp_path,
        "fleet_app",
        random.Random(seed_of_run()),
        {
            "BACKEND": f"aztask+local://{tmp_path}/results.db",
            "RESULTS": f"local://{tmp_path}/results.db",
        },
    )
    yield fleet
    fleet.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[App]:
    """An app that reads the queue's dead letters."""
    app = App("reader", broker=f"local://{tmp_path}/queues.db")
    yield app
    app.close()


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


def test_no_task_of_a_mixed_fleet_is_lost(fleet: Fleet, reader: App) -> None:
    fleet.send(SEND.format(seed=fleet.draw.randrange(1000)))
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
        for letter in reader.broker.peek("celery", dead_letter=True, limit=500)
    )
    assert set(reasons) <= {"expired"}, reasons
    print(f"{kills} kills, {dict(kinds)} runs, dead letters {dict(reasons)}")
