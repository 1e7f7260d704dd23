"""A task that continues with other arguments, and workers that die at any point of that."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from azurite import Azurite
from bus import bus_site
from harness import Site, site_in, wait_until
from ledger_app import rounds
from storage import storage_site
from strategies import left
from test_servicebus_worker import DETECTING, PLAIN
from test_step_kills import actions
from test_wait_kills import ARGUMENTS, BROKERS, LEASE

from aztask.stores.records.base import State
from aztask.testing import RunningEmulator

KILLED = (
    "step-recorded:KILL",
    "renewed:KILL",  # the arguments are recorded, the outcome is not
    "recorded:KILL",
    "settled:KILL",
    "claimed:KILL:2",  # the new history has begun, the former one is there
    "step-ran:KILL:2",  # it is removed
)


@pytest.fixture(params=BROKERS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    folder = tmp_path / "site"
    if request.param == "storage":
        azurite: Azurite = request.getfixturevalue("azurite")
        with storage_site(folder, azurite) as made:
            yield made
    elif request.param in ("detection", "no detection"):
        bus: RunningEmulator = request.getfixturevalue("bus")
        options = DETECTING if request.param == "detection" else PLAIN
        with bus_site(folder, bus, options) as made:
            yield made
    else:
        with site_in(folder, joint=request.param == "one file") as made:
            yield made


@pytest.mark.parametrize("failpoint", KILLED)
def test_killed_around_the_next_history(site: Site, failpoint: str) -> None:
    app = site.app()
    app.send(rounds.name, ["a", 3, []], task_id="a")
    first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=failpoint)
    assert first.wait() == -signal.SIGKILL, first.log
    second = site.worker(*ARGUMENTS)
    assert app.result("a").get(timeout=40) == [f"a-round-{number}" for number in (3, 2, 1)]
    wait_until(lambda: left(site) == 0, LEASE + 15, "all is settled")
    states = [run.state for run in app.results.history("a")]
    assert states == [State.SNOOZED, State.SNOOZED, State.SUCCEEDED]
    made = actions(site)
    assert len(made) == 3, "a step that ran twice had the same key"
    # The pool process may record the step before it notices that its worker is dead.
    assert sum(made.values()) <= (4 if failpoint == "step-ran:KILL:2" else 3)
    assert app.broker.stats("default").dead == 0
    assert second.stop() == 0, second.log
