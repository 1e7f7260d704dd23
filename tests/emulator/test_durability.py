"""Acknowledged messages survive kill -9, a restart and a full disk."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusQuotaExceededError
from emulatorprocess import kill, running, start
from rawclient import RawClient, credit_frame, disposition_frame, message, transfer_frame

from aztask.emulator.amqp.performatives import Disposition, Transfer
from aztask.emulator.amqp.sections import cut
from aztask.queues.engine import FIRST_SEQ
from aztask.testing import emulator

ROUNDS = 20


def body_of(transfer):
    sections = cut(transfer.payload)
    start, end = sections.data_items[0]
    return sections.raw[start:end]


class Traffic:
    """Sends and completes on two connections until the server dies; remembers the answers."""

    def __init__(self, port, label):
        self.label = label
        self.sent, self.acknowledged, self.confirmed, self.asked = 0, set(), set(), set()
        self._port = port
        self.threads = [threading.Thread(target=self._send), threading.Thread(target=self._take)]
        for thread in self.threads:
            thread.start()

    def _send(self):
        try:
            with RawClient(self._port) as client:
                client.attach("q")
                while True:
                    names = [b"%s-%d" % (self.label, self.sent + n) for n in range(20)]
                    client.write(
                        b"".join(
                            transfer_frame(self.sent + n, message(name))
                            for n, name in enumerate(names)
                        )
                    )
                    for _ in names:
                        answer = client.until("Disposition")
                        assert answer.state.descriptor == 0x24
                        self.acknowledged.add(names[answer.first - self.sent])
                    self.sent += 20
        except (OSError, EOFError):
            return

    def _take(self):
        try:
            with RawClient(self._port) as client:
                client.attach("q", receive=True)
                client.write(credit_frame(10_000))
                held = {}
                for performative in client.frames():
                    if isinstance(performative, Transfer):
                        held[performative.delivery_id] = body_of(performative)
                        self.asked.add(held[performative.delivery_id])
                        client.write(disposition_frame(performative.delivery_id))
                    elif isinstance(performative, Disposition) and performative.role is False:
                        last = performative.last or performative.first
                        for number in range(performative.first, last + 1):
                            self.confirmed.add(held[number])
        except (OSError, EOFError):
            return


def everything_in(data):
    """The bodies of all messages of a file, whatever their state."""
    with emulator(data=data) as bus:
        broker = bus._emulator.broker
        found, start = set(), FIRST_SEQ
        while page := broker.engine.peek("q", start, 1000):
            for looked in page:
                raw = looked.payload[looked.payload.rindex(b"\x00\x53\x75\xa0") + 5 :]
                found.add(raw)
            start = page[-1].seq + 1
        return found


def test_kill_9_in_the_middle_of_traffic(tmp_path):
    data = str(tmp_path / "bus.db")
    seeded = random.Random(9)
    acknowledged, gone, maybe = set(), set(), set()
    for number in range(ROUNDS):
        process, ready = start("--data", data, "--queue", "q")
        traffic = Traffic(ready["port"], b"round-%d" % number)
        time.sleep(seeded.uniform(0.05, 0.25))
        kill(process)
        for thread in traffic.threads:
            thread.join()
        acknowledged |= traffic.acknowledged
        gone |= traffic.confirmed
        maybe |= traffic.asked
        left = everything_in(data)
        missing = acknowledged - gone - left - maybe
        assert not missing, f"round {number}: {len(missing)} acknowledged messages are lost"
        assert not gone & left, f"round {number}: completed messages came back"
    assert acknowledged, "there was no traffic"


def test_a_restart_keeps_messages_entities_and_session_state(tmp_path):
    data = str(tmp_path / "bus.db")
    with emulator(data=data) as bus:
        bus.create_queue("q", max_deliveries=3)
        bus.create_queue("s", sessions=True)
        with ServiceBusClient.from_connection_string(bus.connection_string) as client:
            with client.get_queue_sender("q") as sender:
                sender.send_messages(ServiceBusMessage("kept", subject="s"))
            with client.get_queue_receiver("s", session_id="one") as receiver:
                receiver.session.set_state(b"state")
    with emulator(data=data) as bus:
        with bus.administration_client() as admin:
            assert admin.get_queue("q").max_delivery_count == 3
        with ServiceBusClient.from_connection_string(bus.connection_string) as client:
            with client.get_queue_receiver("q") as receiver:
                (message_,) = receiver.receive_messages(1, max_wait_time=5)
                assert (str(message_), message_.subject) == ("kept", "s")
            with client.get_queue_receiver("s", session_id="one") as receiver:
                assert receiver.session.get_state() == b"state"


def test_clients_reconnect_after_a_restart(tmp_path):
    data = str(tmp_path / "bus.db")
    with emulator(data=data, queues=["q"]) as bus:
        port, admin_port = bus.port, bus.admin_port
        client = ServiceBusClient.from_connection_string(
            bus.connection_string, retry_total=5, retry_backoff_factor=0.2
        )
        sender = client.get_queue_sender("q").__enter__()
        receiver = client.get_queue_receiver("q").__enter__()
        sender.send_messages(ServiceBusMessage("before"))
    with emulator(data=data, port=port, admin_port=admin_port):
        sender.send_messages(ServiceBusMessage("after"))
        got = []
        while len(got) < 2:
            more = receiver.receive_messages(2, max_wait_time=5)
            assert more
            for one in more:
                got.append(str(one))
                receiver.complete_message(one)
        assert got == ["before", "after"]
        client.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.fail("this test mounts a small tmpfs: run it as root", pytrace=False)
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=False)
    if done.returncode:
        pytest.fail("this test mounts a small tmpfs, which this machine refuses", pytrace=False)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_refuses_sends_and_loses_nothing(small_disk, tmp_path):
    accepted = 0
    with (
        running("--data", str(small_disk / "bus.db"), "--queue", "q") as ready,
        ServiceBusClient.from_connection_string(
            ready["connection_string"], retry_total=0
        ) as client,
        client.get_queue_sender("q") as sender,
    ):
        with pytest.raises(ServiceBusQuotaExceededError):
            while accepted < 1000:
                sender.send_messages(ServiceBusMessage(b"x" * 10_000))
                accepted += 1
        with pytest.raises(ServiceBusQuotaExceededError):
            sender.send_messages(ServiceBusMessage(b"x" * 10_000))
    assert accepted > 20
    for name in small_disk.iterdir():
        shutil.copy(name, tmp_path / name.name)
    with emulator(data=str(tmp_path / "bus.db")) as bus:
        assert bus._emulator.broker.engine.stats("q").active == accepted
