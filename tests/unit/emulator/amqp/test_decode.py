"""The AMQP type system, both directions, and what is refused."""

from __future__ import annotations

import pytest
from amqpwire import decode_exactly
from hypothesis import given
from hypothesis import strategies as st

from aztask.emulator.amqp import DECODE_ERROR, AmqpError, encode
from aztask.emulator.amqp.decode import MAX_DEPTH, decode, skip
from aztask.emulator.amqp.encode import Described, Symbol, Timestamp

UINT = st.integers(0, 2**32 - 1)
ULONG = st.integers(0, 2**64 - 1)
LONG = st.integers(-(2**63), 2**63 - 1)
ASCII = st.text(st.characters(max_codepoint=127), max_size=300)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def pairs(strategy, write):
    """(value, its encoding)"""
    return strategy.map(lambda value: (value, write(value)))


SIMPLE = st.one_of(
    pairs(st.none(), lambda _: encode.NULL),
    pairs(st.booleans(), encode.boolean),
    pairs(st.integers(0, 255), encode.ubyte),
    pairs(st.integers(0, 65535), encode.ushort),
    pairs(UINT, encode.uint),
    pairs(ULONG, encode.ulong),
    pairs(st.integers(-(2**31), 2**31 - 1), encode.int32),
    pairs(LONG, encode.long),
    pairs(LONG.map(Timestamp), encode.timestamp),
    pairs(st.floats(allow_nan=False), encode.double),
    pairs(st.uuids(), encode.uuid),
    pairs(st.binary(max_size=400), encode.binary),
    pairs(TEXT, encode.string),
    pairs(ASCII.map(Symbol), encode.symbol),
)


def lists(children):
    return st.lists(children, max_size=6).map(
        lambda items: ([v for v, _ in items], encode.list_of([e for _, e in items]))
    )


def maps(children):
    keys = st.dictionaries(ASCII.filter(len), children, max_size=5)
    return keys.map(
        lambda items: (
            {key: value for key, (value, _) in items.items()},
            encode.map_of([(encode.string(key), e) for key, (_, e) in items.items()]),
        )
    )


ANY = st.recursive(SIMPLE, lambda children: st.one_of(lists(children), maps(children)))


@given(ANY)
def test_encoded_values_decode(pair):
    value, encoded = pair
    assert decode_exactly(encoded) == value
    assert skip(encoded, 0) == len(encoded)


@given(ANY, st.binary(min_size=1, max_size=5))
def test_bytes_after_the_value_are_not_read(pair, rest):
    value, encoded = pair
    assert decode(encoded + rest) == (value, len(encoded))
    with pytest.raises(AmqpError):
        decode_exactly(encoded + rest)


@given(ANY.filter(lambda pair: len(pair[1]) > 1), st.data())
def test_cut_off_values_are_refused(pair, data):
    encoded = pair[1]
    end = data.draw(st.integers(0, len(encoded) - 1))
    for read in (decode, lambda part: skip(part, 0)):
        with pytest.raises(AmqpError) as caught:
            read(encoded[:end])
        assert caught.value.condition == DECODE_ERROR


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(data):
    for read in (decode, lambda part: skip(part, 0)):
        try:
            read(data)
        except AmqpError as error:
            assert error.condition == DECODE_ERROR


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        (b"\x56\x01", True),
        (b"\x56\x00", False),
        (b"\x60\x01\x02", 258),
        (b"\x61\xff\xff", -1),
        (b"\x51\xff", -1),
        (b"\x54\x80", -128),
        (b"\x55\x7f", 127),
        (b"\x71\xff\xff\xff\xff", -1),
        (b"\x72\x3f\x00\x00\x00", 0.5),
        (b"\x73\x00\x00\x26\x03", "\u2603"),
        (b"\x74\x00\x00\x00\x01", b"\x00\x00\x00\x01"),
        (b"\x84" + bytes(8), bytes(8)),
        (b"\x94" + bytes(16), bytes(16)),
        (b"\x45", []),
        (b"\xd0\x00\x00\x00\x05\x00\x00\x00\x01\x40", [None]),
        (b"\xe0\x04\x03\x50\x01\x02\x03", None),
        (b"\xe0\x05\x03\x50\x01\x02\x03", [1, 2, 3]),
        (b"\xf0\x00\x00\x00\x09\x00\x00\x00\x01\x71\x00\x00\x00\x05", [5]),
        (b"\xe0\x06\x01\x00\x53\x05\x50\x09", [Described(5, 9)]),
    ],
)
def test_encodings_of_other_clients(encoded, value):
    if value is None:
        with pytest.raises(AmqpError):
            decode_exactly(encoded)
    else:
        assert decode_exactly(encoded) == value


def nested(depth, leaf=encode.NULL):
    for _ in range(depth):
        leaf = encode.compound(0xC0, 1, leaf)
    return leaf


def test_nesting_is_limited():
    assert decode_exactly(nested(MAX_DEPTH)) is not None
    for encoded in (nested(MAX_DEPTH + 1), nested(5000), bytes(100_000), b"\x00\x53\x05" * 5000):
        with pytest.raises(AmqpError):
            decode_exactly(encoded + encode.NULL)


@pytest.mark.parametrize(
    "encoded",
    [
        b"\xd0\x00\x00\x00\x04\xff\xff\xff\xff",
        b"\xc0\x01\xff",
        b"\xf0\x00\x00\x00\x05\x00\x00\xff\xff\x40",
        b"\xf0\x00\x00\x00\x05\xff\xff\xff\xff\x41",
        b"\xc1\x02\x01\x40",
        b"\xc1\x04\x02\x45\x40\x40",
        b"\xc1\x05\x02\xc0\x01\x00\x40",
        b"\xb0\xff\xff\xff\xff",
        b"\xa1\x01\xff",
        b"\xa3\x01\xff",
        b"\x56\x02",
        b"\x73\x7f\xff\xff\xff",
        b"\x73\x80\x00\x00\x00",
        b"\x01",
        b"",
    ],
)
def test_false_sizes_and_counts_are_refused(encoded):
    with pytest.raises(AmqpError):
        decode_exactly(encoded)
