"""Service Bus through a proxy that misbehaves: renewals, settlements, sends and receives."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from bus import address_at, broker_at, bus_site
from harness import wait_until
from ledger_app import work
from proxy import Proxy

from aztask.address.addresses import ServiceBusAddress
from aztask.address.urls import parse_broker
from aztask.errors import BrokerUnavailable, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.base import Delivery, Lost, QueueOptions, Receiver, Renewed, Settled, Unknown
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.settlement import Complete, Resubmit, with_envelope
from aztask.testing import RunningEmulator

LEASE = 20.0
REQUESTS = re.compile(rb"com\.microsoft:(renew-lock|update-disposition)")
_names = count(1)


class Bench:
    """broker: through the proxy. direct: past it."""

    def __init__(self, bus: RunningEmulator) -> None:
        self.proxy = Proxy(bus.port, requests=REQUESTS)
        self.broker: ServiceBusBroker = broker_at(bus, port=self.proxy.port)
        self.direct: ServiceBusBroker = broker_at(bus)
        self.name = f"faults-{next(_names)}"
        self.direct.declare(self.name, QueueOptions(lease=LEASE))

    def held(self) -> tuple[Receiver, Delivery]:
        """A message that is leased through the proxy, whose connections are all open."""
        self.direct.send(self.name, [Envelope(b"x", message_id="m")])
        receiver = self.broker.receiver(self.name, lease=LEASE)
        (delivery,) = receiver.receive(1, 10.0)
        assert isinstance(receiver.renew([delivery])[0], Renewed)
        return receiver, delivery

    def bodies(self) -> list[bytes]:
        return [peeked.envelope.body for peeked in self.direct.peek(self.name)]

    def close(self) -> None:
        self.proxy.set("reset")
        self.broker.close()
        self.direct.close()
        self.proxy.close()


@pytest.fixture
def bench(bus: RunningEmulator) -> Iterator[Bench]:
    made = Bench(bus)
    yield made
    made.close()


def test_a_renewal_whose_connection_is_reset_is_made_over_another(bench: Bench) -> None:
    receiver, delivery = bench.held()
    bench.proxy.reset_all()
    assert isinstance(receiver.renew([delivery])[0], Renewed)


def test_a_renewal_without_answer_is_unknown_well_within_the_lease(bench: Bench) -> None:
    receiver, delivery = bench.held()
    deadline = delivery.deadline
    bench.proxy.set("blackhole")
    began = time.monotonic()
    assert isinstance(receiver.renew([delivery])[0], Unknown)
    assert time.monotonic() - began < LEASE / 2
    assert delivery.deadline == deadline
    bench.proxy.set("pass")
    assert isinstance(receiver.renew([delivery])[0], Renewed)


def test_a_settlement_whose_reply_was_lost_is_found_settled(bench: Bench) -> None:
    """The first request took effect; its repetition finds the lock gone, and that is no failure."""
    receiver, delivery = bench.held()
    bench.proxy.hook = lambda line, number: (
        "drop-reply" if line.endswith(b"update-disposition") else None
    )
    answers = receiver.settle([(delivery, Complete())])
    if isinstance(answers[0], Unknown):
        bench.proxy.hook = None
        answers = receiver.settle([(delivery, Complete())])
    assert answers == [Settled()]
    assert bench.bodies() == []


def test_a_lock_that_somebody_else_has_by_now_is_lost(bench: Bench, bus: RunningEmulator) -> None:
    receiver, delivery = bench.held()
    bench.direct.delete(bench.name)
    bench.direct.declare(bench.name, QueueOptions(lease=LEASE))
    assert isinstance(receiver.settle([(delivery, Complete())])[0], Lost | Unknown)


def test_an_original_is_not_completed_when_its_clone_could_not_be_sent(bench: Bench) -> None:
    receiver, delivery = bench.held()
    bench.proxy.set("reset")
    clone = with_envelope(Resubmit(), Envelope(b"clone", message_id="m1"), 0.0)
    assert isinstance(receiver.settle([(delivery, clone)])[0], Unknown)
    assert bench.bodies() == [b"x"]
    bench.proxy.set("pass")
    assert receiver.settle([(delivery, clone)]) == [Settled()]
    assert bench.bodies() == [b"clone"]


def test_a_send_while_nothing_answers_says_that_nothing_was_stored(bench: Bench) -> None:
    bench.proxy.set("reset")
    with pytest.raises(BrokerUnavailable, match=bench.name):
        bench.broker.send(bench.name, [Envelope(b"x")])
    assert bench.bodies() == []


def test_a_send_over_a_connection_that_ended_while_idle_goes_over_another(bench: Bench) -> None:
    bench.broker.send(bench.name, [Envelope(b"1")])
    time.sleep(1.2)
    bench.proxy.reset_all()
    time.sleep(0.2)
    bench.broker.send(bench.name, [Envelope(b"2")])
    assert bench.bodies() == [b"1", b"2"]


def test_a_send_without_answer_carries_what_to_send_again(bench: Bench) -> None:
    bench.broker.send(bench.name, [Envelope(b"1")])
    bench.proxy.set("drop-reply")
    sent = [Envelope(b"2", message_id="two"), Envelope(b"3", message_id="three")]
    with pytest.raises(SendUnconfirmed) as caught:
        bench.broker.send(bench.name, sent)
    assert list(caught.value.unconfirmed) == sent


def test_a_message_too_large_after_a_batch_leaves_that_batch_sent(bus: RunningEmulator) -> None:
    """Larger than a batch takes, where the broker was told that the queue takes more."""
    address = parse_broker(address_at(bus))
    assert isinstance(address, ServiceBusAddress)
    broker = ServiceBusBroker(address, admin=bus.admin_connection_string, max_message_bytes=2**24)
    name = f"faults-{next(_names)}"
    broker.declare(name, QueueOptions(lease=LEASE))
    sizes = [900_000, 3_000_000, 10]
    sent = [Envelope(b"x" * size, message_id=f"m{n}") for n, size in enumerate(sizes)]
    with pytest.raises(SendUnconfirmed, match="larger than") as caught:
        broker.send(name, sent)
    stored = [peeked.envelope.message_id for peeked in broker.peek(name)]
    assert stored == ["m0"]
    assert [each.message_id for each in caught.value.unconfirmed] == ["m1", "m2"]
    broker.close()


def test_a_receive_goes_on_after_its_connection_was_reset(bench: Bench) -> None:
    receiver = bench.broker.receiver(bench.name, lease=LEASE)
    assert receiver.receive(1, 0.2) == []
    bench.proxy.reset_all()
    bench.direct.send(bench.name, [Envelope(b"x")])
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        try:
            if deliveries := receiver.receive(1, 1.0):
                break
        except BrokerUnavailable:
            continue
    assert [each.envelope.body for each in deliveries] == [b"x"]


def test_a_settlement_is_not_held_up_by_a_waiting_receive(bench: Bench) -> None:
    receiver, delivery = bench.held()
    thread = threading.Thread(target=receiver.receive, args=(1, 3.0))
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    assert receiver.settle([(delivery, Complete())]) == [Settled()]
    assert time.monotonic() - began < 2.0
    thread.join()


def test_a_task_ten_locks_long_runs_once_while_every_third_renewal_gets_no_answer(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    lease = 4.0  # an unanswered renewal leaves a second of it, also on a busy machine
    proxy = Proxy(bus.port, requests=REQUESTS)
    proxy.hook = lambda line, number: (
        "drop-reply" if line.endswith(b"renew-lock") and number % 3 == 0 else None
    )
    options = QueueOptions(lease=lease)
    with bus_site(tmp_path / "site", bus, options, port=proxy.port) as site:
        assert site.broker == address_at(bus, proxy.port)
        app = site.app()
        worker = site.worker("-Q", "default", "-c", "2", "--lease", f"{lease}s")
        app.send(work.name, ["long", 10 * lease], task_id="long")
        assert app.result("long").get(timeout=60 + 10 * lease) == "long"
        wait_until(lambda: not app.broker.peek("default"), 10, "it is settled")
        assert site.counts("start")["long"] == 1
        assert proxy.counts["renew-lock"] >= 10
        assert worker.stop() == 0, worker.log
    proxy.close()
