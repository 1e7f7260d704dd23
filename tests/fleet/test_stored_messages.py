"""The release before messages were signed for their places, and this one, on one store with keys.

Each sends what the other one has stored for later: steps of workflows, schedules, debounced calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fleetprocesses import HERE
from previous import BEFORE_STORED, ROOT, MissingRelease, previous_release

PATIENCE = 60.0


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return previous_release(tmp_path_factory.mktemp("former"), BEFORE_STORED)
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)


class Place:
    """A folder with queues and results, and processes of both releases."""

    def __init__(self, folder: Path, former: Path = ROOT) -> None:
        self.folder = folder
        self.extra: dict[str, str] = {}
        self._packages = {"former": former, "this": ROOT}

    def run(self, release: str, *arguments: str) -> str:
        """Run Python with that release; returns what it logs."""
        path = os.pathsep.join([str(HERE), str(self._packages[release])])
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "FOLDER": str(self.folder), **self.extra},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stderr

    def step(self, release: str, *arguments: str) -> None:
        self.run(release, str(HERE / "stored_app.py"), *arguments)

    def work(self, release: str) -> str:
        options = ["-A", "stored_app:app", "--pool", "threads", "-c", "1", "--burst"]
        return self.run(release, "-m", "aztask", "worker", *options)

    def has_places(self) -> bool:
        """Whether anything in the result store is signed for its place."""
        return any(
            b"; aztask-stored=" in path.read_bytes() for path in self.folder.glob("results*")
        )

    def notes(self) -> list[str]:
        file = self.folder / "notes"
        return file.read_text().splitlines() if file.exists() else []


OLD, NEW = "an-old-key-that-encrypts-of-32-bytes", "a-new-key-that-encrypts-of-32-bytes"
READY = {"AZTASK_ENCRYPTION_KEYS": OLD, "AZTASK_ID_KEY": "an-id-key-of-16-bytes"}


@pytest.mark.parametrize("extra", [{}, READY], ids=["no keys", "keys that are not used yet"])
@pytest.mark.parametrize(("stores", "sends"), [("former", "this"), ("this", "former")])
def test_each_release_sends_what_the_other_one_has_stored(
    stores: str, sends: str, extra: dict[str, str], tmp_path: Path, former: Path
) -> None:
    place = Place(tmp_path, former)
    place.extra = extra
    place.step(stores, "store", "a")
    place.step(sends, "trigger", "a")
    log = place.work(sends)
    ends_at = time.monotonic() + PATIENCE
    while len(place.notes()) < 4 and time.monotonic() < ends_at:
        log += place.work(sends)  # its housekeeping sends the debounced call after its quiet time
    notes = place.notes()
    assert sorted(notes) == ["a-approve", "a-late", "a-night", "a-ship"], log
    assert notes.index("a-approve") < notes.index("a-ship")
    assert "dead-lettered" not in log
    assert "Traceback" not in log


def test_after_a_rollback_the_former_release_sends_what_was_signed_anew(
    tmp_path: Path, former: Path
) -> None:
    place = Place(tmp_path, former)
    place.step("former", "store", "a")
    assert not place.has_places()
    place.step("this", "turn", "worker-1")
    assert place.has_places(), "the schedule is signed anew where it lies"
    place.step("former", "trigger", "a")
    log = place.work("former")
    assert place.notes().count("a-night") == 1, log
    assert "dead-lettered" not in log


FLEET = [
    ("neither encrypts", READY, READY),
    ("the sender encrypts", {**READY, "AZTASK_ENCRYPT": "1"}, READY),
    ("the worker encrypts", READY, {**READY, "AZTASK_ENCRYPT": "1"}),
    (
        "a key is added",
        {**READY, "AZTASK_ENCRYPT": "1"},
        {**READY, "AZTASK_ENCRYPT": "1", "AZTASK_ENCRYPTION_KEYS": f"{OLD} {NEW}"},
    ),
    (
        "a key is moved to the front",
        {**READY, "AZTASK_ENCRYPT": "1", "AZTASK_ENCRYPTION_KEYS": f"{NEW} {OLD}"},
        {**READY, "AZTASK_ENCRYPT": "1", "AZTASK_ENCRYPTION_KEYS": f"{OLD} {NEW}"},
    ),
    (
        "a key is removed",
        {**READY, "AZTASK_ENCRYPT": "1", "AZTASK_ENCRYPTION_KEYS": f"{NEW} {OLD}"},
        {**READY, "AZTASK_ENCRYPT": "1", "AZTASK_ENCRYPTION_KEYS": NEW},
    ),
    (
        "encryption is switched off",
        {**READY, "AZTASK_ENCRYPT": "1"},
        {**READY, "AZTASK_ENCRYPT": "0"},
    ),
]


@pytest.mark.parametrize(
    ("sender", "worker"), [each[1:] for each in FLEET], ids=[f[0] for f in FLEET]
)
def test_a_fleet_runs_everything_while_encryption_and_keys_change(
    sender: dict[str, str], worker: dict[str, str], tmp_path: Path
) -> None:
    place = Place(tmp_path)
    place.extra = sender
    place.step("this", "store", "a")
    place.extra = worker
    place.step("this", "trigger", "a")
    log = place.work("this")
    ends_at = time.monotonic() + PATIENCE
    while len(place.notes()) < 4 and time.monotonic() < ends_at:
        log += place.work("this")
    assert sorted(place.notes()) == ["a-approve", "a-late", "a-night", "a-ship"], log
    assert "dead-lettered" not in log
    assert "Traceback" not in log
