"""Workers of several machines: each in a folder of its own, with nothing in common but Azure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import azurite
import pytest
from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas
from azurite import Azurite
from harness import ROOT, Site, site_in, wait_until
from ledger_app import big, flaky, steps, work
from proxy import Proxy, proxied
from test_kills import runs_allowed

from aztask import App
from aztask.errors import TaskCancelled
from aztask.message.payload import StoredValue, names_in
from aztask.operate.deadletters.view import DeadLetters
from aztask.stores.payloads.store import PayloadKind, new_name
from aztask.stores.records.base import Provisioned, State
from aztask.stores.records.tables.store import TablesResults
from aztask.stores.records.workflows import DocumentChange
from aztask.stores.tables.client import TimeBudget

LEASE = 2.0
ARGUMENTS = ("-Q", "default", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The account's queues, tables and blobs: its connection string."""
    folder = tmp_path_factory.mktemp("account")
    with azurite.storing(folder) as stores, azurite.running(folder / "queue") as queues:
        yield azurite.account_of(queues, *stores)


@pytest.fixture
def machines(services: str, tmp_path: Path) -> Iterator[list[Site]]:
    """Two folders with an app on one account; the queue is new."""
    with (
        site_in(tmp_path / "one", joint=False, broker=services, results=services) as one,
        site_in(tmp_path / "two", joint=False, broker=services, results=services) as two,
    ):
        app = one.app()
        for queue in app.broker.queues():
            app.broker.delete(queue)
        app.broker.declare("default")
        assert isinstance(app.results, Provisioned)
        app.results.create()
        yield [one, two]


KINDS = ("t-a", "x", "c-0", "i-0-x", "w", "d-q", "k-n", "s-s", "u-0", "g-w;part", "o-0", "e-0", "z")
"""The partitions of each kind (`aztask.stores.records.tables.names`), and one of a kind to come."""


def test_every_row_of_every_kind_is_scanned_for_payloads(machines: list[Site]) -> None:
    results = machines[0].app().results
    assert isinstance(results, TablesResults)
    hidden = {}
    for kind in KINDS:
        stored = StoredValue.of(new_name(PayloadKind.ARGUMENTS, None, kind), b"data")
        first, second = str(stored)[:90].encode(), str(stored)[90:].encode()
        row = {"PartitionKey": kind, "RowKey": "scanned", "part9": first, "part10": second}
        assert results._requests.insert(TimeBudget(), row)
        hidden[stored.name] = kind
    long = StoredValue.of(new_name(PayloadKind.ARGUMENTS, None, "long"), b"data")
    document = DocumentChange("w", "long", b"x" * 200_000 + str(long).encode())
    assert results.workflows.write([document]) != [None]
    hidden[long.name] = "a document in a blob"
    found = {name for row in results.scan() for name in names_in(row)}
    assert [kind for name, kind in hidden.items() if name not in found] == []
    for kind in KINDS:
        results._requests.delete(TimeBudget(), kind, "scanned")


def total(site: Site) -> int:
    return site.app().broker.stats("default").total or 0


def runs(machines: list[Site], event: str, key: str) -> int:
    return sum(len(site.lines(event, key)) for site in machines)


@pytest.mark.parametrize("step", ["claimed", "ran", "unindexed", "recorded", "settled"])
def test_killed_at_a_step_and_another_machine_goes_on(machines: list[Site], step: str) -> None:
    """Above all ``recorded``: the other one settles as it was recorded, and runs nothing."""
    one, two = machines
    app = one.app()
    app.send(work.name, [step], task_id=f"killed-{step}")
    first = one.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL")
    assert first.wait() == -signal.SIGKILL, first.log
    second = two.worker(*ARGUMENTS)
    assert app.result(f"killed-{step}").get(timeout=30) == step
    wait_until(lambda: total(one) == 0, 20, "all is settled")
    least, most = runs_allowed(step, joint=False)
    assert least <= runs(machines, "end", step) <= most
    if step in ("unindexed", "recorded"):
        assert runs(machines, "end", step) == 1
    history = app.results.history(f"killed-{step}")
    assert [record.state for record in history] == [State.SUCCEEDED]
    assert f"killed-{step}" in [run.key.task_id for run in app.results.recent()]
    assert second.stop() == 0, second.log


def test_one_machine_sees_and_stops_what_another_runs(machines: list[Site]) -> None:
    one, two = machines
    worker = one.worker(*ARGUMENTS, "--name", "elsewhere")
    app = two.app()
    app.send(steps.name, ["seen", 60.0], task_id="seen")

    def seen() -> list[tuple[str, str]]:
        return [
            (worker.name, task.task_id)
            for worker in app.results.workers()
            for task in worker.tasks
            if not worker.stopped
        ]

    wait_until(lambda: seen() == [("elsewhere", "seen")], 20, "its worker tells of it")
    assert app.result("seen").cancel(running=True)
    with pytest.raises(TaskCancelled):
        app.result("seen").get(timeout=20)
    assert len(one.lines("stopped", "seen")) == 1
    wait_until(lambda: total(one) == 0, 20, "its message is gone")
    assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("step", ["ran", "recorded"])
def test_frozen_past_its_lease_and_thawed_on_another_machine(
    machines: list[Site], step: str
) -> None:
    one, two = machines
    app = one.app()
    task_id = f"frozen-{step}"
    app.send(work.name, ["a"], task_id=task_id)
    first = one.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:STOP")
    wait_until(first.stopped, 30, "the first worker freezes")
    second = two.worker(*ARGUMENTS)
    wait_until(lambda: total(one) == 0, 30, "the second worker settles it")
    before = app.results.get(task_id)
    assert before is not None
    assert before.worker.split("-")[-2] == str((second if step == "ran" else first).process.pid), (
        "whose outcome stands"
    )
    first.signal(signal.SIGCONT)
    app.send(work.name, ["b"], task_id=f"{task_id}-b").get(timeout=30)
    assert first.stop() == 0, first.log
    assert app.results.get(task_id) == before, "the thawed one recorded nothing"
    assert runs(machines, "end", "a") == (2 if step == "ran" else 1)
    assert second.stop() == 0, second.log


def test_both_machines_share_the_work_and_each_task_runs_once(machines: list[Site]) -> None:
    one, two = machines
    app = one.app()
    keys = [f"k{n}" for n in range(60)]
    results = [app.send(work.name, [key]) for key in keys]
    retried = app.send(flaky.name, ["f", 2])
    large = app.send(big.name, [300_000])
    # A short lease may end on a busy machine, and its task would run a second time.
    arguments = ("-Q", "default", "-c", "2", "--lease", "60s")
    workers = [each.worker(*arguments) for each in (one, two)]
    assert [result.get(timeout=60) for result in results] == keys
    assert retried.get(timeout=30) == 2
    assert len(large.get(timeout=30)) == 300_000
    wait_until(lambda: total(one) == 0, 20, "all is settled")
    assert [runs(machines, "end", key) for key in keys] == [1] * len(keys)
    assert len(app.results.workers()) >= 2
    for worker in workers:
        assert worker.stop() == 0, worker.log


@dataclass
class Account:
    """An account's services, of which the tables can be taken away."""

    queues: Azurite
    stores: tuple[Azurite, Azurite]
    tables: Proxy

    @property
    def through_the_proxy(self) -> str:
        return azurite.account_of(self.queues, *self.stores, table=self.tables.port)

    @property
    def past_the_proxy(self) -> str:
        return azurite.account_of(self.queues, *self.stores)


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    with (
        azurite.storing(tmp_path) as stores,
        azurite.running(tmp_path / "queue") as queues,
        proxied(stores[0].port) as proxy,
    ):
        yield Account(queues, stores, proxy)


def test_an_outage_of_the_tables_while_a_task_runs(account: Account, tmp_path: Path) -> None:
    """Its delivery waits, renewed, until the outcome is recorded; it runs once."""
    text = account.through_the_proxy
    with site_in(tmp_path / "site", joint=False, broker=text, results=text) as site:
        app = site.app()
        app.broker.declare("default")
        assert isinstance(app.results, Provisioned)
        app.results.create()
        worker = site.worker(*ARGUMENTS)
        sent = app.send(work.name, ["a", 1.0])
        wait_until(lambda: site.lines("start", "a"), 20, "it runs")
        account.tables.set("reset")
        wait_until(lambda: "deliveries are retried: the table" in worker.log, 20, "an outage")
        time.sleep(2 * LEASE)
        assert total(site) == 1, "it is not settled before its outcome is recorded"
        account.tables.set("pass")
        assert sent.get(timeout=30) == "a"
        wait_until(lambda: total(site) == 0, 20, "it is settled")
        assert len(site.lines("end", "a")) == 1
        assert worker.stop() == 0, worker.log


def test_rights_that_are_missing_keep_deliveries_waiting_and_the_worker_alive(
    account: Account, tmp_path: Path
) -> None:
    text = account.through_the_proxy
    token = generate_account_sas(
        azurite.ACCOUNT,
        azurite.KEY,
        ResourceTypes.from_string("co"),
        AccountSasPermissions.from_string("r"),
        datetime.now(UTC) + timedelta(hours=1),
        services="bt",
    )
    table, blob = account.stores
    reading = (
        f"TableEndpoint={table.endpoint};BlobEndpoint={blob.endpoint};SharedAccessSignature={token}"
    )
    with site_in(tmp_path / "site", joint=False, broker=text, results=text) as site:
        app = site.app()
        app.broker.declare("default")
        assert isinstance(app.results, Provisioned)
        app.results.create()
        worker = site.worker(*ARGUMENTS, LEDGER_RESULTS=reading)
        app.send(work.name, ["a"])
        wait_until(lambda: "1 deliveries are retried: the service ref" in worker.log, 30, "denied")
        assert "assign the role Storage Table Data Contributor" in worker.log
        assert "Traceback" not in worker.log
        assert token.partition("sig=")[2] not in worker.log
        assert worker.stop() == 0, worker.log
        assert site.lines() == []
        assert total(site) == 1


def test_background_parts_go_on_after_the_tables_have_refused_them(
    account: Account, tmp_path: Path
) -> None:
    """Reads are refused for longer than each part waits; heartbeats and outcomes are written."""
    text, past = account.through_the_proxy, account.past_the_proxy
    extra = {"AZTASK_OWNER": "refused", "SCHEDULES": json.dumps({"often": {"every": 1}})}
    with site_in(tmp_path / "site", joint=False, broker=text, results=text, extra=extra) as site:
        site._app = App("ledger", broker=past, results=past, owner="refused")
        site._app.broker.declare("default")
        assert isinstance(site._app.results, Provisioned)
        site._app.results.create()
        site.module = "schedule_app"
        worker = site.worker("-Q", "default", "-c", "1")
        wait_until(lambda: len(site.lines("end")) >= 2, 60, "the schedule runs")
        account.tables.hook = lambda line, seen: "forbid" if line.startswith(b"GET") else None
        shown: dict[str, list[str]] = {}

        def all_fail() -> bool:
            for each in failing(site, past):
                shown.setdefault(each["part"], []).append(each["since"])
            chores = any(part.startswith("chore ") for part in shown)
            return chores and {"schedules", "control"} <= shown.keys()

        wait_until(all_fail, 120, "each part is shown as failing")
        for since in shown.values():
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*", since[0])
        assert len(set(shown["control"])) == 1, "since when does not move while nothing works"
        account.tables.hook = None
        before = len(site.lines("end"))
        wait_until(lambda: len(site.lines("end")) >= before + 2, 90, "the schedule goes on")
        wait_until(lambda: failing(site, past) == [], 90, "nothing fails any more")
        assert worker.process.poll() is None
        assert "Traceback" not in worker.log, "it is a known reason"
        assert worker.stop() == 0, worker.log


def failing(site: Site, address: str) -> list[dict[str, str]]:
    """The failing parts of the site's worker, as ``aztask workers`` lists them."""
    listed = subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "ledger_app", "workers", "--json"],
        env={**site.environment, "LEDGER_BROKER": address, "LEDGER_RESULTS": address},
        cwd=site.folder,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return [each for line in listed.stdout.splitlines() for each in json.loads(line)["failing"]]


def command(folder: Path, services: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "shop.py").write_text(
        "from aztask import App\n"
        'app = App("shop")\n'
        '@app.task(queue="orders")\n'
        "def ship(order: int) -> int:\n"
        "    return order\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "aztask", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{folder}",
            "AZTASK_APP": "shop:app",
            "AZTASK_BROKER": services,
            "AZTASK_RESULTS": services,
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[str]:
    """An account with nothing in it."""
    with azurite.storing(tmp_path) as stores, azurite.running(tmp_path / "queue") as queues:
        yield azurite.account_of(queues, *stores)


def test_from_an_empty_account_by_the_command_line(tmp_path: Path, fresh: str) -> None:
    missing = "does not exist; create it with: aztask -A MODULE:APP queues create QUEUE"
    app = App("shop", broker=fresh, results=fresh)
    app.broker.declare("orders")
    found = command(tmp_path, fresh, "worker", "-Q", "orders", "--burst")
    assert found.returncode == 5, found.stderr
    assert found.stderr.strip().splitlines()[-1].endswith(missing)
    examined = command(tmp_path, fresh, "doctor", "--json")
    assert examined.returncode == 5
    lines = [json.loads(line) for line in examined.stdout.splitlines()]
    assert [line["text"].endswith(missing) for line in lines if line["subject"] == "results"] == [
        True
    ]
    asked = command(tmp_path, fresh, "send", "shop.ship", "--args", "[1]", "--task-id", "one")
    assert asked.returncode == 5, asked.stderr
    assert missing in asked.stderr
    created = command(tmp_path, fresh, "queues", "create", "orders")
    assert created.returncode == 0, created.stderr
    assert created.stdout.splitlines() == [
        "queue orders exists already",
        "the table 'aztaskresults' of tables://devstoreaccount1 is created",
        "the container 'aztask-results' of tables://devstoreaccount1 is created",
    ]
    again = command(tmp_path, fresh, "queues", "create", "orders")
    assert again.returncode == 0
    assert [line.endswith(" exists already") for line in again.stdout.splitlines()] == [True] * 3
    sent = command(tmp_path, fresh, "send", "shop.ship", "--args", "[1]", "--task-id", "one")
    assert sent.returncode == 0, sent.stderr
    worked = command(tmp_path, fresh, "worker", "-Q", "orders", "--burst", "-c", "1")
    assert worked.returncode == 0, worked.stderr
    assert app.result("one").get(timeout=5) == 1
    listed = command(tmp_path, fresh, "result", "--json")
    assert [json.loads(line)["id"] for line in listed.stdout.splitlines()] == ["one"]
    running = command(tmp_path, fresh, "result", "--state", "started")
    assert running.returncode == 4
    assert "list only ended runs" in running.stderr
    (worker,) = command(tmp_path, fresh, "workers", "--json").stdout.splitlines()
    assert json.loads(worker)["state"] == "stopped"
    examined = command(tmp_path, fresh, "doctor", "-Q", "orders", "--json")
    assert examined.returncode == 0, examined.stdout
    assert azurite.KEY not in found.stderr + examined.stdout + created.stdout
    app.close()


def test_more_dead_letters_than_the_service_shows_are_listed_from_the_table(
    machines: list[Site],
) -> None:
    one, two = machines
    app = one.app()
    for n in range(40):
        app.send("nobody.knows", [n], task_id=f"dead-{n}")
    two.extra["LEDGER_GRACE"] = "0"
    worker = two.worker(*ARGUMENTS)
    wait_until(lambda: app.broker.stats("default").dead == 40, 60, "all are dead")
    found = DeadLetters(app, "default").list(limit=100)
    assert {letter.message.id for letter in found if letter.message} == {
        f"dead-{n}" for n in range(40)
    }
    assert worker.stop() == 0, worker.log
