"""The stores of rows under test, and kinds of rows that use all that a kind may have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import azurite
from proxy import Proxy
from rowmodel import ModelStore
from services import FINE, Fault, Outcome, Request, Tables, rows_store
from simulated import line

from aztask.address.addresses import TablesAddress
from aztask.address.urls import parse_results
from aztask.queues.engine import Database
from aztask.stores.layout import Shards, SqlLayout, TablesLayout
from aztask.stores.local.rows import SqliteStore
from aztask.stores.records.tables.store import TABLE
from aztask.stores.rows import Kind, RowStore
from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.stores.tables.store import TablesStore
from aztask.support.clock import SYSTEM_CLOCK

_names = itertools.count(1)

_PLACE = "part TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, at REAL NOT NULL"
_VALUES = "text TEXT, data BLOB, number REAL, count INTEGER, flag INTEGER"
PLAIN = Kind(
    {"text": str, "data": bytes, "number": float, "count": int, "flag": bool},
    SqlLayout(
        "plain_owned",
        "plain",
        "part",
        "key",
        app=True,
        written="at",
        steps={
            "plain": (
                f"CREATE TABLE plain ({_PLACE}, {_VALUES}, PRIMARY KEY (part, key));\n"
                f"CREATE TABLE plain_owned (broker TEXT, app TEXT, {_PLACE}, {_VALUES},"
                " PRIMARY KEY (broker, app, part, key));",
            )
        },
    ),
    TablesLayout("P", "p", "r-", "name"),
    long="data",
)
"""Rows in partitions, each with values of every type, of an app."""

_DUE = "key TEXT NOT NULL, version INTEGER NOT NULL, due REAL NOT NULL, data BLOB NOT NULL"
DUE = Kind(
    {"due": float, "data": bytes},
    SqlLayout(
        "due_owned",
        "due",
        key="key",
        guard="data",
        steps={
            "due": (
                f"CREATE TABLE due ({_DUE}, PRIMARY KEY (key));\n"
                f"CREATE TABLE due_owned (broker TEXT, {_DUE}, PRIMARY KEY (broker, key));",
            )
        },
    ),
    Shards("W", "w", "k-", "name"),
    due="due",
    inherits=True,
)
"""Rows with due times, in one partition that is spread over shards, of a broker."""


_NUMBERED = "part TEXT NOT NULL, key TEXT NOT NULL, text TEXT, more TEXT, data BLOB"
NUMBERED = Kind(
    {"number": int, "text": str, "more": str, "data": bytes},
    SqlLayout(
        "numbered_owned",
        "numbered",
        "part",
        "key",
        version="number",
        steps={
            "numbered": (
                f"CREATE TABLE numbered (number INTEGER PRIMARY KEY AUTOINCREMENT, {_NUMBERED},"
                " UNIQUE (part, key));\n"
                "CREATE TABLE numbered_owned (number INTEGER PRIMARY KEY AUTOINCREMENT,"
                f" broker TEXT, {_NUMBERED}, UNIQUE (broker, part, key));",
            )
        },
    ),
    TablesLayout("N", "n", "n-", "name", {"both": ("text", "more")}),
    long="data",
    number="number",
)
"""Rows in the order in which they were made, of a broker."""

SIMPLE = Kind(
    {"number": float},
    SqlLayout(
        "simple",
        "simple",
        "part",
        version="",
        steps={"simple": ("CREATE TABLE simple (broker TEXT, part TEXT, number REAL);",)},
    ),
    TablesLayout("N", "n", "r"),
)
"""Rows without versions, all with an owner, in the partitions of the others."""


@dataclass
class RowSubject:
    """store: the one under test. another: the same rows, as another process has them.

    lose: loses the answer to the next change that `store` makes; the change is carried out.
    """

    store: RowStore
    another: RowStore
    lose: Callable[[], None]
    at_end: list[Callable[[], None]] = field(default_factory=list)


Make = Callable[[], RowSubject]


@contextmanager
def sqlite(directory: Path) -> Iterator[Make]:
    """A file, and two connections to it. A call in this process cannot lose its answer."""

    def make() -> RowSubject:
        path = str(directory / f"rows-{next(_names)}.db")
        databases = [Database(path), Database(path)]
        first, second = (SqliteStore(each, SYSTEM_CLOCK) for each in databases)
        return RowSubject(first, second, lambda: None, [each.close for each in databases])

    yield make


@contextmanager
def tables(directory: Path) -> Iterator[Make]:
    """A table on Azurite: one client through a proxy that loses answers, and one past it."""
    services = azurite.kept("table"), azurite.kept("blob")
    proxy = Proxy(services[0].port)

    def client(name: str, **port: int) -> TableRequests:
        address = parse_results(azurite.account_of(*services, **port))
        assert isinstance(address, TablesAddress)
        return TableRequests(address, name)

    def make() -> RowSubject:
        table = f"rows{next(_names)}"
        requests = [client(table, table=proxy.port), client(table)]
        requests[1].create(TimeBudget())
        first, second = (TablesStore(each, SYSTEM_CLOCK) for each in requests)

        def lose() -> None:
            left = [True]

            def hook(line: bytes, seen: int) -> str | None:
                reads = line.startswith(b"GET")
                return None if reads or not left or not left.pop() else "drop-reply"

            proxy.hook = hook

        def forget() -> None:
            proxy.hook = None

        return RowSubject(first, second, lose, [forget, *(each.close for each in requests)])

    yield make
    proxy.close()


@contextmanager
def model(directory: Path) -> Iterator[Make]:
    """Rows in memory, which both parties share."""

    def make() -> RowSubject:
        store = ModelStore()

        def lose() -> None:
            store.lost = 1

        return RowSubject(store, store, lose)

    yield make


class LosesOne:
    """A fate that loses the answer to the next change. left: whether it is to come."""

    def __init__(self) -> None:
        self.left = False

    def of(self, request: Request) -> Outcome:
        """Reads are left alone."""
        if not self.left or request.operation in ("get", "query"):
            return FINE
        self.left = False
        return Outcome(Fault.ANSWER_LOST)


@contextmanager
def simulated_tables(directory: Path) -> Iterator[Make]:
    """The real port over the modelled table service of the simulation, and two programs on it."""

    def make() -> RowSubject:
        service, fate = Tables(SYSTEM_CLOCK), LosesOne()
        service.create(TABLE)
        first, second = (rows_store(service, each) for each in (line(fate=fate), line()))

        def lose() -> None:
            fate.left = True

        return RowSubject(first, second, lose)

    yield make


FACTORIES: dict[str, Callable[[Path], AbstractContextManager[Make]]] = {
    "model": model,
    "simulated-tables": simulated_tables,
    "sqlite": sqlite,
    "tables": tables,
}
