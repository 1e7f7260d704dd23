"""How connections to Service Bus end when nobody cuts them: detached links, idle closes, a busy
service, silence. Each is survived without a busy loop, well within the lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from bus import broker_at, bus_site
from harness import wait_until
from ledger_app import work
from proxy import Proxy

from aztask.emulator.amqp import AmqpError
from aztask.emulator.broker import client as client_module
from aztask.emulator.broker import management
from aztask.errors import AztaskError, BrokerUnavailable, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.base import Delivery, QueueOptions, Receiver, Renewed, Settled
from aztask.queues.servicebus import receiver as servicebus_receiver
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.settlement import Complete
from aztask.testing import RunningEmulator

LEASE = 20.0
IDLE = AmqpError("amqp:link:detach-forced", "the link was idle for ten minutes")
CLOSED = AmqpError("amqp:connection:forced", "the connection was inactive for too long")
BUSY = AmqpError("com.microsoft:server-busy", "the request was ended because of throttling")
_names = count(1)


class Bench:
    """A queue on an emulator into which faults are put from its own thread."""

    def __init__(self, bus: RunningEmulator) -> None:
        self.bus = bus
        self.broker: ServiceBusBroker = broker_at(bus)
        self.name = f"endings-{next(_names)}"
        self.broker.declare(self.name, QueueOptions(lease=LEASE))

    def receiver(self) -> Receiver:
        receiver = self.broker.receiver(self.name, lease=LEASE)
        assert receiver.receive(1, 0.1) == []
        return receiver

    def send(self, body: bytes) -> None:
        self.broker.send(self.name, [Envelope(body)])

    def taken(self, receiver: Receiver) -> Delivery:
        """The next delivery, over as many tries as a worker's intake would make."""
        until = time.monotonic() + LEASE / 2
        while time.monotonic() < until:
            try:
                if deliveries := receiver.receive(1, 1.0):
                    return deliveries[0]
            except BrokerUnavailable:
                time.sleep(0.2)
        raise AssertionError("nothing came within half a lease")

    def on_the_server(self, act: Callable[[Any], None]) -> None:
        """`act` on each connection of the emulator, on its thread."""
        server = self.bus._emulator.server
        done = threading.Event()

        def run() -> None:
            for endpoint in list(server.endpoints):
                act(endpoint)
                server.output_waiting(endpoint)
            done.set()

        assert server._server is not None
        server._server.get_loop().call_soon_threadsafe(run)
        assert done.wait(5)

    def detach_all(self) -> None:
        self.on_the_server(
            lambda endpoint: [link.detach(IDLE) for link in list(endpoint.client._addresses)]
        )

    def close_all(self) -> None:
        self.on_the_server(lambda endpoint: endpoint.connection.close(CLOSED))


@pytest.fixture
def bench(bus: RunningEmulator) -> Iterator[Bench]:
    made = Bench(bus)
    yield made
    made.broker.close()


@pytest.mark.parametrize("end", [Bench.detach_all, Bench.close_all], ids=["detached", "closed"])
def test_after_an_idle_end_everything_goes_on(bench: Bench, end: Callable[[Bench], None]) -> None:
    """Receiving, renewing, settling and sending each find their connection ended."""
    receiver = bench.receiver()
    bench.send(b"1")
    held = bench.taken(receiver)
    assert isinstance(receiver.renew([held])[0], Renewed)
    end(bench)
    began = time.monotonic()
    assert isinstance(receiver.renew([held])[0], Renewed)
    assert receiver.settle([(held, Complete())]) == [Settled()]
    time.sleep(1.1)  # a sender is looked at once it was idle for a second
    bench.send(b"2")
    again = bench.taken(receiver)
    assert again.envelope.body == b"2"
    assert receiver.settle([(again, Complete())]) == [Settled()]
    assert time.monotonic() - began < LEASE / 2


def test_a_detached_receive_says_so_and_is_no_busy_loop(bench: Bench) -> None:
    receiver = bench.receiver()
    cpu = time.process_time()
    for _ in range(4):
        bench.detach_all()
        try:
            assert receiver.receive(1, 0.5) == []
        except BrokerUnavailable as error:
            assert bench.name in str(error)
    bench.send(b"x")
    assert bench.taken(receiver).envelope.body == b"x"
    assert time.process_time() - cpu < 4.0


def test_a_busy_service_gets_the_same_send_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is refused: nothing was stored, and the error says to try again."""
    real = client_module.sendable

    def busy(*arguments: Any) -> Any:
        raise BUSY

    monkeypatch.setattr(client_module, "sendable", busy)
    with pytest.raises((BrokerUnavailable, SendUnconfirmed)) as caught:
        bench.send(b"x")
    assert "server-busy" in str(caught.value)
    monkeypatch.setattr(client_module, "sendable", real)
    assert bench.broker.peek(bench.name) == []
    bench.send(b"x")
    assert [each.envelope.body for each in bench.broker.peek(bench.name)] == [b"x"]


def test_a_busy_service_costs_no_lease(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewal and settlement are unknown while it is busy, at once, and succeed afterwards."""
    receiver = bench.receiver()
    bench.send(b"x")
    held = bench.taken(receiver)
    deadline = held.deadline

    def busy(_call: Any) -> Any:
        raise BUSY

    for name in ("renew-lock", "update-disposition"):
        monkeypatch.setitem(management.OPERATIONS, name, busy)
    began = time.monotonic()
    (renewal,) = receiver.renew([held])
    (settlement,) = receiver.settle([(held, Complete())])
    assert time.monotonic() - began < LEASE / 4
    assert (type(renewal).__name__, type(settlement).__name__) == ("Unknown", "Unknown")
    assert held.deadline == deadline
    monkeypatch.undo()
    assert isinstance(receiver.renew([held])[0], Renewed)
    assert receiver.settle([(held, Complete())]) == [Settled()]


def test_a_connection_that_went_silent_is_found_and_replaced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes and nothing fails: a connection that has been quiet for too long is tried."""
    monkeypatch.setattr(servicebus_receiver, "QUIET_SECONDS", 1.0)
    proxy = Proxy(bench.bus.port)
    through = broker_at(bench.bus, port=proxy.port)
    receiver = through.receiver(bench.name, lease=LEASE)
    assert receiver.receive(1, 0.1) == []
    proxy.set("blackhole")
    bench.send(b"x")
    began, tries = time.monotonic(), 0
    with pytest.raises(AztaskError):
        while time.monotonic() - began < LEASE:
            tries += 1
            receiver.receive(1, 1.0)
    assert time.monotonic() - began < LEASE / 2
    assert tries < 10
    proxy.reset_all()
    proxy.set("pass")
    bench.send(b"y")  # the first may be leased to the connection that was given up
    bench.taken(receiver)
    through.close()
    proxy.close()


def test_a_worker_whose_queue_is_deleted_says_so_and_goes_on_with_the_next_one(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    lease = 5.0
    with bus_site(tmp_path / "site", bus, QueueOptions(lease=lease)) as site:
        app = site.app()
        app.broker.declare("gone", QueueOptions(lease=lease))
        worker = site.worker("-Q", "default,gone", "-c", "1", "--lease", f"{lease:g}s")
        app.send(work.name, ["first"])
        wait_until(lambda: site.counts("end").get("first"), 20, "it works")
        app.broker.delete("gone")
        wait_until(lambda: "there is no queue 'gone'" in worker.log, 15, "it says so")
        lines = worker.log.count("there is no queue 'gone'")
        app.send(work.name, ["second"])
        wait_until(lambda: site.counts("end").get("second"), 15, "the other queue goes on")
        time.sleep(3.0)
        assert worker.log.count("there is no queue 'gone'") - lines <= 8, "it backs off"
        assert worker.stop() == 0, worker.log
