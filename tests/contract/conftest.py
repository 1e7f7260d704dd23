"""The contract's fixture: every test of this directory runs against every broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from subjects import FACTORIES, Subject


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
