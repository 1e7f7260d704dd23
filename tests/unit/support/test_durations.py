"""Durations and times: a float of seconds comes out, nonsense is refused by name."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from aztask.errors import ConfigurationError
from aztask.support.durations import fine_span, parse_duration, to_epoch_seconds, to_seconds


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("1h30m", 5400.0),
        ("1d2h3m4s5ms", 93784.005),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
        ("0", 0.0),
        ("12.5", 12.5),
        (" 7s ", 7.0),
    ],
)
def test_durations_are_read_from_text(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "s", "-1", "-5s", "1m1h", "5s5s", "1h 30m", "1e9", "nan", "inf", "5x", "1,5s"),
        *("٣s", "9" * 5000, "5s\x1b[31m", "\x00", "5\ud800"),
    ],
)
def test_other_text_is_refused_in_one_line_with_an_example(text):
    with pytest.raises(ConfigurationError, match="write 30s, 5m") as caught:
        parse_duration(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0.0),
        (datetime(2030, 1, 1, 12, 0, 0, 250_000, tzinfo=UTC), 1_893_499_200.25),
        (datetime(2030, 1, 1, 7, 0, tzinfo=timezone(timedelta(hours=-5))), 1_893_499_200.0),
    ],
)
def test_a_time_becomes_epoch_seconds(value, seconds):
    assert to_epoch_seconds(value, "eta") == seconds


@pytest.mark.parametrize("value", [datetime(2030, 1, 1), 1_893_499_200, "2030-01-01", None])
def test_what_is_no_time_with_a_zone_is_refused(value):
    with pytest.raises(ConfigurationError, match=r"eta .*time zone.* datetime\.now"):
        to_epoch_seconds(value, "eta")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(-1.0, "0ms"), (0.0004, "0ms"), (0.0285, "28ms"), (0.9994, "999ms"), (0.9996, "1.0s")],
        *[(1.64, "1.6s"), (9.94, "9.9s"), (9.96, "10s"), (119.4, "119s"), (300.0, "5m")],
    ],
)
def test_what_a_task_takes_is_shown_finer_than_seconds(seconds: float, text: str) -> None:
    assert fine_span(seconds) == text
