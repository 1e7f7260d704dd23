"""A task that continues with other arguments, and workers that die at any point of that."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from everyplace import PLACES, site_at
from harness import Site, wait_until
from ledger_app import rounds
from strategies import left
from test_step_kills import actions
from test_wait_kills import ARGUMENTS, LEASE

from aztask.stores.records.base import State

KILLED = (
    "step-recorded:KILL",
    "renewed:KILL",  # the arguments are recorded, the outcome is not
    "recorded:KILL",
    "settled:KILL",
    "claimed:KILL:2",  # the new history has begun, the former one is there
    "step-ran:KILL:2",  # it is removed
)


@pytest.fixture(params=PLACES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site_at(request, tmp_path / "site") as made:
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
