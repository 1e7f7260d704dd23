"""Many tasks, several workers, random kills. Prints attempted / lost / duplicated / recovered.

Beside them run the tasks of `mixture`; workers and pool processes are killed, and workers drain.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from azurite import account_of, running, storing
from bus import bus_site
from damaging import LOCAL_DAMAGES, RUN_DAMAGES, SqlOutsider
from harness import Site, site_in, wait_until
from hostilemessages import MALFORMED, ODD, send_raw, taken_as_it_is, task_payload, with_properties
from killing import KILL, kill_while_they_last
from ledger_app import hostile, work
from mixture import DRAINING, Mixture
from neighbour import neighbour_of

from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.base import QueueOptions
from aztask.stores.records.base import Provisioned, RunKey, State
from aztask.testing import emulator

TASKS = int(os.environ.get("CHAOS_TASKS", "2000"))
STORAGE_TASKS = TASKS // 5
"""On a Storage queue each task is several requests to one Azurite."""
BUS_TASKS = TASKS // 4
HOSTILE_TASKS = TASKS // 5
HOSTILE_ROWS = HOSTILE_TASKS // 4
SEED = int(os.environ.get("CHAOS_SEED", "20260719"))
HOSTILE = ("surrogate", "nul", "reject", "text")
"""How some tasks end: with texts that are hard to write."""
LEASE = 2.0
ARGUMENTS = ("--pool", "processes", "-c", "3", "--lease", f"{LEASE}s", "--max-lease", "60s")
MIXED = (*ARGUMENTS, *DRAINING)


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
            recent = site.app().results.recent(limit=2 * STORAGE_TASKS)
            listed = {run.key.task_id for run in recent}
            assert listed >= {f"t{n}" for n in range(STORAGE_TASKS)}
            assert sum(task_id.startswith("h") for task_id in listed) >= len(HOSTILE)


def test_random_kills_lose_nothing_on_service_bus(tmp_path: Path, capsys) -> None:
    """Every tenth task has a property of a type that the SDK cannot read, and between them are
    messages that nobody can: they become dead letters, once each, and harm no other.
    """
    options = QueueOptions(lease=LEASE, max_deliveries=1000)
    with emulator() as bus, taken_as_it_is(), bus_site(tmp_path / "site", bus, options) as site:
        site.extra["LEDGER_MAX_DELIVERIES"] = "1000"
        outsider = Outsider(site, bus.port)
        chaos(site, BUS_TASKS, capsys, outsider)
        undecodable = DeadLetters(site.app(), "default").find(Selection(reason="undecodable"))
        assert len(list(undecodable)) == outsider.unreadable > 0


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
def test_random_kills_beside_hostile_rows_lose_nothing(joint: bool, tmp_path: Path, capsys) -> None:
    """Somebody writes into the rows of runs meanwhile. Each such run ends, or its message becomes a
    dead letter that can be replayed; the others do not notice.
    """
    extra = {"LEDGER_MAX_DELIVERIES": "1000"}
    with site_in(tmp_path / "site", joint=joint, extra=extra) as site, neighbour_of(site):
        dice, app = random.Random(SEED), site.app()
        ids = [f"t{n}" for n in range(HOSTILE_TASKS)]
        for task_id in ids:
            app.send(work.name, [task_id, dice.choice([0.0, 0.02, 0.05])], task_id=task_id)
        vandal = Vandal(site, ids)
        kills = kill_while_they_last(
            site, dice, ids, ARGUMENTS, excused=vandal.strike, kinds=[KILL]
        )
        wait_until(lambda: left(site) == 0, 30, "all is settled or dead")
        letters = DeadLetters(app, "default")
        dead = {letter.id for letter in letters.find(Selection(reason="unreadable-record"))}
        assert app.broker.stats("default").dead == len(dead)
        assert dead <= vandal.struck
        ends = site.counts("end")
        assert set(ids) - dead <= set(ends), "lost"
        for task_id in set(ids) - vandal.struck:
            (run,) = app.results.history(task_id)
            assert run.state is State.SUCCEEDED
            assert ends[task_id] <= run.starts, "run again only after a kill"
        assert letters.replay(Selection(reason="unreadable-record")).done == len(dead)
        for task_id in dead:
            assert app.result(task_id).get(timeout=60) == task_id
        site.stop_workers()
        assert not any("Traceback" in worker.log for worker in site.workers)
    with capsys.disabled():
        print(
            f"\nchaos seed {SEED}: attempted {HOSTILE_TASKS} / damaged {len(vandal.struck)} / "
            f"dead and replayed {len(dead)} / lost 0 ({kills})"
        )


class Vandal:
    """Damages rows of runs: half of them before a worker meets them, the others once they have
    started. struck: the tasks whose rows it damaged.
    """

    def __init__(self, site: Site, ids: list[str]) -> None:
        self.struck: set[str] = set()
        self._site = site
        self._dice = random.Random(SEED + 1)
        self._outsider = SqlOutsider(site.results.removeprefix("local://"))
        self._left = self._dice.sample(ids, HOSTILE_ROWS)
        self._kinds = [*(RUN_DAMAGES | LOCAL_DAMAGES).values(), {"ended_at": 5.0}]
        for task_id in self._left[::2]:
            self._damage(task_id)

    def strike(self) -> set[str]:
        """Damage the rows of those whose turn it is and which were started."""
        started = {line.key for line in self._site.lines("start")}
        for task_id in [each for each in self._left if each in started]:
            self._damage(task_id)
        return self.struck | set(self._left)

    def _damage(self, task_id: str) -> None:
        self._left.remove(task_id)
        self.struck.add(task_id)
        self._outsider.damage_run(RunKey(task_id), self._dice.choice(self._kinds))


class Outsider:
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


def chaos(site: Site, tasks: int, capsys, outsider: Outsider | None = None) -> None:
    """Run `tasks` tasks under random kills; assert that each ended once, and print the count.

    Among them are tasks that fail with hostile texts: they end in the dead letters, one by one.
    outsider: sends every tenth task.
    """
    with neighbour_of(site):
        chaos_beside(site, tasks, capsys, outsider)


def chaos_beside(site: Site, tasks: int, capsys, outsider: Outsider | None) -> None:
    """As `chaos`, beside an app with a broker of its own on the same store."""
    dice = random.Random(SEED)
    mixture = Mixture(site, random.Random(SEED + 2))
    app = site.app()
    mixture.begin()
    seconds = [dice.choice([0.0, 0.01, 0.02, 0.05]) for _ in range(tasks)]
    ids = [
        outsider.send(f"t{n}", seconds[n])
        if outsider is not None and n % 10 == 0
        else app.send(work.name, [f"t{n}", seconds[n]], task_id=f"t{n}").id
        for n in range(tasks)
    ]
    odd = [f"h{n}" for n in range(max(len(HOSTILE), tasks // 50))]
    for task_id in odd:
        app.send(hostile.name, [task_id, dice.choice(HOSTILE)], task_id=task_id)
    kills = kill_while_they_last(
        site, dice, [*ids, *odd], MIXED, seconds=180 + tasks / 5, excused=mixture.go_on
    )
    others = mixture.end()
    if app.broker.capabilities.remote:  # there the settlement follows the record
        wait_until(lambda: left(site) == 0, 20, "all is settled")
    site.stop_workers()
    mixture.leave_nothing()
    assert {app.results.get(task_id).state for task_id in odd} == {State.FAILED}
    unreadable = outsider.unreadable if outsider is not None else 0
    report = account(site, ids, dead=len(odd) + unreadable)
    with capsys.disabled():
        print(
            f"\nchaos seed {SEED}: attempted {tasks} / lost {report['lost']} / duplicated "
            f"{report['duplicated']} / recovered {report['recovered']} ({kills}; {others})"
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


def dead_letters(site: Site) -> int:
    """How many there are. On Storage queues a kill between the copy and the deletion of the
    original stores one twice, so those of one task count once.
    """
    broker = site.app().broker
    stored = broker.stats("default").dead or 0
    if stored == 0 or broker.capabilities.native_dead_letter:
        return stored
    return len(
        {
            letter.id
            for letter in DeadLetters(site.app(), "default").find(Selection(everything=True))
        }
    )


def account(site: Site, ids: list[str], *, dead: int = 0) -> dict[str, int]:
    """What became of the tasks, by the ledger and by the result store.

    dead: how many dead letters there must be.
    """
    app = site.app()
    ends = site.counts("end")
    lost = duplicated = recovered = restarted = 0
    for task_id in ids:
        *struck, last = app.results.history(task_id)
        # a run whose pool process was killed has failed, and is tried again
        assert all(record.state is State.RETRYING for record in struck), task_id
        if last.state is not State.SUCCEEDED or not ends.get(task_id):
            lost += 1
        duplicated += max(0, ends.get(task_id, 0) - 1)
        starts = sum(record.starts for record in (*struck, last)) - 1
        restarted += starts
        recovered += starts > 0
    lost += abs(dead_letters(site) - dead) + left(site)
    return {
        "lost": lost,
        "duplicated": duplicated,
        "recovered": recovered,
        "restarted": restarted,
    }
