"""Workflows cross between Celery's and aztask's workers of two releases, beside tasks with keys,
while workers of every kind are killed.

A Celery app sends chains and chords to one queue, which Celery and aztask workers of both releases
serve; an aztask app with a signing key sends tasks to the same queue. Workflows that are signed and
encrypted have a queue of their own, because Celery has no keys. FLEET_SEED=... draws other kills,
FLEET_PREVIOUS=... names another release, which must encrypt.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fleetprocesses import HERE, seed_of_run
from previous import ROOT, WITH_ENCRYPTION, MissingRelease, previous_release
from test_previous import LEASE, running_broker

from aztask import App
from aztask.queues.base import QueueOptions

SECONDS = 420.0
KILLS = 14
QUEUES = ("celery", "secret")
CHAINS, CHORDS, SIGNED, SECRETS = range(90), range(90, 120), range(120, 200), range(200, 260)
HIDDEN = b"a-number-that-no-file-may-show"
KINDS = {
    "celery": ["celery", "-A", "crossing_app:celery", "worker", "-P", "prefork"],
    "aztask": ["aztask", "worker", "-A", "crossing_app:app", "-Q", "celery"],
    "secret": ["aztask", "worker", "-A", "crossing_app:secret", "-Q", "secret"],
}
SEND_OPEN = f"""
from crossing_app import *
from celery import chain, chord
celery.set_default()
for n in range({CHAINS.start}, {CHAINS.stop}):
    chain(step.s(0, n), step.s(n), step.si(7, n), step.s(n)).apply_async()
for n in range({CHORDS.start}, {CHORDS.stop}):
    members = [chain(step.s(0, n), step.s(n)) for _ in range(3)]
    chord(members, total.s(n)).apply_async()
"""
SEND_SIGNED = f"""
from crossing_app import *
for n in range({SIGNED.start}, {SIGNED.stop}):  # over half a minute, so that both kinds get some
    plain_here.with_options(delay=0.4 * (n - {SIGNED.start})).delay(n)
signed.close()
"""
SEND_SECRET = f"""
from crossing_app import *
for n in range({SECRETS.start}, {SECRETS.stop}):
    secret_workflow(n)
secret.close()
"""


class Crossing:
    """Workers of three kinds and two releases in one folder."""

    def __init__(
        self, folder: Path, former: Path, draw: random.Random, environment: Mapping[str, str]
    ) -> None:
        self.folder, self.draw, self._extra = folder, draw, environment
        self._packages = {"former": former, "this": ROOT}
        self.workers: list[tuple[str, str, subprocess.Popen[bytes]]] = []

    def _environment(self, kind: str, release: str) -> dict[str, str]:
        package = self._packages[release]
        return {
            **os.environ,
            "PLACE": str(self.folder),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(package)]),
            "FLEET_PACKAGE": str(package / "aztask"),
            "KIND": f"{kind}-{release}",
            **self._extra,
        }

    def send(self, code: str, release: str) -> None:
        sent = subprocess.run(
            [sys.executable, "-c", code],
            env=self._environment("sender", release),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert sent.returncode == 0, sent.stderr

    def start(self, kind: str, release: str) -> None:
        with (self.folder / f"{kind}-{release}.log").open("ab") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", *KINDS[kind], "-c", "2"],
                cwd=self.folder,
                env=self._environment(kind, release),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.workers.append((kind, release, worker))

    def kill_one(self) -> None:
        """Kill a worker with all its processes; another of its kind and release follows."""
        kind, release, worker = self.workers.pop(self.draw.randrange(len(self.workers)))
        assert worker.poll() is None, f"a worker has ended: {self.folder}/{kind}-{release}.log"
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(10)
        self.start(kind, release)

    def notes(self) -> list[list[str]]:
        file = self.folder / "notes"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def close(self) -> None:
        for _, _, worker in self.workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(10)


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    revision = None if os.environ.get("FLEET_PREVIOUS") else WITH_ENCRYPTION
    try:
        return previous_release(tmp_path_factory.mktemp("previous"), revision)
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(params=["local", "servicebus", "storagequeue"])
def reader(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[App]:
    """An app of this release whose broker has the two queues."""
    with running_broker(request.param, tmp_path) as (address, variables):
        for name, value in {"FLEET_BROKER": address, **variables}.items():
            monkeypatch.setenv(name, value)
        app = App("reader", broker=address)
        for queue in QUEUES:
            app.broker.declare(queue, QueueOptions(lease=LEASE))
        yield app
        app.close()


@pytest.fixture
def fleet(reader: App, tmp_path: Path, former: Path) -> Iterator[Crossing]:
    made = Crossing(tmp_path, former, random.Random(seed_of_run()), {"LEASE": f"{LEASE:g}"})
    yield made
    made.close()


def missing(notes: list[list[str]]) -> list[str]:
    """What has not ended yet: a line for each."""
    ended = Counter(" ".join(words[1:]) for words in notes)
    wanted = [f"step {n} {value}" for n in CHAINS for value in (0, 1, 7, 8)]
    wanted += [f"total {n} 6" for n in CHORDS]
    wanted += [f"plain {n}" for n in SIGNED]
    wanted += [f"{what} {n}" for n in SECRETS for what in ("first", "second")]
    wanted += [f"last {n} {2 * n}" for n in SECRETS]
    return [each for each in wanted if not ended[each]]


def test_workflows_cross_kinds_and_releases_beside_tasks_with_keys(
    fleet: Crossing, reader: App, tmp_path: Path
) -> None:
    fleet.send(SEND_OPEN, "former")
    fleet.send(SEND_SECRET, "this")
    ends_at, kills = time.monotonic() + SECONDS, 0
    for kind in KINDS:  # Celery's workers take longer to start, and are to run some, too
        for release in ("former", "this"):
            fleet.start(kind, release)
        while kind == "celery" and len({words[0] for words in fleet.notes()}) < 2:
            assert time.monotonic() < ends_at, "Celery's workers run nothing"
            time.sleep(0.1)
        if kind == "celery":
            fleet.send(SEND_SIGNED, "former")
    while left := missing(fleet.notes()):
        assert time.monotonic() < ends_at, f"{len(left)} not ended: {left[:20]}"
        time.sleep(fleet.draw.uniform(1.0, 3.0))
        if kills < KILLS and fleet.notes():
            fleet.kill_one()
            kills += 1
    notes = fleet.notes()
    fleet.close()
    assert kills >= 3, "the work ended before the kills"

    ran = defaultdict(set)
    for who, what, number, *_ in notes:
        ran[what, number].add(who)
    crossed = [who for (what, _), who in ran.items() if what == "step" and len(who) > 1]
    both = [who for who in crossed if len({each.partition("-")[0] for each in who}) == 2]
    assert len(both) >= 10, Counter(words[0] for words in notes)
    assert {words[0] for words in notes if words[1] == "plain"} & {"celery-former", "celery-this"}
    assert {words[0] for words in notes if words[1] in ("first", "second", "last")} == {
        "secret-former",
        "secret-this",
    }
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or HIDDEN not in file.read_bytes(), file
    check_no_dead_letters(reader)
    print(f"{kills} kills, {dict(Counter(words[0] for words in notes))} runs")


def check_no_dead_letters(reader: App) -> None:
    for queue in QUEUES:
        letters = reader.broker.peek(queue, dead_letter=True, limit=30)
        reasons = Counter(each.dead_letter_reason for each in letters)
        assert not reasons, (queue, reasons)
