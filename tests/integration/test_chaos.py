"""Many tasks, several workers, random kills. Prints attempted / lost / duplicated / recovered."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from azurite import account_of, running, storing
from bus import bus_site
from harness import Site, site_in, wait_until
from hostilemessages import MALFORMED, ODD, send_raw, taken_as_it_is, task_payload, with_properties
from killing import kill_while_they_last
from ledger_app import work

from aztask.brokers.base import QueueOptions
from aztask.results.base import Provisioned, State
from aztask.testing import emulator

TASKS = int(os.environ.get("CHAOS_TASKS", "2000"))
STORAGE_TASKS = TASKS // 5
"""On a Storage queue each task is several requests to one Azurite."""
BUS_TASKS = TASKS // 4
SEED = int(os.environ.get("CHAOS_SEED", "20260719"))
LEASE = 2.0
ARGUMENTS = ("--pool", "processes", "-c", "3", "--lease", f"{LEASE}s", "--max-lease", "60s")


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
def test_random_kills_lose_nothing(joint: bool, tmp_path: Path, capsys) -> None:
    with site_in(tmp_path / "site", joint=joint, extra={"LEDGER_MAX_DELIVERIES": "1000"}) as site:
        chaos(site, TASKS, capsys)


def test_random_kills_lose_nothing_on_a_storage_queue(tmp_path: Path, capsys) -> None:
    with (
        running(tmp_path / "azurite") as server,
        site_in(
            tmp_path / "site",
            joint=False,
            broker=server.connection_string,
            extra={"LEDGER_MAX_DELIVERIES": "1000"},
        ) as site,
    ):
        site.app().broker.declare("default")
        chaos(site, STORAGE_TASKS, capsys)


def test_random_kills_lose_nothing_with_results_in_tables(tmp_path: Path, capsys) -> None:
    """The index of ended runs is whole too: no run is missing in it."""
    with storing(tmp_path) as stores, running(tmp_path / "queue") as queues:
        text = account_of(queues, *stores)
        extra = {"LEDGER_MAX_DELIVERIES": "1000"}
        with site_in(
            tmp_path / "site", joint=False, broker=text, results=text, extra=extra
        ) as site:
            results = site.app().results
            assert isinstance(results, Provisioned)
            results.create()
            site.app().broker.declare("default")
            chaos(site, STORAGE_TASKS, capsys)
            listed = {run.key.task_id for run in results.recent(limit=2 * STORAGE_TASKS)}
            assert listed == {f"t{n}" for n in range(STORAGE_TASKS)}


def test_random_kills_lose_nothing_on_service_bus(tmp_path: Path, capsys) -> None:
    """Every tenth task has a property of a type that the SDK cannot read, and between them are
    messages that nobody can: they become dead letters, once each, and harm no other.
    """
    options = QueueOptions(lease=LEASE, max_deliveries=1000)
    with emulator() as bus, taken_as_it_is(), bus_site(tmp_path / "site", bus, options) as site:
        site.extra["LEDGER_MAX_DELIVERIES"] = "1000"
        hostile = Hostile(site, bus.port)
        chaos(site, BUS_TASKS, capsys, hostile)
        letters = site.app().broker.peek("default", dead_letter=True, limit=1000)
        assert len(letters) == hostile.unreadable > 0
        assert {each.dead_letter_reason for each in letters} == {"undecodable"}


class Hostile:
    """Sends messages that no client of aztask would send. unreadable: how many of them are."""

    def __init__(self, site: Site, port: int) -> None:
        self.unreadable = 0
        self._codec = site.app().codec
        self._port = port
        self._dice = random.Random(SEED)

    def send(self, task_id: str, seconds: float) -> str:
        """A task with an odd property, and perhaps a message that cannot be read; the task's id."""
        dice = self._dice
        name = dice.choice(sorted(ODD))
        task = task_payload(self._codec, work.name, [task_id, seconds], task_id)
        payloads = [with_properties(task, {name: ODD[name][0]})]
        if dice.random() < 0.5:
            spoil = MALFORMED[dice.choice(sorted(MALFORMED))]
            payloads.append(spoil(task_payload(self._codec, work.name, ["x"], f"x-{task_id}")))
            self.unreadable += 1
        dice.shuffle(payloads)
        send_raw(self._port, "default", payloads)
        return task_id


def chaos(site: Site, tasks: int, capsys, hostile: Hostile | None = None) -> None:
    """Run `tasks` tasks under random kills; assert that each ended once, and print the count."""
    dice = random.Random(SEED)
    app = site.app()
    seconds = [dice.choice([0.0, 0.01, 0.02, 0.05]) for _ in range(tasks)]
    ids = [
        hostile.send(f"t{n}", seconds[n])
        if hostile is not None and n % 10 == 0
        else app.send(work.name, [f"t{n}", seconds[n]], task_id=f"t{n}").id
        for n in range(tasks)
    ]
    kills = kill_while_they_last(site, dice, ids, ARGUMENTS, seconds=180 + tasks / 5)
    if app.broker.capabilities.remote:  # there the settlement follows the record
        wait_until(lambda: left(site) == 0, 20, "all is settled")
    site.stop_workers()
    report = account(site, ids)
    report["lost"] -= hostile.unreadable if hostile is not None else 0
    with capsys.disabled():
        print(
            f"\nchaos seed {SEED}: attempted {tasks} / lost {report['lost']} / duplicated "
            f"{report['duplicated']} / recovered {report['recovered']} ({kills} kills)"
        )
    assert report["lost"] == 0
    # a task may finish twice only if a kill struck between its start and its record
    assert report["duplicated"] <= report["restarted"]


def left(site: Site) -> int:
    """Messages that are neither done with nor dead."""
    stats = site.app().broker.stats("default")
    if stats.total is not None:
        return stats.total
    return (stats.active or 0) + (stats.leased or 0)


def account(site: Site, ids: list[str]) -> dict[str, int]:
    """What became of the tasks, by the ledger and by the result store."""
    app = site.app()
    ends = site.counts("end")
    lost = duplicated = recovered = restarted = 0
    for task_id in ids:
        history = app.results.history(task_id)
        succeeded = [record for record in history if record.state is State.SUCCEEDED]
        assert len(history) == 1, f"{task_id} has {len(history)} runs with outcomes"
        if len(succeeded) != 1 or not ends.get(task_id):
            lost += 1
        duplicated += max(0, ends.get(task_id, 0) - 1)
        starts = history[0].starts - 1
        restarted += starts
        recovered += starts > 0
    lost += (app.broker.stats("default").dead or 0) + left(site)
    return {
        "lost": lost,
        "duplicated": duplicated,
        "recovered": recovered,
        "restarted": restarted,
    }
