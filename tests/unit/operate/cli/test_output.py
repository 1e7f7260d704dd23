import json
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import click
import pytest

from aztask.operate.cli import output
from aztask.operate.cli.output import (
    ago,
    fit,
    iso_time,
    local_time,
    print_fields,
    print_json,
    print_table,
    to_json,
)


def test_json_of_what_a_message_can_hold():
    value = {
        "at": datetime(2024, 1, 2, tzinfo=UTC),
        "id": UUID(int=1),
        "sum": Decimal("1.50"),
        "raw": b"\xff",
        "set": {2, 1},
        "list": (1, None, "é"),
    }
    assert json.loads(to_json(value)) == {
        "at": "2024-01-02T00:00:00+00:00",
        "id": "00000000-0000-0000-0000-000000000001",
        "sum": "1.50",
        "raw": "/w==",
        "set": [1, 2],
        "list": [1, None, "é"],
    }


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ({"a": 1, "b": float("nan")}, {"a": 1, "b": "nan"}),
    ],
)
def test_json_of_what_json_cannot_hold(value, shown):
    assert json.loads(to_json(value)) == shown


def test_json_of_an_integer_of_5000_digits_is_json():
    assert isinstance(json.loads(to_json(10**5000)), str)


def test_json_is_one_line_of_ascii():
    text = to_json({"a": "x\ny\ud800\u2028"})
    assert "\n" not in text
    assert text.isascii()


def test_a_table_is_aligned_and_shows_nothing_invisible(capsys):
    output.print_table(["name", "count"], [["a\x1b[31m", 5], ["long name", None]])
    assert capsys.readouterr().out == (
        "NAME       COUNT\n"  # numbers to the right
        "a\\x1b[31m      5\n"
        "long name      -\n"
    )


def test_an_empty_table_is_its_head(capsys):
    output.print_table(["name", "count"], [])
    assert capsys.readouterr().out == "NAME  COUNT\n"


def test_states_are_coloured_where_colour_is_wanted():
    assert "\x1b[32m" in output._line(["succeeded"], [12], [False])
    assert click.unstyle(output._line(["succeeded"], [12], [False])) == "succeeded   "


def test_wide_columns_give_way_first():
    widths = [36, 10, 60]
    fit(widths, [2, 4, 11], 80)
    assert sum(widths) + 4 == 80
    assert widths[1] == 10


def test_a_terminal_may_be_too_narrow():
    widths = [30, 30]
    fit(widths, [4, 4], 5)
    assert widths == [8, 8]


def test_fields_that_are_unknown_are_left_out(capsys):
    output.print_fields([("id", "x"), ("started", None), ("lines", "1\n2")])
    assert capsys.readouterr().out == "id:    x\nlines: 1\\n2\n"


@pytest.mark.parametrize("at", [0.0, 1e9, 253402300799.0])
def test_times(at):
    assert local_time(at)[4] == iso_time(at)[4] == "-"


@pytest.mark.parametrize("at", [1e30, float("nan"), float("inf"), -1e30])
def test_impossible_times_are_shown_as_numbers(at):
    assert local_time(at) == iso_time(at) == f"{at:g}"


def test_no_time():
    assert local_time(None) is None
    assert iso_time(None) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s ago"),
        (0, "0s ago"),
        (119, "119s ago"),
        (120, "2m ago"),
        (7200, "2h ago"),
        (3 * 86400, "3d ago"),
    ],
)
def test_how_long_ago(seconds, text):
    assert ago(1000.0, 1000.0 + seconds) == text


def test_neither_tables_nor_json_tell_a_secret(capsys):
    text = "AccountKey=c2VjcmV0c2VjcmV0;\x1b[31m"
    print_table(["error"], [[text]])
    print_fields([("error", text)])
    print_json({"error": text})
    out = capsys.readouterr().out
    assert out.count("AccountKey=****") == 3
    assert "c2VjcmV0" not in out
    assert "\x1b" not in out
