"""The result stores under test.

To put another store under the contract, add a factory to `FACTORIES`: a context manager that takes
a temporary directory and gives a function that makes a `Store`, new and empty. Servers that it
starts, it stops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import azurite
from damaging import Outsider, SqlOutsider, TableOutsider

from aztask.address.addresses import TablesAddress
from aztask.address.urls import parse_results
from aztask.engine import Database
from aztask.results.base import ResultStore
from aztask.results.local.store import LocalResults
from aztask.results.tables.store import TablesResults

_names = itertools.count(1)


@dataclass
class Store:
    """results: the store. another: the same one, as another process would have it. lists_running:
    whether `recent` shows runs that have not ended. close: at the end.

    outsider: writes into its rows past it.
    """

    name: str
    results: ResultStore
    another: ResultStore
    lists_running: bool
    close: Callable[[], None]
    outsider: Outsider


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

        return Store("local", first, second, True, close, SqlOutsider(path))

    yield make


@contextmanager
def tables(directory: Path) -> Iterator[Maker]:
    """A new table on Azurite, and two clients of it."""
    with azurite.storing(directory / "azurite") as services:
        address = parse_results(azurite.account_of(*services))
        assert isinstance(address, TablesAddress)

        def make() -> Store:
            number = next(_names)
            names = {"table": f"contract{number}", "container": f"contract-{number}"}
            first, second = (TablesResults(address, **names) for _ in range(2))
            first.create()

            def close() -> None:
                first.close()
                second.close()

            outsider = TableOutsider(azurite.account_of(*services), names["table"])
            return Store("tables", first, second, False, close, outsider)

        yield make


FACTORIES: dict[str, Callable[[Path], AbstractContextManager[Maker]]] = {
    "local": local,
    "tables": tables,
}
