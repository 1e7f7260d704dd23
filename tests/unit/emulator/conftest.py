"""Fixtures of the emulator's unit tests."""

from __future__ import annotations

import pytest
from emulatorbench import Bench


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.emulator.database.close()
