"""Encoding of AMQP types."""

from __future__ import annotations

from uuid import UUID

import pytest
from amqpwire import decode_exactly, uuid_array
from hypothesis import given
from hypothesis import strategies as st

from aztask.emulator.amqp import encode

LONG = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def test_arrays():
    identifiers = [UUID(int=1), UUID(int=2)]
    assert decode_exactly(uuid_array(identifiers)) == identifiers
    assert decode_exactly(encode.long_array([-1, 2**62])) == [-1, 2**62]
    assert decode_exactly(encode.timestamp_array([5])) == [5]
    assert decode_exactly(encode.string_array(["a", "\u2603" * 300])) == ["a", "\u2603" * 300]
    assert decode_exactly(encode.symbol_array(["PLAIN"])) == ["PLAIN"]


def test_trailing_nulls_are_left_out():
    assert encode.fields(0x18, [encode.NULL, encode.NULL]) == b"\x00\x53\x18\x45"
    assert encode.fields(0x18, [encode.NULL, encode.TRUE, encode.NULL]) == (
        b"\x00\x53\x18\xc0\x03\x02\x40\x41"
    )


@given(st.one_of(st.none(), st.booleans(), LONG, TEXT, st.binary(), st.uuids()))
def test_simple_values_find_their_type(value):
    assert decode_exactly(encode.simple(value)) == value


def test_values_that_are_not_simple_have_no_encoding():
    assert encode.simple([1]) == b""
    assert encode.simple(2**64) == b""


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (encode.uint(0), b"\x43"),
        (encode.uint(255), b"\x52\xff"),
        (encode.uint(256), b"\x70\x00\x00\x01\x00"),
        (encode.ulong(0), b"\x44"),
        (encode.ulong(256), b"\x80" + (256).to_bytes(8)),
        (encode.binary(bytes(256))[:5], b"\xb0\x00\x00\x01\x00"),
        (encode.symbol("snow \u2603"), b"\xa3\x06snow ?"),
        (encode.list_of([]), b"\x45"),
    ],
)
def test_shortest_forms(encoded, expected):
    assert encoded == expected
