"""When a schedule is due: cron through both daylight-saving days, intervals, one time."""

from datetime import UTC, datetime
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.errors import ConfigurationError
from aztask.schedules import triggers
from aztask.schedules.triggers import (
    At,
    Cron,
    Every,
    latest_times,
    next_time,
    read_trigger,
    trigger_of,
)
from aztask.stores.records.damage import Damaged

NEW_YORK, BERLIN = "America/New_York", "Europe/Berlin"


def local(year, month, day, hour=0, minute=0, *, tz=NEW_YORK):
    return datetime(year, month, day, hour, minute, tzinfo=ZoneInfo(tz)).timestamp()


def shown(trigger, after, count):
    """The next times as local time with the offset: ``1 01:30 -0400`` is on the first."""
    tz = ZoneInfo(trigger.tz)
    found = (datetime.fromtimestamp(each, tz) for each in islice(trigger.after(after), count))
    return [each.strftime("%d %H:%M %z").lstrip("0") for each in found]


# Debian's cron(8), "Notes": in the skipped hour, jobs run right after the change; jobs of the
# repeated hour run once; jobs with * in the hour or minute follow the clock.
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 2 * * *", ["8 03:00 -0400", "9 02:30 -0400"]),
        ("0 2 * * *", ["8 03:00 -0400", "9 02:00 -0400"]),
        ("30 1 * * *", ["8 01:30 -0500", "9 01:30 -0400"]),
        ("30 3 * * *", ["8 03:30 -0400", "9 03:30 -0400"]),
        ("30 */6 * * *", ["8 00:30 -0500", "8 06:30 -0400"]),
        ("30 * * * *", ["8 00:30 -0500", "8 01:30 -0500", "8 03:30 -0400", "8 04:30 -0400"]),
        ("*/30 1-2 * * *", ["8 01:00 -0500", "8 01:30 -0500", "9 01:00 -0400"]),
    ],
)
def test_the_hour_that_is_skipped(expression, expected):
    """8 March 2026 in New York: 02:00 is followed by 03:00."""
    after = local(2026, 3, 7, 23, 59)
    assert shown(Cron(expression, NEW_YORK), after, len(expected)) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 1 * * *", ["1 01:30 -0400", "2 01:30 -0500"]),
        ("0 1 * * *", ["1 01:00 -0400", "2 01:00 -0500"]),
        ("0 2 * * *", ["1 02:00 -0500", "2 02:00 -0500"]),
        ("30 * * * *", ["1 00:30 -0400", "1 01:30 -0400", "1 01:30 -0500", "1 02:30 -0500"]),
        ("*/30 1 * * *", ["1 01:00 -0400", "1 01:30 -0400", "1 01:00 -0500", "1 01:30 -0500"]),
    ],
)
def test_the_hour_that_is_repeated(expression, expected):
    """1 November 2026 in New York: 01:59 is followed by 01:00."""
    after = local(2026, 10, 31, 23, 59)
    assert shown(Cron(expression, NEW_YORK), after, len(expected)) == expected


def test_berlin_changes_on_other_days():
    assert shown(Cron("30 2 * * *", BERLIN), local(2026, 10, 24, 12, tz=BERLIN), 2) == [
        "25 02:30 +0200",
        "26 02:30 +0100",
    ]
    assert shown(Cron("30 2 * * *", BERLIN), local(2026, 3, 28, 12, tz=BERLIN), 2) == [
        "29 03:00 +0200",
        "30 02:30 +0200",
    ]


@given(
    expression=st.sampled_from(
        ["30 1 * * *", "30 2 * * *", "*/20 * * * *", "15 */2 * * *", "0 0 1 * *", "5 1,2 * * SUN"]
    ),
    day=st.sampled_from([(2026, 3, 7), (2026, 10, 31)]),
    first=st.integers(0, 3 * 86400),
    second=st.integers(0, 3 * 86400),
)
def test_the_times_do_not_depend_on_where_one_begins(expression, day, first, second):
    """A worker that starts in the repeated hour finds the same times as one that ran all along."""
    trigger = Cron(expression, NEW_YORK)
    early, late = sorted((local(*day) + first, local(*day) + second))
    until = local(*day) + 5 * 86400
    everything = list(takewhile(lambda each: each <= until, trigger.after(early)))
    rest = list(takewhile(lambda each: each <= until, trigger.after(late)))
    assert rest == [each for each in everything if each > late]


@given(
    expression=st.sampled_from(["* * * * *", "30 2 * * *", "0 0 1 1 *", "0 0 29 2 *"]),
    back=st.integers(0, 400 * 86400),
    limit=st.integers(1, 5),
)
def test_the_latest_times_are_the_last_of_all(expression, back, limit):
    until = local(2026, 7, 1)
    trigger = Cron(expression, NEW_YORK)
    if expression == "* * * * *":
        back %= 86400
    everything = list(takewhile(lambda each: each <= until, trigger.after(until - back)))
    assert latest_times(trigger, until - back, until, limit) == everything[-limit:]


def test_an_interval_counts_from_midnight_utc_of_1970():
    assert list(islice(Every(300).after(1000.0), 3)) == [1200, 1500, 1800]
    assert next_time(Every(300), 1200.0) == 1500
    assert next_time(Every(1.5), 4.4) == 4.5
    assert next_time(Every(1.1), 3.3) == 4.4, "although 3.3 / 1.1 is a little less than 3"
    day = datetime(2026, 5, 1, tzinfo=UTC).timestamp()
    assert next_time(Every(86400), day - 1) == day
    assert latest_times(Every(60), 0.0, 1e9, 3) == [999999840, 999999900, 999999960]


def test_one_time_is_due_once():
    assert list(At(50.0).after(49.0)) == [50.0]
    assert list(At(50.0).after(50.0)) == []
    assert latest_times(At(50.0), 10.0, 60.0, 5) == [50.0]


@pytest.mark.parametrize("trigger", [Cron("0 2 * * 1-5", BERLIN), Every(90.0), At(1.8e9)])
def test_a_trigger_is_read_as_it_was_packed(trigger):
    assert read_trigger(trigger.packed()) == trigger


@pytest.mark.parametrize(
    "packed", [None, [], ["cron", 5, "UTC"], ["every", 0.1], ["at", -1], ["at", 1e12], ["moon"]]
)
def test_a_wrong_trigger_is_damaged(packed):
    with pytest.raises(Damaged):
        read_trigger(packed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "takes one of cron=, every= and at="),
        ({"cron": "0 2 * * *", "every": 5}, "takes one of"),
        ({"cron": "nightly"}, "cron takes five fields such as '0 2 \\* \\* \\*', not 'nightly'"),
        ({"cron": "61 2 * * *"}, "cron takes five fields"),
        ({"cron": 5}, "cron takes five fields"),
        ({"cron": "0 2 * * *", "tz": "Mars/Base"}, "time zone, such as 'Europe/Berlin'.*tzdata"),
        ({"every": 0.5}, "every must be between 1 and"),
        ({"every": "5m"}, "every must be seconds"),
        ({"at": datetime(2026, 1, 1)}, "at .* no time zone"),
    ],
)
def test_wrong_options_say_what_to_write(options, words):
    given = {"cron": None, "every": None, "at": None, "tz": "UTC", **options}
    with pytest.raises(ConfigurationError, match=words):
        trigger_of("schedule 'x'", given["cron"], given["every"], given["at"], given["tz"])


def test_without_the_library_one_line_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(triggers, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r'pip install "aztask\[schedules\]"$'):
        Cron("0 2 * * *")
    assert next_time(Every(60), 0.0) == 60


@pytest.mark.parametrize(("name", "expression"), triggers.NAMES.items())
def test_a_common_name_is_the_expression_that_it_stands_for(name, expression):
    """Also in the store, so that workers of an earlier release read the definition."""
    made = trigger_of("s", name, None, None, BERLIN)
    assert made == Cron(expression, BERLIN)
    assert made.packed() == ["cron", expression, BERLIN]
    assert next_time(made, local(2026, 5, 6)) is not None


def test_the_names_of_debians_cron_are_known():
    """crontab(5); ``@reboot`` is not a time."""
    assert set(triggers.NAMES) == {
        *("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")
    }


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("@dayly", "Did you mean '@daily'"),
        ("@reboot", "It has: @yearly"),
        ("@every 5m", "every=300"),
        ("@", "It has: @yearly"),
    ],
)
def test_another_name_is_refused_and_the_known_ones_are_named(name, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        Cron(name)
    assert "\n" not in str(caught.value)


def test_a_zone_is_checked_even_where_it_does_not_matter():
    with pytest.raises(ConfigurationError, match="tz takes the name"):
        trigger_of("s", None, 60, None, "Mars/Base")


# -- what operators and other releases rely on ----------------------------------------------------


def test_triggers_are_stored_in_the_words_of_every_release():
    assert Cron("0 2 * * *").packed() == ["cron", "0 2 * * *", "UTC"]
    assert Every(90.0).packed() == ["every", 90.0]
    assert At(5.0).packed() == ["at", 5.0]


def test_triggers_say_when_they_are_due():
    assert str(Cron("0 2 * * *", BERLIN)) == "0 2 * * * Europe/Berlin"
    assert repr(Cron("0 2 * * *")) == "Cron(expression='0 2 * * *', tz='UTC')"
    assert (str(Every(90.0)), str(At(1.8e9))) == ("every 90 s", "at 2027-01-15 08:00:00Z")


def test_equal_expressions_are_equal_whatever_they_hold_beside():
    assert Cron("0 2 * * *", BERLIN) == Cron("0 2 * * *", BERLIN)
    assert Cron("0 2 * * *", BERLIN) != Cron("0 2 * * *")


def test_the_shortest_interval_is_a_second_and_times_reach_to_the_year_9892():
    assert read_trigger(["every", 1.0]) == Every(1.0) == trigger_of("s", None, 1, None, "UTC")
    assert read_trigger(["every", 1]) == Every(1)
    for packed in (["every", 0.999], ["at", 2.5e11], ["at", -0.001], ["at", "5"], ["every", "5"]):
        with pytest.raises(Damaged):
            read_trigger(packed)
    assert read_trigger(["at", 0]) == At(0)
    assert read_trigger(["at", 2.5e11 - 1]) == At(2.5e11 - 1)
    assert next_time(Every(1e11), 2.0e11) is None
    assert next_time(Every(1e11), 1.0e11) == 2.0e11


def test_times_are_in_whole_milliseconds():
    at = datetime(2026, 5, 1, 0, 0, 0, 123_456, tzinfo=UTC)
    assert trigger_of("s", None, None, at, "UTC") == At(round(at.timestamp(), 3))
    found = list(islice(Every(1.0004).after(0.0), 3))
    assert found == [1.0, 2.001, 3.001]


def test_a_wrong_zone_is_refused_beside_every_kind_of_times():
    for options in (("0 2 * * *", None, None), (None, 60, None), (None, None, datetime.now(UTC))):
        with pytest.raises(ConfigurationError, match="tz takes the name of a time zone"):
            trigger_of("s", *options, "Mars/Base")


def test_the_time_itself_is_not_after_it():
    for trigger in (Cron("0 * * * *"), Every(3600.0)):
        first = next_time(trigger, 1_800_000_000.0 - 1)
        assert first == 1_800_000_000.0
        assert next_time(trigger, first) == first + 3600.0
        assert next_time(trigger, first - 0.001) == first


def test_a_start_within_a_minute_near_a_change_of_the_clocks_loses_no_second():
    """Six fields, seconds first."""
    trigger = Cron("*/20 * * * * *", BERLIN)
    after = local(2026, 10, 25, 1, 59, tz=BERLIN) + 30.5
    found = [each - after for each in islice(trigger.after(after), 4)]
    assert found == [9.5, 29.5, 49.5, 69.5]


@pytest.mark.parametrize("days", [1, 2, 3, 30, 400])
def test_the_latest_times_of_a_long_outage_are_found_in_few_steps(days):
    asked = []

    class Counting(Every):
        def after(self, at):
            asked.append(at)
            return super().after(at)

    until = 1_800_000_000.0
    back = days * 86400.0
    assert latest_times(Counting(86400.0 * 5), until - back, until, 1) == (
        [until - until % 432000.0] if until % 432000.0 < back else []
    )
    assert len(asked) <= 5
    assert min(asked) >= until - back
    assert asked == sorted(asked, reverse=True)


def test_of_a_schedule_of_every_second_an_outage_of_a_year_costs_two_days():
    asked = []

    class Counting(Every):
        def after(self, at):
            asked.append(at)
            return super().after(at)

    until = 1_800_000_000.0
    assert latest_times(Counting(60.0), until - 3e7, until, 2) == [until - 60.0, until]
    assert asked == [until - 172800.0]
