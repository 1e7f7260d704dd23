"""Listings of an account or namespace that other programs use too: theirs is skipped, and kept.

Each command is a real process of the command line, on Azurite and on the emulator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import azurite
import pytest
from azure.data.tables import TableClient
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.storage.blob import BlobServiceClient
from azure.storage.queue import QueueClient
from harness import ROOT

from aztask.emulator.broker.entities import Status
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.stores.records.tables.store import CONTAINER, TABLE
from aztask.testing import RunningEmulator

LONG = "a-queue-of-another-program-whose-name-has-sixty-characters-x"
LONE = "orders-poison"
FOREIGN = f"aztask: skipped 2 queues that aztask cannot use: {LONG}, {LONE}"
FOREIGN_NAMES = ("team/./odd", "ends_with_")
FOREIGN_ON_BUS = "aztask: skipped 2 queues that aztask cannot use: ends_with_, team/./odd"
LISTINGS = (("queues", "list"), ("dlq", "list"), ("dlq", "groups"))


@dataclass
class Machine:
    """Runs commands in a folder, with an environment."""

    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("AZTASK_")}
        return subprocess.run(
            [sys.executable, "-m", "aztask", *arguments],
            env={**kept, "PYTHONPATH": str(ROOT), **self.environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def listed(self, *arguments: str) -> tuple[list[dict[str, object]], list[str]]:
        """(objects of the JSON output, lines on stderr) of a command that succeeds."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr.splitlines()


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An account with queues, tables and blobs: its connection string."""
    folder = tmp_path_factory.mktemp("account")
    with azurite.storing(folder) as stores, azurite.running(folder / "queue") as queues:
        yield azurite.account_of(queues, *stores)


@pytest.fixture(scope="module")
def shared(account: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """An account with queues of ours, and with queues, tables, rows and blobs of others."""
    assert len(LONG) == 60
    addresses = {"AZTASK_BROKER": account, "AZTASK_RESULTS": account}
    machine = Machine(tmp_path_factory.mktemp("machine"), addresses)
    assert machine.run("queues", "create", "ours").returncode == 0
    foreign = [QueueClient.from_connection_string(account, name) for name in (LONG, LONE)]
    for queue in foreign:
        queue.create_queue()
        queue.send_message("theirs")
    QueueClient.from_connection_string(account, "ours-poison").send_message("not of aztask either")
    blobs = BlobServiceClient.from_connection_string(account)
    blobs.create_container("theirs")
    for container in ("theirs", CONTAINER):
        blobs.get_blob_client(container, "their/own/blob").upload_blob(b"theirs")
    TableClient.from_connection_string(account, "Theirs").create_table()
    row = {"PartitionKey": "theirs", "RowKey": "1", "theirs": 1}
    for table in ("Theirs", TABLE):
        TableClient.from_connection_string(account, table).create_entity(row)
    yield machine
    for queue in foreign:  # nothing above has touched them
        (message,) = queue.peek_messages(5)
        assert (message.content, message.dequeue_count) == ("theirs", 0)
    for container in ("theirs", CONTAINER):
        assert blobs.get_blob_client(container, "their/own/blob").exists()


@pytest.mark.parametrize("command", LISTINGS, ids=" ".join)
def test_foreign_storage_queues_are_skipped_and_named(
    shared: Machine, command: tuple[str, ...]
) -> None:
    found, said = shared.listed(*command)
    assert [each["queue"] for each in found] == ["ours"]
    assert said == [FOREIGN]
    shown = shared.run(*command)
    assert shown.returncode == 0
    assert shown.stderr.splitlines() == [FOREIGN]
    assert "ours" in shown.stdout
    assert LONG not in shown.stdout


def test_all_dead_letters_are_those_of_our_queues(shared: Machine) -> None:
    """Acting on everything leaves foreign queues alone; the fixture looks at them at the end."""
    purged = shared.run("dlq", "purge", "--all", "--yes")
    assert (purged.returncode, purged.stdout) == (0, "purged 1 dead letter\n")
    assert purged.stderr.splitlines() == [FOREIGN]


def test_the_doctor_examines_our_queues(shared: Machine) -> None:
    found, said = shared.listed("doctor")
    assert said[0] == FOREIGN
    assert not any(LONE in str(each) or LONG in str(each) for each in found)


@pytest.mark.parametrize("command", ["workers", "running"])
def test_tables_and_blobs_of_others_do_not_disturb(shared: Machine, command: str) -> None:
    assert shared.listed(command) == ([], [])


# -- Service Bus


@pytest.fixture(scope="module")
def namespace(bus: RunningEmulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A namespace with two queues of ours, and queues that are disabled or have foreign names."""
    addresses = {
        "AZTASK_BROKER": bus.connection_string,
        ADMIN_VARIABLE: bus.admin_connection_string,
    }
    machine = Machine(tmp_path_factory.mktemp("machine"), addresses)
    for name in ("ours", "team/orders/late", *FOREIGN_NAMES):
        bus.create_queue(name)
    bus.create_queue("off", status=Status.DISABLED)
    bus.create_queue("unread", status=Status.RECEIVE_DISABLED)
    bus.create_queue("in-sessions", sessions=True)
    bus.create_queue("passing-on", forward_to="ours")
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_queue_sender("team/orders/late") as sender,
        client.get_queue_receiver("team/orders/late") as receiver,
    ):
        sender.send_messages(ServiceBusMessage("not of aztask"))
        (message,) = receiver.receive_messages(1, max_wait_time=10)
        receiver.dead_letter_message(message, reason="theirs")
    yield machine


def test_foreign_service_bus_queues_are_skipped_and_named(namespace: Machine) -> None:
    found, said = namespace.listed("queues", "list")
    usable = ["in-sessions", "off", "ours", "passing-on", "team/orders/late", "unread"]
    assert [each["queue"] for each in found] == usable
    assert said == [FOREIGN_ON_BUS]


@pytest.mark.parametrize("command", ["list", "groups"])
def test_a_disabled_queue_does_not_hide_the_dead_letters_of_others(
    namespace: Machine, command: str
) -> None:
    found, said = namespace.listed("dlq", command)
    assert [(each["queue"], each["reason"]) for each in found] == [("team/orders/late", "theirs")]
    assert said[0] == FOREIGN_ON_BUS
    assert [line.split(": ")[1] for line in said[1:]] == [
        "skipped queue off",
        "skipped queue unread",
    ]
    asked_for = namespace.run("dlq", command, "-Q", "off")
    assert asked_for.returncode == 4
    (line,) = asked_for.stderr.splitlines()
    assert line.startswith("aztask: error: queue 'off' is disabled: ")


def test_the_doctor_goes_on_behind_a_disabled_queue(namespace: Machine) -> None:
    done = namespace.run("doctor", "-Q", "off,ours", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 4
    assert {each["subject"] for each in found} >= {"queue off", "queue ours"}
    assert any(each["check"] == "permissions" for each in found if each["subject"] == "queue ours")
