"""Pytest's part: one emulator for each process that runs tests, and a fixture of the suite's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sdksuite.service import service


@pytest.fixture(scope="session", autouse=True)
def emulated_service() -> Iterator[None]:
    """The service for all tests of this process."""
    with service():
        yield


@pytest.fixture(scope="session")
def test_proxy() -> None:
    """The recorder of HTTP requests, which is not needed: every test is live."""
