"""Flows that wait, while workers of this release and of a previous one serve their queue, under
random kills.

As in a rolling deploy: the flows have begun on this release, workers of the previous one are still
there, and end after a while. They have the task `flow`, too, but know no steps: what continues a
flow must not run there from its first line. FLEET_SEED=... draws other kills.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import azurite
import pytest
from fleetprocesses import Releases
from previous import BEFORE_STORED, ROOT, MissingRelease, previous_release

from aztask import App
from aztask.queues.base import QueueOptions
from aztask.stores.records.base import Provisioned, State

FLOWS = 12
ROUNDS = 3
LEASE = 5.0
MIXED_SECONDS = 40.0
PATIENCE = 300.0


class Mixed(Releases):
    """Workers of both releases in one folder."""

    def __init__(self, folder: Path, results: str, former: Path) -> None:
        places = {"FLEET_BROKER": f"local://{folder}/queues.db", "FLEET_RESULTS": results}
        super().__init__(folder, "flow_app:app", {"former": former, "this": ROOT}, places)

    def kill_one(self) -> None:
        """Kill a worker with all its processes; another of its release takes its place."""
        self.start(self.killed())

    def end(self, kind: str) -> None:
        """Stop the workers of a release, as a deploy does."""
        ending = [each for each in self.workers if each[0] == kind]
        for each in ending:
            self.workers.remove(each)
            each[1].terminate()
        for _, worker in ending:
            worker.wait(60)


@pytest.fixture(params=["local", "tables"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mixed]:
    try:
        former = previous_release(tmp_path / "former", BEFORE_STORED)
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)
    if request.param == "local":
        made = Mixed(tmp_path, f"local://{tmp_path}/results.db", former)
        yield made
        made.close()
        return
    with azurite.storing(tmp_path / "azurite") as services:
        made = Mixed(tmp_path, azurite.account_of(*services), former)
        yield made
        made.close()


def until(check: Callable[[], bool], what: str) -> None:
    ends_at = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < ends_at, what
        time.sleep(0.2)


def test_no_flow_runs_from_its_first_line_on_the_former_release(mixed: Mixed) -> None:
    app = App(
        "shop", broker=mixed.variables["FLEET_BROKER"], results=mixed.variables["FLEET_RESULTS"]
    )
    if isinstance(app.results, Provisioned):
        app.results.create()
    app.broker.declare("default", QueueOptions(lease=LEASE))
    keys = [f"f{number}" for number in range(FLOWS)]
    for key in keys:
        app.send("flow", [key, ROUNDS, []], task_id=key)
    for _ in range(2):
        mixed.start("this")
    store = app.sends.signals.store
    assert store is not None
    until(lambda: all(store.parked(key) is not None for key in keys), "all have begun")
    for _ in range(2):
        mixed.start("former")
    ends_at, kills = time.monotonic() + MIXED_SECONDS, 0
    due = [(key, number) for number in range(ROUNDS) for key in keys]
    while time.monotonic() < ends_at:
        time.sleep(mixed.draw.uniform(0.2, 1.0))
        app.send("child", ["plain"])
        if due:
            key, number = due.pop(0)
            app.result(key).signal("go", number)
        if kills < MIXED_SECONDS / 4 and mixed.draw.random() < 0.4:
            mixed.kill_one()
            kills += 1
    for key, number in due:
        app.result(key).signal("go", number)
    mixed.end("former")
    until(lambda: all(app.result(key).ready() for key in keys), "all have ended")
    for key in keys:
        wanted = [[ROUNDS - n, [True, f"{key}-{ROUNDS - n}"], n] for n in range(ROUNDS)]
        assert app.result(key).get(timeout=0) == [each for one in wanted for each in one]
        ends = [run.state for run in app.results.history(key) if run.state.final]
        assert ends == [State.SUCCEEDED], "its end is recorded once"
    notes = mixed.notes()
    ran = Counter(" ".join(words[:2]) for words in notes)
    print(f"{kills} kills, {dict(ran)}")
    assert kills >= 3
    assert ran["former child"], "the former release was there"
    assert not ran["former flow"], "a continuation ran from its first line"
    step_keys = defaultdict(set)
    for words in notes:
        if words[1] == "act":
            step_keys[words[2], words[3]].add(words[4])
    assert len(step_keys) == FLOWS * ROUNDS
    assert {len(each) for each in step_keys.values()} == {1}, "a step that runs again has its key"
    assert app.broker.stats("default").dead == 0
    app.close()
