"""Bounds of an adaptive lease, at their very edges."""

from __future__ import annotations

from datetime import timedelta

import pytest

from aztask.errors import ConfigurationError
from aztask.queues.lease.bounds import Bounds, read_bounds

WEEK = 7 * 86400.0


def test_the_defaults() -> None:
    assert Bounds() == Bounds(30.0, WEEK, 100)


@pytest.mark.parametrize(
    ("least", "most", "good"),
    [
        (0.001, 0.001, True),
        (30.0, WEEK, True),
        (0.0, 5.0, False),
        (-1.0, 5.0, False),
        (5.0, 4.999, False),
        (5.0, WEEK + 0.001, False),
        (float("nan"), 5.0, False),
        (5.0, float("nan"), False),
    ],
)
def test_which_bounds_make_sense(least: float, most: float, good: bool) -> None:
    if good:
        assert Bounds(least, most).least == least
    else:
        with pytest.raises(ConfigurationError, match="between"):
            Bounds(least, most)


@pytest.mark.parametrize(
    ("seconds", "clamped"), [(9.9, 10.0), (10.0, 10.0), (15.0, 15.0), (20.0, 20.0), (20.1, 20.0)]
)
def test_a_lease_stays_within(seconds: float, clamped: float) -> None:
    assert Bounds(10.0, 20.0).clamp(seconds) == clamped


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_a_switch(value: bool) -> None:
    assert read_bounds(value, 5.0) is value


@pytest.mark.parametrize("value", [(60, 120.0), [timedelta(minutes=1), timedelta(minutes=2)]])
def test_two_durations_are_seconds(value: object) -> None:
    assert read_bounds(value, None) == (60.0, 120.0)
    assert read_bounds(value, 120.001) == (60.0, 120.0)


@pytest.mark.parametrize("value", [(60,), (1, 2, 3), "ab", None, 60.0, {1, 2}])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="adaptive is True, False or"):
        read_bounds(value, None)


@pytest.mark.parametrize("max_lease", [120.0, 119.0])
def test_max_lease_must_be_longer(max_lease: float) -> None:
    with pytest.raises(ConfigurationError, match="max_lease"):
        read_bounds((60, 120.0), max_lease)


def test_a_duration_that_is_none_names_its_setting() -> None:
    with pytest.raises(ConfigurationError, match=r"\badaptive\b"):
        read_bounds(("soon", 60.0), None)
