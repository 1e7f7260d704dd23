"""Every header at the edges of what is accepted: what is read, what is refused, what is written."""

from __future__ import annotations

import dataclasses
import math

import pytest

from aztask.errors import DecodeError, EncodeError
from aztask.message.bounds import MessageLimits
from aztask.message.headers import check_extra, check_outgoing, read_headers, to_iso, write_headers
from aztask.message.message import TaskMessage

LIMITS = MessageLimits(body_bytes=100, header_bytes=50)
COUNTS = (0, 1, 2**31 - 1)
NO_COUNTS = (-1, 2**31, True, 1.0, "1", b"1", [1])
NO_TEXT = ("", "\n", "a\0b", "\udcff", 7, b"x", ["x"], True)
YEAR_9999 = 253370764800
DECADE = 10 * 366 * 86400
PLAIN = {"lang": "py", "task": "shop.pay", "id": "t1"}

# header, field, what is accepted with what it is read as, what is refused
TABLE = [
    ("task", "task", ["x", "é" * 512], [*NO_TEXT, "x" * 513]),
    ("id", "id", ["x", "x" * 1024], [*NO_TEXT, "x" * 1025]),
    ("root_id", "root_id", ["x", "x" * 1024], [*NO_TEXT, "x" * 1025]),
    ("parent_id", "parent_id", ["x", "x" * 1024], [*NO_TEXT, "x" * 1025]),
    ("group", "group", ["x", "x" * 1024], [*NO_TEXT, "x" * 1025]),
    ("traceparent", "traceparent", ["x", "x" * 1024], [*NO_TEXT, "x" * 1025]),
    ("aztask-hop", "hop", COUNTS, NO_COUNTS),
    ("aztask-generation", "generation", COUNTS, NO_COUNTS),
    ("aztask-resubmit-count", "resubmit_count", COUNTS, NO_COUNTS),
    ("retries", "resubmit_count", COUNTS, NO_COUNTS),
    ("aztask-snooze-count", "snooze_count", COUNTS, NO_COUNTS),
    ("aztask-delivery-base", "delivery_base", COUNTS, NO_COUNTS),
    ("aztask-pointer", "pointer", [0, 2**63 - 1], [-1, 2**63, True, 1.0, "1"]),
    ("aztask-ordered", "ordered", [(0, False), (1, True)], [2, -1, True, "1", 1.0]),
    (
        "aztask-saved",
        "saved",
        [b"", b"x" * 100, (bytearray(b"x"), b"x"), (memoryview(b"x"), b"x")],
        ["x", 7, b"x" * 101],
    ),
    (
        "aztask-lease-seconds",
        "lease_seconds",
        [0.001, DECADE, (5, 5.0)],
        [0, 0.0, -1, DECADE + 1, math.nan, math.inf, True, "5", 10**400],
    ),
    *(
        (
            header,
            field,
            [
                (0, 0.0),
                0.5,
                YEAR_9999 - 1,
                ("1970-01-01T00:00:00", 0.0),
                ("1970-01-01T02:00:00+02:00", 0.0),
                ("2026-11-21T06:00:00.000001+00:00", 1795240800.000001),
                ("1970-01-01T00:00:01Z", 1.0),
                ("1970-01-01T00:00:01." + "0" * 44, 1.0),  # 64 characters
            ],
            [
                -0.001,
                YEAR_9999,
                math.nan,
                math.inf,
                -math.inf,
                True,
                10**400,
                b"0",
                "",
                "soon",
                "1969-12-31T23:59:59",
                "9999-01-01T00:00:00+00:00",
                "1970-01-01T00:00:01." + "0" * 45,
            ],
        )
        for header, field in (
            ("eta", "eta"),
            ("expires", "expires"),
            ("aztask-unknown-since", "unknown_since"),
        )
    ),
    *(
        (
            name,
            name,
            ["", "x", ("x" * 600, "x" * 512), ("a\nb\0", "a?b?"), ("\udcff", "?")],
            [7, b"x", ["x"]],
        )
        for name in ("argsrepr", "kwargsrepr", "origin")
    ),
]
ACCEPTED = [
    (header, field, *(each if isinstance(each, tuple) else (each, each)))
    for header, field, accepted, _ in TABLE
    for each in accepted
]
REFUSED = [(header, each) for header, _, _, refused in TABLE for each in refused]


def read(**changed):
    return read_headers({**PLAIN, **changed}, LIMITS)


@pytest.mark.parametrize(
    ("header", "field", "value", "expected"), ACCEPTED, ids=range(len(ACCEPTED))
)
def test_what_is_accepted(header, field, value, expected):
    got = read_headers({**PLAIN, header: value}, LIMITS)[field]
    assert got == expected
    assert type(got) is type(expected) or isinstance(got, float)


@pytest.mark.parametrize(("header", "value"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused_is_named_on_one_short_line(header, value):
    with pytest.raises(DecodeError) as caught:
        read_headers({**PLAIN, header: value}, LIMITS)
    text = str(caught.value)
    assert header in text
    assert text.isprintable()
    assert len(text) < 200


def test_an_absent_header_and_one_that_says_nothing_are_left_to_their_defaults():
    optional = {header: None for header, *_ in TABLE if header not in ("task", "id")}
    expected = {"task": "shop.pay", "id": "t1", "resubmit_count": 0}
    assert read(**optional) == read() == expected


@pytest.mark.parametrize(
    ("value", "hard", "soft"),
    [
        ([5, None], 5.0, None),
        ((None, 0.001), None, 0.001),
        ([DECADE, DECADE], DECADE, DECADE),
        ([None, None], None, None),
    ],
)
def test_time_limits(value, hard, soft):
    got = read(timelimit=value)
    assert (got["time_limit"], got["soft_time_limit"]) == (hard, soft)
    assert "timelimit" not in got


@pytest.mark.parametrize(
    "value",
    [5, "55", [5], [5, 5, 5], [0, None], [None, 0], [-1, None], [None, DECADE + 1], ["5", None],
     [math.nan, None], [True, None], {}, {1: 2, 3: 4}],
)  # fmt: skip
def test_time_limits_that_cannot_be(value):
    with pytest.raises(DecodeError, match="timelimit"):
        read(timelimit=value)


def test_our_own_count_comes_before_celerys():
    assert read(retries=3)["resubmit_count"] == 3
    assert read(**{"retries": 3, "aztask-resubmit-count": 5})["resubmit_count"] == 5


@pytest.mark.parametrize("version", [1, None])
def test_our_own_version(version):
    assert read(**({} if version is None else {"aztask-version": version}))["task"] == "shop.pay"


@pytest.mark.parametrize("version", [0, 2, True, "1", None, 1.5])
def test_other_versions_are_refused(version):
    with pytest.raises(DecodeError, match=r"aztask-version .* is not known here"):
        read(**{"aztask-version": version})


@pytest.mark.parametrize("headers", [None, [], "x", 7])
def test_headers_that_are_no_map(headers):
    with pytest.raises(DecodeError, match=f"not a map but {type(headers).__name__}"):
        read_headers(headers, LIMITS)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "no task header"),
        ({"id": "t1"}, "no task header"),
        ({"id": "t1", "task": None}, "no task header"),
        ({"task": "a"}, "no id header"),
        ({"task": "a", "id": None}, "no id header"),
    ],
)
def test_what_is_no_task_message(headers, words):
    with pytest.raises(DecodeError, match=words):
        read_headers(headers, LIMITS)


# -- headers of others -------------------------------------------------------------------------


def mapped(depth, value="x"):
    for _ in range(depth):
        value = {"a": value}
    return value


def nested(depth, value="x"):
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(2**63), 2**63 - 1, 1.5, math.inf, "", "x" * 50, "a\nb", b"x" * 50,
        [], [1, "x"], (1,), {"a": {"b": [1]}}, nested(7), mapped(7), ["x"] * 255,
    ],
)  # fmt: skip
def test_headers_of_others_are_carried_on(value):
    assert read(tenant=value)["extra"] == {"tenant": value}
    check_extra({"tenant": value}, LIMITS)


@pytest.mark.parametrize(
    "value",
    [
        -(2**63) - 1, 2**63, "x" * 51, b"x" * 51, "\udcff", object(), {1}, 1j,
        {1: "x"}, {"": "x"}, {"a\nb": 1}, {"a": 2**63}, [object()], nested(8), ["x"] * 256,
        mapped(8),
    ],
    ids=range(16),
)  # fmt: skip
def test_headers_of_others_that_nobody_could_write_again_are_refused(value):
    with pytest.raises(DecodeError, match=r"header (tenant|a) |tenant") as caught:
        read(tenant=value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 1025, 7, b"x"])
def test_names_of_headers_that_cannot_be(name):
    with pytest.raises(DecodeError, match="a header's name"):
        read_headers({**PLAIN, name: 1}, LIMITS)


def test_the_further_values_of_all_headers_count_together():
    check_extra({f"h{n}": n for n in range(256)}, LIMITS)
    with pytest.raises(DecodeError, match="at most 256 further values, 8 levels deep"):
        check_extra({f"h{n}": n for n in range(257)}, LIMITS)


def test_what_is_written_anew_is_not_carried_on():
    ours = {"lang": "js", "aztask-version": 1, "aztask-signature": "x", "compression": "zlib"}
    assert "extra" not in read(**ours)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10**20, "an integer of more than 20 digits"),
        (-(10**20), "an integer of more than 20 digits"),
        (10**20 - 1, str(10**20 - 1)),
        (-1, "-1"),
        (True, "True"),
    ],
)
def test_a_hostile_value_is_shown_shortly(value, shown):
    with pytest.raises(DecodeError, match=shown):
        read(timelimit=value)


def test_what_is_no_number_is_shown_by_its_kind_alone():
    with pytest.raises(DecodeError, match=r"not list$"):
        read(timelimit=["secret", 2, 3])
    with pytest.raises(DecodeError, match="aztask-version None is not known"):
        read(**{"aztask-version": None})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("header", ["eta", "expires", "aztask-lease-seconds"])
def test_a_number_that_is_not_finite_is_called_that(header, value):
    with pytest.raises(DecodeError, match=f"{header} must be a finite number"):
        read(**{header: value})


def test_long_text_is_shown_by_its_beginning():
    with pytest.raises(DecodeError) as caught:
        read(eta="x" * 41)
    assert f"'{'x' * 40}'" in str(caught.value)


# -- writing -----------------------------------------------------------------------------------

MESSAGE = TaskMessage("t1", "shop.pay", "pay", b"")
FULL = TaskMessage(
    "t1",
    "shop.pay",
    "pay",
    b"body",
    root_id="r",
    parent_id="p",
    group="g",
    eta=0.5,
    expires=100.0,
    time_limit=5.0,
    soft_time_limit=4.0,
    argsrepr="(1,)",
    kwargsrepr="{}",
    origin="here",
    ordered=False,
    resubmit_count=2,
    snooze_count=3,
    hop=4,
    generation=5,
    delivery_base=6,
    unknown_since=7.0,
    saved=b"page",
    pointer=8,
    traceparent="00-a-b-01",
    lease_seconds=9.0,
    extra={"tenant": "x"},
)


def test_a_plain_message_has_no_more_headers_than_it_needs():
    assert write_headers(MESSAGE) == {
        "lang": "py",
        "task": "shop.pay",
        "id": "t1",
        "retries": 0,
        "aztask-version": 1,
        "aztask-hop": 0,
        "aztask-generation": 0,
        "aztask-resubmit-count": 0,
    }


def test_a_full_message_says_everything():
    assert write_headers(FULL) == {
        "lang": "py",
        "task": "shop.pay",
        "id": "t1",
        "retries": 2,
        "root_id": "r",
        "parent_id": "p",
        "group": "g",
        "eta": "1970-01-01T00:00:00.500000+00:00",
        "expires": "1970-01-01T00:01:40+00:00",
        "timelimit": [5.0, 4.0],
        "argsrepr": "(1,)",
        "kwargsrepr": "{}",
        "origin": "here",
        "traceparent": "00-a-b-01",
        "aztask-version": 1,
        "aztask-hop": 4,
        "aztask-generation": 5,
        "aztask-resubmit-count": 2,
        "aztask-snooze-count": 3,
        "aztask-delivery-base": 6,
        "aztask-unknown-since": 7.0,
        "aztask-saved": b"page",
        "aztask-pointer": 8,
        "aztask-lease-seconds": 9.0,
        "aztask-ordered": 0,
        "tenant": "x",
    }


def test_what_was_written_is_read_again():
    fields = read_headers(write_headers(FULL), LIMITS)
    again = TaskMessage(queue="pay", body=b"body", **fields)
    assert again == FULL


@pytest.mark.parametrize("limits", [(5.0, None), (None, 4.0), (None, None)])
def test_one_time_limit_alone(limits):
    message = dataclasses.replace(MESSAGE, time_limit=limits[0], soft_time_limit=limits[1])
    written = write_headers(message).get("timelimit")
    assert written == (None if limits == (None, None) else list(limits))


def test_headers_of_others_never_replace_ours():
    message = dataclasses.replace(MESSAGE, extra={"task": "os.system", "tenant": "x"})
    headers = write_headers(message)
    assert (headers["task"], headers["tenant"]) == ("shop.pay", "x")
    assert message.extra == {"task": "os.system", "tenant": "x"}


@pytest.mark.parametrize("seconds", [0.0, 0.000001, YEAR_9999 - 1])
def test_times_that_can_be_written(seconds):
    assert read(eta=to_iso(seconds))["eta"] == seconds


@pytest.mark.parametrize("seconds", [-0.000001, YEAR_9999, math.nan, math.inf])
def test_times_that_cannot(seconds):
    with pytest.raises(ValueError, match="between the years 1970 and 9998"):
        to_iso(seconds)


@pytest.mark.parametrize(
    ("field", "fits", "refused"),
    [
        ("id", "x" * 1024, ["", "x" * 1025, "\n", 7]),
        ("task", "x" * 512, ["", "x" * 513, "a\0"]),
        ("session", "x" * 128, ["", "x" * 129, "\udcff"]),
        ("group", "x" * 1024, ["", "x" * 1025]),
        ("correlation_id", "x" * 1024, ["", "x" * 1025]),
        ("extra", {"a": 1}, [{"a": object()}, {"": 1}]),
    ],
)
def test_what_no_reader_would_accept_is_not_sent(field, fits, refused):
    check_outgoing(dataclasses.replace(MESSAGE, **{field: fits}), LIMITS)
    named = {"id": "the task id", "task": "the task name", "extra": "a header's name|header a"}
    for value in refused:
        with pytest.raises(EncodeError, match=f"^({named.get(field, field)}) "):
            check_outgoing(dataclasses.replace(MESSAGE, **{field: value}), LIMITS)


def test_a_plain_message_may_be_sent():
    check_outgoing(MESSAGE, LIMITS)
