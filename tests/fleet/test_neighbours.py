"""The release before, as a wheel of its tag, beside this one on one queue and one store.

Both send, both work, and a worker that is killed is replaced by one of either release. Messages,
rows, parked runs and events of each are read by the other. FLEET_SEED=... draws other kills,
FLEET_BEFORE=... names another tag or revision.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import azurite
import emulatorprocess
import pytest
from fleetprocesses import Releases
from previous import ROOT, STANDS_FOR, MissingRelease, release_before, wheel_of

from aztask import App
from aztask.queues.base import QueueOptions
from aztask.stores.records.base import Provisioned, State

LEASE = 5.0
WORK, FLAKY, FLOWS = 40, 10, 6
"""How many each release sends."""
KILLS = 10
TURN_SECONDS = 2.0
"""What a turn of a worker's loop takes at most on a busy machine."""
PATIENCE = 240.0
RELEASES = ("before", "this")
SEND = f"""
import sys
from neighbours_app import *
from aztask import chain
release = sys.argv[1]
first = 0 if release == "before" else 1000
for number in range(first, first + {WORK}):
    work.with_options(task_id=f"work-{{number}}", delay=number % 5 * 0.5).delay(number)
for number in range(first, first + {FLAKY}):
    flaky.with_options(task_id=f"flaky-{{number}}").delay(number, 1 + number % 3)
for number in range({FLOWS}):
    flow.with_options(task_id=f"flow-{{release}}-{{number}}").delay(f"flow-{{release}}-{{number}}")
chain(work.s(first + 500), work.s()).delay(workflow_id=f"chain-{{release}}")
app.close()
"""
FLOW = """
import sys
from neighbours_app import app, flow
for key in sys.argv[2:]:
    flow.with_options(task_id=key).delay(key)
app.close()
"""
SIGNAL = """
import sys
from neighbours_app import app
for key in sys.argv[2:]:
    app.result(key).signal("go", len(key))
app.close()
"""
READ = """
import json, os, sys
from collections import Counter
from neighbours_app import app
from aztask.stores.events.sink import read_events
values = {key: app.result(key).get(timeout=5) for key in json.loads(sys.argv[2])}
events = Counter()
for event in read_events(f"{os.environ['PLACE']}/events"):
    events[f"{event.event} {event.task_id}"] += 1
states = {key: [run.state.name for run in app.results.history(key)] for key in values}
print(json.dumps({"values": values, "events": events, "states": states}))
app.close()
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the package of the release before, out of its wheel."""
    try:
        return wheel_of(release_before(), tmp_path_factory.mktemp("before"))
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)


def test_without_a_tag_a_stated_revision_stands_for_the_release_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.delenv("FLEET_BEFORE", raising=False)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert release_before(tmp_path) == STANDS_FOR
    git("tag", "v1.0.0")
    git("commit", "-q", "--allow-empty", "-m", "second")
    git("tag", "not-a-release")
    assert release_before(tmp_path) == "v1.0.0"
    git("tag", "v1.1.0")
    assert release_before(tmp_path) == "v1.0.0", "this one is v1.1.0 itself"
    git("commit", "-q", "--allow-empty", "-m", "third")
    assert release_before(tmp_path) == "v1.1.0"
    monkeypatch.setenv("FLEET_BEFORE", "v0.9")
    assert release_before(tmp_path) == "v0.9"


def test_a_release_that_a_clone_does_not_have_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingRelease, match="git fetch --unshallow") as caught:
        wheel_of("v0.0.0-none", tmp_path)
    assert "\n" not in str(caught.value)


class Neighbours(Releases):
    """Processes of both releases in one folder."""

    def __init__(self, folder: Path, before: Path, variables: dict[str, str]) -> None:
        packages = {"before": before, "this": ROOT}
        all_variables = {"FLEET_LEASE": str(LEASE), **variables}
        super().__init__(folder, "neighbours_app:app", packages, all_variables)
        self.kills: Counter[str] = Counter()

    def python(self, release: str, code: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, release, *arguments],
            cwd=self.folder,
            env=self.environment(release),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill_one(self) -> None:
        """Kill a worker with all its processes; one of either release takes its place."""
        self.kills[self.killed()] += 1
        left = {each for each, _ in self.workers}
        # a release without a worker gets the next one, so that both are there all the time
        self.start((set(RELEASES) - left or {self.draw.choice(RELEASES)}).pop())

    def only(self, release: str) -> None:
        """Kill every worker; one of this release takes their place."""
        while self.workers:
            self.kills[self.killed()] += 1
        self.start(release)


@pytest.fixture(params=["local", "servicebus and tables"])
def neighbours(
    request: pytest.FixtureRequest, tmp_path: Path, before: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Neighbours]:
    if request.param == "local":
        local = {"FLEET_BROKER": f"local://{tmp_path}/queues.db"}
        made = Neighbours(tmp_path, before, {**local, "FLEET_RESULTS": f"local://{tmp_path}/r.db"})
        yield made
        made.close()
        return
    with (
        emulatorprocess.running() as bus,
        azurite.storing(tmp_path / "azurite") as services,
    ):
        variables = {
            "FLEET_BROKER": bus["connection_string"],
            "FLEET_RESULTS": azurite.account_of(*services),
            "AZTASK_SERVICEBUS_ADMIN": bus["admin_connection_string"],
        }
        monkeypatch.setenv("AZTASK_SERVICEBUS_ADMIN", bus["admin_connection_string"])
        made = Neighbours(tmp_path, before, variables)
        yield made
        made.close()


def until(check: Callable[[], bool], what: str) -> None:
    ends_at = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < ends_at, what
        time.sleep(0.3)


def test_neighbouring_releases_share_messages_rows_parked_runs_and_events(
    neighbours: Neighbours,
) -> None:
    variables = neighbours.variables
    app = App("shop", broker=variables["FLEET_BROKER"], results=variables["FLEET_RESULTS"])
    if isinstance(app.results, Provisioned):
        app.results.create()
    app.broker.declare("default", QueueOptions(lease=LEASE))
    for release in RELEASES:
        neighbours.python(release, SEND, release)
        neighbours.start(release)
        neighbours.start(release)
    flows = [f"flow-{release}-{number}" for release in RELEASES for number in range(FLOWS)]
    store = app.sends.signals.store
    assert store is not None
    until(lambda: bool(neighbours.notes()), "the work has begun")
    for _ in range(KILLS // 2):
        time.sleep(neighbours.draw.uniform(0.5, 1.5))
        neighbours.kill_one()
    until(lambda: all(store.parked(key) is not None for key in flows), "all flows are parked")
    # Half of the flows of each release are woken by the other one.
    for release, keys in zip(RELEASES, (flows[1::2], flows[::2]), strict=True):
        neighbours.python(release, SIGNAL, *keys)
    for _ in range(KILLS - KILLS // 2):
        time.sleep(neighbours.draw.uniform(0.5, 1.5))
        neighbours.kill_one()
    wanted = outcomes(flows)
    until(lambda: all(app.result(key).ready() for key in wanted), "all have ended")
    until(lambda: all(app.workflows.result(f"chain-{each}").ready() for each in RELEASES), "chains")
    for release in RELEASES:
        # Which release ran which flow was chance so far: each runs one of each alone.
        keys = [f"flow-{each}-alone-{release}" for each in RELEASES]
        neighbours.only(release)
        alone(neighbours, app, dict(zip(RELEASES, keys, strict=True)))
        wanted |= outcomes(keys)
    assert [app.workflows.result(f"chain-{each}").get(timeout=0) for each in RELEASES] == [
        4 * 500,
        4 * 1500,
    ]
    found = {
        release: json.loads(neighbours.python(release, READ, json.dumps(list(wanted))))
        for release in RELEASES
    }
    for release in RELEASES:
        assert found[release]["values"] == wanted, f"read by {release}"
    assert found["before"] == found["this"], "rows and events say the same to both"
    unlogged = []
    for key in wanted:
        ends = [run for run in app.results.history(key) if run.state.final]
        assert [run.state for run in ends] == [State.SUCCEEDED], f"{key}: its end is recorded once"
        assert found["this"]["events"][f"enqueued {key}"] >= 1
        if not found["this"]["events"].get(f"succeeded {key}"):
            unlogged.append(ends[0])
    # A killed worker loses the events of its last turn (docs/reference/events.md), and nothing else
    # does.
    for run in unlogged:
        killed = neighbours.killed_at.get(int(run.worker.split("-")[-2]))
        assert killed is not None, f"no kill explains the missing event of {run}"
        assert run.outcome is not None
        assert killed - TURN_SECONDS < run.outcome.at < killed, f"{run} was in an earlier turn"
    assert app.broker.stats("default").dead == 0
    ran = {(words[0], words[2].split("-")[1]) for words in neighbours.notes() if words[1] == "flow"}
    print(f"{dict(neighbours.kills)} kills, {Counter(words[0] for words in neighbours.notes())}")
    assert ran == {(by, of) for by in RELEASES for of in RELEASES}, "flows of each ran on each"
    assert neighbours.kills.keys() == set(RELEASES)
    app.close()


def alone(neighbours: Neighbours, app: App, keys: dict[str, str]) -> None:
    """Workers of one release: each release sends a flow, and wakes that of the other one."""
    store = app.sends.signals.store
    assert store is not None
    for release, key in keys.items():
        neighbours.python(release, FLOW, key)
    until(lambda: all(store.parked(key) is not None for key in keys.values()), "parked alone")
    for release, key in zip(reversed(keys), keys.values(), strict=True):
        neighbours.python(release, SIGNAL, key)
    until(lambda: all(app.result(key).ready() for key in keys.values()), "ended alone")


def outcomes(flows: list[str]) -> dict[str, Any]:
    """The result of each task."""
    firsts = (0, 1000)
    return {
        **{f"work-{n}": 2 * n for first in firsts for n in range(first, first + WORK)},
        **{f"flaky-{n}": n for first in firsts for n in range(first, first + FLAKY)},
        **{key: [f"acted for {key}", len(key), 2 * len(key)] for key in flows},
    }
