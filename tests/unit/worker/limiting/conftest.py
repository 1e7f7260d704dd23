"""Benches of the tests in this directory, and the databases that are closed after each test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from pipelinebench import Make, make_bench

from aztask.queues.engine import Database


@pytest.fixture
def make() -> Iterator[Make]:
    databases: set[Database] = set()
    yield partial(make_bench, databases)
    for database in databases:
        database.close()
