"""Two owners on one result store, and how the engines that read its rows are found.

A scenario is a function ``(mine, theirs) -> None``. It lets `mine` write rows through an engine,
and asserts that the same engine of `theirs` does not see, act on or delete them. The modules of
`MODULES` export ``SCENARIOS: dict[str, Scenario]``, by the name of the engine as `subjects` gives
it, and may export ``EXEMPT: dict[str, str]``: why a class or function needs none. The only reason
is that it passes a store on, or reads what the caller names.
"""

from __future__ import annotations

import ast
import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import azurite
from services import Blobs, Tables, tables_results
from simulated import line

from aztask import App
from aztask.address.addresses import TablesAddress
from aztask.address.owner import Owner
from aztask.address.urls import parse_results
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.stores.records.base import ResultStore
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.tables.store import TablesResults
from aztask.support.clock import SYSTEM_CLOCK

MODULES = {
    "ResultStore": "owners_runs",
    "WorkflowStore": "owners_runs",
    "UniqueStore": "owners_keyed",
    "ControlStore": "owners_keyed",
    "DeadIndex": "owners_keyed",
    "LeaseStore": "owners_keyed",
    "ScheduleStore": "owners_schedules",
}
"""The parts of a result store, and the module with the scenarios of what reads each."""

ELSEWHERE = {
    "aztask.operate.findings.pause_findings": "owners_keyed",
    "aztask.operate.findings.schedule_findings": "owners_schedules",
    "aztask.stores.records.deadindex.index_for": "owners_keyed",
    "aztask.schedules.schedules.Schedules": "owners_schedules",
}
"""What is handed a whole store, but reads one part of it."""

STORES = ("aztask.stores.records.local", "aztask.stores.records.tables")
"""The parts themselves; the contract of each has tests of its own."""

_names = itertools.count(1)


@dataclass
class World:
    """One app with its own broker, and the store that it shares.

    again: opens that store for another owner.
    """

    app: App
    store: ResultStore
    owner: Owner
    again: Callable[[Owner], ResultStore]


Scenario = Callable[[World, World], None]
Worlds = Callable[[], tuple[World, World]]


# -- worlds ----------------------------------------------------------------------------------


def world(name: str, folder: Path, open_store: Callable[[Owner], ResultStore]) -> World:
    """An app of this name with a broker of its own, on a store that `open_store` opens for it."""
    folder.mkdir(parents=True, exist_ok=True)
    broker = LocalBroker(Database(str(folder / "queues.db")))
    owner = Owner(broker.identity, name)
    store = open_store(owner)
    return World(App(name, broker=broker, results=store), store, owner, open_store)


@contextmanager
def local(directory: Path) -> Iterator[Worlds]:
    """Two apps of one name, and one file."""

    def make() -> tuple[World, World]:
        folder = directory / f"owners-{next(_names)}"
        path = str(folder / "results.db")
        return (
            world("shop", folder / "mine", lambda own: LocalResults(Database(path), owner=own)),
            world("shop", folder / "theirs", lambda own: LocalResults(Database(path), owner=own)),
        )

    yield make


@contextmanager
def tables(directory: Path) -> Iterator[Worlds]:
    """Two apps of one name, and one table on Azurite."""
    services = azurite.kept("table"), azurite.kept("blob")
    address = parse_results(azurite.account_of(*services))
    assert isinstance(address, TablesAddress)

    def make() -> tuple[World, World]:
        number = next(_names)
        folder = directory / f"owners-{number}"
        names = {"table": f"owners{number}", "container": f"owners-{number}"}

        def opened(owner: Owner) -> ResultStore:
            store = TablesResults(address, **names, owner=owner)
            store.create()
            return store

        return (
            world("shop", folder / "mine", opened),
            world("shop", folder / "theirs", opened),
        )

    yield make


@contextmanager
def simulated_tables(directory: Path) -> Iterator[Worlds]:
    """Two apps of one name, and one modelled table of the simulation."""

    def make() -> tuple[World, World]:
        folder = directory / f"owners-{next(_names)}"
        service, blobs = Tables(SYSTEM_CLOCK), Blobs(SYSTEM_CLOCK)

        def opened(owner: Owner) -> ResultStore:
            store = tables_results(service, blobs, line(), owner=owner)
            store.create()
            return store

        return world("shop", folder / "mine", opened), world("shop", folder / "theirs", opened)

    yield make


FACTORIES: dict[str, Callable[[Path], AbstractContextManager[Worlds]]] = {
    "local": local,
    "simulated-tables": simulated_tables,
    "tables": tables,
}


# -- what reads rows -------------------------------------------------------------------------


OPENS = {"StoreConnection": "ResultStore"}
"""Ports that open a part: who is handed one is handed the part."""


def subjects(package: Path) -> dict[str, set[str]]:
    """Each class and function of a package that is handed parts of a store, and which parts."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        if not module.startswith(STORES):
            _visit(ast.parse(path.read_text()), module, "", found)
    return found


def _visit(node: ast.AST, place: str, owner: str, found: dict[str, set[str]]) -> None:
    """Add what is in `node`. owner: the class that it belongs to, "" outside of classes."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef):
            name = f"{place}.{each.name}"
            fields = (part.annotation for part in each.body if isinstance(part, ast.AnnAssign))
            _add(found, name, fields)
            _visit(each, name, name, found)
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            given = (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)
            _add(found, owner or f"{place}.{each.name}", (part.annotation for part in given))
        else:
            _visit(each, place, owner, found)


def _add(found: dict[str, set[str]], name: str, annotations: Iterator[ast.expr | None]) -> None:
    named = (part for each in annotations for part in _named(each))
    parts = {OPENS.get(part, part) for part in named} & MODULES.keys()
    if parts:
        found.setdefault(name, set()).update(parts)


def _named(annotation: ast.expr | None) -> Iterator[str]:
    """The names in an annotation, also in one that is written as text."""
    if annotation is None:
        return
    for each in ast.walk(annotation):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            with suppress(SyntaxError):  # a text of Literal["..."]
                yield from _named(ast.parse(each.value, mode="eval").body)


def responsible(subject: str, parts: set[str]) -> set[str]:
    """The modules that may have the scenario of a subject."""
    if subject in ELSEWHERE:
        return {ELSEWHERE[subject]}
    return {MODULES[part] for part in parts}


def scenario_modules() -> dict[str, ModuleType]:
    """The modules of scenarios that exist."""
    found: dict[str, ModuleType] = {}
    for name in sorted(set(MODULES.values())):
        if (Path(__file__).parent / f"{name}.py").is_file():
            found[name] = importlib.import_module(name)
    return found
