"""Apps of the revision before rows had owners, and of this one, on one result store.

Both revisions serve one broker, as in a rolling deploy; a second app of this revision shares the
store. No run is lost or run twice, and what the older revision wrote gets an owner.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import azurite
import pytest
from previous import BEFORE_OWNERS, ROOT, MissingRelease, previous_release
from waiting import wait_until

from aztask import App
from aztask.errors import ForeignId
from aztask.stores.records.base import Provisioned
from aztask.stores.records.workflows import workflows_of

APP = """
import os, sys
from aztask import App, chain
import aztask
assert aztask.__file__.startswith(os.environ["MIXED_PACKAGE"]), aztask.__file__
app = App(
    "shop",
    broker=os.environ["MIXED_BROKER"],
    results=os.environ["MIXED_RESULTS"],
    unknown_task_grace=30.0,
)

@app.task(name="step")
def step(*numbers):
    with open(os.environ["MIXED_NOTES"], "a") as notes:
        notes.write(f"{numbers[-1]}\\n")
    return numbers[-1]

@app.task_with_context(name="waits")
def waits(context, seconds):
    with open(os.environ["MIXED_NOTES"], "a") as notes:
        notes.write("1\\n" if hasattr(context, "sleep") else "2\\n")
    context.sleep(seconds)
    return "woke"

@app.task_with_context(name="rounds")
def rounds(context, left):
    with open(os.environ["MIXED_NOTES"], "a") as notes:
        notes.write("1\\n" if hasattr(context, "continue_with") else "2\\n")
    if left:
        context.continue_with(left - 1)
    return "done"
"""
SEND = """
from mixed_app import *
for number in range({first}, {first} + 20):
    step.with_options(task_id=f"task-{{number}}").delay(number)
chain(step.si({first} + 20), step.si({first} + 21)).delay(workflow_id="flow-{first}")
app.close()
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return previous_release(tmp_path_factory.mktemp("older"), BEFORE_OWNERS)
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(params=["local", "tables"])
def results(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of an empty result store."""
    if request.param == "local":
        yield f"local://{tmp_path}/results.db"
        return
    with azurite.storing(tmp_path / "azurite") as services:
        address = azurite.account_of(*services)
        maker = App("maker", broker="local://:memory:", results=address)
        assert isinstance(maker.results, Provisioned)
        maker.results.create()
        maker.close()
        yield address


class Mixed:
    """Processes of two revisions on one broker and one store."""

    def __init__(self, folder: Path, results: str, older: Path) -> None:
        self.folder = folder
        self.broker = f"local://{folder}/queues.db"
        self.results = results
        self.packages = {"older": older, "this": ROOT}
        (folder / "mixed_app.py").write_text(APP)

    def environment(self, revision: str) -> dict[str, str]:
        package = self.packages[revision]
        return {
            **os.environ,
            "MIXED_PACKAGE": str(package),
            "MIXED_BROKER": self.broker,
            "MIXED_RESULTS": self.results,
            "MIXED_NOTES": str(self.folder / "notes"),
            "PYTHONPATH": os.pathsep.join([str(package), str(self.folder)]),
        }

    def python(self, revision: str, code: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env=self.environment(revision),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    @contextmanager
    def worker(self, revision: str) -> Iterator[None]:
        """A worker of this revision, in the block."""
        command = [sys.executable, "-m", "aztask", "-A", "mixed_app:app", "worker"]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment(revision), stderr=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(60) == 0

    def send(self, revision: str, first: int) -> None:
        self.python(revision, SEND.format(first=first))

    def work(self, *revisions: str) -> None:
        """Workers of these revisions at the same time, until the queue is empty."""
        command = [sys.executable, "-m", "aztask", "-A", "mixed_app:app", "worker", "--burst"]
        running = [
            subprocess.Popen(command, cwd=self.folder, env=self.environment(revision))
            for revision in revisions
        ]
        assert [process.wait(300) for process in running] == [0] * len(running)

    def ran(self) -> list[int]:
        return sorted(int(line) for line in (self.folder / "notes").read_text().split())


@pytest.fixture
def mixed(tmp_path: Path, results: str, older: Path) -> Mixed:
    return Mixed(tmp_path, results, older)


@pytest.fixture
def app(mixed: Mixed) -> Iterator[App]:
    """An app of this revision on the broker that both serve."""
    app = App("shop", broker=mixed.broker, results=mixed.results)
    yield app
    app.close()


@pytest.fixture
def neighbour(mixed: Mixed) -> Iterator[App]:
    """An app of this revision with another broker on the same store."""
    app = App("shop", broker=f"local://{mixed.folder}/other.db", results=mixed.results)
    yield app
    app.close()


def test_rows_of_the_older_revision_are_adopted(mixed: Mixed, app: App, neighbour: App) -> None:
    mixed.send("older", 0)
    store, others = workflows_of(app.results), workflows_of(neighbour.results)
    assert store is not None
    assert others is not None
    assert store.open_workflows(10) == others.open_workflows(10) == []  # nobody repairs it
    mixed.work("this")
    assert mixed.ran() == list(range(22))
    assert app.workflows.result("flow-0").get(timeout=30) == 21
    assert [each.workflow for each in store.ended_workflows(10)] == ["flow-0"]
    for number in range(20):
        assert app.result(f"task-{number}").get(timeout=5) == number
        with pytest.raises(ForeignId):
            neighbour.result(f"task-{number}").ready()
    with pytest.raises(ForeignId):
        neighbour.workflows.result("flow-0").ready()


def test_the_older_revision_reads_and_ends_what_this_one_began(mixed: Mixed, app: App) -> None:
    """A rollback: the older revision opens the store, and runs what waits."""
    mixed.send("this", 0)
    mixed.work("older")
    assert mixed.ran() == list(range(22))
    assert app.workflows.result("flow-0").get(timeout=30) == 21
    assert app.result("task-3").get(timeout=5) == 3
    mixed.send("this", 100)
    mixed.work("this")
    mixed.python(
        "older",
        "from mixed_app import *\n"
        "assert app.result('task-103').get(timeout=5) == 103\n"
        "assert app.workflows.result('flow-100').get(timeout=5) == 121\n",
    )


def test_both_revisions_work_at_the_same_time(mixed: Mixed, app: App, neighbour: App) -> None:
    for first, revision in ((0, "older"), (100, "this"), (200, "older"), (300, "this")):
        mixed.send(revision, first)
    mixed.work("this", "older", "this")
    wanted = [number for first in (0, 100, 200, 300) for number in range(first, first + 22)]
    assert mixed.ran() == wanted
    for first in (0, 100, 200, 300):
        assert app.workflows.result(f"flow-{first}").get(timeout=30) == first + 21
        assert app.result(f"task-{first}").get(timeout=5) == first
    assert neighbour.results is not None
    assert neighbour.results.purge(time.time() + 3600.0) == 0
    assert app.result("task-0").get(timeout=5) == 0


def test_the_older_revision_puts_off_the_next_round(mixed: Mixed, app: App) -> None:
    """The worker of this one dies as soon as the next round is in the queue."""
    result = app.send("rounds", [1], task_id="r")
    dies = subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "mixed_app:app", "worker"],
        cwd=mixed.folder,
        env={**mixed.environment("this"), "AZTASK_FAILPOINT": "settled:KILL"},
        timeout=120,
        check=False,
    )
    assert dies.returncode == -signal.SIGKILL

    def put_off() -> bool:
        return any(
            each.envelope.headers["task"] == "rounds#renewed"
            and "aztask-unknown-since" in each.envelope.headers
            for each in app.broker.peek("default", limit=10)
        )

    with mixed.worker("older"):
        wait_until(put_off, 60, "the older worker has met it")
    mixed.work("this")
    assert result.get(timeout=10) == "done"
    assert mixed.ran() == [1, 1]


def test_the_older_revision_puts_off_what_continues_a_run(mixed: Mixed, app: App) -> None:
    """Under the plain name, it would run the task from its first line, and fail."""
    result = app.send("waits", [4.0], task_id="w")
    with mixed.worker("this"):
        wait_until(lambda: result.state == "waiting", 60, "it waits")
    mixed.python("older", "from mixed_app import *\nassert app.result('w').state == 'snoozed'\n")

    def put_off() -> bool:
        return any(
            "aztask-unknown-since" in each.envelope.headers
            for each in app.broker.peek("default", limit=10)
        )

    with mixed.worker("older"):
        wait_until(put_off, 60, "the older worker has met it")
    assert result.state == "waiting"
    mixed.work("this")
    assert result.get(timeout=10) == "woke"
    assert mixed.ran() == [1, 1]
