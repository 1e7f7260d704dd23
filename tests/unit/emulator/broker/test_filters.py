"""SQL and correlation filters."""

from __future__ import annotations

import json
from uuid import UUID

import pytest

from aztask.emulator.amqp import encode, sections
from aztask.emulator.amqp.encode import Described, Timestamp
from aztask.emulator.broker.filters import (
    TIMESPAN,
    CorrelationFilter,
    FalseFilter,
    SqlFilter,
    TrueFilter,
    filter_from,
    filter_record,
)
from aztask.errors import ConfigurationError

MESSAGE = sections.cut(
    encode.fields(
        sections.PROPERTIES,
        [
            *(encode.string("id"), encode.NULL, encode.string("to"), encode.string("label")),
            *(encode.NULL, encode.string("corr")),
        ],
    )
    + encode.described(
        sections.APPLICATION_PROPERTIES,
        encode.map_of(
            [
                (encode.string("n"), encode.long(7)),
                (encode.string("f"), encode.double(2.5)),
                (encode.string("s"), encode.string("it's 100%")),
                (encode.string("flag"), encode.TRUE),
                (encode.string("two words"), encode.string("x")),
                (encode.string("nothing"), encode.NULL),
            ]
        ),
    )
    + encode.described(sections.DATA, encode.binary(b""))
)


@pytest.mark.parametrize(
    "text",
    [
        "n = 7",
        "n <> 8 AND n != 9",
        "n > 6 AND n >= 7 AND n < 8 AND n <= 7",
        "N = 7",
        "user.n = 7",
        "sys.Label = 'label'",
        "sys.MessageId = 'id' AND sys.CorrelationId = 'corr'",
        "s = 'it''s 100%'",
        "s LIKE 'it%'",
        "s LIKE '%100\\%' ESCAPE '\\'",
        "s NOT LIKE 'x%'",
        "s LIKE '__''s%'",
        "n IN (1, 7)",
        "n NOT IN (1, 2)",
        "missing IS NULL",
        "nothing IS NULL",
        "n IS NOT NULL",
        "EXISTS(n) AND NOT EXISTS(missing)",
        "[two words] = 'x'",
        "\"two words\" = 'x'",
        "flag = TRUE",
        "flag",
        "NOT (n = 8)",
        "NOT NOT n = 7",
        "n + 1 = 8 AND n * 2 = 14 AND n - 1 = 6 AND n / 2 = 3.5 AND n % 2 = 1",
        "-n = -7",
        "f = 2.5 AND f < n",
        "s + '!' = 'it''s 100%!'",
        "n = @p",
        "n = 1 OR n = 7 AND flag",
        "1=1",
    ],
)
def test_filters_that_match(text):
    assert SqlFilter(text, {"@p": 7}).matches(MESSAGE)


@pytest.mark.parametrize(
    "text",
    [
        "n = 8",
        "n = '7'",
        "missing = 1",
        "missing <> 1",
        "NOT (missing = 1)",
        "missing LIKE '%'",
        "n LIKE '7'",
        "missing IN (1)",
        "flag = 1",
        "n / 0 = 1",
        "n > 'a'",
        "1=0",
        "n = @unknown",
        "nothing = nothing",
    ],
)
def test_filters_that_do_not_match(text):
    assert not SqlFilter(text, {"@p": 7}).matches(MESSAGE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n =",
        "= n",
        "n = = 1",
        "(n = 1",
        "n = 1)",
        "n NOT 1",
        "n IN 1",
        "n IN ()",
        "SET n = 1",
        "n = 'open",
        "sys.",
        "n IS 5",
        "\x00",
        "(" * 100 + "1" + ")" * 100,
        "n = 1 OR " * 200 + "n = 1",
    ],
)
def test_invalid_filters(text):
    with pytest.raises(ConfigurationError, match="filter"):
        SqlFilter(text)


def test_a_pattern_that_would_take_exponential_time():
    message = sections.cut(
        encode.described(
            sections.APPLICATION_PROPERTIES,
            encode.map_of([(encode.string("s"), encode.string("a" * 5000))]),
        )
        + encode.described(sections.DATA, encode.binary(b""))
    )
    assert not SqlFilter(f"s LIKE '{'%a' * 40}b'").matches(message)


def test_correlation():
    assert CorrelationFilter({"Label": "label"}, {"n": 7}).matches(MESSAGE)
    assert CorrelationFilter({}, {"flag": True, "s": "it's 100%"}).matches(MESSAGE)
    assert not CorrelationFilter({"Label": "other"}).matches(MESSAGE)
    assert not CorrelationFilter({"To": "to"}, {"n": 8}).matches(MESSAGE)
    assert not CorrelationFilter({"SessionId": "s"}).matches(MESSAGE)


@pytest.mark.parametrize(
    "given",
    [
        TrueFilter(),
        FalseFilter(),
        SqlFilter("a = @p", {"@p": 5}),
        CorrelationFilter({"Label": "l"}, {"a": 1}),
    ],
)
def test_filters_are_kept_as_plain_data(given):
    assert filter_from(filter_record(given)) == given


VALUES = {
    "timestamp": Timestamp(1_700_000_000_123),
    "span": Described(TIMESPAN, 36_000_000_000),
    "uuid": UUID(int=7),
    "binary": b"\x00\xff",
    "text": "snow \u2603",
    "numbers": 2**63 - 1,
    "half": 0.5,
    "flag": True,
    "null": None,
}


@pytest.mark.parametrize(
    "rule_filter",
    [CorrelationFilter({"Label": "l"}, VALUES), SqlFilter("a = @a", VALUES)],
    ids=["correlation", "sql"],
)
def test_filters_outlive_a_restart(rule_filter):
    again = filter_from(json.loads(json.dumps(filter_record(rule_filter))))
    assert again == rule_filter
    values = again.properties if isinstance(again, CorrelationFilter) else again.parameters
    assert {name: type(value) for name, value in values.items()} == {
        name: type(value) for name, value in VALUES.items()
    }


def test_a_filter_cannot_compare_with_a_list():
    with pytest.raises(ConfigurationError, match="list"):
        filter_record(CorrelationFilter({}, {"a": [1]}))
