"""Storage queues for the integration tests: Azurite, and a broker on it through a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from azurite import Azurite
from harness import Site, site_in
from proxy import Proxy

from aztask import App
from aztask.address.addresses import StorageQueueAddress
from aztask.address.urls import parse_broker
from aztask.message.envelope import Envelope
from aztask.queues.base import Delivery, Receiver
from aztask.queues.storagequeue.broker import StorageQueueBroker
from aztask.support.clock import SYSTEM_CLOCK, Clock

_names = count(1)
PATIENCE = 10.0


def broker_at(connection_string: str, *, clock: Clock = SYSTEM_CLOCK) -> StorageQueueBroker:
    address = parse_broker(connection_string)
    assert isinstance(address, StorageQueueAddress)
    return StorageQueueBroker(address, poll_ceiling=0.1, clock=clock)


@contextmanager
def storage_site(
    folder: Path, azurite: Azurite, *, port: int | None = None, past: bool = False
) -> Iterator[Site]:
    """Workers go through the proxy if a port is given, and the test too unless it goes past it;
    the queue is new.
    """
    address = azurite.connection_string_at(port or azurite.port)
    # The proxy's port is a part of the broker's name: without a name for both, they would differ.
    named = {} if port is None else {"AZTASK_OWNER": "azurite"}
    with site_in(folder, joint=False, broker=address, extra=named) as made:
        if past:
            made._app = App(
                "ledger",
                broker=azurite.connection_string,
                results=made.results,
                owner=named.get("AZTASK_OWNER"),
            )
        broker = made.app().broker
        for queue in broker.queues():
            broker.delete(queue)
        broker.declare("default")
        yield made


@dataclass
class Storage:
    """broker: through the proxy. direct: past it."""

    azurite: Azurite
    proxy: Proxy
    broker: StorageQueueBroker
    direct: StorageQueueBroker
    receivers: list[Receiver] = field(default_factory=list)

    def queue(self) -> str:
        name = f"faults-{next(_names)}"
        self.direct.declare(name)
        return name

    def receiver(self, queue: str, lease: float = 20.0, *, direct: bool = False) -> Receiver:
        broker = self.direct if direct else self.broker
        receiver = broker.receiver(queue, lease=lease)
        self.receivers.append(receiver)
        return receiver

    def one(self, receiver: Receiver) -> Delivery:
        (delivery,) = receiver.receive(1, PATIENCE)
        return delivery

    def held(self, lease: float = 20.0) -> tuple[str, Receiver, Delivery]:
        """A queue with one message, which is leased."""
        queue = self.queue()
        self.direct.send(queue, [Envelope(b"x", message_id="m")])
        receiver = self.receiver(queue, lease)
        return queue, receiver, self.one(receiver)

    def held_all(self, count: int, lease: float = 20.0) -> tuple[str, Receiver, list[Delivery]]:
        """A queue with so many messages (at most 32), which are all leased."""
        queue = self.queue()
        self.direct.send(queue, [Envelope(b"x", message_id=f"m{n}") for n in range(count)])
        receiver = self.receiver(queue, lease)
        deliveries = receiver.receive(count, PATIENCE)
        assert len(deliveries) == count
        return queue, receiver, deliveries

    def bodies(self, queue: str) -> list[bytes]:
        return [peeked.envelope.body for peeked in self.direct.peek(queue)]

    def total(self, queue: str) -> int:
        return self.direct.stats(queue).total or 0

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.broker.close()
        self.direct.close()
        self.proxy.close()
