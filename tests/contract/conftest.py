"""The contract's fixtures: every test of this directory runs against every broker, or store."""

from __future__ import annotations

from collections.abc import Iterator

import azurite
import pytest
import rowstores
import stores
from rowstores import Make, RowSubject
from stores import Maker, Store
from subjects import FACTORIES, Subject

from aztask.stores.records.base import ResultStore
from aztask.stores.rows import RowStore


def pytest_sessionfinish() -> None:
    """Azurite's services serve all modules of a process."""
    azurite.stop_kept()


@pytest.fixture(scope="session", params=sorted(FACTORIES))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """One broker for the whole run: servers are slow to start."""
    with FACTORIES[request.param](tmp_path_factory.mktemp("contract")) as subject:
        yield subject
        subject.broker.close()


@pytest.fixture
def subject(served: Subject) -> Iterator[Subject]:
    """The broker under test; the receivers that the test opened are closed at its end."""
    yield served
    for receiver in served.opened:
        receiver.close()
    served.opened.clear()


@pytest.fixture(scope="session", params=sorted(stores.FACTORIES))
def maker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Maker]:
    """One service for the whole run: servers are slow to start."""
    with stores.FACTORIES[request.param](tmp_path_factory.mktemp("results")) as make:
        yield make


@pytest.fixture
def store(maker: Maker) -> Iterator[Store]:
    """A new, empty store."""
    made = maker()
    yield made
    made.close()


@pytest.fixture
def results(store: Store) -> ResultStore:
    return store.results


@pytest.fixture(scope="module", params=sorted(rowstores.FACTORIES))
def make_rows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Make]:
    """One service for the rows of a module."""
    with rowstores.FACTORIES[request.param](tmp_path_factory.mktemp("rows")) as made:
        yield made


@pytest.fixture
def row_subject(make_rows: Make) -> Iterator[RowSubject]:
    """A new, empty store of rows."""
    made = make_rows()
    yield made
    for each in made.at_end:
        each()


@pytest.fixture
def rows(row_subject: RowSubject) -> RowStore:
    return row_subject.store
