"""Test your tasks: a `Context` for direct calls, and a local Service Bus on free ports.

::

    with aztask.testing.task_context(saved={"page": 3}) as context:
        crawl("https://example.com")                 # a task with a context, called here
    assert context.saved == {"page": 4}

    def test_orders(servicebus_emulator):            # the pytest fixture
        servicebus_emulator.create_queue("orders")
        client = ServiceBusClient.from_connection_string(servicebus_emulator.connection_string)

    with aztask.testing.emulator(queues=["orders"]) as bus:     # or anywhere
        ...

To use the fixture, write ``pytest_plugins = ["aztask.testing"]`` in your conftest.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from aztask.brokers.servicebus.administration import administration_client
from aztask.context import Context, current_context, set_current_context, unsent_context
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


@contextmanager
def task_context(
    *,
    task_id: str | None = None,
    task: str = "test",
    queue: str | None = None,
    saved: Any = None,
    resubmit_count: int = 0,
    delivery_count: int = 1,
    session: str | None = None,
    lease: float | timedelta = math.inf,
) -> Iterator[Context]:
    """Make a `Context` the current one for the length of a ``with`` block, as in a running task.

    A task with a context that is called in the block gets it, and `aztask.current_context` returns
    it. Checkpoints are kept in ``context.saved``, and the state of the session in
    ``context.session.state``; an extension of the lease is always granted.

    * `task_id`: a new UUID by default.
    * `task`, `queue`: the names of task and queue: "test" and "default" by default.
    * `saved`: the checkpoint that an earlier run has left; none by default.
    * `resubmit_count`, `delivery_count`: 0 and 1 by default, as in a first run.
    * `session`: the name of the session; by default there is none.
    * `lease`: how long the lease lasts, in seconds or as a ``timedelta``; by default it does not
      end. 0 is a lease that is lost already.
    """
    seconds = lease.total_seconds() if isinstance(lease, timedelta) else lease
    context = unsent_context(
        task_id=task_id,
        task=task,
        queue=queue,
        saved=saved,
        resubmit_count=resubmit_count,
        delivery_count=delivery_count,
        session=session,
        lease=seconds,
    )
    before = current_context()
    set_current_context(context)
    try:
        yield context
    finally:
        set_current_context(before)


@dataclass(frozen=True, slots=True)
class RunningEmulator:
    """A running local Service Bus, from `emulator` or the fixture `servicebus_emulator`.

    * `connection_string`: for an `App` (``broker=...``) and for messaging clients.
    * `admin_connection_string`: for administration clients.
    * `host`, `port`, `admin_port`: where it listens.
    * `certificate`: the file to trust with ``tls=True``, else None.
    """

    connection_string: str
    admin_connection_string: str
    host: str
    port: int
    admin_port: int
    certificate: Path | None
    _emulator: Emulator

    def create_queue(self, name: str, **settings: Any) -> None:
        """Create a queue, for example ``create_queue("orders", lock_seconds=5, sessions=True)``.

        The settings are the fields of `aztask.emulator.broker.entities.Entity`, among them
        ``lock_seconds``, ``max_deliveries``, ``sessions`` and ``duplicate_window``. Raises
        ConfigurationError.
        """
        self._emulator.namespace.create(Entity(name, **settings))

    def administration_client(self) -> Any:
        """A ``ServiceBusAdministrationClient`` of the Azure SDK for this emulator."""
        certificate = str(self.certificate) if self.certificate else None
        return administration_client(self.admin_connection_string, certificate=certificate)


@contextmanager
def emulator(
    *,
    queues: Sequence[str] = (),
    data: str | None = None,
    shared_access_key: str | None = None,
    rules: Mapping[str, Rule] | None = None,
    clock_offset: float | timedelta = 0.0,
    tls: bool = False,
    config: Path | None = None,
    port: int = 0,
    admin_port: int = 0,
    clock: Clock | None = None,
) -> Iterator[RunningEmulator]:
    """Run a local Service Bus on 127.0.0.1 for the length of a ``with`` block.

    * `queues`: names of queues to create with the service's defaults.
    * `data`: a file that keeps the messages after the block; in memory by default.
    * `shared_access_key`: the key that clients must use; any key is accepted by default.
    * `rules`: further keys by name, with the permissions of each: ``Rule("key",
      frozenset({Right.SEND}))``.
    * `clock_offset`: how far the emulator's clock is ahead, in seconds or as a ``timedelta``; 0 by
      default, below 0 it is behind.
    * `tls`: True encrypts the connections with a self-signed certificate.
    * `config`: a configuration file of Microsoft's emulator, see docs/emulator.md.
    * `port`, `admin_port`: 0, the default, takes free ones.
    * `clock`: a clock of your own, for tests that move time.

    Raises ConfigurationError, and OSError if a port is in use.
    """
    if isinstance(clock_offset, timedelta):
        clock_offset = clock_offset.total_seconds()
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
        """A pytest fixture: a fresh, empty local Service Bus for one test."""
        with emulator() as running:
            yield running


__all__ = ["Right", "Rule", "RunningEmulator", "administration_client", "emulator", "task_context"]
