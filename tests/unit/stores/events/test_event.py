"""An event's line is valid JSON on one line whatever it carries; a reader trusts no line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.stores.events.event import (
    ERROR_LIMIT,
    EVENT_KINDS,
    TEXT_LIMIT,
    Event,
    from_line,
    quote,
    to_line,
)

ANY_TEXT = st.text(st.characters(exclude_categories=[]))  # lone surrogates included
HOSTILE = 'a\nb\r\x00\x1b[31m\u2028"\\\ud800é😀'


def line_of(event):
    return to_line(event, "n-1", 12.5, quote("worker-1"))


def test_what_is_known_is_written_and_read_again():
    event = Event(
        "failed",
        "id-1",
        "shop.resize",
        "default",
        delivery_count=2,
        resubmit_count=1,
        duration_seconds=1.25,
        wait_seconds=0.0,
        lease_seconds=60.0,
        margin_seconds=-0.5,
        held_seconds=2.5,
        renewals=3,
        error_type="OSError",
        error="no space",
    )
    record = json.loads(line_of(event))
    assert record["v"] == 1
    assert record["margin_seconds"] == -0.5
    assert from_line(line_of(event).encode()) == event._replace(
        ts=12.5, worker="worker-1", id="n-1"
    )


def test_what_is_unknown_is_left_out():
    record = json.loads(line_of(Event("enqueued", "id-1", "t", "q")))
    assert list(record) == [
        *("id", "v", "event", "ts", "task_id", "task", "queue", "worker"),
        *("delivery_count", "resubmit_count"),
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_numbers_that_json_or_readers_do_not_have_are_left_out(value):
    record = json.loads(line_of(Event("renewed", "i", "t", "q", duration_seconds=value)))
    assert "duration_seconds" not in record


@given(ANY_TEXT | st.just(HOSTILE))
def test_any_text_makes_one_valid_line(text):
    line = line_of(Event("failed", text, text, text, error_type=text, error=text))
    assert line.isascii()
    assert line.index("\n") == len(line) - 1
    record = json.loads(line)
    for name in ("task_id", "task", "queue", "error_type", "error"):
        record[name].encode("utf-8")  # raises if half of a surrogate pair is left
    event = from_line(line.encode())
    assert event is not None
    if text.isascii():
        assert event.task_id == text


def test_long_text_is_cut():
    event = from_line(line_of(Event("failed", "i" * 5000, "t", "q", error="e" * 100_000)).encode())
    assert len(event.task_id) == TEXT_LIMIT
    assert len(event.error) == ERROR_LIMIT
    assert event.error.endswith("…")


def test_secrets_in_errors_are_masked():
    line = line_of(Event("failed", "i", "t", "q", error="GET https://h/q?sig=abcdefgh failed"))
    assert "abcdefgh" not in line


def test_names_of_errors_are_masked_and_escaped():
    """A task may make a class of any name, of what it read from a message, for example."""
    line = line_of(Event("failed", "i", "t", "q", error_type="Bad\x1b[2J?sig=abcdefghijk&x"))
    assert "abcdefghijk" not in line
    assert "\x1b" not in line
    long = line_of(Event("failed", "i", "t", "q", error_type="E" * 100_000 + "?sig=abcdefgh"))
    assert len(from_line(long.encode()).error_type) == TEXT_LIMIT


GOOD = {
    "id": "n-1",
    "v": 1,
    "event": "started",
    "ts": 1.5,
    "task_id": "i",
    "task": "t",
    "queue": "q",
    "worker": "w",
}


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": "1"},
        {"event": "exploded"},
        {"event": ["started"]},
        {"event": None},
        {"ts": "1.5"},
        {"ts": True},
        {"ts": 10**400},
        {"id": 5},
        {"task": None},
        {"delivery_count": 1.5},
        {"delivery_count": 2**63},
        {"delivery_count": False},
        {"lease_seconds": "60"},
        {"held_seconds": None},
        {"renewals": "3"},
        {"error": {}},
    ],
)
def test_a_wrong_type_or_value_is_no_event(change):
    assert from_line(json.dumps(GOOD).encode()) is not None
    assert from_line(json.dumps(GOOD | change).encode()) is None


@pytest.mark.parametrize("missing", list(GOOD))
def test_a_missing_field_is_no_event(missing):
    record = {name: value for name, value in GOOD.items() if name != missing}
    assert from_line(json.dumps(record).encode()) is None


def test_fields_of_later_versions_are_ignored():
    assert from_line(json.dumps(GOOD | {"colour": "red"}).encode()) is not None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1]",
        b"1",
        b"null",
        b'"text"',
        b"{",
        b"\x00" * 100,
        b"\xff\xfe",
        b'{"v":NaN}',
        b"[" * 100_000,
        b'{"v":' + b"9" * 5000 + b"}",
        json.dumps(GOOD).encode()[:-5],
        json.dumps(GOOD).replace("1.5", "NaN").encode(),
        json.dumps(GOOD).replace("1.5", "1e400").encode(),
    ],
    ids=range(14),
)
def test_what_is_not_an_event_is_none(line):
    assert from_line(line) is None


@given(st.binary())
def test_any_bytes_are_an_event_or_none(line):
    assert from_line(line) is None


def test_the_kinds_are_those_of_the_documented_life_cycle():
    assert len(EVENT_KINDS) == 21
    assert {"enqueued", "lease_lost", "settle_failed", "dead_lettered"} <= EVENT_KINDS


def test_what_an_operator_did_is_read_as_it_was_written():
    event = Event(
        "operator_acted",
        "",
        "",
        "orders",
        reason="purge 3 dead letters (3 of orders)",
        by="ann@desk AccountKey=c2VjcmV0c2VjcmV0c2VjcmV0",
        action="purge",
        selected=3,
        done=2,
    )
    line = to_line(event, "n-1", 1.5, quote("w"))
    read = from_line(line.encode())
    assert read is not None
    assert (read.action, read.selected, read.done, read.reason) == ("purge", 3, 2, event.reason)
    assert read.by is not None
    assert read.by.startswith("ann@desk ")
    assert "c2VjcmV0" not in read.by
    for wrong in ('"selected":"3"', '"selected":true'):
        assert from_line(line.replace('"selected":3', wrong).encode()) is None
    other = to_line(Event("received", "a", "t", "q"), "n-2", 1.5, quote("w"))
    assert not any(name in other for name in ("action", '"by"', "selected", "done"))
