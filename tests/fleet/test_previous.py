"""Senders of a previous release feed workers of this one, and the reverse, under random kills.

A Celery app and an aztask app send to one queue, which Celery and aztask workers serve. No task is
lost, and none runs that must not. FLEET_SEED=... draws others, FLEET_PREVIOUS=... names a release.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import azurite
import emulatorprocess
import pytest
from fleetprocesses import HERE, Fleet, seed_of_run
from previous import ROOT, MissingRelease, previous_release

from aztask import App
from aztask.queues.base import QueueOptions

SECONDS = 180.0
KILLS = 6
LEASE = 5.0
SEND = """
import random
from release_app import *
celery.set_default()
draw = random.Random({seed})
for n in range(40):
    work.delay(n)
for n in range(40, 60):
    work.apply_async((n,), countdown=draw.uniform(0.5, 8))
for n in range(60, 70):
    work.apply_async((n,), expires=170)
for n in range(70, 80):
    work.apply_async((n,), countdown=draw.uniform(3, 6), expires=1)  # these must not run
for n in range(80, 110):
    flaky.delay(n, draw.randint(1, 2))
for n in range(200, 240):
    work_here.delay(n)
for n in range(240, 260):
    work_here.with_options(delay=draw.uniform(0.5, 8)).delay(n)
for n in range(260, 270):
    work_here.with_options(expires=170).delay(n)
for n in range(270, 280):
    work_here.with_options(delay=draw.uniform(3, 6), expires=1).delay(n)  # these must not run
for n in range(280, 310):
    flaky_here.delay(n, draw.randint(1, 2))
app.close()
"""
EXPIRED = {*range(70, 80), *range(270, 280)}
REASONS = {"expired", "TTLExpiredException"}
"""Why a message that expired is a dead letter: a worker or Service Bus found it."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to import the previous release from."""
    try:
        return previous_release(tmp_path_factory.mktemp("previous"))
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)


@contextmanager
def running_broker(name: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(the broker's address, environment variables that it needs)."""
    if name == "servicebus":
        with emulatorprocess.running() as ready:
            variables = {"AZTASK_SERVICEBUS_ADMIN": ready["admin_connection_string"]}
            yield ready["connection_string"], variables
    elif name == "storagequeue":
        with azurite.running(folder / "azurite") as server:
            yield server.connection_string, {}
    else:
        yield f"local://{folder}/queues.db", {}


@pytest.fixture(params=["local", "servicebus", "storagequeue"])
def queue(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[App]:
    """An app of this release whose broker has the empty queue celery."""
    with running_broker(request.param, tmp_path) as (address, variables):
        for name, value in {"FLEET_BROKER": address, **variables}.items():
            monkeypatch.setenv(name, value)
        app = App("reader", broker=address)
        app.broker.declare("celery", QueueOptions(lease=LEASE))
        yield app
        app.close()


def test_a_revision_that_a_clone_does_not_have_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_PREVIOUS", "0" * 40)
    with pytest.raises(MissingRelease, match="git fetch --unshallow") as caught:
        previous_release(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aztask").mkdir()
    (tmp_path / "aztask" / "__init__.py").touch()
    monkeypatch.setenv("FLEET_PREVIOUS", str(tmp_path))
    assert previous_release(tmp_path / "elsewhere") == tmp_path


def missing(notes: list[list[str]]) -> list[str]:
    """What has not ended yet: a line for each."""
    ended = Counter(" ".join(words[1:]) for words in notes)
    wanted = []
    for first in (0, 200):
        wanted += [f"work {n}" for n in range(first, first + 70)]
        wanted += [f"flaky {n}" for n in range(first + 80, first + 110)]
    return [each for each in wanted if not ended[each]]


@pytest.mark.parametrize("sender", ["previous", "this"])
def test_no_task_is_lost_between_two_releases(
    sender: str, queue: App, release: Path, tmp_path: Path
) -> None:
    releases = (release, ROOT) if sender == "previous" else (ROOT, release)
    sending, working = map(importing, releases)
    fleet = Fleet(tmp_path, "release_app", random.Random(seed_of_run()), working)
    code = SEND.format(seed=fleet.draw.randrange(1000))
    try:
        fleet.send(code, {**fleet.environment, **sending})
        for kind in ("celery", "celery"):
            fleet.start(kind)
        until(fleet.notes)  # Celery's workers take longer to start, and are to run some, too
        for kind in ("aztask", "aztask"):
            fleet.start(kind)
        kills = killed_until_all_ended(fleet)
        notes = fleet.notes()
    finally:
        fleet.close()
    kinds = Counter(words[0] for words in notes)
    assert kills >= 3, "the work ended before the kills"
    assert kinds["celery"] and kinds["aztask"], kinds
    assert not [words for words in notes if words[1] == "work" and int(words[2]) in EXPIRED]
    letters = queue.broker.peek("celery", dead_letter=True, limit=500)
    reasons = Counter(letter.dead_letter_reason for letter in letters)
    assert set(reasons) <= REASONS, reasons
    print(f"{kills} kills, {dict(kinds)} runs, dead letters {dict(reasons)}")


def until(check: Callable[[], object]) -> None:
    """Wait until `check` returns something."""
    ends_at = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < ends_at, "no task has ended"
        time.sleep(0.1)


def importing(folder: Path) -> dict[str, str]:
    """The environment variables of a process that imports aztask from `folder`."""
    path = os.pathsep.join([str(HERE), str(folder)])
    return {"PYTHONPATH": path, "FLEET_PACKAGE": str(folder / "aztask")}


def killed_until_all_ended(fleet: Fleet) -> int:
    """Kill workers at random until every task has ended; returns the number of kills."""
    ends_at = time.monotonic() + SECONDS
    kills = 0
    while left := missing(fleet.notes()):
        assert time.monotonic() < ends_at, f"{len(left)} not ended: {left[:20]}"
        time.sleep(fleet.draw.uniform(0.5, 1.5))
        if kills < KILLS and fleet.notes():
            fleet.kill_one()
            kills += 1
    return kills
