"""SQL and correlation filters."""

from __future__ import annotations

import json
from uuid import UUID

import pytest

from aztask.emulator.amqp import encode, sections
from aztask.emulator.amqp.encode import Described, Int32, Timestamp
from aztask.emulator.broker.filters import (
    REMOVED,
    TIMESPAN,
    CorrelationFilter,
    FalseFilter,
    RuleAction,
    RuleMessage,
    SqlFilter,
    TrueFilter,
    action_from,
    action_record,
    filter_from,
    filter_record,
)
from aztask.emulator.broker.sql import SqlFault
from aztask.errors import ConfigurationError

CUT = sections.cut(
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
MESSAGE = RuleMessage(CUT, {"SequenceNumber": 9})


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
        "n + 1 = 8 AND n * 2 = 14 AND n - 1 = 6 AND n / 2.0 = 3.5 AND n % 2 = 1",
        "n / 2 = 3",
        "-n = -7",
        "f = 2.5 AND f < n",
        "s + '!' = 'it''s 100%!'",
        "n = @p",
        "n = 1 OR n = 7 AND flag",
        "1=1",
        "n = 7;",
        "sys.label = 'label' AND SYS.Subject = sys.Label",
        "sys.SequenceNumber > 8",
        "property('n') = 7 AND p('user.n') = 7 AND P('sys.' + 'Label') = 'label'",
        "p(missing) IS NULL",
        "newid() <> newid()",
        "EXISTS(sys.Label) AND NOT EXISTS(sys.To2)".replace("To2", "ReplyTo"),
        "[sys] IS NULL AND user IS NULL",
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
        "sys.Nothing = 1",
        "EXISTS(1)",
        "and = 1",
        "newid(1) = 1",
        "property() = 1",
        "(" * 100 + "1" + ")" * 100,
        "n = 1 OR " * 200 + "n = 1",
    ],
)
def test_invalid_filters(text):
    with pytest.raises(ConfigurationError, match="filter"):
        SqlFilter(text)


def test_a_pattern_that_would_take_exponential_time():
    message = RuleMessage(
        sections.cut(
            encode.described(
                sections.APPLICATION_PROPERTIES,
                encode.map_of([(encode.string("s"), encode.string("a" * 5000))]),
            )
            + encode.described(sections.DATA, encode.binary(b""))
        )
    )
    assert not SqlFilter(f"s LIKE '{'%a' * 40}b'").matches(message)


def test_correlation():
    assert CorrelationFilter({"Label": "label"}, {"n": 7}).matches(MESSAGE)
    assert CorrelationFilter({}, {"flag": True, "s": "it's 100%"}).matches(MESSAGE)
    assert not CorrelationFilter({"Label": "other"}).matches(MESSAGE)
    assert not CorrelationFilter({"To": "to"}, {"n": 8}).matches(MESSAGE)
    assert not CorrelationFilter({"SessionId": "s"}).matches(MESSAGE)


@pytest.mark.parametrize(
    ("expected", "fits"),
    [(7, True), (Int32(7), True), (7.0, True), ("7", False), (Timestamp(7), False), (True, False)],
)
def test_values_of_two_types_are_not_equal(expected, fits):
    assert CorrelationFilter({}, {"n": expected}).matches(MESSAGE) is fits


@pytest.mark.parametrize("value", [1, "true"])
def test_a_flag_is_no_number_and_no_text(value):
    assert not CorrelationFilter({}, {"flag": value}).matches(MESSAGE)


def test_a_correlation_filter_names_a_property():
    with pytest.raises(ConfigurationError, match="fits all messages"):
        CorrelationFilter()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n / 0 = 1", "division by zero"),
        ("n % 0 = 1", "division by zero"),
        ("flag + 1 = 2", "bool"),
        ("n - 's' = 1", "str"),
        ("n * 9223372036854775807 = 1", "64 bits"),
        ("s LIKE 'a' ESCAPE 'ab'", "ESCAPE"),
        ("p('sys.Nothing') = 1", "no system property"),
        ("p(n) = 1", "needs a name"),
    ],
)
def test_what_has_no_value_is_a_fault(text, said):
    with pytest.raises(SqlFault, match=said):
        SqlFilter(text).matches(MESSAGE)


def changed(text, **parameters):
    message = RuleMessage(CUT, {"SequenceNumber": 9})
    RuleAction(text, parameters).run(message)
    return message.fields, message.properties


@pytest.mark.parametrize(
    ("text", "fields", "properties"),
    [
        ("SET a = 1", {}, {"a": 1}),
        ("SET a = 1; SET b = a + 1;", {}, {"a": 1, "b": 2}),
        ("SET a = 1, SET b = 2", {}, {"a": 1, "b": 2}),
        ("SET a = 1 SET b = 2", {}, {"a": 1, "b": 2}),
        ("set sys.Label = 'x' + s; remove sys.To", {3: "xit's 100%", 2: None}, {}),
        ("SET sys.CorrelationId = n", {5: "7"}, {}),
        ("REMOVE n; SET still = EXISTS_", {}, {"n": REMOVED, "still": None}),
        ("SET N = 'x'", {}, {"n": "x"}),
        ("SET N = '8'", {}, {"n": 8}),
        ("SET s = 5", {}, {"s": "5"}),
        ("SET f = n", {}, {"f": 7.0}),
        ("SET flag = 'FALSE'", {}, {"flag": False}),
        ("SET [two words] = sys.SequenceNumber", {}, {"two words": "9"}),
        ("SET user.sys = 'x'", {}, {"sys": "x"}),
    ],
)
def test_actions(text, fields, properties):
    assert changed(text) == (fields, properties)


def test_an_action_makes_new_ids():
    fields, properties = changed("SET sys.MessageId = newid(); SET id = newid()")
    assert UUID(fields[0]) != properties["id"]
    assert type(properties["id"]) is UUID


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "n = 1",
        "SET n",
        "SET = 1",
        "SET n = ",
        "REMOVE",
        "REMOVE n = 1",
        "SET n = 1 = 1",
        "SET sys.Nothing = 1",
        "SET sys.SequenceNumber = 1",
        "SET a = 1;" * 33,
        "SET a = '" + "x" * 1024 + "'",
    ],
)
def test_invalid_actions(text):
    with pytest.raises(ConfigurationError, match="action"):
        RuleAction(text)


def test_actions_outlive_a_restart():
    action = RuleAction("SET a = @a", VALUES)
    assert action_from(json.loads(json.dumps(action_record(action)))) == action
    assert action_from(action_record(None)) is None


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
    "int": Int32(5),
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
