"""Bounds of advised leases."""

import pytest

from aztask.errors import ConfigurationError
from aztask.lease.bounds import Bounds, read_bounds


def test_a_lease_is_moved_to_the_nearer_bound():
    bounds = Bounds(30.0, 600.0)
    assert [bounds.clamp(seconds) for seconds in (1.0, 60.0, 1e9)] == [30.0, 60.0, 600.0]


@pytest.mark.parametrize("pair", [(0.0, 1.0), (2.0, 1.0), (1.0, 1e9), (float("nan"), 1.0)])
def test_bounds_that_contradict_each_other_are_refused(pair):
    with pytest.raises(ConfigurationError, match="a lease cannot be kept between"):
        Bounds(*pair)


def test_the_setting_is_a_switch_or_two_numbers_below_max_lease():
    assert read_bounds(True, 1.0) is True
    assert read_bounds((30, 600), 3600.0) == (30.0, 600.0)
    with pytest.raises(ConfigurationError, match="need a longer max_lease than 600 s"):
        read_bounds((30, 600), 600.0)
    with pytest.raises(ConfigurationError, match="adaptive is True, False or"):
        read_bounds("yes", None)
