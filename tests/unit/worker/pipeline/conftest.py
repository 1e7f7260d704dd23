"""Fixtures of the tests of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from pipelinebench import Make, make_bench

from aztask.engine import Database


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes benches; see `pipelinebench.make_bench`."""
    databases: set[Database] = set()
    yield partial(make_bench, tmp_path, databases)
    for database in databases:
        database.close()


@pytest.fixture(params=[True, False], ids=["one file", "two files"])
def joint(request: pytest.FixtureRequest) -> bool:
    """Whether broker and store share a file, so that record and settlement are one transaction."""
    return bool(request.param)
