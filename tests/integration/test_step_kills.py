"""A worker that dies around each record of a step, and another one that goes on after it."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from harness import Site, site_in
from ledger_app import five_steps

from aztask.stores.records.base import State

LEASE = 1.5
ARGUMENTS = ("--pool", "processes", "-c", "1", "--lease", f"{LEASE}s", "--max-lease", "60s")
NAMES = ("one", "two", "three", "four", "five")


def actions(site: Site) -> Counter[tuple[str, str]]:
    """How often each step acted, by its name and its key."""
    lines = [line.split() for line in site.ledger.read_text().splitlines()]
    return Counter((line[0].removeprefix("step-"), line[1]) for line in lines if "step-" in line[0])


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
@pytest.mark.parametrize("number", [1, 3, 5])
@pytest.mark.parametrize("step", ["step-ran", "step-recorded"])
def test_killed_around_a_record(step: str, number: int, joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=joint) as site:
        app = site.app()
        app.send(five_steps.name, ["a"], task_id="a")
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL:{number}")
        assert first.wait() == -signal.SIGKILL, first.log
        second = site.worker(*ARGUMENTS)
        assert app.result("a").get(timeout=20) == [f"a-{name}" for name in NAMES]
        assert [record.state for record in app.results.history("a")] == [State.SUCCEEDED]
        assert second.stop() == 0, second.log
        found = actions(site)
        assert {name for name, _ in found} == set(NAMES)
        assert len(found) == len(NAMES), "a step that ran twice had the same key"
        again = {name for (name, _), times in found.items() if times > 1}
        # The pool process may have been faster than the signal: then it went on, and the step that
        # it ran when it died runs again. None that was recorded at the kill does.
        recorded = NAMES[: number if step == "step-recorded" else number - 1]
        assert len(again) <= 1
        assert again.isdisjoint(recorded)
