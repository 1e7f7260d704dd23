"""AMQP 1.0 type system, writing: one function per type, which returns the encoded bytes.

Rules
1. The caller names the type. Nothing is guessed from Python's types, because the peer distinguishes
   uint, int, long and timestamp.
2. Descriptors are written as smallulong, the form that every SDK reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from struct import error as struct_error
from typing import Any, NamedTuple
from uuid import UUID

# -- python types for the AMQP types that have no equivalent in Python ---------------------
#
# The others decode as follows: integers to int, floats to float, binary to bytes, uuid to
# `uuid.UUID`, char and string to str, lists and arrays to list, maps to dict. Decimals stay bytes.


class Symbol(str):
    """An AMQP symbol (ASCII); equal to the str of the same characters."""

    __slots__ = ()


class Timestamp(int):
    """An AMQP timestamp: milliseconds since 1970-01-01T00:00Z."""

    __slots__ = ()


class Int32(int):
    """An AMQP int of 32 bits, so that it is not written as a long: some clients tell them apart."""

    __slots__ = ()


class Described(NamedTuple):
    """A value with its descriptor, which is an int or a `Symbol`."""

    descriptor: Any
    value: Any


def undescribed(value: Any) -> Any:
    """Return the value without its descriptors: clients send filters with and without one."""
    while isinstance(value, Described):
        value = value.value
    return value


NULL = b"\x40"
TRUE = b"\x41"
FALSE = b"\x42"
EMPTY_LIST = b"\x45"

_OCTET_UINT = Struct(">BI")
_OCTET_ULONG = Struct(">BQ")
_OCTET_LONG = Struct(">Bq")
_OCTET_INT = Struct(">Bi")
_OCTET_DOUBLE = Struct(">Bd")
_COMPOUND8 = Struct(">BBB")
_COMPOUND32 = Struct(">BII")


def boolean(value: bool) -> bytes:
    return TRUE if value else FALSE


def ubyte(value: int) -> bytes:
    return bytes((0x50, value))


def ushort(value: int) -> bytes:
    return b"\x60" + value.to_bytes(2)


def uint(value: int) -> bytes:
    """Encode a uint in its shortest form."""
    if value < 256:
        return bytes((0x52, value)) if value else b"\x43"
    return _OCTET_UINT.pack(0x70, value)


def ulong(value: int) -> bytes:
    """Encode a ulong in its shortest form."""
    if value < 256:
        return bytes((0x53, value)) if value else b"\x44"
    return _OCTET_ULONG.pack(0x80, value)


def int32(value: int) -> bytes:
    """Encode an AMQP int, which has 32 bits."""
    return _OCTET_INT.pack(0x71, value)


def long(value: int) -> bytes:
    """Encode an AMQP long, which has 64 bits."""
    return _OCTET_LONG.pack(0x81, value)


def timestamp(milliseconds: int) -> bytes:
    """Encode a timestamp given in milliseconds since 1970-01-01T00:00Z."""
    return _OCTET_LONG.pack(0x83, milliseconds)


def uuid(value: UUID) -> bytes:
    return b"\x98" + value.bytes


def binary(value: bytes) -> bytes:
    return _sized(0xA0, value)


def string(value: str) -> bytes:
    """Encode a string; a lone surrogate becomes a question mark."""
    return _sized(0xA1, value.encode("utf-8", "replace"))


def symbol(value: str) -> bytes:
    """Encode a symbol; a character outside ASCII becomes a question mark."""
    return _sized(0xA3, value.encode("ascii", "replace"))


def _sized(code: int, data: bytes) -> bytes:
    if len(data) < 256:
        return bytes((code, len(data))) + data
    return _OCTET_UINT.pack(code + 0x10, len(data)) + data


def list_of(items: Sequence[bytes]) -> bytes:
    """Encode a list whose items are encoded already."""
    return compound(0xC0, len(items), b"".join(items)) if items else EMPTY_LIST


def map_of(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode a map whose keys and values are encoded already."""
    flat = [part for pair in pairs for part in pair]
    return compound(0xC1, len(flat), b"".join(flat))


def compound(code: int, count: int, body: bytes) -> bytes:
    """Encode a list (code 0xC0) or map (0xC1) of `count` items whose encodings are `body`."""
    if len(body) < 255 and count < 256:
        return _COMPOUND8.pack(code, len(body) + 1, count) + body
    return _COMPOUND32.pack(code + 0x10, len(body) + 4, count) + body


def array_of(constructor: int, items: Sequence[bytes]) -> bytes:
    """Encode an array. items: each encoded without the `constructor` that they share."""
    body = bytes((constructor,)) + b"".join(items)
    return _COMPOUND32.pack(0xF0, len(body) + 4, len(items)) + body


def long_array(values: Sequence[int]) -> bytes:
    return array_of(0x81, [value.to_bytes(8, signed=True) for value in values])


def timestamp_array(values: Sequence[int]) -> bytes:
    """Encode an array of timestamps in milliseconds since 1970-01-01T00:00Z."""
    return array_of(0x83, [value.to_bytes(8, signed=True) for value in values])


def string_array(values: Sequence[str]) -> bytes:
    encoded = [value.encode() for value in values]
    return array_of(0xB1, [len(data).to_bytes(4) + data for data in encoded])


def symbol_array(values: Sequence[str]) -> bytes:
    """Encode an array of symbols of at most 255 ASCII characters each."""
    return array_of(0xA3, [bytes((len(value),)) + value.encode("ascii") for value in values])


def described(code: int, value: bytes) -> bytes:
    """Put a numeric descriptor below 256 before an encoded value."""
    return bytes((0x00, 0x53, code)) + value


def fields(code: int, items: Sequence[bytes]) -> bytes:
    """Encode a described list without its trailing nulls, the usual form of a section."""
    count = len(items)
    while count and items[count - 1] == NULL:
        count -= 1
    return described(code, list_of(items[:count]))


def double(value: float) -> bytes:
    return _OCTET_DOUBLE.pack(0x82, value)


_SIMPLE_TYPES: list[tuple[type, Callable[[Any], bytes]]] = [
    (bool, boolean),
    (Timestamp, timestamp),
    (Int32, int32),
    (int, long),
    (float, double),
    (Symbol, symbol),
    (str, string),
    (bytes, binary),
    (UUID, uuid),
]


def simple(value: Any) -> bytes:
    """Encode a decoded value of a simple type, which may have a descriptor.

    Returns b"" for all other values: lists, maps, and numbers that do not fit a long.
    """
    if value is None:
        return NULL
    if isinstance(value, Described):
        inner = simple(value.value)
        number = isinstance(value.descriptor, int)
        head = ulong(value.descriptor) if number else symbol(str(value.descriptor))
        return b"\x00" + head + inner if inner else b""
    for kind, write in _SIMPLE_TYPES:
        if isinstance(value, kind):
            try:
                return write(value)
            except (OverflowError, struct_error):
                return b""
    return b""
