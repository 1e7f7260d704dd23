"""Reading, emptying and cancelling on all three brokers, with the commands as they are typed."""

import json
import os
import signal
import subprocess
import sys

import pytest
from harness import ROOT

from aztask import App
from aztask.message.envelope import Envelope
from aztask.operate.cli import main
from aztask.queues.servicebus.admin import ADMIN_VARIABLE

BROKERS = ("local", "storagequeue", "servicebus")


class Commands:
    """Commands on one broker; the queue ``mail`` is new and empty."""

    def __init__(self, name, address, folder, capsys, monkeypatch):
        self.name = name
        self.folder = folder
        self._capsys = capsys
        results = f"local://{folder}/results.db"
        monkeypatch.setenv("AZTASK_BROKER", address)
        monkeypatch.setenv("AZTASK_RESULTS", results)
        self.app = App("shop", broker=address, results=results)
        if "mail" in self.app.broker.queues():
            self.app.broker.delete("mail")
        self.app.broker.declare("mail")
        self.lease = 60.0

    def __call__(self, *arguments):
        """(exit code, stdout, stderr)"""
        self._capsys.readouterr()
        code = main.run([str(argument) for argument in arguments])
        return code, *self._capsys.readouterr()

    def json(self, *arguments):
        code, out, _ = self(*arguments, "--json")
        assert code == 0
        return [json.loads(line) for line in out.splitlines()]

    def lease_one(self):
        """Lease the queue's first message for the rest of the test."""
        lock = self.app.broker.receiver("mail", lease=self.lease)
        (delivery,) = lock.receive(1, 10.0)
        return delivery


@pytest.fixture(params=BROKERS)
def commands(request, tmp_path, capsys, monkeypatch):
    for name in ("APP", "EVENTS", "DEBUG"):
        monkeypatch.delenv(f"AZTASK_{name}", raising=False)
    if request.param == "local":
        address = f"local://{tmp_path}/queues.db"
    elif request.param == "storagequeue":
        address = request.getfixturevalue("azurite").connection_string
    else:
        bus = request.getfixturevalue("bus")
        monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
        address = bus.connection_string
    made = Commands(request.param, address, tmp_path, capsys, monkeypatch)
    yield made
    made.app.close()


def test_peek_shows_what_waits_and_says_what_it_cannot_show(commands):
    commands.app.send("shop.welcome", ["ann"], task_id="one", queue="mail")
    commands.app.send("shop.welcome", ["bob"], {"copy": True}, task_id="two", queue="mail")
    commands.app.send("shop.remind", ["eve"], task_id="later", queue="mail", delay=600)
    found = {each["id"]: each for each in commands.json("queues", "peek", "mail", "--arguments")}
    assert (found["one"]["task"], found["one"]["state"]) == ("shop.welcome", "active")
    assert (found["one"]["delivery_count"], found["one"]["resubmit_count"]) == (0, 0)
    assert (found["two"]["args"], found["two"]["kwargs"]) == (["bob"], {"copy": True})
    assert found["one"]["due_at"] is None
    _, out, err = commands("queues", "peek", "mail")
    lines = out.splitlines()
    assert lines[0].split() == [
        *("ID", "TASK", "STATE", "DUE", "ENQUEUED", "DELIVERIES", "RETRIES"),
    ]
    assert "ann" not in out
    assert '["ann"]' in commands("queues", "peek", "mail", "--arguments")[1]
    assert "args" not in commands.json("queues", "peek", "mail")[0]
    if commands.name == "storagequeue":
        assert "later" not in found
        assert err.startswith("aztask: 2 of 3 messages; this service shows only the first 32 ")
    else:
        assert found["later"]["state"] == "scheduled"
        assert found["later"]["due_at"] > found["later"]["enqueued_at"]
        assert bool(err) == (commands.name == "servicebus")


def test_peek_pages_up_to_its_limit(commands):
    count = 20 if commands.name == "storagequeue" else 1100
    commands.app.send("t", queue="mail")
    task = commands.app.task(name="shop.many", queue="mail")(lambda number: number)
    task.map([(number,) for number in range(count)])
    paged = commands.name != "storagequeue"
    assert len(commands.json("queues", "peek", "mail", "--limit", 1050)) == (1050 if paged else 21)
    assert len(commands.json("queues", "peek", "mail", "--limit", 5)) == 5
    assert "5 of " in commands("queues", "peek", "mail", "--limit", 5)[2]


def test_peek_shows_foreign_messages_as_such(commands):
    commands.app.broker.send("mail", [Envelope(b"hello", message_id="foreign")])
    (found,) = commands.json("queues", "peek", "mail", "--arguments")
    assert found["task"] is None
    assert found["problem"]
    assert "(cannot be read: " in commands("queues", "peek", "mail", "--arguments")[1]
    assert commands("queues", "peek", "nosuch")[0] == 5


def test_purge_counts_asks_and_empties(commands):
    for task_id in ("one", "two", "three"):
        commands.app.send("shop.welcome", ["ann"], task_id=task_id, queue="mail")
    commands.app.send("shop.welcome", ["ann"], task_id="later", queue="mail", delay=600)
    commands.lease_one()
    included = commands.name == "storagequeue"
    about = "leased ones included" if included else "except leased"
    what = f"delete 4 messages in queue mail, {about}"
    assert commands("queues", "purge", "mail", "--dry-run")[:2] == (0, f"would {what}\n")
    code, out, err = commands("queues", "purge", "mail")
    assert (code, out) == (2, "")
    assert f"this would {what}; add --yes" in err
    code, out, err = commands("queues", "purge", "mail", "--yes")
    assert (code, out) == (0, f"deleted {4 if included else 3} messages in queue mail\n")
    assert ("1 message left: leased or new" in err) == (not included)
    assert commands("queues", "purge", "nosuch", "--yes")[0] == 5


def test_cancel_by_task_and_queue(commands):
    for number in range(3):
        commands.app.send("shop.welcome", [], task_id=f"w{number}", queue="mail")
    commands.app.send("shop.remind", [], task_id="r", queue="mail")
    select = ("cancel", "--task", "shop.welcome", "--queue", "mail")
    code, out, err = commands(*select, "--dry-run")
    assert (code, out) == (0, "would cancel 3 tasks (3 shop.welcome in mail)\n")
    assert ("shows only the first 32" in err) == (commands.name == "storagequeue")
    assert commands(*select)[0] == 2, "not a terminal, and no --yes"
    assert commands.app.result("w0").state == "pending"
    assert commands(*select, "--yes")[:2] == (0, "cancelled 3 tasks\n")
    states = [commands.app.result(each).state for each in ("w0", "w1", "w2", "r")]
    assert states == ["cancelled", "cancelled", "cancelled", "pending"]
    assert commands("cancel", "-Q", "nosuch", "--yes")[0] == 5
    assert commands("cancel", "--task", "none", "--yes")[1] == "there is nothing to cancel\n"


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_watching_ends_cleanly_at_ctrl_c(tmp_path, option):
    app = App("shop", broker=f"local://{tmp_path}/queues.db")
    app.broker.declare("mail")
    process = subprocess.Popen(
        [sys.executable, "-m", "aztask", "queues", "--watch", "--interval", "0.1", *option],
        env={**os.environ, "PYTHONPATH": str(ROOT), "AZTASK_BROKER": app.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = [process.stdout.readline() for _ in range(6)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        app.close()
    assert (process.returncode, err) == (0, "")
    if option:
        assert [json.loads(line)["queues"][0]["queue"] for line in lines] == ["mail"] * 6
    else:
        assert [line.split()[0] for line in lines] == ["QUEUE", "mail"] * 3
