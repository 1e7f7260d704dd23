"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from azurite import Azurite, running
from harness import Site, site_in
from proxy import Proxy

from aztask import App


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A broker and a result store in one file; workers are killed at the end."""
    with site_in(tmp_path / "site") as made:
        yield made


@pytest.fixture
def split_site(tmp_path: Path) -> Iterator[Site]:
    """A broker and a result store in two files: no common transaction."""
    with site_in(tmp_path / "site", joint=False) as made:
        yield made


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """Azurite's queue service, one for each file of tests."""
    with running(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def proxy(azurite: Azurite) -> Iterator[Proxy]:
    """In front of Azurite."""
    made = Proxy(azurite.port)
    yield made
    made.close()


@pytest.fixture
def proxied_site(azurite: Azurite, proxy: Proxy, tmp_path: Path) -> Iterator[Site]:
    """Workers reach a new queue on Azurite through the proxy, the test past it."""
    with site_in(
        tmp_path / "site", joint=False, broker=azurite.connection_string_at(proxy.port)
    ) as made:
        made._app = App("ledger", broker=azurite.connection_string, results=made.results)
        broker = made.app().broker
        for queue in broker.queues():
            broker.delete(queue)
        broker.declare("default")
        yield made
