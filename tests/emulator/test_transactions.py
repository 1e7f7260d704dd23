"""Transactions with real clients, and a kill between the discharge and its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from emulatorprocess import kill, start
from rawclient import RawClient, attach_frame, message, transfer_frame

from aztask.emulator.amqp import encode, sections
from aztask.emulator.amqp.link import COORDINATOR
from aztask.emulator.amqp.outgoing import frame
from aztask.emulator.broker.transactions import transactional
from aztask.queues.engine import Database, Engine
from aztask.testing import emulator
from tests.emulator.sdkversions import PROTON_SCENARIO, proton


def test_qpid_proton():
    environment = {**os.environ, "PYTHONPATH": str(proton())}
    with emulator(queues=["q", "out"]) as bus:
        with (
            ServiceBusClient.from_connection_string(bus.connection_string) as client,
            client.get_queue_sender("q") as sender,
        ):
            sender.send_messages([ServiceBusMessage(str(number)) for number in range(5)])
        done = subprocess.run(
            [sys.executable, str(PROTON_SCENARIO), f"{bus.host}:{bus.port}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout) == ["aborted", "committed", "committed"]
        engine = bus._emulator.broker.engine
        left = engine.stats("q")
        assert (left.active, left.leased) == (0, 3)  # what was not committed stays locked
        assert engine.stats("out").active == 103
        bodies = [each.payload for each in engine.peek("out", limit=3)]
        assert all(b"commit-" in body for body in bodies)


COUNT = 40


def control(number, code, *items):
    """A message to the coordinator, on handle 1."""
    body = encode.described(code, encode.list_of(list(items)))
    return transfer_frame(number, encode.described(sections.AMQP_VALUE, body), handle=1)


def prepared(port):
    """A client that has sent under a transaction; and the frame that discharges it."""
    client = RawClient(port)
    coordinator = encode.described(COORDINATOR, encode.list_of([]))
    fields = [encode.string("control"), encode.uint(1), encode.FALSE, *[encode.NULL] * 3]
    client.write(attach_frame("q") + frame(0, encode.fields(0x12, [*fields, coordinator])))
    client.write(control(0, 0x31))
    transaction = client.until("Disposition").state.value[0]
    state = transactional(transaction, encode.NULL)
    for number in range(1, COUNT + 1):
        client.write(transfer_frame(number, message(b"x" * 5000), state=state))
    for _ in range(COUNT):
        assert client.until("Disposition").state.descriptor == 0x34
    return client, control(COUNT + 1, 0x32, encode.binary(transaction), encode.FALSE)


def test_a_kill_between_discharge_and_answer_leaves_all_or_nothing(tmp_path):
    """The kill comes 0 to 9 ms after the discharge was written, while it is committed."""
    seen = set()
    for milliseconds in range(10):
        file = tmp_path / f"{milliseconds}.db"
        process, ready = start("--data", str(file), "--queue", "q")
        client, discharge = prepared(ready["port"])
        client.write(discharge)
        time.sleep(milliseconds / 1000)
        kill(process)
        client.socket.close()
        database = Database(str(file))
        seen.add(Engine(database).stats("q").active)
        database.close()
    assert seen <= {0, COUNT}
    assert COUNT in seen
