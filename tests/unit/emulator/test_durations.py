"""ISO 8601 durations."""

from __future__ import annotations

import pytest

from aztask.emulator.config import MAX_DURATION, format_duration, parse_duration
from aztask.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("PT1M", 60.0),
        ("P14D", 1209600.0),
        ("PT1H30M5.5S", 5405.5),
        ("P1W", 604800.0),
        ("PT0.1S", 0.1),
        ("P10675199DT2H48M5.4775807S", MAX_DURATION),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "P", "PT", "1M", "PT1", "-PT1M", "P1Y", "PT1M5"])
def test_invalid_durations(text):
    with pytest.raises(ConfigurationError):
        parse_duration(text)
