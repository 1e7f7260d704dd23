"""This release beside the one whose rows have no owner, on one store: a rolling deploy.

Unique keys, debounced calls and pauses of the former release hold here, and a roll back works: the
former release opens a file that this one has written to.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import azurite
import pytest
from previous import BEFORE_OWNERS, ROOT, MissingRelease, previous_release

from aztask.address.owner import NO_OWNER, Owner
from aztask.address.urls import parse_results
from aztask.queues.engine import Database
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.tables.store import TablesResults

HERE = Path(__file__).parent
CALL = "from mixed_app import *\nprint({call}.id)"
REPAIR = """
from mixed_app import *
from aztask.worker.pipeline.uniquekeys import unique_engine
print(unique_engine(app).repair())
"""
PAUSED = """
from mixed_app import *
from aztask.limits.control import Controls
print(*sorted(Controls(app.results.controls).read().queues))
"""


class Site:
    """Two releases on one broker and one result store."""

    def __init__(self, folder: Path, former: Path, results: str) -> None:
        self.folder = folder
        self.results = results
        self.packages = {"former": former, "this": ROOT}

    def run(self, release: str, *command: str, broker: str = "queues") -> str:
        package = self.packages[release]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(package)]),
            "FLEET_PACKAGE": str(package / "aztask"),
            "MIXED_BROKER": f"local://{self.folder}/{broker}.db",
            "MIXED_RESULTS": self.results,
            "MIXED_NOTES": str(self.folder / "notes"),
        }
        done = subprocess.run(
            [sys.executable, *command], env=environment, cwd=self.folder, timeout=120,
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def code(self, release: str, code: str, broker: str = "queues") -> str:
        return self.run(release, "-c", code, broker=broker)

    def call(self, release: str, call: str, broker: str = "queues") -> str:
        """The id of the task that a call of this release returns."""
        return self.code(release, CALL.format(call=call), broker)

    def command(self, release: str, *words: str) -> str:
        return self.run(release, "-m", "aztask", *words, "-A", "mixed_app:app")

    def work(self, release: str) -> list[str]:
        """What has run in all, after a worker of this release has emptied the queue."""
        self.command(release, "worker", "--burst", "-c", "1", "--pool", "threads")
        notes = self.folder / "notes"
        return notes.read_text().splitlines() if notes.exists() else []

    def repaired(self, release: str, broker: str = "queues") -> int:
        return int(self.code(release, REPAIR, broker))


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to import the former release from."""
    try:
        return previous_release(tmp_path_factory.mktemp("former"), BEFORE_OWNERS)
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(params=["local", "tables"])
def site(request: pytest.FixtureRequest, tmp_path: Path, former: Path) -> Iterator[Site]:
    if request.param == "local":
        yield Site(tmp_path, former, f"local://{tmp_path}/results.db")
        return
    with azurite.storing(tmp_path / "azurite") as services:
        account = azurite.account_of(*services)
        store = TablesResults(parse_results(account))  # type: ignore[arg-type]
        store.create()
        store.close()
        yield Site(tmp_path, former, account)


def test_a_key_of_the_former_release_is_held_here_and_freed_here(site: Site) -> None:
    first = site.call("former", "single.delay('a')")
    assert site.call("this", "single.delay('a')") == first
    assert site.work("this") == ["single a"]
    second = site.call("this", "single.delay('a')")
    assert second != first
    assert site.call("this", "single.delay('a')") == second
    # The former release does not see the holder, as the page on unique tasks says.
    assert site.call("former", "single.delay('a')") != second


def test_a_task_of_this_release_that_the_former_one_ran_holds_no_key(site: Site) -> None:
    first = site.call("this", "single.delay('a')")
    assert site.work("former") == ["single a"]
    assert site.call("this", "single.delay('a')") != first
    assert site.work("this") == ["single a", "single a"]


@pytest.mark.parametrize("last", ["former", "this"])
def test_a_debounced_call_of_both_releases_is_sent_once(site: Site, last: str) -> None:
    first = site.call("former", "settled.delay('a', 1)")
    assert site.call("this", "settled.delay('a', 2)") == first
    time.sleep(2.5)  # its quiet time, and the clock of a table, which is up to a second late
    assert site.repaired(last) == 1
    assert site.repaired("this") == site.repaired("former") == 0
    assert site.work(last) == ["settled a 2"]


def test_a_debounced_call_of_this_release_is_sent_by_its_own_broker_alone(site: Site) -> None:
    site.call("this", "settled.delay('a', 1)")
    time.sleep(2.5)
    assert site.repaired("former") == 0
    assert site.repaired("this", "another") == 0, "another broker, the same code"
    assert site.repaired("this") == 1
    assert site.work("this") == ["settled a 1"]


def test_a_pause_of_the_former_release_holds_until_it_is_resumed_here(site: Site) -> None:
    site.command("former", "control", "pause", "-Q", "default")
    assert site.code("this", PAUSED) == "default"
    assert site.code("this", PAUSED, "another") == "default", "it has no owner"
    site.command("this", "control", "resume", "-Q", "default")
    assert site.code("former", PAUSED) == site.code("this", PAUSED) == ""
    site.command("this", "control", "pause", "-Q", "default")
    assert site.code("this", PAUSED, "another") == ""
    assert site.code("former", PAUSED) == "", "it does not see it, as the page says"


def test_holders_of_a_task_that_no_code_declares_stay_for_others(site: Site) -> None:
    """A worker of another app, of this release, repairs nothing of the former release."""
    site.call("former", "settled.delay('a', 1)")
    time.sleep(2.5)
    code = REPAIR.replace("print(", "del app.tasks['mixed.settled']\nprint(")
    assert site.code("this", code, "another") == "0"
    assert site.repaired("this") == 1


def opened(site: Site, owner: Owner) -> LocalResults | TablesResults:
    address = parse_results(site.results)
    if site.results.startswith("local://"):
        return LocalResults(Database(address.path), owner=owner)  # type: ignore[union-attr]
    return TablesResults(address, owner=owner)  # type: ignore[arg-type]


def test_both_releases_write_to_their_own_places(site: Site) -> None:
    site.call("former", "single.delay('a')")
    site.call("this", "single.delay('b')")
    store = opened(site, NO_OWNER)
    try:
        assert [each.key.split(":")[0] for each in store.uniques.due(1e11, 10)] == ["mixed.single"]
        owners = store.uniques.owners()
    finally:
        store.close()
    assert len(owners) == 2
    assert NO_OWNER in owners
