"""What users need to test their tasks: a local Service Bus on free ports.

::

    def test_orders(servicebus_emulator):            # the pytest fixture
        servicebus_emulator.create_queue("orders")
        client = ServiceBusClient.from_connection_string(servicebus_emulator.connection_string)

    with aztask.testing.emulator(queues=["orders"]) as bus:     # or anywhere
        ...

The fixture is found when ``pytest_plugins = ["aztask.testing"]`` stands in a conftest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aztask.brokers.servicebus.administration import administration_client
from aztask.emulator.background import BackgroundEmulator
from aztask.emulator.broker.access import Right, Rule
from aztask.emulator.broker.entities import Entity
from aztask.emulator.emulator import Emulator
from aztask.emulator.options import Options
from aztask.support.clock import Clock

try:
    import pytest
except ImportError:  # only the fixture needs it
    pytest = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class RunningEmulator:
    """A local Service Bus. connection_string is for messaging clients."""

    connection_string: str
    admin_connection_string: str
    host: str
    port: int
    admin_port: int
    certificate: Path | None
    _emulator: Emulator

    def create_queue(self, name: str, **settings: Any) -> None:
        """Create a queue; settings are those of `aztask.emulator.broker.entities.Entity`.

        For example ``lock_seconds=5``, ``max_deliveries=3``, ``sessions=True``,
        ``duplicate_window=600``. Raises ConfigurationError.
        """
        self._emulator.namespace.create(Entity(name, **settings))

    def administration_client(self) -> Any:
        """A ``ServiceBusAdministrationClient`` for this emulator, with or without TLS."""
        certificate = str(self.certificate) if self.certificate else None
        return administration_client(self.admin_connection_string, certificate=certificate)


@contextmanager
def emulator(
    *,
    queues: Sequence[str] = (),
    data: str | None = None,
    shared_access_key: str | None = None,
    rules: Mapping[str, Rule] | None = None,
    clock_offset: float = 0.0,
    tls: bool = False,
    config: Path | None = None,
    port: int = 0,
    admin_port: int = 0,
    clock: Clock | None = None,
) -> Iterator[RunningEmulator]:
    """A local Service Bus on 127.0.0.1, on free ports unless they are given.

    queues: created with the service's defaults. data: a file that outlives the block. rules:
    further keys, by name, with some rights: ``Rule("key", frozenset({Right.SEND}))``. clock: the
    emulator's, for tests that let time pass. Everything else: see ``docs/emulator.md``.

    Raises ConfigurationError, OSError for a port in use.
    """
    options = Options(
        port=port,
        admin_port=admin_port,
        data=data,
        shared_access_key=shared_access_key,
        rules=rules or {},
        clock_offset=clock_offset,
        tls=tls,
        config=config,
        queues=tuple(queues),
    )
    with BackgroundEmulator(options, clock=clock) as background:
        running = background.emulator
        yield RunningEmulator(
            connection_string=running.connection_string(),
            admin_connection_string=running.admin_connection_string(),
            host=options.host,
            port=running.port,
            admin_port=running.admin_port or 0,
            certificate=running.certificate,
            _emulator=running,
        )


if pytest is not None:

    @pytest.fixture
    def servicebus_emulator() -> Iterator[RunningEmulator]:
        """A fresh, empty local Service Bus for one test."""
        with emulator() as running:
            yield running


__all__ = ["Right", "Rule", "RunningEmulator", "administration_client", "emulator"]
