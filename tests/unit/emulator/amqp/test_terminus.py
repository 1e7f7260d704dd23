"""Sources and targets."""

from __future__ import annotations

import pytest
from amqpwire import decode_exactly

from aztask.emulator.amqp import AmqpError, encode
from aztask.emulator.amqp.decode import decode
from aztask.emulator.amqp.encode import Described, Symbol
from aztask.emulator.amqp.link import (
    COORDINATOR,
    SOURCE,
    TARGET,
    parse_terminus,
    raw_fields,
    with_filter,
)


def source(filters, address=None):
    items = [address or encode.string("q"), *[encode.NULL] * 6, encode.map_of(filters)]
    return encode.described(SOURCE, encode.list_of(items))


def parsed(raw):
    return parse_terminus(decode_exactly(raw), raw)


def test_null_is_no_terminus():
    assert parse_terminus(None, encode.NULL) is None


def test_descriptors_are_numbers_or_symbols():
    assert parse_terminus(Described(TARGET, ["q"]), b"").kind == TARGET
    assert parse_terminus(Described(Symbol("amqp:source:list"), ["q"]), b"").kind == SOURCE
    assert parse_terminus(Described(COORDINATOR, []), b"").address == ""


@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        (encode.string("q"), "q"),
        (encode.symbol("q"), "q"),
        (encode.binary(b"q"), "q"),
        (encode.uint(5), ""),
        (encode.NULL, ""),
    ],
)
def test_addresses_of_every_type(encoded, text):
    assert parsed(source([], encoded)).address == text


@pytest.mark.parametrize(
    "value",
    [Described(5, []), Described(SOURCE, "q"), Described([1], []), Described(None, [])],
    ids=range(4),
)
def test_anything_else_is_refused(value):
    with pytest.raises(AmqpError, match="invalid-field"):
        parse_terminus(value, b"")


def test_dynamic_nodes_are_noticed():
    assert parse_terminus(Described(TARGET, [None, 0, "s", 0, True]), b"").dynamic
    assert not parse_terminus(Described(TARGET, [None, 0, "s", 0, False]), b"").dynamic


def test_filters_lose_their_descriptors():
    plain = (encode.symbol("a"), encode.string("x"))
    described = (encode.symbol("b"), b"\x00" + encode.ulong(2**40) + encode.string("y"))
    assert parsed(source([plain, described])).filters == {"a": "x", "b": "y"}


def test_raw_fields_are_the_encoded_items():
    for items in ([], [encode.NULL], [encode.string("x" * 300), encode.uint(5)]):
        assert raw_fields(encode.described(SOURCE, encode.list_of(items))) == items


@pytest.mark.parametrize(
    ("before", "descriptor"),
    [
        (encode.NULL, None),
        (b"\x00" + encode.ulong(2**40) + encode.NULL, 2**40),
        (b"\x00" + encode.symbol("f") + encode.NULL, "f"),
    ],
)
def test_an_answered_filter_keeps_its_descriptor(before, descriptor):
    answer = with_filter(parsed(source([(encode.symbol("f"), before)])), "f", encode.string("v"))
    terminus, _ = decode(answer)
    value = terminus.value[7]["f"]
    assert value == ("v" if descriptor is None else Described(descriptor, "v"))
    assert terminus.value[0] == "q"
