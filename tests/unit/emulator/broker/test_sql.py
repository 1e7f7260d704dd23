"""The SQL dialect of filters, without a message around it."""

from __future__ import annotations

import time

import pytest

from aztask.emulator.broker.sql import (
    MAX_LENGTH,
    MAX_NESTING,
    NameLookup,
    SqlFault,
    parse_expression,
)
from aztask.errors import ConfigurationError

NAMES = NameLookup({"Label": "system"}.get, {"n": 7, "s": "text", "b": True}.get, {"@p": 7})


def value(text):
    return parse_expression(text)(NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3 - 8 / 4 % 3", 5),
        ("(1 + 2) * 3", 9),
        ("--3 + -(-2)", 5),
        ("'it''s'", "it's"),
        ("'a' + 'b'", "ab"),
        ("1.5e1", 15.0),
        ("@p", 7),
        ("@missing", None),
        ("sys.Label", "system"),
        ("user.n", 7),
        ("[n]", 7),
        ("7 / -2", -3),
        ("-7 % 2", -1),
        ("7 / 2.0", 3.5),
        ("-7.5 % 2", -1.5),
        ("1 / 0.0", float("inf")),
        ("1 + 'a'", "1a"),
        ("missing / 0", None),
        ("true or missing", True),
        ("false and missing", False),
        ("true and missing", None),
        ("not missing", None),
        ("n = 'text'", None),
        ("s = 7 or 1 = 1", True),
        ("b = 1", None),
        ("n in (1, missing)", None),
        ("n in (7, missing)", True),
        ("n not in (1, 2)", True),
        ("s like 't%t'", True),
        ("s like '_ext'", True),
        ("s like 'T%'", False),
        ("n like '7'", None),
        ("'50%' like '50!%' escape '!'", True),
        ("missing is null", True),
        ("n is not null", True),
        ("exists(n) and not exists(missing)", True),
    ],
)
def test_values(text, expected):
    found = value(text)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a value is expected at character 0, not the end"),
        ("n = ", "a value is expected"),
        ("n 7", "an operator is expected at character 2, not '7'"),
        ("(n = 7", r"\) is expected"),
        ("n is 7", "NULL is expected"),
        ("n not 7", "LIKE or IN is expected"),
        ("sys. 7", "a name is expected at character 5"),
        ("n = #", "'#' is not understood"),
        ("(" * (MAX_NESTING + 1) + "1", "at most"),
        ("1" * (MAX_LENGTH + 1), "characters"),
    ],
)
def test_mistakes_are_reported_with_their_place(text, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_expression(text)


def test_a_pattern_takes_little_time():
    like = parse_expression("x LIKE '%" + "a_" * 250 + "b%'")
    names = NameLookup(lambda _: None, lambda _: "a" * 60_000, {})
    started = time.process_time()
    assert like(names) is False
    assert time.process_time() - started < 2.0


def test_a_pattern_from_the_message_is_limited():
    names = NameLookup(lambda _: None, lambda _: "%a" * 30_000, {})
    with pytest.raises(SqlFault, match="a pattern of 60000 characters"):
        parse_expression("'x' LIKE p")(names)


@pytest.mark.parametrize(
    ("value", "pattern", "matches"),
    [
        ("ab", "a%b", True),
        ("ab", "ab%b", False),
        ("aXbXc", "a_b_c", True),
        ("abcbc", "%b_", True),
        ("line\nend", "l%_end", True),
        ("", "%", True),
        ("", "_", False),
        ("a.c", "a.c", True),
        ("abc", "a.c", False),
        ("aaa", "%a%a%a%", True),
        ("aa", "%a%a%a%", False),
        ("100%", "100!%", True),
        ("100x", "100!%", False),
        ("a!", "a!", True),
    ],
)
def test_patterns(value, pattern, matches):
    names = NameLookup(lambda _: None, {"v": value, "p": pattern}.get, {})
    assert parse_expression("v LIKE p ESCAPE '!'")(names) is matches
