"""Fixtures of the tests of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from pipelinebench import Make, make_bench

from aztask.queues.engine import Database


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes benches; see `pipelinebench.make_bench`."""
    databases: set[Database] = set()
    yield partial(make_bench, databases)
    for database in databases:
        database.close()


@pytest.fixture(params=[True, False], ids=["one database", "two databases"])
def joint(request: pytest.FixtureRequest) -> bool:
    """Whether broker and store share a database: then record and settlement are one."""
    return bool(request.param)
