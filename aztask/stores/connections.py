"""The connections of an App: one broker and one result store per process, opened when needed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from aztask.address.addresses import LocalAddress, TablesAddress
from aztask.address.owner import NO_OWNER, Identified, Owner
from aztask.address.shards import UNSHARDED, ShardCount, ShardCounts
from aztask.config import mask, parse_broker, parse_results
from aztask.errors import ConfigurationError
from aztask.message.rowsignatures import RowSignatures
from aztask.queues.base import Broker, NameChecker
from aztask.queues.engine import Database
from aztask.queues.kinds import kind_of
from aztask.queues.sharded.broker import sharded
from aztask.stores.records.base import ResultStore
from aztask.stores.records.controls import controls_of
from aztask.stores.records.local.store import LocalResults
from aztask.stores.shardlayouts import StoredLayouts
from aztask.support.forks import fork_safe_rlock
from aztask.support.late import install_command

TABLES: Final = "aztask.stores.records.tables.store"
"""Imported only where results are in Azure Tables: its SDKs come with an extra."""

TEST_BROKER: Final = "AZTASK_TEST_BROKER"
"""Set by `aztask.testing.worker` for its worker: the address that replaces the broker and the
result store of every app."""

NO_BROKER: Final = (
    "no broker is named: set AZTASK_BROKER, or give App(..., broker=...); local:// keeps the "
    "queues in a file of this directory"
)


class Connections:
    """Opens the broker and the result store at their first use.

    After a fork, the child opens its own and does not touch those of its parent.
    """

    def __init__(
        self,
        broker: str | Broker | None,
        results: str | ResultStore | None,
        *,
        poll_ceiling: float = 1.0,
        app: str = "",
        owner: str | None = None,
        signatures: RowSignatures | None = None,
    ) -> None:
        """Parse the addresses now, so that a wrong one is reported at once.

        * `broker`: None is reported when the broker is first needed, so that a module can be
          imported without it.
        * `poll_ceiling`: the longest pause in seconds between two polls of an empty queue, for
          services that are polled.
        * `app`: the app's name, a part of its `Owner`.
        * `owner`: replaces the broker's name in it (``App(owner=...)``).
        * `signatures`: of what the result store keeps; None signs nothing.
        """
        self._broker_given, self._results_given = broker, results
        self._signatures = signatures
        self._app = app
        self._owner_name = owner
        self._broker_target = self.broker_target = (
            parse_broker(broker) if isinstance(broker, str) else broker
        )
        self._results_target = parse_results(results) if isinstance(results, str) else results
        self.broker_text = broker if isinstance(broker, str) else None
        self._shown = (
            mask(broker)
            if isinstance(broker, str)
            else "none"
            if broker is None
            else type(broker).__name__
        )
        self.poll_ceiling = poll_ceiling
        self._shards: dict[str, ShardCount] = {}
        self._lock = fork_safe_rlock()
        self._pid = os.getpid()
        self._broker: Broker | None = None
        self._results: ResultStore | None = None
        self._opening: Broker | None = None  # by the thread that has the lock
        self._databases: dict[str, Database] = {}

    def at(
        self, broker: str | Broker | None, results: str | ResultStore | None, *, app: str
    ) -> Connections:
        """Connections to other addresses, with the same settings; None: to the same."""
        made = Connections(
            self._broker_given if broker is None else broker,
            self._results_given if results is None else results,
            poll_ceiling=self.poll_ceiling,
            app=app,
            owner=self._owner_name,
            signatures=self._signatures,
        )
        made.shard(self._shards)
        return made

    @property
    def shards(self) -> ShardCounts:
        """The queues that were declared with shards."""
        return self._shards

    def shard(self, shards: ShardCounts) -> None:
        """Note how many shards queues have.

        Raises ConfigurationError if that changes while the broker is open.
        """
        changed = {
            name: each for name, each in shards.items() if each != self._shards.get(name, UNSHARDED)
        }
        if not changed:
            return
        if self._broker is not None and self._pid == os.getpid():
            raise ConfigurationError(
                f"queue {next(iter(changed))!r} gets its shards too late: declare it before the "
                "app sends, or is used otherwise"
            )
        self._shards = {name: each for name, each in {**self._shards, **changed}.items() if each}

    def shown(self) -> str:
        """The broker's address, with its secrets masked."""
        return self._shown

    def check_queue_name(self, queue: str) -> None:
        """Raise InvalidQueueName unless the broker allows the name. Opens nothing.

        Without a broker, or with one of a kind that is refused when it is opened, any name passes.
        """
        target = self._broker_target
        checker = kind_of(target) or target
        if isinstance(checker, NameChecker):
            checker.check_name(queue)

    def missing_file(self) -> str | None:
        """The queue file of ``local://`` if it does not exist; opening the broker would make it."""
        target = self._broker_target
        if not isinstance(target, LocalAddress) or target.in_memory:
            return None
        try:
            Path(target.path).stat()
        except FileNotFoundError:
            return target.path
        except (OSError, ValueError):
            pass  # it may be there; opening it says what is wrong
        return None

    def local_files(self) -> list[tuple[str, LocalAddress]]:
        """The files of ``local://``, each with a name for it; one file that has both is one."""
        found = {}
        for what, target in (
            ("the result file", self._results_target),
            ("the queue file", self._broker_target),
        ):
            if isinstance(target, LocalAddress) and not target.in_memory:
                found[target.path] = (what, target)
        return list(found.values())

    def broker(self) -> Broker:
        """The broker, opened if it is not open yet. Raises ConfigurationError without one."""
        if self._broker is None or self._pid != os.getpid():
            with self._lock:
                self._check_process()
                if self._broker is None:
                    self._broker = self._open_sharded()
        return self._broker

    def results(self) -> ResultStore | None:
        """The result store, opened if it is not open yet; None if none is configured."""
        if self._results_target is None:
            return None
        if self._results is None or self._pid != os.getpid():
            with self._lock:
                self._check_process()
                if self._results is None:
                    self._results = self._open_results()
        return self._results

    def owner(self) -> Owner:
        """Whose rows this app makes and acts on in a result store; see `aztask.address.owner`.

        Opens the file of ``local://``, which holds its id; asks no service. Without a broker, or
        with one of your own that has no `Identified.identity`, it is `NO_OWNER`.
        """
        if self._owner_name is not None:
            return Owner(self._owner_name, self._app)
        target = self._broker_target
        if target is None:
            return NO_OWNER
        kind = kind_of(target)
        if kind is not None and (name := kind.identity(target)) is not None:
            return Owner(name, self._app)
        broker = self._opening or self.broker()
        return Owner(broker.identity, self._app) if isinstance(broker, Identified) else NO_OWNER

    def replace(self, broker: Broker, results: ResultStore) -> Callable[[], None]:
        """Use these instead, until the returned function is called. For tests.

        What is open stays open, and is used again afterwards.
        """
        with self._lock:
            before = (self._broker_target, self._results_target, self._broker, self._results)
            self._broker_target, self._results_target = broker, results
            self._broker, self._results = broker, results
            self._pid = os.getpid()

        def restore() -> None:
            with self._lock:
                self._broker_target, self._results_target, self._broker, self._results = before

        return restore

    def close(self) -> None:
        """Close what this process has opened."""
        with self._lock:
            if self._pid == os.getpid():
                for each in (self._broker, self._results, *self._databases.values()):
                    if each is not None:
                        each.close()
            self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._broker = None
        self._results = None
        self._databases = {}

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._forget()

    def _open_broker(self) -> Broker:
        target = self._broker_target
        kind = kind_of(target)
        if kind is not None:
            return kind.open(target, self)
        if isinstance(target, Broker):
            return target
        if target is None:
            raise ConfigurationError(NO_BROKER)
        raise ConfigurationError(f"{self._shown} is not a broker; give a URL or a Broker")

    def _open_sharded(self) -> Broker:
        """The broker; the result store, if there is one, knows which shards its queues have."""
        stored = None
        if self._shards and self._results_target is not None:
            stored = StoredLayouts(self._shards)
        opened = self._open_broker()
        broker = sharded(opened, self._shards, stored, poll_ceiling=self.poll_ceiling)
        if stored is not None:
            # The owner of the store's rows may be what this broker is called.
            self._opening = broker
            try:
                stored.attach(controls_of(self.results()))
            except BaseException:
                broker.close()
                raise
            finally:
                self._opening = None
        return broker

    def _open_results(self) -> ResultStore:
        target = self._results_target
        if isinstance(target, LocalAddress):
            return LocalResults(
                self.database(target), owner=self.owner(), signatures=self._signatures
            )
        if isinstance(target, TablesAddress):
            store: ResultStore = _tables().TablesResults(
                target, owner=self.owner(), signatures=self._signatures
            )
            return store
        if isinstance(target, ResultStore):
            return target
        raise ConfigurationError(
            f"{type(target).__name__} is not a result store; give a URL or a ResultStore"
        )

    def database(self, address: LocalAddress) -> Database:
        """The database of a file. Broker and results in one file share it and its transactions."""
        database = self._databases.get(address.path)
        if database is None:
            database = Database(
                address.path,
                durability="full" if address.full_durability else "process",
                group=address.group,
            )
            self._databases[address.path] = database
        return database


def _tables() -> Any:
    """Import the adapter for Azure Tables, whose SDKs come with an extra."""
    try:
        return importlib.import_module(TABLES)
    except ImportError as error:
        raise ConfigurationError(
            f"results in Azure Tables need a package that is missing ({error.name}); install it "
            f"with: {install_command('tables')}"
        ) from None
