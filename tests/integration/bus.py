"""Service Bus for the integration tests: emulators, and sites whose workers use one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import Site, site_in

from aztask.address.addresses import ServiceBusAddress
from aztask.address.urls import parse_broker
from aztask.queues.base import QueueOptions
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.testing import RunningEmulator


def broker_at(bus: RunningEmulator, *, port: int | None = None) -> ServiceBusBroker:
    """A broker on the emulator; port: of a proxy in front of it."""
    address = parse_broker(address_at(bus, port))
    assert isinstance(address, ServiceBusAddress)
    return ServiceBusBroker(address, admin=bus.admin_connection_string)


def address_at(bus: RunningEmulator, port: int | None = None) -> str:
    """The connection string, of the proxy where a port is given."""
    return bus.connection_string.replace(f":{bus.port}", f":{port or bus.port}", 1)


@contextmanager
def bus_site(
    folder: Path,
    bus: RunningEmulator,
    options: QueueOptions,
    *,
    port: int | None = None,
    **site: object,
) -> Iterator[Site]:
    """Workers go through the proxy if a port is given; the queue is new. site: see `site_in`."""
    previous = os.environ.get(ADMIN_VARIABLE)
    os.environ[ADMIN_VARIABLE] = bus.admin_connection_string
    manager = broker_at(bus)
    try:
        if "default" in manager.queues():
            manager.delete("default")
        manager.declare("default", options)
        extra = {"LEDGER_LEASE": str(options.lease)} if options.lease else {}
        address = address_at(bus, port)
        with site_in(folder, joint=False, broker=address, extra=extra, **site) as made:
            yield made
            made.app().close()
    finally:
        manager.close()
        if previous is None:
            del os.environ[ADMIN_VARIABLE]
        else:
            os.environ[ADMIN_VARIABLE] = previous
