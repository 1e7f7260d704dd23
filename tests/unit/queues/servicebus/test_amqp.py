"""AMQP messages as our decoder reads them: beside the SDK's, beyond it, and broken in every way."""

from __future__ import annotations

import tracemalloc
import uuid
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from azure.servicebus._pyamqp import _decode, _encode
from azure.servicebus._pyamqp.message import Header, Message, Properties
from hypothesis import assume, given
from hypothesis import strategies as some

from aztask.queues.servicebus.reading import DamagedMessage, read_message
from aztask.queues.servicebus.values import (
    ERRORS,
    MAX_DEPTH,
    UnreadableValue,
    read_value,
    reason_of,
)

HEADER = b"\x00\x53\x70"
ANNOTATIONS = b"\x00\x53\x72"
PROPERTIES = b"\x00\x53\x73"
APPLICATION = b"\x00\x53\x74"
DATA = b"\x00\x53\x75"
BODY = DATA + b"\xa0\x04body"


def value(text: str) -> Any:
    raw = bytes.fromhex(text)
    found, end = read_value(raw, 0)
    assert end == len(raw)
    return found


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("40", None),
        ("41", True),
        ("42", False),
        ("56 01", True),
        ("56 00", False),
        ("43", 0),
        ("44", 0),
        ("50 ff", 255),
        ("51 ff", -1),
        ("52 ff", 255),
        ("53 ff", 255),
        ("54 ff", -1),
        ("55 80", -128),
        ("60 ffff", 65535),
        ("61 ffff", -1),
        ("70 ffffffff", 2**32 - 1),
        ("71 80000000", -(2**31)),
        ("80 ffffffffffffffff", 2**64 - 1),
        ("81 8000000000000000", -(2**63)),
        ("72 3fc00000", 1.5),
        ("82 3ff8000000000000", 1.5),
        ("83 0000018bcfe56800", 1_700_000_000_000),
        ("73 0001f600", "\U0001f600"),
        ("73 00000041", "A"),
        ("98" + bytes(range(16)).hex(), uuid.UUID(bytes=bytes(range(16)))),
        ("a0 02 00ff", b"\x00\xff"),
        ("b0 00000002 00ff", b"\x00\xff"),
        ("a1 02 c3a4", "ä".encode()),
        ("b1 00000002 c3a4", "ä".encode()),
        ("a3 02 6162", b"ab"),
        ("b3 00000002 6162", b"ab"),
        ("45", []),
        ("c0 03 02 41 40", [True, None]),
        ("d0 00000006 00000002 41 40", [True, None]),
        ("c1 05 02 a1 01 61 41", {b"a": True}),
        ("d1 00000008 00000002 a1 01 61 41", {b"a": True}),
        ("e0 04 02 50 01 02", [1, 2]),
        ("f0 00000007 00000002 50 01 02", [1, 2]),
        ("e0 08 02 00 a3 01 61 50 01 02", [1, 2]),
        ("00 a3 01 61 54 07", 7),
    ],
)
def test_each_type_of_the_specification(raw: str, expected: Any) -> None:
    assert value(raw) == expected
    assert type(value(raw)) is type(expected)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        # Intel's decimal library and the BSON specification's decimal128 vectors give these bytes
        ("74 32800001", "1"),
        ("74 b2800001", "-1"),
        ("74 6cb8967f", "9999999"),
        ("74 77f8967f", "9.999999E+96"),
        ("74 00000001", "1E-101"),
        ("74 78000000", "Infinity"),
        ("74 f8000000", "-Infinity"),
        ("74 7c000000", "NaN"),
        ("84 31c0000000000001", "1"),
        ("84 31800000000002ee", "7.50"),
        ("84 6c7386f26fc0ffff", "9999999999999999"),
        ("84 77fb86f26fc0ffff", "9.999999999999999E+384"),
        ("94 30400000000000000000000000000000", "0"),
        ("94 b0400000000000000000000000000000", "-0"),
        ("94 303e0000000000000000000000000001", "0.1"),
        ("94 30403cde6fff9732de825cd07e96aff2", "1234567890123456789012345678901234"),
        ("94 5fffed09bead87c0378d8e63ffffffff", "9.999999999999999999999999999999999E+6144"),
        ("94 00000000000000000000000000000001", "1E-6176"),
        ("94 78000000000000000000000000000000", "Infinity"),
        ("94 f8000000000000000000000000000000", "-Infinity"),
        ("94 30400000000000000000000100000005", "4294967301"),
        # coefficients of too many digits are 0
        ("74 6cb89680", "0"),
        ("84 6c7386f26fc10000", "0"),
        ("94 3041ed09bead87c0378d8e6400000000", "0"),
        ("94 6c100000000000000000000000000000", "0"),
    ],
)
def test_decimals_are_exact(raw: str, expected: str) -> None:
    found = value(raw)
    if Decimal(expected).is_nan():
        assert found.is_nan()
    else:
        assert found == Decimal(expected)
        assert found.is_signed() == Decimal(expected).is_signed()
    if raw[3:5] not in ("6c", "30"):
        assert str(found) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("94 0c400000 ffffffff ffffffff ffffffff", "79228162514264337593543950335"),
        ("94 8c400000 ffffffff ffffffff ffffffff", "-79228162514264337593543950335"),
        ("94 0c380000 00000000 00000000 1425d829", "33802.4489"),
        ("94 0c080000 00000000 00000001 00000005", "4.294967301E-19"),
        ("94 0c400000 00000000 00000000 00000000", "0"),
    ],
)
def test_decimals_as_dotnet_wrote_them(raw: str, expected: str) -> None:
    """Exponents shifted by 9 bits; the last but one has 28 places, as many as .NET allows."""
    assert str(value(raw)) == expected


@given(some.decimals(allow_nan=False, allow_infinity=False))
def test_what_the_sdk_writes_as_a_decimal_is_read(number: Decimal) -> None:
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    assume(len(digits) <= 34 and -4000 <= exponent <= 6111)
    raw = bytearray()
    _encode.encode_decimal128(raw, number)
    assert read_value(bytes(raw), 0)[0].as_tuple() == number.as_tuple()


PLAIN = (
    some.none()
    | some.booleans()
    | some.integers(-(2**31), 2**31 - 1)
    | some.floats(allow_nan=False)
    | some.text(max_size=300)
    | some.binary(max_size=300)
    | some.uuids()
)
VALUES = some.recursive(
    PLAIN,
    lambda inner: some.lists(inner, max_size=5) | some.dictionaries(some.text(), inner, max_size=5),
    max_leaves=20,
)


@given(
    some.dictionaries(some.text(max_size=20), PLAIN, max_size=8),
    some.lists(some.binary(max_size=400), min_size=1, max_size=3),
    some.text(max_size=40),
    some.none() | some.integers(0, 2**32 - 1),
)
def test_what_the_sdk_reads_is_read_as_it_reads_it(application, data, message_id, count) -> None:
    message = Message(
        header=Header(delivery_count=count),
        properties=Properties(message_id=message_id, subject="s"),
        application_properties=application,
        message_annotations={b"x-opt-sequence-number": 7},
        data=data,
    )
    raw = bytes(_encode.encode_payload(bytearray(), message))
    assert read_message(memoryview(raw)) == _decode.decode_payload(memoryview(raw))


@given(VALUES)
def test_bodies_of_any_value_too(body) -> None:
    raw = bytes(_encode.encode_payload(bytearray(), Message(value=body)))
    assert read_message(raw) == _decode.decode_payload(memoryview(raw))


def test_descriptors_may_be_long_or_names() -> None:
    for descriptor in (b"\x80\0\0\0\0\0\0\0\x75", b"\xa3\x10amqp:data:binary"):
        assert read_message(b"\x00" + descriptor + b"\xa0\x01x").data == [b"x"]


def test_a_section_that_nobody_knows_is_left_out() -> None:
    assert read_message(BODY + b"\x00\x53\x79\x41").data == [b"body"]


BROKEN = [
    (b"\x2f", "0x2f is not an AMQP type"),
    (b"\x56\x02", "0x02 is not a boolean"),
    (b"\x73\x00\x00\xd8\x00", "0xd800 is not a Unicode character"),
    (b"\x73\x00\x11\x00\x00", "0x110000 is not a Unicode character"),
    (b"\xa1\x02\xff\xfe", "can't decode byte 0xff"),
    (b"\xa3\x02\xc3\xa4", "can't decode byte 0xc3"),
    (b"\xa0\x05ab", "5 bytes are declared, 2 are available"),
    (b"\xb0\xff\xff\xff\xff", "4294967295 bytes are declared, 0 are available"),
    (b"\xc0\x09\x01\x41", "9 bytes are declared, 2 are available"),
    (b"\xc0\x03\x01\x41\x41", "disagree"),
    (b"\xc0\x02\x02\x41", "2 values do not fit into 1 bytes"),
    (b"\xc1\x02\x01\x41", "a value for every key"),
    (b"\xc1\x03\x02\x45\x41", "unhashable"),
    (b"\xd0\x00\x00\x00\x04\xff\xff\xff\xff", "4294967295 values do not fit"),
    (b"\xf0\x00\x00\x00\x06\xff\xff\xff\xff\x40\x40", "4294967295 values do not fit into 1 bytes"),
    (b"\x71\x00", "too soon"),
    (b"\x98\x00", "16"),
    (b"\x94\x00", "a decimal has 16 bytes"),
    (b"", "too soon"),
    (b"\x00" * 300, "nested more than 64 deep"),
    (b"\xe0\xfa\x01" + b"\x00\x41" * 124 + b"\x41", "nested more than 64 deep"),
]


@pytest.mark.parametrize(("raw", "problem"), BROKEN)
def test_what_is_wrong_is_told(raw: bytes, problem: str) -> None:
    with pytest.raises(ERRORS) as caught:
        read_value(raw, 0)
    assert problem in reason_of(caught.value)


@pytest.mark.parametrize("raw", [raw for raw, _ in BROKEN])
def test_beside_one_broken_property_nothing_else_is_lost(raw: bytes) -> None:
    """The rest is there: what the service wrote, the other sections, and all bytes."""
    pairs = b"\xa1\x01a\x41\xa1\x01p" + raw
    section = APPLICATION + b"\xd1" + (len(pairs) + 4).to_bytes(4) + b"\0\0\0\4" + pairs
    annotations = ANNOTATIONS + b"\xc1\x08\x02\xa3\x03x-n\x55\x07"
    whole = HEADER + b"\xc0\x02\x01\x41" + annotations + section + BODY
    message = read_message(whole)
    assert isinstance(message, DamagedMessage)
    assert message.problem.startswith("the application properties at byte 20 cannot be read: ")
    assert message.raw == whole
    assert message.header == Header(durable=True)
    assert message.message_annotations == {b"x-n": 7}
    assert message.data == [b"body"]
    assert message.application_properties == {b"a": True}


def test_of_properties_the_readable_ones_are_kept() -> None:
    pairs = b"\xa1\x01a\x41" + b"\xa1\x01b\x56\x07" + b"\xa1\x01c\xa1\x01\xff" + b"\xa1\x01d\x42"
    raw = APPLICATION + b"\xc1" + bytes((len(pairs) + 1, 8)) + pairs + BODY
    message = read_message(raw)
    assert isinstance(message, DamagedMessage)
    assert message.application_properties == {b"a": True, b"d": False}
    assert message.data == [b"body"]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x01",
        b"\x00",
        b"\x00\x53",
        b"\x00\x53\x75",
        b"\x00\x41\x75",
        b"\x00\xa3\x04what\x41",
        HEADER + b"\x41",
        HEADER + b"\xc0\x02\x01\x45",
        HEADER + b"\xc0\x07\x06\x40\x40\x40\x40\x40\x40",
        PROPERTIES + b"\xc0\x0f\x0e" + b"\x40" * 14,
        APPLICATION + b"\x45",
        APPLICATION,
        b"\x00\x53\x76\x41",
        b"\x00" * 70_000,
        b"\x00\x00\x53\x75" * 1000,
    ],
)
def test_sections_that_are_none(raw: bytes) -> None:
    message = read_message(raw)
    assert isinstance(message, DamagedMessage)
    assert "cannot be read" in message.problem
    assert message.raw == raw


def test_nesting_has_an_end() -> None:
    def nested(depth: int) -> bytes:
        raw = b"\x41"
        for _ in range(depth):
            raw = b"\xd0" + (len(raw) + 4).to_bytes(4) + b"\x00\x00\x00\x01" + raw
        return raw

    assert read_value(nested(MAX_DEPTH), 0)
    for depth in (MAX_DEPTH + 1, 5000):
        with pytest.raises(UnreadableValue, match="nested more than 64 deep"):
            read_value(nested(depth), 0)


def test_memory_stays_proportional_to_the_bytes() -> None:
    """Arrays whose values take no bytes are what a bomb would be made of."""
    bomb = b"\xf0\x00\x00\x00\x05\x00\x00\xff\xff\x40" * 20_000
    body = b"\xd0" + (len(bomb) + 4).to_bytes(4) + (20_000).to_bytes(4) + bomb
    flat = b"\x45" * 200_000
    lists = b"\xd0" + (len(flat) + 4).to_bytes(4) + len(flat).to_bytes(4) + flat
    tracemalloc.start()
    assert isinstance(read_message(b"\x00\x53\x77" + body), DamagedMessage)
    assert read_message(b"\x00\x53\x77" + lists).value == [[]] * 200_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40_000_000


@given(some.binary(max_size=80))
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    read_message(raw)
    with suppress(*ERRORS):
        read_value(raw, 0)


@given(some.data())
def test_no_change_of_a_message_raises(data) -> None:
    raw = bytearray(
        _encode.encode_payload(
            bytearray(),
            Message(
                header=Header(delivery_count=1),
                properties=Properties(message_id="m"),
                application_properties={"a": 1, "b": "text", "c": 1.5, "d": uuid.UUID(int=5)},
                message_annotations={b"x-opt-sequence-number": 7},
                data=[b"body"],
            ),
        )
    )
    for _ in range(data.draw(some.integers(1, 4))):
        raw[data.draw(some.integers(0, len(raw) - 1))] = data.draw(some.integers(0, 255))
    message = read_message(raw[: data.draw(some.integers(0, len(raw)))])
    assert isinstance(message, Message)


def _list32(code: int, count: int, items: bytes) -> bytes:
    return bytes([code]) + (len(items) + 4).to_bytes(4) + count.to_bytes(4) + items


COUNT = 2_000_000
FLOODS = {
    "empty lists": _list32(0xD0, COUNT, b"\x45" * COUNT),
    "nested": _list32(0xD0, COUNT // 1000, _list32(0xD0, 1000, b"\x45" * 1000) * (COUNT // 1000)),
    "array": b"\xf0"
    + (COUNT * 2 + 5).to_bytes(4)
    + COUNT.to_bytes(4)
    + b"\x61"
    + b"\x7f" * COUNT * 2,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_property_with_millions_of_values_costs_no_memory(flood):
    raw = APPLICATION + _list32(0xD1, 2, b"\xa1\x01h" + flood) + BODY
    tracemalloc.start()
    try:
        message = read_message(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(message, DamagedMessage)
    assert "holds more than 262,144 values" in message.problem
    assert peak < 2 * len(raw)


def test_a_long_body_is_no_flood():
    message = read_message(DATA + b"\xb0" + COUNT.to_bytes(4) + b"\x45" * COUNT)
    assert not isinstance(message, DamagedMessage)


def test_what_the_service_wrote_is_not_replaced_by_what_the_sender_wrote() -> None:
    """Its sections are in front of the sender's bytes, which may hold the same sections again."""

    def annotations(code: int, until: bytes) -> bytes:
        pair = b"\xa3\x05until" + until
        return bytes((0, 0x53, code, 0xC1, len(pair) + 1, 2)) + pair

    service = HEADER + b"\xc0\x07\x05\x40\x40\x40\x40\x52\x03"
    service += annotations(0x71, b"\x53\x01") + annotations(0x72, b"\x53\x01")
    sender = HEADER + b"\xc0\x07\x05\x40\x40\x40\x40\x52\x63"
    sender += annotations(0x71, b"\x53\x63") + annotations(0x72, b"\x53\x63")
    message = read_message(service + sender + BODY)
    assert message.header is not None
    assert message.header.delivery_count == 3
    assert message.delivery_annotations == {b"until": 1}
    assert message.message_annotations == {b"until": 1}


@pytest.mark.parametrize("key", [b"\x45", b"\xc1\x01\x00", b"\xe0\x02\x00\x40"])
def test_a_list_or_a_map_as_a_name_beside_a_damaged_value_is_skipped(key: bytes) -> None:
    """No dict can hold such a key. The dead-letter reason in the same map is still read."""
    pairs = key + b"\x41" + b"\xa1\x03bad\x2f" + b"\xa1\x03why\xa1\x02so"
    raw = APPLICATION + bytes((0xC1, len(pairs) + 1, 6)) + pairs
    message = read_message(raw + BODY)
    assert isinstance(message, DamagedMessage)
    assert message.application_properties == {b"why": b"so"}
