"""What Celery messages embed runs on aztask workers, and the reverse, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aztask import App
from aztask.operate.deadletters.view import DeadLetters
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import RunningEmulator

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 60.0


class Place:
    """A folder with a queue file, and the programs that share it."""

    def __init__(
        self, folder: Path, backend: str, results: str = "queues.db", store: str | None = None
    ) -> None:
        """results: the file of the aztask workers; store: another address in its place."""
        self.folder = folder
        self.results = store or f"local://{folder}/{results}"
        self.app = App("reader", broker=f"local://{folder}/queues.db", results=self.results)
        self.environment = {
            **os.environ,
            "PLACE": str(folder),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
            "BACKEND": backend,
            "RESULTS": self.results,
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env={**self.environment, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def send(self, code: str) -> Any:
        """Run code with the names of `embedded_app`; returns what it assigned to `out`."""
        text = f"from embedded_app import *\nfrom celery import *\ncelery.set_default()\n{code}\n"
        ended = subprocess.run(
            [sys.executable, "-c", f"{text}\nimport json; print(json.dumps(out))"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def aztask(
        self, *options: str, queue: str = "celery", **environment: str
    ) -> subprocess.Popen[bytes]:
        command = ("-m", "aztask", "-A", "embedded_app:app", "worker", "-Q", queue, "-c", "2")
        return self.start(*command, "--pool", "threads", *options, KIND="aztask", **environment)

    def celery(self) -> subprocess.Popen[bytes]:
        command = ("-m", "celery", "-A", "embedded_app:celery", "worker", "-c", "2")
        return self.start(*command, "-P", "threads", "-l", "warning", KIND="celery")

    def burst(self, **environment: str) -> None:
        worker = self.aztask("--burst", **environment)
        assert worker.wait(SECONDS) == 0, self.log

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()[-6000:]

    def notes(self) -> list[str]:
        file = self.folder / "notes"
        return file.read_text().splitlines() if file.exists() else []

    def until(self, check: Callable[[], object], what: str) -> None:
        ends_at = time.monotonic() + SECONDS
        while not check():
            assert time.monotonic() < ends_at, f"{what}: {self.notes()}\n{self.log}"
            time.sleep(0.05)

    def close(self) -> None:
        self.app.close()
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, f"file://{tmp_path}/backend")
    (tmp_path / "backend").mkdir()
    yield place
    place.close()


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Place]:
    """Queues and results in two files, so that no transaction covers both."""
    place = Place(tmp_path, f"file://{tmp_path}/backend", "results.db")
    (tmp_path / "backend").mkdir()
    yield place
    place.close()


def test_a_chain_runs_task_by_task(place: Place) -> None:
    sent = place.send("out = (add.s(1, 2) | add.s(10) | add.si(5, 5) | add.s(7)).apply_async().id")
    place.burst()
    assert place.app.result(sent).get(timeout=0) == 17
    assert place.notes() == [
        "aztask add 1 2",
        "aztask add 3 10",
        "aztask add 5 5",
        "aztask add 10 7",
    ]


def test_callbacks_and_errbacks_are_called(place: Place) -> None:
    place.send(
        "add.apply_async((1, 2), link=[add.s(10), add.si(5, 5)])\n"
        "errbacks = [failed_id.s(), failed_request.s()]\n"
        "out = fail.apply_async((1,), link=add.s(1), link_error=errbacks, task_id='bad').id"
    )
    place.burst()
    assert sorted(place.notes()) == [
        "aztask add 1 2", "aztask add 3 10", "aztask add 5 5",
        "aztask fail 1", "aztask failed_id bad", "aztask failed_request bad ValueError: no (1,)",
    ]  # fmt: skip


def test_a_failed_chain_fails_what_follows_and_calls_its_errback_once(place: Place) -> None:
    sent = place.send(
        "out = chain(fail.s(1), add.s(1), add.s(2)).on_error(failed_id.s()).apply_async().id"
    )
    place.burst()
    result = place.app.result(sent)
    assert result.state == "failed" and "no (1,)" in str(result.error)
    assert [note.split()[1] for note in place.notes()] == ["fail", "failed_id"]


def test_groups_chords_and_chains_in_a_chain(place: Place) -> None:
    sent = place.send(
        "inner = chain(add.s(100), add.s(1000))\n"
        "out = chain(add.s(1, 1), group(add.s(1), inner, group(add.s(2), add.s(3))), total.s(),"
        " add.s(10), group(add.s(1), add.s(2)), total.s()).apply_async().id"
    )
    place.burst()
    #   2 -> [3, 1102, 4, 5] -> 1114 -> 1124 -> [1125, 1126] -> 2251
    assert place.app.result(sent).get(timeout=0) == 2251, place.log
    # Celery itself turns the order of a group inside a group round.
    assert "aztask total 3 1102 5 4" in place.notes(), place.notes()


def test_a_failed_member_fails_the_chord(place: Place) -> None:
    place.send(
        "body = total.s().on_error(failed_id.s())\n"
        "out = chain(add.s(1, 1), chord([add.s(1), fail.s()], body)).apply_async(task_id='c').id"
    )
    place.burst()
    assert sorted(note.split()[1] for note in place.notes()) == ["add", "add", "fail", "failed_id"]


def test_a_chord_of_another_store_is_dead_lettered_with_the_reason(place: Place) -> None:
    place.send("out = chord([add.s(1, 1), add.s(2, 2)], total.s()).apply_async().id")
    place.aztask()  # Celery's chord_unlock stays in the queue for the Celery workers
    place.until(lambda: len(DeadLetters(place.app, "celery").list()) == 2, "both are dead")
    letters = DeadLetters(place.app, "celery").list()
    assert {letter.reason for letter in letters} == {"unknown-chord"} and len(letters) == 2
    assert "result_backend" in letters[0].description
    assert place.notes() == []


@pytest.mark.parametrize("service", ["Storage queue", "Service Bus"])
def test_chains_and_chords_on_the_services(
    service: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place = Place(tmp_path, f"aztask+local://{tmp_path}/results.db", "results.db")
    if service == "Storage queue":
        address = request.getfixturevalue("azurite").connection_string
    else:
        bus: RunningEmulator = request.getfixturevalue("bus")
        address = bus.connection_string
        place.environment[ADMIN_VARIABLE] = bus.admin_connection_string
    place.environment |= {"BROKER": address, "LEASE": "30"}
    try:
        place.send(
            "from aztask.queues.base import QueueOptions\n"
            "app.broker.declare('celery', QueueOptions(lease=30.0)); out = 0"
        )
        place.aztask("--lease", "30s")
        place.celery()
        out = place.send(
            "long = chain(add.s(1, 2), add.s(10), group(add.s(1), add.s(2)), total.s())\n"
            "long = long.apply_async()\n"
            "wide = chord([add.s(n, n) for n in range(10)], total.s()).apply_async()\n"
            "out = [long.get(timeout=50), wide.get(timeout=50)]"
        )
    finally:
        place.close()
    assert out == [29, 90]


def test_what_cannot_be_sent_makes_its_message_a_dead_letter(place: Place) -> None:
    place.send("out = (add.s(1, 2) | add.s(3).set(queue='no such/queue')).apply_async().id")
    place.burst()
    [letter] = DeadLetters(place.app, "celery").list()
    assert letter.reason == "unprocessable" and "no such/queue" in letter.description
    assert place.notes() == ["aztask add 1 2"], "the task itself ran once"


@pytest.mark.kills
@pytest.mark.parametrize("step", ["recorded", "followed", "settled"])
def test_a_worker_that_is_killed_in_between_repeats_what_follows(apart: Place, step: str) -> None:
    place = apart
    sent = place.send(
        "out = chain(add.s(1, 1), group(add.s(1), add.s(2)), total.s()).apply_async().id"
    )
    for number in (1, 2, 3):
        worker = place.aztask("--burst", AZTASK_FAILPOINT=f"{step}:KILL:{number}")
        worker.wait(SECONDS)
    place.burst()
    assert place.app.result(sent).get(timeout=0) == 7
    assert place.notes().count("aztask total 3 4") == 1, "a recorded task does not run again"


def test_a_chain_passes_through_both_kinds_of_worker(place: Place) -> None:
    sent = place.send(
        "there = only_celery.s().set(queue='celery')\n"
        "here = celery.signature('embedded.only_aztask').set(queue='aztask')\n"
        "out = (add.s(1, 2).set(queue='aztask') | there | here | there | here).apply_async().id"
    )
    place.aztask(queue="aztask")
    place.celery()
    place.until(lambda: place.app.result(sent).ready(), "the chain ends")
    assert place.app.result(sent).get(timeout=0) == 12
    assert [note for note in place.notes() if "only" in note] == [
        "celery only_celery 3", "aztask only_aztask 6", "celery only_celery -6",
        "aztask only_aztask -12",
    ]  # fmt: skip


def test_celery_workers_run_what_aztask_sends(place: Place) -> None:
    place.send(
        "app.send('embedded.add', [1, 2])\n"
        "app.send('embedded.add', [3, 4], delay=1)\n"
        "app.send('embedded.only_celery', [5], expires=60)\n"
        "app.tasks['embedded.add'].map([(n, 0) for n in range(5)])\nout = 0"
    )
    place.celery()
    place.until(lambda: len(place.notes()) == 8, "all ran")
    assert sorted(place.notes()) == sorted(
        ["celery add 1 2", "celery add 3 4", "celery only_celery 5"]
        + [f"celery add {n} 0" for n in range(5)]
    )
