"""Limits: what is refused has cost no memory, and what passes is complete."""

import json
import tracemalloc
import zlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.errors import CodecError, ConfigurationError, ContentRefused, DecodeError
from aztask.message.bounds import MessageLimits, check_json, check_msgpack
from aztask.message.compression import decompress

SMALL = MessageLimits(body_bytes=1000, depth=5, items=20)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=300)),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=60,
)


@given(values)
def test_whatever_msgpack_writes_passes(value):
    check_msgpack(msgpack.packb(value), MessageLimits())


@given(values, st.data())
def test_msgpack_cut_short_or_continued_is_refused(value, data):
    packed = msgpack.packb(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(DecodeError):
        check_msgpack(packed[:cut], MessageLimits())
    with pytest.raises(DecodeError, match="1 bytes follow"):
        check_msgpack(packed + b"\x00", MessageLimits())


@given(st.binary(max_size=200))
def test_what_passes_is_what_msgpack_can_read(data):
    try:
        check_msgpack(data, MessageLimits())
    except CodecError:
        return
    try:
        msgpack.unpackb(data, raw=True, strict_map_key=False)
    except (ValueError, TypeError) as error:
        # Complete, but with a key that is a list, a timestamp of a wrong length, or an extension
        # whose code is negative.
        known = ("unhashable", "timestamp", "ext", "code must be")
        assert any(word in str(error).lower() for word in known)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff" + b"\x00" * 100,
        b"\xdb\xff\xff\xff\xffabc",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdc\xff\xff" * 300,
        b"\xc1",
        b"\x93\xc1\x00\x00",
        b"",
    ],
)
def test_lying_lengths_cost_nothing(data):
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            check_msgpack(data, MessageLimits())
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_msgpack_depth_and_items_are_exact():
    check_msgpack(b"\x91" * 5 + b"\x00", SMALL)
    with pytest.raises(ContentRefused, match="5 levels"):
        check_msgpack(b"\x91" * 6 + b"\x00", SMALL)
    check_msgpack(msgpack.packb(list(range(20))), SMALL)
    with pytest.raises(ContentRefused, match="20 values"):
        check_msgpack(msgpack.packb(list(range(21))), SMALL)
    with pytest.raises(ContentRefused, match="20 values"):
        check_msgpack(msgpack.packb({str(n): n for n in range(11)}), SMALL)
    with pytest.raises(ContentRefused, match="20 values"):
        check_msgpack(msgpack.packb([[1, 2, 3]] * 6), SMALL)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'["\\"]",', b"[[],"])
def test_json_nested_very_deep_is_refused_without_recursion(opening):
    with pytest.raises(ContentRefused, match="levels deep"):
        check_json(opening * 100_000, MessageLimits())


def test_msgpack_nested_very_deep_is_refused_without_recursion():
    with pytest.raises(ContentRefused, match="levels deep"):
        check_msgpack(b"\x91" * 100_000 + b"\x00", MessageLimits())


def test_json_counts_marks_outside_of_strings_only():
    check_json(json.dumps(["[[[[[[,,,,,,,,,,,,,,,,,,,,,,,,,,", '\\"[[[[[[[']).encode(), SMALL)
    with pytest.raises(ContentRefused, match="20 values"):
        check_json(json.dumps(list(range(40))).encode(), SMALL)
    with pytest.raises(ContentRefused, match="5 levels"):
        check_json(b'["]]]]]]",[[[[[[', SMALL)


def test_a_json_string_that_never_ends_takes_linear_time():
    check_json(b'["' + b"\\a,[" * 200_000, MessageLimits(items=1))


@pytest.mark.parametrize(
    "options", [{"items": 0}, {"depth": -1}, {"body_bytes": 1.5}, {"items": True}, {"depth": 501}]
)
def test_limits_are_checked(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        MessageLimits(**options)


GZIP = "application/x-gzip"


@pytest.mark.parametrize("size", [0, 1, 999, 1000])
def test_what_fits_is_decompressed(size):
    assert decompress(zlib.compress(b"x" * size), GZIP, SMALL) == b"x" * size


def test_a_decompression_bomb_costs_no_more_than_the_limit():
    bomb = zlib.compress(b"\x00" * 50_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(ContentRefused, match="1000 allowed"):
            decompress(bomb, GZIP, SMALL)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["application/x-bz2", "application/x-lzma", GZIP])
def test_broken_streams_are_decode_errors(kind):
    for data in (b"", b"garbage", zlib.compress(b"abc")[:-2]):
        with pytest.raises(DecodeError, match="compressed body"):
            decompress(data, kind, SMALL)


@pytest.mark.parametrize("kind", ["zstd", "application/x-brotli", 7, b"x", ["y"], {}])
def test_other_methods_are_refused(kind):
    with pytest.raises(ContentRefused, match="not accepted"):
        decompress(b"x", kind, SMALL)
