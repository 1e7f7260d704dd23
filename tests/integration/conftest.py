"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Site, site_in


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
