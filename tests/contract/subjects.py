"""The brokers under test, and what a test may do with one.

To put another broker under the contract, add a factory to `FACTORIES`: a context manager that takes
a temporary directory and gives a `Subject`. Servers that it starts, it stops.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import azurite
import memorybroker
from services import ServiceBus, StorageQueues, service_bus_broker, storage_queue_broker
from simulated import line

from aztask.address.addresses import ServiceBusAddress, StorageQueueAddress
from aztask.address.shards import AddressNames, ShardCount
from aztask.address.urls import parse_broker
from aztask.message.envelope import Envelope
from aztask.queues.base import Broker, Delivery, Peeked, QueueOptions, Receiver
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.queues.sharded.addresses import AddressBroker, Home
from aztask.queues.sharded.broker import sharded
from aztask.queues.sharded.layouts import DeclaredLayouts
from aztask.queues.storagequeue.broker import StorageQueueBroker
from aztask.settlement import Settlement
from aztask.support.clock import Clock
from aztask.testing import emulator

_names = itertools.count(1)


@dataclass
class Subject:
    """One broker under test.

    another: a second broker of the same service, as another process would have it. pass_time: let
    that many seconds pass, for leases and for schedules. clock: the broker's; deadlines count on
    it. lease: seconds, as short as the service takes it. patience: how long to wait for what must
    come; silence: for what must not come. coarse: seconds that the service's times may be off.
    ordered: whether messages without a session come in the order in which they were sent. shards:
    how many queues of the service one queue is. counts_on: whether a later message is behind all
    earlier ones in a listing; each of several addresses counts by itself.
    """

    name: str
    broker: Broker
    another: Callable[[], Broker]
    pass_time: Callable[[float], None]
    clock: Clock
    lease: float
    patience: float = 5.0
    silence: float = 0.03
    coarse: float = 0.5
    ordered: bool = True
    shards: int = 1
    counts_on: bool = True
    opened: list[Receiver] = field(default_factory=list)

    @property
    def can(self) -> Any:
        return self.broker.capabilities

    def queue(self, **options: Any) -> str:
        """A new, empty queue."""
        name = f"contract-{next(_names)}"
        self.broker.declare(name, QueueOptions(**{"lease": self.lease, **options}))
        return name

    def receiver(self, queue: str, *, broker: Broker | None = None, **options: Any) -> Receiver:
        """A receiver that is closed when the test ends."""
        receiver = (broker or self.broker).receiver(queue, **{"lease": self.lease, **options})
        self.opened.append(receiver)
        return receiver

    def send(self, queue: str, *bodies: bytes, **properties: Any) -> None:
        self.broker.send(queue, [Envelope(body, **properties) for body in bodies])

    def take(self, receiver: Receiver, count: int = 1) -> list[Delivery]:
        """That many deliveries, in as many receives as it needs."""
        taken: list[Delivery] = []
        until = time.monotonic() + self.patience
        while len(taken) < count and time.monotonic() < until:
            taken += receiver.receive(count - len(taken), self.patience)
        assert len(taken) == count, f"{len(taken)} of {count} deliveries came"
        return taken

    def one(self, receiver: Receiver) -> Delivery:
        return self.take(receiver)[0]

    def assert_nothing(self, receiver: Receiver) -> None:
        assert receiver.receive(10, self.silence) == []

    def assert_all(self, found: Sequence[bytes], sent: Sequence[bytes]) -> None:
        """These bodies are those that were sent, in their order if the broker keeps it."""
        assert list(found) == list(sent) if self.ordered else sorted(found) == sorted(sent)

    def lapse(self) -> None:
        """Let every lease end that was granted until now."""
        self.pass_time(self.lease + self.coarse)

    def peek(self, queue: str, **options: Any) -> list[Peeked]:
        return self.broker.peek(queue, **options)


def settle(receiver: Receiver, settlement: Settlement, *deliveries: Delivery) -> list[Any]:
    return receiver.settle([(delivery, settlement) for delivery in deliveries])


def bodies(messages: Sequence[Delivery] | Sequence[Peeked]) -> list[bytes]:
    return [message.envelope.body for message in messages]


class ShiftedClock:
    """A clock that goes on only when it is told to; with a start, also by itself."""

    def __init__(self, start: float | None = None) -> None:
        self.passed = 0.0
        if start is None:
            self.clock = Clock(
                monotonic=lambda: 1000.0 + self.passed, wall=lambda: 1_800_000_000.0 + self.passed
            )
        else:
            self.clock = Clock(
                monotonic=lambda: time.monotonic() + self.passed,
                wall=lambda: time.time() + self.passed,
            )

    def pass_time(self, seconds: float) -> None:
        self.passed += seconds


@contextmanager
def local_file(directory: Path) -> Iterator[Subject]:
    """The local broker on a file, the second broker with a connection of its own."""
    time_machine = ShiftedClock()
    path = str(directory / "queues.db")
    databases = [Database(path), Database(path)]
    brokers = [LocalBroker(database, clock=time_machine.clock) for database in databases]
    yield Subject(
        "local",
        brokers[0],
        lambda: brokers[1],
        time_machine.pass_time,
        time_machine.clock,
        lease=30.0,
    )
    for database in databases:
        database.close()


@contextmanager
def local_memory(directory: Path) -> Iterator[Subject]:
    """The local broker in memory."""
    time_machine = ShiftedClock()
    database = Database(":memory:")

    def broker() -> LocalBroker:
        return LocalBroker(database, clock=time_machine.clock)

    yield Subject(
        "local-memory", broker(), broker, time_machine.pass_time, time_machine.clock, lease=30.0
    )
    database.close()


@contextmanager
def example(directory: Path) -> Iterator[Subject]:
    """The broker of ``examples/broker``, which shows how to write one."""
    time_machine = ShiftedClock()
    shelf = memorybroker.Shelf(time_machine.clock)

    def broker() -> Broker:
        return memorybroker.MemoryBroker(shelf)

    yield Subject(
        "example", broker(), broker, time_machine.pass_time, time_machine.clock, lease=30.0
    )


@contextmanager
def storage_queue(directory: Path) -> Iterator[Subject]:
    """Storage queues on Azurite, whose clock moves with ours."""
    time_machine = ShiftedClock(start=time.time())
    with azurite.running(directory / "azurite") as server:
        address = parse_broker(server.connection_string)
        assert isinstance(address, StorageQueueAddress)

        def broker() -> StorageQueueBroker:
            return StorageQueueBroker(address, poll_ceiling=0.05, clock=time_machine.clock)

        def pass_time(seconds: float) -> None:
            server.advance(seconds)
            time_machine.pass_time(seconds)

        other = broker()
        yield Subject(
            "storagequeue",
            broker(),
            lambda: other,
            pass_time,
            time_machine.clock,
            lease=30.0,
            silence=0.15,
            coarse=1.0,
        )
        other.close()


@contextmanager
def service_bus(directory: Path) -> Iterator[Subject]:
    """Service Bus over TCP on the emulator, whose clock moves with ours."""
    time_machine = ShiftedClock(start=time.time())
    with emulator(clock=time_machine.clock) as bus:
        address = parse_broker(bus.connection_string)
        assert isinstance(address, ServiceBusAddress)

        def broker() -> ServiceBusBroker:
            return ServiceBusBroker(
                address, admin=bus.admin_connection_string, clock=time_machine.clock
            )

        other = broker()
        yield Subject(
            "servicebus",
            broker(),
            lambda: other,
            time_machine.pass_time,
            time_machine.clock,
            lease=30.0,
            silence=0.15,
        )
        other.close()


@contextmanager
def simulated_storage_queue(directory: Path) -> Iterator[Subject]:
    """The real broker over the modelled service of the simulation."""
    time_machine = ShiftedClock(start=time.time())
    service = StorageQueues(time_machine.clock)

    def broker() -> StorageQueueBroker:
        return storage_queue_broker(service, line(time_machine.clock), poll_ceiling=0.05)

    other = broker()
    yield Subject(
        "simulated-storagequeue",
        broker(),
        lambda: other,
        time_machine.pass_time,
        time_machine.clock,
        lease=30.0,
        coarse=1.0,
    )
    other.close()


@contextmanager
def simulated_service_bus(directory: Path) -> Iterator[Subject]:
    """The real broker over the modelled service of the simulation."""
    time_machine = ShiftedClock(start=time.time())
    service = ServiceBus(time_machine.clock)

    def broker() -> ServiceBusBroker:
        return service_bus_broker(service, line(time_machine.clock), tick=0.01)

    other = broker()
    yield Subject(
        "simulated-servicebus",
        broker(),
        lambda: other,
        time_machine.pass_time,
        time_machine.clock,
        lease=30.0,
        silence=0.15,
    )
    other.close()


class Everywhere(dict[str, ShardCount]):
    """Every queue has three shards."""

    def get(self, name: str, default: Any = None) -> ShardCount:
        return self["all"]


def in_shards(make: Callable[[Path], AbstractContextManager[Subject]]) -> Any:
    """The subject with its queues in three shards."""

    @contextmanager
    def made(directory: Path) -> Iterator[Subject]:
        with make(directory) as found:
            shards = Everywhere(all=ShardCount(3, 3))
            another = found.another
            others: list[Broker] = []

            def other() -> Broker:
                if not others:
                    others.append(sharded(another(), shards, poll_ceiling=0.05))
                return others[0]

            found.name = f"sharded-{found.name}"
            found.broker = sharded(found.broker, shards, poll_ceiling=0.05)
            found.another = other
            found.patience *= 2
            found.ordered, found.shards = False, 3
            yield found

    return made


def at_two_addresses(make: Callable[[Path], AbstractContextManager[Subject]]) -> Any:
    """Two such subjects as one, whose queues have two shards at each of the two."""

    @contextmanager
    def made(directory: Path) -> Iterator[Subject]:
        for name in ("a", "b"):
            (directory / name).mkdir()
        with make(directory / "a") as found, make(directory / "b") as second:
            layouts = DeclaredLayouts(
                Everywhere(all=ShardCount(4, 4)), AddressNames(("a", "b"), "a", several=True)
            )

            def joined(*brokers: Any) -> Broker:
                homes = [given_home(*each) for each in zip("ab", brokers, strict=True)]
                return sharded(AddressBroker(homes, layouts), {}, layouts, poll_ceiling=0.05)

            pass_first, another = found.pass_time, found.another
            others: list[Broker] = []

            def other() -> Broker:
                if not others:
                    others.append(joined(another(), second.another()))
                return others[0]

            def pass_time(seconds: float) -> None:
                pass_first(seconds)
                second.pass_time(seconds)

            found.name = f"addresses-{found.name}"
            found.broker = joined(found.broker, second.broker)
            found.another, found.pass_time = other, pass_time
            found.patience *= 2
            found.ordered, found.shards, found.counts_on = False, 4, False
            yield found

    return made


def given_home(name: str, broker: Any) -> Home:
    """The address with this broker, which is open."""
    made = Home(name, broker._kind, None, broker)
    made._broker = broker
    return made


FACTORIES: dict[str, Callable[[Path], AbstractContextManager[Subject]]] = {
    "local": local_file,
    "local-memory": local_memory,
    "example": example,
    "simulated-servicebus": simulated_service_bus,
    "simulated-storagequeue": simulated_storage_queue,
    "storagequeue": storage_queue,
    "servicebus": service_bus,
    "sharded-local": in_shards(local_file),
    "sharded-simulated-servicebus": in_shards(simulated_service_bus),
    "sharded-simulated-storagequeue": in_shards(simulated_storage_queue),
    "addresses-local": at_two_addresses(local_file),
    "addresses-simulated-servicebus": at_two_addresses(simulated_service_bus),
    "addresses-simulated-storagequeue": at_two_addresses(simulated_storage_queue),
}
