"""The plots in the documentation are what their scripts draw, and the scripts are right."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

PLOTS = Path(__file__).parents[2] / "docs" / "plots"


@pytest.fixture
def plot():
    spec = importlib.util.spec_from_file_location("plot", PLOTS / "invisibility_time.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_picture_is_the_drawn_one(plot):
    assert plot.SVG.read_text(encoding="utf-8") == plot.draw()
    ElementTree.fromstring(plot.draw())


def test_a_crash_after_ten_of_thirty_minutes_costs_twenty(plot):
    assert plot.wait_without_renewal(30, 10) == 20
    assert plot.wait_without_renewal(30, 31) == 0


def test_with_renewal_the_wait_is_between_what_is_left_at_renewal_and_a_whole_lease(plot):
    waits = [plot.wait_with_renewal(1, crash / 100) for crash in range(5000)]
    assert max(waits) == 1
    assert 0.3 <= min(waits) < 0.32
