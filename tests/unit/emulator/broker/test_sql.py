"""The SQL dialect of filters, without a message around it."""

from __future__ import annotations

import pytest

from aztask.emulator.broker.sql import MAX_LENGTH, MAX_NESTING, NameLookup, parse_expression
from aztask.errors import ConfigurationError

NAMES = NameLookup({"Label": "system"}.get, {"n": 7, "s": "text", "b": True}.get, {"@p": 7})


def value(text):
    return parse_expression(text)(NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3 - 8 / 4 % 3", 5.0),
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
        ("1 / 0", None),
        ("1 + 'a'", None),
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
