"""Leases that are not the queue's lock, where the right to manage is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from harness import site_in, wait_until
from ledger_app import retry_later
from proxy import Proxy

from aztask import App
from aztask.address.addresses import ServiceBusAddress
from aztask.address.urls import parse_broker
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.base import AnySession, Delivery, QueueOptions, Receiver, Settled
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.settlement import Complete
from aztask.testing import Right, Rule, RunningEmulator, emulator

MAIN = "main-key-of-this-test"
RULES = {
    "worker": Rule("worker-key", frozenset({Right.LISTEN, Right.SEND})),
    "listener": Rule("listener-key", frozenset({Right.LISTEN})),
}
LOCK = 60.0
_names = count(1)


class Bench:
    """An emulator whose clock may be off, a broker with few rights, and one with all of them."""

    def __init__(self, bus: RunningEmulator, who: str, port: int | None = None) -> None:
        self.bus = bus
        self.manager = self._broker(bus.connection_string, bus.admin_connection_string)
        self.address, self.admin = (self._of(who, each) for each in (bus.port, bus.admin_port))
        self.broker = self._broker(self._of(who, port or bus.port), self.admin)
        self.queue = f"lock-{next(_names)}"

    def _of(self, who: str, port: int) -> str:
        return (
            f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName={who};"
            f"SharedAccessKey={who}-key;UseDevelopmentEmulator=true"
        )

    def _broker(self, text: str, admin: str) -> ServiceBusBroker:
        address = parse_broker(text)
        assert isinstance(address, ServiceBusAddress)
        return ServiceBusBroker(address, admin=admin)

    def declare(self, lock: float = LOCK, *, sessions: bool = False) -> None:
        self.manager.declare(self.queue, QueueOptions(lease=lock, sessions=sessions or None))

    def send(self, number: int, session: str | None = None) -> None:
        self.manager.send(
            self.queue, [Envelope(b"%d" % number, message_id=f"m{number}", session=session)]
        )

    def counts(self) -> list[int]:
        """How often each message in the queue was delivered, as the service counts."""
        return [each.delivery_count for each in self.manager.peek(self.queue)]

    def close(self) -> None:
        self.broker.close()
        self.manager.close()


@pytest.fixture(scope="module", params=[0.0, 3000.0, -3600.0], ids=["exact", "ahead", "behind"])
def off(request: pytest.FixtureRequest) -> Iterator[RunningEmulator]:
    with emulator(shared_access_key=MAIN, rules=RULES, clock_offset=request.param) as running:
        yield running


@pytest.fixture
def benches(off: RunningEmulator) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(who: str, port: int | None = None) -> Bench:
        made.append(Bench(off, who, port))
        return made[-1]

    yield make
    for each in made:
        each.close()


def received(receiver: Receiver, seconds: float = 10.0) -> list[Delivery]:
    """The next deliveries. Raises ConfigurationError where the lease is refused."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if deliveries := receiver.receive(10, 1.0):
                return deliveries
        except BrokerUnavailable:
            continue
    raise AssertionError("nothing came")


def refusal(bench: Bench, receiver: Receiver, messages: int) -> str:
    """What is raised while so many messages come, one after the other."""
    for number in range(messages):
        time.sleep(0.5)
        bench.send(number, getattr(receiver, "_session", None) and "s")
        try:
            for delivery in received(receiver):
                receiver.settle([(delivery, Complete())])
        except ConfigurationError as error:
            return str(error)
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(("who", "messages"), [("worker", 2), ("listener", 5)])
def test_a_lease_that_is_too_short_is_refused(
    benches: Callable[..., Bench], who: str, messages: int
) -> None:
    """And what was received is given back, uncounted: another worker can have it."""
    bench = benches(who)
    bench.declare()
    receiver = bench.broker.receiver(bench.queue, lease=5.0)
    assert receiver.receive(1, 0.2) == []
    error = refusal(bench, receiver, messages)
    assert bench.queue in error
    assert "not for 5 s" in error
    assert any(f"{seconds:.1f} s" in error for seconds in (60.0, 59.9, 59.8, 59.7)), error
    assert bench.counts() == [0]
    (delivery,) = bench.manager.receiver(bench.queue, lease=LOCK).receive(1, 5.0)
    assert delivery.delivery_count == 1


@pytest.mark.parametrize("who", ["worker", "listener"])
def test_a_lease_that_is_too_long_is_refused_at_once(
    benches: Callable[..., Bench], who: str
) -> None:
    bench = benches(who)
    bench.declare(20.0)
    bench.send(1)
    receiver = bench.broker.receiver(bench.queue, lease=60.0)
    with pytest.raises(ConfigurationError, match=r"not for 60 s"):
        received(receiver)
    assert bench.counts() == [0]


@pytest.mark.parametrize("who", ["worker", "listener"])
def test_the_right_lease_is_taken_whatever_waits_in_the_queue(
    benches: Callable[..., Bench], who: str
) -> None:
    bench = benches(who)
    bench.declare()
    for number in range(3):
        bench.send(number)
    time.sleep(2.0)
    receiver = bench.broker.receiver(bench.queue, lease=LOCK)
    for number in range(3, 8):
        bench.send(number)
        for delivery in received(receiver):
            assert receiver.settle([(delivery, Complete())]) == [Settled()]
        time.sleep(0.3)


def test_delays_are_as_long_as_asked_for(benches: Callable[..., Bench]) -> None:
    bench = benches("worker")
    bench.declare()
    receiver = bench.broker.receiver(bench.queue, lease=LOCK)
    bench.send(1)
    received(receiver)
    began = time.monotonic()
    bench.broker.send(bench.queue, [Envelope(b"later", delay=2.0)])
    (delivery,) = received(receiver)
    assert delivery.envelope.body == b"later"
    # The clock is learned from one message, which the SDK hands over half a second late or more.
    assert 1.0 < time.monotonic() - began < 6.0


def test_a_refused_lease_is_taken_when_it_was_put_right(benches: Callable[..., Bench]) -> None:
    bench = benches("worker")
    bench.declare()
    receiver = bench.broker.receiver(bench.queue, lease=5.0)
    refusal(bench, receiver, 2)
    with pytest.raises(ConfigurationError, match="not for 5 s"):
        receiver.receive(1, 1.0)
    assert bench.counts() == [0]
    bench.declare(5.0)
    deliveries: list[Delivery] = []
    for _ in range(10):
        try:
            if deliveries := receiver.receive(10, 1.0):
                break
        except ConfigurationError:
            continue
    assert [each.delivery_count for each in deliveries] == [1]


@pytest.mark.parametrize("session", ["s", AnySession.ANY])
def test_the_lock_of_a_session_too(
    benches: Callable[..., Bench], session: str | AnySession
) -> None:
    bench = benches("worker")
    bench.declare(sessions=True)
    receiver = bench.broker.receiver(bench.queue, lease=5.0, session=session)
    assert "not for 5 s" in refusal(bench, receiver, 3)
    assert bench.counts() == [0]
    receiver.close()
    right = bench.broker.receiver(bench.queue, lease=LOCK, session=session)
    (delivery,) = received(right)
    assert delivery.delivery_count == 1
    right.renew([delivery])
    assert right.settle([(delivery, Complete())]) == [Settled()]


def test_a_slow_network_makes_no_lease_wrong(
    off: RunningEmulator, benches: Callable[..., Bench]
) -> None:
    proxy = Proxy(off.port)
    bench = benches("worker", proxy.port)
    bench.declare(20.0)
    receiver = bench.broker.receiver(bench.queue, lease=20.0)
    bench.send(0)
    received(receiver)
    proxy.delay = 0.7
    for number in range(1, 4):
        bench.send(number)
        received(receiver, 20.0)
    bench.broker.close()
    proxy.close()


def test_app_receive_learns_for_the_next_time(
    benches: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker remembers what it has found out of the service's clock."""
    bench = benches("worker")
    bench.declare()
    monkeypatch.setenv(ADMIN_VARIABLE, bench.admin)
    app = App("held", broker=bench.address, lease=5.0)
    with pytest.raises(ConfigurationError, match="not for 5 s"):
        for number in range(3):
            bench.send(number)
            with app.receive(bench.queue, wait=10.0) as lease:
                lease.complete()
    assert bench.counts() == [0]
    app.close()


def test_a_worker_says_so_and_leaves_the_messages_alone(
    benches: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right lease its retries come on time."""
    bench = benches("worker")
    bench.queue = "default"
    bench.declare()
    monkeypatch.setenv(ADMIN_VARIABLE, bench.admin)
    with site_in(tmp_path / "site", joint=False, broker=bench.address) as site:
        app = site.app()
        wrong = site.worker("-Q", "default", "--lease", "5s", "--max-lease", "60s")
        wait_until(lambda: "lease 5 s" in wrong.log, 20, "it is up")
        app.send(retry_later.name, ["r", 2.0], task_id="r")
        wait_until(lambda: "not for 5 s" in wrong.log, 20, "it refuses")
        assert wrong.stop() == 0, wrong.log
        sent_at = time.time()
        right = site.worker("-Q", "default", "--lease", f"{LOCK:g}s")
        ended_at = app.result("r").get(timeout=30)
        assert ended_at - sent_at < 15.0
        assert right.stop() == 0, right.log
        assert "not for" not in right.log
    bench.manager.delete("default")
