"""Workers of this release and of the one before make the occurrences of one app's schedules.

A second app with a broker of its own shares the result store, and even has a schedule of the same
name. The fleet is updated, rolled back and updated again, by kills: every occurrence runs once, and
none is sent to the wrong broker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import azurite
import pytest
from fleetprocesses import HERE
from previous import BEFORE_OWNERS, ROOT, MissingRelease, previous_release

from aztask import App

PATIENCE = 120.0


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to import the release from whose rows have no owners."""
    try:
        return previous_release(tmp_path_factory.mktemp("previous"), BEFORE_OWNERS)
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(params=["local", "tables"])
def results(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of the result store that both apps share."""
    if request.param == "local":
        yield f"local://{tmp_path}/results.db"
        return
    with azurite.storing(tmp_path / "azurite") as services:
        account = azurite.account_of(*services)
        app = App("setup", broker=f"local://{tmp_path}/setup.db", results=account)
        app.results.create()  # type: ignore[union-attr]
        app.close()
        yield account


class Fleet:
    """The workers of both apps, which notes tell apart."""

    def __init__(self, folder: Path, results: str, release: Path) -> None:
        self.folder, self.results = folder, results
        self._packages = {"old": release, "new": ROOT}
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, app: str, revision: str) -> None:
        path = os.pathsep.join([str(HERE), str(self._packages[revision])])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "APP": app,
            "BROKER": f"local://{self.folder}/{app}.db",
            "RESULTS": self.results,
            "NOTES": str(self.folder / "notes"),
        }
        command = ["worker", "-A", "schedules_app:app", "-c", "1", "--pool", "threads"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.workers[name] = subprocess.Popen(
                [sys.executable, "-m", "aztask", *command],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        worker = self.workers.pop(name)
        assert worker.poll() is None, self.log(name)
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(10)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def notes(self) -> list[list[str]]:
        file = self.folder / "notes"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def more(self, app: str, count: int) -> None:
        """Wait until so many further occurrences of each of the app's schedules have run."""
        schedules = (f"{app}.tick", "shared.tick")
        wanted = {name: len(self.times(app, name)) + count for name in schedules}
        self.until(lambda: all(len(self.times(app, name)) >= wanted[name] for name in schedules))

    def until(self, check: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + PATIENCE
        while not check():
            logs = "\n".join(f"{name}\n{self.log(name)[-3000:]}" for name in self.workers)
            assert time.monotonic() < ends_at, logs
            time.sleep(0.2)

    def times(self, app: str, schedule: str) -> list[int]:
        return sorted(int(at) for by, name, at, _ in self.notes() if (by, name) == (app, schedule))


@contextmanager
def fleet_in(folder: Path, results: str, release: Path) -> Iterator[Fleet]:
    fleet = Fleet(folder, results, release)
    try:
        yield fleet
    finally:
        for worker in fleet.workers.values():
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(10)


def test_updates_and_rollbacks_make_every_occurrence_once(
    results: str, release: Path, tmp_path: Path
) -> None:
    with fleet_in(tmp_path, results, release) as fleet:
        fleet.start("old-1", "shop", "old")
        fleet.more("shop", 2)
        fleet.start("other", "other", "new")  # its shared.tick is the second of that name
        fleet.more("other", 2)
        fleet.start("new-1", "shop", "new")
        fleet.more("shop", 4)
        fleet.kill("old-1")
        fleet.more("shop", 4)
        fleet.start("old-2", "shop", "old")  # rolled back, and again both at once
        fleet.more("shop", 4)
        fleet.kill("new-1")
        fleet.more("shop", 4)
        fleet.start("new-2", "shop", "new")
        fleet.more("shop", 4)
        fleet.kill("old-2")
        fleet.more("shop", 4)
        fleet.more("other", 2)
        check(fleet)
        ids = {(by, name): set() for by, name, _, _ in fleet.notes()}
        for by, name, _, task_id in fleet.notes():
            ids[by, name].add(task_id)
        assert all("~" not in each for each in ids["shop", "shared.tick"])
        assert all("~" in each for each in ids["other", "shared.tick"])
        assert not ids["shop", "shared.tick"] & ids["other", "shared.tick"]


def check(fleet: Fleet) -> None:
    """Every second of every schedule is there once, and no message is on a wrong broker."""
    kinds = Counter((by, name) for by, name, _, _ in fleet.notes())
    assert set(kinds) == {
        ("shop", "shop.tick"),
        ("shop", "shared.tick"),
        ("other", "other.tick"),
        ("other", "shared.tick"),
    }
    for by, name in kinds:
        times = fleet.times(by, name)
        assert times == list(range(times[0], times[0] + len(times))), (by, name)
    for app in ("shop", "other"):
        broker = App(app, broker=f"local://{fleet.folder}/{app}.db").broker
        assert not broker.peek("default", dead_letter=True, limit=10)
        foreign = "other" if app == "shop" else "shop"
        assert f"{foreign}.tick" not in {each.envelope.headers.get("task") for each in
                                        broker.peek("default", limit=100)}  # fmt: skip
    logs = "".join(fleet.log(path.stem) for path in fleet.folder.glob("*.log"))
    assert "unknown task" not in logs
    assert "Traceback" not in logs
