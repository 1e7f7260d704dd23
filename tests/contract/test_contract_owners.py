"""Two owners on one store: no engine sees, acts on or deletes rows of the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import owners
import pytest
from owners import FACTORIES, Scenario, Worlds

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
