"""Two owners of one result store: what a real worker and the commands do with foreign rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Site, site_in, wait_until
from ledger_app import work
from neighbour import neighbour_of

from aztask import App
from aztask.errors import ForeignId
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State


def test_a_message_with_the_id_of_another_owner_is_a_dead_letter(tmp_path: Path) -> None:
    """It is refused where it is sent; a sender without a result store cannot know."""
    with site_in(tmp_path / "site", joint=False) as site:
        other = App("other", broker=f"local://{tmp_path}/other.db", results=site.results)
        store = other.results
        assert store is not None
        store.start([Start(RunKey("a"), "t", "q", 1, "lease", "w", 1.0)])
        outcome = Outcome(State.SUCCEEDED, Complete(), b"\x01", at=2.0)
        assert store.record([Finish(RunKey("a"), "lease", outcome)]) == [True]
        with pytest.raises(ForeignId, match="use another task id"):
            site.app().send(work.name, ["a"], task_id="a")
        blind = App("ledger", broker=site.broker)
        blind.send(work.name, ["a"], task_id="a")
        blind.send(work.name, ["b"], task_id="b")
        site.worker("-c", "2")
        letters = DeadLetters(site.app(), "default")
        found = Selection(reason="id-of-another-owner")
        wait_until(lambda: len(list(letters.find(found))) == 1, 60, "it is a dead letter")
        assert site.app().result("b").get(timeout=60) == "b"
        (letter,) = letters.find(found)
        for broker in (other.owner.broker, site.app().owner.broker):
            assert broker in letter.description
        assert other.result("a").get(timeout=0) == 1
        assert letters.replay(found).done == 1
        assert site.app().result("a").get(timeout=60) == "a"
        assert other.result("a").get(timeout=0) == 1
        assert site.counts("end") == {"a": 1, "b": 1}
        for app in (blind, other):
            app.close()


def aztask(site: Site, *words: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "aztask", *words],
        cwd=site.folder,
        env={**site.environment, "AZTASK_APP": "ledger_app:app"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_show_other_owners_and_adopt_their_rows(tmp_path: Path) -> None:
    with (
        site_in(tmp_path / "site", joint=False) as site,
        neighbour_of(site, check=False) as neighbour,
    ):
        site.app().broker.declare("default")
        shown = aztask(site, "result", "--json")
        rows = {row["id"]: row["owner"] for row in map(json.loads, shown.splitlines())}
        assert rows["neighbour-0"] == neighbour.app.owner.broker
        listed = aztask(site, "workflow", "list", "--json")
        states = {row["id"]: row["state"] for row in map(json.loads, listed.splitlines())}
        assert states == {"neighbour-open": "foreign", "neighbour-ended": "foreign"}
        assert neighbour.app.owner.broker in aztask(site, "workers", "--json")
        assert f"shared with {neighbour.app.owner}, " in aztask(site, "doctor")
        moved = aztask(site, "doctor", "--adopt", neighbour.app.owner.broker, "--yes")
        assert moved.startswith("moved ")
        assert site.app().result("neighbour-0").state == "succeeded"
        assert site.app().workflows.result("neighbour-open").state == "started"
        with pytest.raises(ForeignId):
            neighbour.app.result("neighbour-0").ready()
