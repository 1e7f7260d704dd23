"""Durations: seconds or timedelta in, a float of seconds out, nonsense refused by name."""

from datetime import timedelta

import pytest

from aztask.durations import to_seconds
from aztask.errors import ConfigurationError


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0.0), (1, 1.0), (2.5, 2.5), (timedelta(minutes=1, milliseconds=5), 60.005)],
)
def test_numbers_and_timedeltas_become_seconds(value, seconds):
    result = to_seconds(value, "delay")
    assert result == seconds
    assert isinstance(result, float)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -1, -0.001, True, "1", None, 10**400, timedelta(seconds=-1), 1e12],
)
def test_nonsense_is_refused_with_the_settings_name(value):
    with pytest.raises(ConfigurationError, match="visibility") as caught:
        to_seconds(value, "visibility")
    assert "\n" not in str(caught.value)


def test_the_bounds_are_inclusive():
    assert to_seconds(5, "lease", minimum=5, maximum=300) == 5
    assert to_seconds(300, "lease", minimum=5, maximum=300) == 300
    with pytest.raises(ConfigurationError, match="between 5 and 300"):
        to_seconds(301, "lease", minimum=5, maximum=300)
