"""The result stores under test.

To put another store under the contract, add a factory to `FACTORIES`: a context manager that takes
a temporary directory and gives a function that makes a `Store`, new and empty. Servers that it
starts, it stops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import azurite
from damaging import Outsider, SqlOutsider, TableOutsider
from services import Blobs, Tables, tables_results
from services.tableclient import ModelTable
from simulated import line

from aztask.address.addresses import TablesAddress
from aztask.address.owner import NO_OWNER, Owner
from aztask.address.urls import parse_results
from aztask.message.rowsignatures import RowSignatures
from aztask.queues.engine import Database
from aztask.stores.records.base import ResultStore
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.tables.store import TABLE, TablesResults
from aztask.support.clock import SYSTEM_CLOCK

_names = itertools.count(1)


@dataclass
class Store:
    """results: the store. another: the same one, as another process would have it. lists_running:
    whether `recent` shows runs that have not ended. close: at the end.

    outsider: writes into its rows past it. of: the same one, opened by an owner, who may sign.
    """

    name: str
    results: ResultStore
    another: ResultStore
    lists_running: bool
    close: Callable[[], None]
    outsider: Outsider
    of: Callable[..., LocalResults | TablesResults]


Maker = Callable[[], Store]


@contextmanager
def local(directory: Path) -> Iterator[Maker]:
    """A file, and two connections to it."""

    def make() -> Store:
        path = str(directory / f"results-{next(_names)}.db")
        databases = [Database(path), Database(path)]
        first, second = (LocalResults(database) for database in databases)

        def close() -> None:
            for database in databases:
                database.close()

        def of(owner: Owner, signatures: RowSignatures | None = None) -> LocalResults:
            databases.append(Database(path))
            return LocalResults(databases[-1], owner=owner, signatures=signatures)

        return Store("local", first, second, True, close, SqlOutsider(path), of)

    yield make


@contextmanager
def tables(directory: Path) -> Iterator[Maker]:
    """A new table on Azurite, and two clients of it."""
    services = azurite.kept("table"), azurite.kept("blob")
    address = parse_results(azurite.account_of(*services))
    assert isinstance(address, TablesAddress)

    def make() -> Store:
        number = next(_names)
        names = {"table": f"contract{number}", "container": f"contract-{number}"}
        first, second = (TablesResults(address, **names) for _ in range(2))
        first.create()

        opened = [first, second]

        def close() -> None:
            for each in opened:
                each.close()

        def of(owner: Owner, signatures: RowSignatures | None = None) -> TablesResults:
            made = TablesResults(address, **names, owner=owner, signatures=signatures)
            opened.append(made)
            return made

        outsider = TableOutsider(azurite.account_of(*services), names["table"])
        return Store("tables", first, second, False, close, outsider, of)

    yield make


class ModelOutsider(TableOutsider):
    """Another program that writes into the modelled table."""

    def __init__(self, service: Tables, table: str) -> None:
        self._client = ModelTable(service, line(), table)

    def _opened(self) -> AbstractContextManager[Any]:
        return nullcontext(self._client)


@contextmanager
def simulated_tables(directory: Path) -> Iterator[Maker]:
    """The real store over the modelled services of the simulation, and two programs on it."""

    def make() -> Store:
        service, blobs = Tables(SYSTEM_CLOCK), Blobs(SYSTEM_CLOCK)

        def opened(
            owner: Owner = NO_OWNER, signatures: RowSignatures | None = None
        ) -> TablesResults:
            return tables_results(service, blobs, line(), owner=owner, signatures=signatures)

        first, second = opened(), opened()
        first.create()
        outsider = ModelOutsider(service, TABLE)
        return Store("tables", first, second, False, lambda: None, outsider, opened)

    yield make


FACTORIES: dict[str, Callable[[Path], AbstractContextManager[Maker]]] = {
    "local": local,
    "simulated-tables": simulated_tables,
    "tables": tables,
}
