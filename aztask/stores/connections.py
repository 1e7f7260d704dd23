"""The connections of an App: one broker and one result store per process, opened when needed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from aztask.address.addresses import BrokerAddress, LocalAddress, TablesAddress
from aztask.address.owner import NO_OWNER, Identified, Owner
from aztask.address.shards import UNSHARDED, AddressNames, ShardCount, ShardCounts
from aztask.address.urls import parse_brokers, split_brokers
from aztask.config import mask, parse_broker, parse_results
from aztask.errors import AztaskError, ConfigurationError
from aztask.message.rowsignatures import RowSignatures
from aztask.queues.base import Broker, NameChecker
from aztask.queues.engine import Database
from aztask.queues.kinds import kind_of
from aztask.queues.sharded.addresses import Home, over_addresses
from aztask.queues.sharded.broker import sharded
from aztask.queues.sharded.layouts import DeclaredLayouts
from aztask.stores.records.base import ResultStore
from aztask.stores.records.controls import controls_of
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.owners import OwnedRows, parts_of
from aztask.stores.shardlayouts import LayoutRows, StoredLayouts
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
        broker: str | Sequence[str] | Broker | None,
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
        texts = split_brokers(broker)
        self._addresses = () if texts is None else tuple(parse_brokers(texts))
        self._broker_target: Any = self._addresses or (
            parse_broker(broker) if isinstance(broker, str) else broker
        )
        self.broker_target: object = self._broker_target
        self._results_target = parse_results(results) if isinstance(results, str) else results
        self.broker_text = broker if isinstance(broker, str) and texts is None else None
        self._shown = (
            ", ".join(map(mask, texts or [str(broker)]))
            if texts or isinstance(broker, str)
            else "none"
            if broker is None
            else type(broker).__name__
        )
        self._check_several()
        self.poll_ceiling = poll_ceiling
        self._shards: dict[str, ShardCount] = {}
        self._lock = fork_safe_rlock()
        self._pid = os.getpid()
        self._broker: Broker | None = None
        self._results: ResultStore | None = None
        self._opening: Broker | None = None  # by the thread that has the lock
        self._databases: dict[str, Database] = {}

    def at(
        self,
        broker: str | Sequence[str] | Broker | None,
        results: str | ResultStore | None,
        *,
        app: str,
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
    def several(self) -> bool:
        """Whether the queues are spread over a list of addresses, and be it of one."""
        return bool(self._addresses) and self._broker_target is self.broker_target

    def _check_several(self) -> None:
        """Refuse two equal addresses, and several without an owner or a result store."""
        if not self._addresses:
            return
        names = [_name_of(each) for each in self._addresses]
        if twice := next((each for each in names if names.count(each) > 1), None):
            raise ConfigurationError(f"broker address {twice} is named twice; name it once")
        if self._owner_name is None:
            first = self._addresses[0]
            kind = kind_of(first)
            known = kind.identity(first) if kind else None
            same = f", or {known!r} to go on with the rows of that address" if known else ""
            raise ConfigurationError(
                "an app with a list of broker addresses needs a name for its rows in the result "
                f"store: write App(owner={self._app or 'shop'!r}){same}; or set AZTASK_OWNER"
            )
        if self._results_target is None:
            raise ConfigurationError(
                "an app with a list of broker addresses needs a result store, which knows at which "
                "of them a queue is: set AZTASK_RESULTS, or give App(results=...)"
            )

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
        target = self._addresses[0] if self.several else self._broker_target
        checker = kind_of(target) or target
        if isinstance(checker, NameChecker):
            checker.check_name(queue)

    def missing_file(self) -> str | None:
        """A queue file of ``local://`` that does not exist; opening the broker would make it."""
        for target in self._addresses if self.several else (self._broker_target,):
            if not isinstance(target, LocalAddress) or target.in_memory:
                continue
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
            *(("the queue file", each) for each in self._addresses or (self._broker_target,)),
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
        homes = self._homes()
        names = self._names(homes)
        stored = None
        if (self._shards or homes) and self._results_target is not None:
            stored = StoredLayouts(self._shards, names)
        layouts = stored or DeclaredLayouts(self._shards, names)
        opened = over_addresses(homes, layouts) if homes else self._open_broker()
        broker = sharded(opened, self._shards, layouts, poll_ceiling=self.poll_ceiling)
        if stored is None:
            self._check_one_address()
        else:
            # The owner of the store's rows may be what this broker is called.
            self._opening = broker
            try:
                stored.attach(controls_of(self.results()))
                if homes:
                    stored.settle_home(self._pin(stored.rows, homes, names))
                else:
                    self._check_one_address()
            except BaseException:
                broker.close()
                raise
            finally:
                self._opening = None
        return broker

    # -- several addresses -------------------------------------------------------------------

    def _homes(self) -> list[Home]:
        """The addresses of a list, none of them opened yet; [] for one broker."""
        found = []
        for each in self._addresses if self.several else ():
            kind = kind_of(each)
            assert kind is not None  # noqa: S101  # it was parsed by its kind
            found.append(Home(_name_of(each), kind, each, self))
        return found

    def _names(self, homes: Sequence[Home]) -> AddressNames:
        """What the layouts call the addresses, and where the queues were when there was one."""
        if not homes:
            target = self._broker_target
            one = _name_of(target) if kind_of(target) is not None else ""
            return AddressNames((one,) if one else (), home=one)
        names = tuple(each.name for each in homes)
        before = next((each for each in homes if self._identity(each) == self._owner_name), None)
        return AddressNames(names, home=before.name if before else names[0], several=True)

    def _identity(self, home: Home) -> str | None:
        """The owner of an app that had this address alone; None if it cannot be known."""
        target = self._addresses[[_name_of(each) for each in self._addresses].index(home.name)]
        name = home.kind.identity(target)
        if name is not None or not isinstance(target, LocalAddress):
            return name
        try:
            there = Path(target.path).stat().st_size > 0
            return home.broker.identity if there and isinstance(home.broker, Identified) else None
        except (AztaskError, OSError):
            return None  # it says so when it is used

    def _pin(self, rows: LayoutRows | None, homes: Sequence[Home], names: AddressNames) -> str:
        """Note that there is a list of addresses, or refuse rows of another owner.

        Returns the address of the queues that were used before, as the first program noted it.

        Raises ConfigurationError if the rows of an app that had one of them alone would be left
        behind: workers would refuse the messages that they belong to.
        """
        if rows is None:
            raise ConfigurationError(
                "this result store cannot note at which address a queue is; use Azure Tables or a "
                "local file"
            )
        if (noted := rows.pinned()) is not None:
            return noted.home
        results = self.results()
        owners = {
            each.broker
            for part in parts_of(results)
            if isinstance(part, OwnedRows)
            for each in part.owners()
        }
        left = sorted(owners & {self._identity(each) for each in homes} - {self._owner_name})
        if left and self._owner_name not in owners:
            raise ConfigurationError(
                f"the result store has rows of {left[0]}, and none of {self._owner_name}: write "
                f"owner={left[0]!r}, or run aztask doctor --adopt {left[0]!r} first; if they are "
                "those of another app, use another result store"
            )
        rows.pin(names)
        noted = rows.pinned()  # another program may have been faster
        return names.home if noted is None else noted.home

    def _check_one_address(self) -> None:
        """Refuse to be the program of an app with several addresses that knows one of them.

        Only where the code names the owner, as such an app does; others ask nothing here. If the
        store does not answer, the program goes on: it may be the only thing that still works.
        """
        if self._owner_name is None or kind_of(self._broker_target) is None:
            return
        try:
            controls = controls_of(self.results())
            pinned = LayoutRows(controls).pinned() if controls is not None else None
        except AztaskError:
            return
        if pinned is not None:
            raise ConfigurationError(
                f"the queues of owner {self._owner_name!r} are spread over "
                f"{', '.join(pinned.names)}, "
                "and this program names one address: write broker=[...] with all of them, or end "
                "AZTASK_BROKER with a comma if only one is left"
            )

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


def _name_of(address: BrokerAddress) -> str:
    """The name of an address without credentials. That of a file is its path: its id is inside."""
    if isinstance(address, LocalAddress):
        return f"local://{address.path}"
    kind = kind_of(address)
    return (kind.identity(address) if kind is not None else None) or str(address)


def _tables() -> Any:
    """Import the adapter for Azure Tables, whose SDKs come with an extra."""
    try:
        return importlib.import_module(TABLES)
    except ImportError as error:
        raise ConfigurationError(
            f"results in Azure Tables need a package that is missing ({error.name}); install it "
            f"with: {install_command('tables')}"
        ) from None
