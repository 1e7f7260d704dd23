"""AMQP values: what they are in Python, and what is refused."""

from decimal import Decimal
from uuid import UUID

import pytest

from aztask.queues.servicebus.values import (
    ERRORS,
    MAX_DEPTH,
    MAX_WEIGHTLESS,
    UnreadableValue,
    end_of,
    pairs_of,
    read_value,
    reason_of,
)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"\x40", None),
        (b"\x41", True),
        (b"\x56\x00", False),
        (b"\x43", 0),
        (b"\x52\xff", 255),
        (b"\x54\xff", -1),
        (b"\x71\x80\x00\x00\x00", -(2**31)),
        (b"\x80" + b"\xff" * 8, 2**64 - 1),
        (b"\x82\x3f\xf8" + b"\x00" * 6, 1.5),
        (b"\x73\x00\x01\xf6\x00", "\U0001f600"),
        (b"\x98" + bytes(range(16)), UUID(bytes=bytes(range(16)))),
        (b"\xa0\x02\x00\xff", b"\x00\xff"),
        (b"\xa1\x02\xc3\xa9", "é".encode()),
        (b"\xb1\x00\x00\x00\x01a", b"a"),
        (b"\x45", []),
        (b"\xc0\x03\x02\x41\x42", [True, False]),
        (b"\xc1\x05\x02\xa1\x01a\x43", {b"a": 0}),
        (b"\xe0\x04\x02\x50\x01\x02", [1, 2]),
        (b"\x00\x53\x70\x43", 0),
        (b"\x74\x32\x00\x00\x0f", Decimal("1.5")),
    ],
    ids=lambda each: each.hex() if isinstance(each, bytes) else "",
)
def test_a_value_and_where_it_ends(raw, value):
    read, end = read_value(raw + b"\x40", 0)
    assert (read, end) == (value, len(raw))
    assert type(read) is type(value)
    assert end_of(raw + b"\x40", 0) == len(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x01",
        b"\x56\x02",
        b"\x71\x00",
        b"\x73\x00\x00\xd8\x00",
        b"\xa0\x05ab",
        b"\xb0\xff\xff\xff\xffab",
        b"\xa1\x01\xff",
        b"\xa3\x01\xe9",
        b"\xc0\x01\xff",
        b"\xd0\x00\x00\x00\x04\xff\xff\xff\xff",
        b"\xc0\x03\x01\x41\x41",
        b"\xc1\x02\x01\x41",
        b"\xc1\x04\x02\x45\x41\x40",
        b"\xe0\x03\x7f\x40\x40",
    ],
    ids=bytes.hex,
)
def test_malformed_bytes_raise_one_of_the_errors(raw):
    with pytest.raises(ERRORS) as raised:
        read_value(raw, 0)
    assert reason_of(raised.value)


def test_nesting_is_bounded():
    def nested(depth):
        value = b"\x40"
        for _ in range(depth):
            value = b"\xd0" + (len(value) + 4).to_bytes(4) + b"\x00\x00\x00\x01" + value
        return value

    assert read_value(nested(MAX_DEPTH), 0)
    with pytest.raises(UnreadableValue, match="nested"):
        read_value(nested(MAX_DEPTH + 1), 0)
    with pytest.raises(ERRORS):
        read_value(b"\x00" * 100_000, 0)


def test_items_that_take_no_bytes_are_bounded():
    def nulls(count):
        return b"\xf0\x00\x00\x00\x05" + count.to_bytes(4) + b"\x40"

    assert read_value(nulls(MAX_WEIGHTLESS), 0)[0] == [None] * MAX_WEIGHTLESS
    with pytest.raises(UnreadableValue):
        read_value(nulls(MAX_WEIGHTLESS + 1), 0)


@pytest.mark.parametrize("raw", [b"", b"\x00", b"\xa0", b"\xb0\x00", b"\xa0\xffab"], ids=bytes.hex)
def test_the_end_of_what_is_cut_is_the_end_of_everything(raw):
    assert end_of(raw, 0) == len(raw)


def test_pairs_that_cannot_be_read_are_skipped():
    raw = b"\xc1\x0d\x06\xa1\x01a\x41\xa1\x01b\x56\x09\xa1\x01c\x43"
    raw = raw[:1] + bytes([len(raw) - 2]) + raw[2:]
    assert list(pairs_of(raw, 0)) == [(b"a", True), (b"c", 0)]
    assert list(pairs_of(b"\x41", 0)) == list(pairs_of(b"", 0)) == []
