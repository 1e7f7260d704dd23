"""Workers that meet damaged rows: each costs its own message a way through the dead letters."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import azurite
import pytest
from bus import bus_site
from damaging import (
    LOCAL_DAMAGES,
    RUN_DAMAGES,
    TABLES_DAMAGES,
    Outsider,
    SqlOutsider,
    TableOutsider,
)
from harness import Site, Worker, site_in, wait_until
from ledger_app import work

from aztask.errors import ResultDamaged
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.base import QueueOptions
from aztask.settlement import Complete
from aztask.stores.records.base import (
    Finish,
    Outcome,
    Provisioned,
    RunKey,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.tables.store import TABLE
from aztask.testing import RunningEmulator

LEASE = 2.0
ARGUMENTS = ("-Q", "default", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")
HEALTHY = [f"healthy-{number}" for number in range(20)]
UNREADABLE = "unreadable-record"


@contextmanager
def local_site(folder: Path, *, joint: bool) -> Iterator[tuple[Site, Outsider]]:
    with site_in(folder, joint=joint) as site:
        yield site, SqlOutsider(site.results.removeprefix("local://"))


@contextmanager
def on_azure(site: Site, account: str) -> Iterator[tuple[Site, Outsider]]:
    site.results = account
    results = site.app().results
    assert isinstance(results, Provisioned)
    results.create()
    yield site, TableOutsider(account, TABLE)


class Damaged:
    """Messages whose runs were started, and half of them ended, by a worker that is gone; every
    run's row is damaged in another way. Between them lie healthy ones.
    """

    def __init__(self, site: Site, outsider: Outsider) -> None:
        app, self.site = site.app(), site
        own = LOCAL_DAMAGES if isinstance(outsider, SqlOutsider) else TABLES_DAMAGES
        self.kinds = dict(enumerate((RUN_DAMAGES | own).items()))
        self.keys = [RunKey(f"damaged-{number}") for number in self.kinds]
        for number, key in enumerate(self.keys):
            app.send(work.name, [key.task_id], task_id=key.task_id)
            if number < len(HEALTHY):
                app.send(work.name, [HEALTHY[number]], task_id=HEALTHY[number])
        positions = {
            app.codec.from_envelope(each.envelope, "default").id: each.position
            for each in app.broker.peek("default", limit=100)
        }
        done = Outcome(State.SUCCEEDED, Complete(), b"\x01", at=time.time(), duration=0.1)
        for number, key in enumerate(self.keys):
            position = positions[key.task_id]
            app.results.start([Start(key, work.name, "default", position, "gone", "w", 1e9)])
            if number % 2:
                assert app.results.record([Finish(key, "gone", done)]) == [True]
            outsider.damage_run(key, self.kinds[number][1])
        now = time.time()
        app.results.heartbeat(WorkerRecord("broken", now, now, ("default",), 1, 1))
        outsider.damage_worker("broken", {"running": "three"})

    def letters(self) -> dict[str, str]:
        """The dead letters by task id, and why they are dead."""
        found = DeadLetters(self.site.app(), "default").list(limit=1000)
        assert {letter.reason for letter in found} <= {UNREADABLE}
        return {letter.id: letter.description for letter in found}


def check_the_worker(damaged: Damaged, worker: Worker) -> None:
    """It ran what is healthy, and none of the others, and says what it did with them, once each."""
    site, app = damaged.site, damaged.site.app()
    for task_id in HEALTHY:
        assert app.result(task_id).get(timeout=60) == task_id
    wait_until(lambda: len(damaged.letters()) == len(damaged.keys), 30, "the others are dead")
    letters = damaged.letters()
    for key in damaged.keys:
        result = app.result(key.task_id)
        assert result.state == "unreadable"
        with pytest.raises(
            ResultDamaged, match=f"the row of task {key.task_id} .* is damaged"
        ) as e:
            result.get(timeout=5)
        assert str(e.value).isprintable()
        assert letters[key.task_id] in str(e.value)
        assert site.lines(key=key.task_id) == [], "it is not run: it may have ended"
        assert worker.log.count(f"row of task {key.task_id} (") == 1
    assert worker.process.poll() is None, worker.log
    assert "Traceback" not in worker.log
    assert sorted({line.key for line in site.lines("end")}) == sorted(HEALTHY)


def check_the_replay(damaged: Damaged, worker: Worker) -> None:
    """Each dead letter is run, in a row of its own."""
    app = damaged.site.app()
    report = DeadLetters(app, "default").replay(Selection(reason=UNREADABLE))
    assert report.done == len(damaged.keys)
    for key in damaged.keys:
        assert app.result(key.task_id).get(timeout=60) == key.task_id
        assert [run.damage == "" for run in app.results.history(key.task_id)] == [False, True]
    assert worker.stop() == 0, worker.log
    assert "Traceback" not in worker.log


def check_the_commands(damaged: Damaged) -> None:
    """They list the others, as JSON too, and name what is damaged on one line."""
    site = damaged.site

    def run(*arguments: str) -> tuple[list[str], list[str]]:
        ended = subprocess.run(
            [sys.executable, "-m", "aztask", *arguments],
            env={
                **site.environment,
                "AZTASK_APP": "",
                "AZTASK_BROKER": site.broker,
                "AZTASK_RESULTS": site.results,
            },
            cwd=site.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines(), ended.stderr.splitlines()

    out, err = run("result", "--limit", "1000", "--json")
    assert {json.loads(line)["id"] for line in out} == set(HEALTHY)
    assert len(err) == 1
    assert err[0].startswith(f"aztask: warning: {len(damaged.keys)} damaged runs: damaged-")
    out, err = run("result", "--state", "unreadable", "--limit", "1000", "--json")
    assert {json.loads(line)["id"] for line in out} == {key.task_id for key in damaged.keys}
    assert err == []
    out, err = run("result", "damaged-0")
    assert [line for line in out if line.startswith("state:")] == ["state:   unreadable"]
    assert len([line for line in out if line.startswith("damaged:")]) == 1
    for command in ("workers", "running"):
        out, err = run(command, "--json")
        assert all(json.loads(line)["worker"] != "broken" for line in out)
        assert len(err) == 1
        assert err[0].startswith("aztask: warning: 1 damaged worker: broken (its running is ")
    assert len(run("workers")[0]) == 2, "the head, and the one that lives"
    out, _ = run("doctor", "-Q", "default", "--json")
    checks = {json.loads(line)["check"]: json.loads(line) for line in out}
    assert f"cannot be read: {len(damaged.keys)}: " in checks["damage"]["text"]
    assert checks["workers"]["level"] == "warning"
    out, err = run("dlq", "list", "--json", "--limit", "1000")
    assert len(out) == len(damaged.keys)
    assert err == []


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
def test_a_local_worker(tmp_path: Path, joint: bool) -> None:
    with local_site(tmp_path / "site", joint=joint) as (site, outsider):
        damaged = Damaged(site, outsider)
        worker = site.worker(*ARGUMENTS)
        check_the_worker(damaged, worker)
        check_the_commands(damaged)
        check_the_replay(damaged, worker)


def test_a_worker_on_service_bus_with_results_in_tables(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    with (
        azurite.storing(tmp_path / "azurite") as stores,
        bus_site(tmp_path / "site", bus, QueueOptions(lease=LEASE)) as made,
        on_azure(made, azurite.account_of(*stores)) as (site, outsider),
    ):
        damaged = Damaged(site, outsider)
        worker = site.worker(*ARGUMENTS)
        check_the_worker(damaged, worker)
        check_the_commands(damaged)
        check_the_replay(damaged, worker)
