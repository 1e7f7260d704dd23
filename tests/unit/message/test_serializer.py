"""The msgpack encoding: every stated type comes back, every other is refused by name."""

import datetime as dt
import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePosixPath

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.message.serializer import INTEGER_BYTES, TEXT_BYTES, check_keys, pack, unpack

zones = st.none() | st.timezones()
offsets = st.integers(-86399, 86399).map(lambda s: dt.timezone(dt.timedelta(seconds=s)))


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.datetimes(timezones=st.none() | offsets)
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False)
)
keys = st.text() | st.binary() | st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.none()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=30
)


@given(values)
def test_every_stated_value_comes_back_equal_and_of_its_type(value):
    result = unpack(pack(value))
    assert result == value
    assert type(result) is type(value)


@given(st.datetimes(timezones=zones))
def test_a_zone_becomes_its_offset(moment):
    result = unpack(pack(moment))
    assert result.utcoffset() == moment.utcoffset()
    assert result.replace(tzinfo=None) == moment.replace(tzinfo=None, fold=0)


@pytest.mark.parametrize("bits", [63, 64, 65, 1000, INTEGER_BYTES * 8 - 1])
def test_integers_of_any_allowed_length_come_back(bits):
    for value in (2**bits - 1, -(2**bits), 2 ** (bits - 1)):
        assert unpack(pack(value)) == value


def test_an_integer_of_five_thousand_digits_comes_back():
    assert unpack(pack(10**5000)) == 10**5000


def test_an_integer_beyond_the_limit_is_refused():
    with pytest.raises(OverflowError, match="at most 4096"):
        pack(2 ** (INTEGER_BYTES * 8))


Point = namedtuple("Point", "x y")


class Colour(enum.StrEnum):
    RED = "red"


def test_what_becomes_what():
    assert unpack(pack((1, (2, 3)))) == [1, [2, 3]]
    assert unpack(pack(Point(1, 2))) == [1, 2]
    assert unpack(pack(OrderedDict(a=1))) == {"a": 1}
    assert unpack(pack(Colour.RED)) == "red"
    assert unpack(pack(bytearray(b"x"))) == b"x"
    assert unpack(pack(memoryview(b"x"))) == b"x"
    assert unpack(pack(Decimal("NaN"))).is_nan()


def test_a_timestamp_of_other_producers_is_a_moment_in_utc():
    moment = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    assert unpack(msgpack.packb(msgpack.Timestamp.from_datetime(moment))) == moment


def test_plain_values_are_plain_msgpack():
    value = {"a": [1, 2.5, "x", b"y", None, True]}
    assert pack(value) == msgpack.packb(value)


@pytest.mark.parametrize("value", [{1}, object(), print, 1j, Exception("x"), iter([])])
def test_other_types_are_refused_by_name(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        pack(value)


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb(msgpack.ExtType(code, payload))
        for code in range(1, 9)
        for payload in (b"", b"\xff", b"nonsense", b"x" * 5000, b"9" * (TEXT_BYTES + 1))
        if not (code == 7 and len(payload) <= INTEGER_BYTES)
    ],
)
def test_broken_extensions_are_value_errors(data):
    with pytest.raises(ValueError, match=r"."):
        unpack(data)


tuples = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.dictionaries(keys | st.tuples(keys, st.floats(allow_nan=False)), inner)
    ),
    max_leaves=20,
)


@given(tuples)
def test_the_check_of_keys_refuses_exactly_what_cannot_be_read(value):
    data = pack(value)
    try:
        unpack(data)
    except TypeError:
        with pytest.raises(TypeError, match="a tuple as a key"):
            check_keys(data)
    else:
        check_keys(data)


@pytest.mark.parametrize(
    "value", [b"\x81" * 5000, "text", 7, ["row"] * 5000, [{"a": 7, "b": "c"}] * 500]
)
def test_most_values_are_not_read_to_check_their_keys(value, monkeypatch):
    data = pack(value)
    monkeypatch.setattr("aztask.message.serializer.unpack", lambda data: pytest.fail("it was read"))
    check_keys(data)


@dataclass
class Spot:
    x: int


class Tint(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        ({1, 2}, "a list, such as sorted(value), instead"),
        (frozenset(), "a list, such as sorted(value), instead"),
        (PurePosixPath("/a"), "str(path) instead"),
        (Tint.RED, "its .value instead"),
        (Spot(1), "dataclasses.asdict(value) instead"),
        (object(), "plain data instead"),
    ],
)
def test_a_refused_value_says_what_to_write_instead(value, instead):
    with pytest.raises(TypeError) as caught:
        pack({"a": [value]})
    assert str(caught.value).endswith(f"has no encoding; pass {instead}")
