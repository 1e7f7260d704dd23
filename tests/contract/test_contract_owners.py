"""Two owners on one store: no engine sees, acts on or deletes rows of the other."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import owners
import pytest
from owners import FACTORIES, Scenario, Worlds

from aztask.operate.owners import adoption
from aztask.stores.rows import Change, Kind, Place

PACKAGE = Path(__file__).parents[2] / "aztask"

found = owners.scenario_modules()
SCENARIOS: dict[str, Scenario] = {
    name: scenario for module in found.values() for name, scenario in module.SCENARIOS.items()
}
EXEMPT: dict[str, str] = {
    name: why for module in found.values() for name, why in getattr(module, "EXEMPT", {}).items()
}


@pytest.fixture(scope="module", params=sorted(FACTORIES))
def worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worlds]:
    """One service for the whole module: servers are slow to start."""
    with FACTORIES[request.param](tmp_path_factory.mktemp("owners")) as make:
        yield make


def test_every_engine_that_reads_rows_has_a_scenario():
    known = owners.subjects(PACKAGE)
    here = {
        name for name, parts in known.items() if owners.responsible(name, parts) <= found.keys()
    }
    missing = here - SCENARIOS.keys() - EXEMPT.keys()
    assert not missing, f"without a scenario of two owners: {', '.join(sorted(missing))}"
    unknown = (SCENARIOS.keys() | EXEMPT.keys()) - known.keys()
    assert not unknown, f"no longer in the package: {', '.join(sorted(unknown))}"


def test_subjects_are_found_by_code(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "engine.py").write_text(
        "class Engine:\n    def __init__(self, store: 'UniqueStore | None') -> None: ...\n"
        "class Part:\n    results: base.ResultStore\n"
        "def look(controls: ControlStore) -> None: ...\n"
        "def other(name: str) -> None: ...\n"
    )
    assert owners.subjects(tmp_path / "package") == {
        "package.engine.Engine": {"UniqueStore"},
        "package.engine.Part": {"ResultStore"},
        "package.engine.look": {"ControlStore"},
    }


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_an_owner_leaves_the_rows_of_another_alone(worlds, name):
    mine, theirs = worlds()
    try:
        SCENARIOS[name](mine, theirs)
    finally:
        for each in (mine, theirs):
            each.app.close()


def kinds() -> dict[str, Kind]:
    """Every kind of rows in the package, by its module and name."""
    found: dict[str, Kind] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^(\w+): Final = Kind\($", path.read_text(), re.MULTILINE):
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            found[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    return found


KINDS = kinds()
SAMPLES: dict[type, Any] = {bytes: b"{}", str: "text", float: 1.0, int: 1, bool: True}
DROPPED = {
    "aztask.stores.records.deadindex.NOTES": "a damaged note: its dead letter is in the queue",
}
BESIDE = {
    "aztask.stores.records.deadindex.READ": "it goes with the notes: how far their queue was read",
    "aztask.stores.records.rowsigning.ADOPTIONS": "each adoption signs notes of its own",
}


def test_kinds_of_rows_are_found_by_code():
    assert {
        "aztask.steps.records.STEPS",
        "aztask.steps.parts.PARTS",
        "aztask.operate.ledger.OPERATIONS",
    } <= KINDS.keys()
    assert len(KINDS) >= 6
    assert DROPPED.keys() | BESIDE.keys() <= KINDS.keys()


@pytest.mark.parametrize("name", sorted(KINDS.keys() - BESIDE.keys()))
def test_an_adoption_moves_rows_of_every_kind(worlds, name):
    """A task whose recorded steps stayed behind would run them again."""
    kind = KINDS[name]
    mine, theirs = worlds()
    try:
        rows = theirs.store.rows.of(kind)
        partition = "a" if kind.sql.partition else ""
        place = Place(theirs.owner.of_broker, partition, "k" if kind.sql.key else "")
        values = {column: SAMPLES[each] for column, each in kind.columns.items()}
        assert rows.write(Change(place, values)) is not None
        (place,) = [row.place for row in rows.of_owner(theirs.owner.of_broker)]
        adoption(mine.app, theirs.owner.broker).act()
        assert list(rows.of_owner(theirs.owner.of_broker)) == []
        moved = [row.place for row in rows.of_owner(mine.owner.of_broker)]
        assert (place._replace(owner=mine.owner.of_broker) in moved) is (name not in DROPPED)
    finally:
        for each in (mine, theirs):
            each.app.close()
