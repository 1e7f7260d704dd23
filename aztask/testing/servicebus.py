"""A local Service Bus on free ports, for tests: a context manager, and what it yields."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from aztask.emulator.broker.access import Rule
from aztask.emulator.broker.entities import Entity, Tier
from aztask.emulator.broker.entra import EntraTokens
from aztask.emulator.config import Options
from aztask.emulator.emulator import Emulator
from aztask.emulator.faults import NO_FAULTS, Faults
from aztask.errors import AztaskError, BrokerUnavailable
from aztask.queues.servicebus.admin import administration_client
from aztask.support.clock import Clock

# -- an emulator on its own thread, for tests and scripts that are not asynchronous --------


START_SECONDS = 30.0


class BackgroundEmulator:
    """A context manager that starts an emulator on entry and stops it on exit."""

    def __init__(self, options: Options, *, clock: Clock | None = None) -> None:
        self.emulator = Emulator(options, clock=clock)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="aztask-emulator", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> BackgroundEmulator:
        """Start the emulator and wait until it listens.

        Raises OSError for a port in use, AztaskError, and BrokerUnavailable after `START_SECONDS`.
        """
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise BrokerUnavailable(f"the emulator did not start within {START_SECONDS:g} s")
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self.emulator.start())
        except (AztaskError, OSError) as error:
            self._failure = error
        self._started.set()
        if self._failure is None:
            loop.run_forever()
        loop.run_until_complete(self.emulator.stop())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


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
    entra: EntraTokens | None = None,
    clock_offset: float | timedelta = 0.0,
    tls: bool = False,
    config: Path | None = None,
    tier: Literal["standard", "premium"] | None = None,
    faults: Faults = NO_FAULTS,
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
    * `entra`: the keys of a token service, and what its identities may do; without a shared access
      key, only its tokens count then. SDKs send tokens over TLS only.
    * `clock_offset`: how far the emulator's clock is ahead, in seconds or as a ``timedelta``; 0 by
      default, below 0 it is behind.
    * `tls`: True encrypts the connections with a self-signed certificate.
    * `config`: a configuration file of Microsoft's emulator, see docs/emulator.md.
    * `tier`: has the limits of a tier of the service, for example locks of 5 seconds and more; by
      default locks may be shorter, which makes tests of lost locks fast.
    * `faults`: what goes wrong on purpose, for example ``Faults(busy=0.1, drop=0.01)``.
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
        entra=entra,
        clock_offset=clock_offset,
        tls=tls,
        config=config,
        queues=tuple(queues),
        faults=faults,
        tier=None if tier is None else Tier(tier.capitalize()),
    )
    with BackgroundEmulator(options, clock=clock) as background:
        yield _facade(background.emulator)


def _facade(running: Emulator) -> RunningEmulator:
    return RunningEmulator(
        connection_string=running.connection_string(),
        admin_connection_string=running.admin_connection_string(),
        host=running.options.host,
        port=running.port,
        admin_port=running.admin_port or 0,
        certificate=running.certificate,
        _emulator=running,
    )
