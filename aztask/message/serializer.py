"""The msgpack encoding of values: which Python type becomes what.

========================  =======================================================================
Python                    msgpack
========================  =======================================================================
None, bool, float         nil, boolean, float 64
str, bytes                str (UTF-8), bin; ``bytearray`` and ``memoryview`` become bin
list, tuple               array; comes back as a **list**
dict                      map; keys are of any other type here, but no list, tuple or dict
int of 64 bits            int
int beyond that           ext 7: two's complement, big-endian, at most 4,096 bytes
datetime                  ext 1: ISO 8601 text with its offset (the zone's name is not kept)
date, time                ext 2, ext 3: ISO 8601 text
timedelta                 ext 4: days, seconds, microseconds as three big-endian signed 32-bit ints
UUID                      ext 5: its 16 bytes
Decimal                   ext 6: its text
StoredValue               ext 8: ``aztask-stored:`` and the reference, see `aztask.message.payload`
anything else             refused, with the type's name
========================  =======================================================================

msgpack's own timestamp (ext -1), which other producers may send, is read as a datetime in UTC.

Rules
1. Plain values are plain msgpack: any other msgpack library reads and writes them.
2. Reading builds only the types above; no name in the data ever leads to an import or a call.
3. A value is written as its base class holds it, and refused if a part of it would be lost
   (`aztask.message.exact`). Reading accepts more than is written: whatever older releases wrote.
4. The codec registers this encoding with Kombu as ``msgpack``, replacing Kombu's own. It is a
   superset: the same bytes for the values that both can write.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Set
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

import msgpack

from aztask.message.exact import exact
from aztask.message.payload import MARK, StoredValue

MSGPACK = "application/x-msgpack"
JSON = "application/json"

INTEGER_BYTES = 4096
"""Longest integer: about 9,800 decimal digits; reading one takes time linear in its length."""

TEXT_BYTES = 16 * 1024
"""Bytes of the longest accepted text of a date, a time or a Decimal."""

_TIMEDELTA = struct.Struct(">iii")

_find_map = re.compile(rb"[\x81-\x8f\xde\xdf]").search
_find_array = re.compile(rb"[\x90-\x9f\xdc\xdd]").search
"""They find the first byte of a map with entries and of an array, see the msgpack specification.
Other values may contain the same bytes."""

_packers: list[Any] = []
"""Idle packers, kept because making one takes longer than packing a small value with it."""

_KEPT_BYTES = 64 * 1024
"""A packer keeps memory for the largest value it wrote; beyond these bytes it is not kept."""


def pack(value: Any) -> bytes:
    """`value` as msgpack. Raises TypeError, ValueError, OverflowError or UnicodeEncodeError."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(default=_to_ext)
    packed: bytes = packer.pack(value)  # if this raises, the packer is not kept
    if len(packed) <= _KEPT_BYTES:
        _packers.append(packer)
    return packed


def check_keys(data: bytes) -> None:
    """Raise TypeError if a dict that `pack` wrote into `data` has a tuple as a key.

    msgpack writes such a key as an array, of which a reader makes a list, and no list can be a key.
    The array must follow the beginning of a map. So most data, such as a list of maps of scalars,
    passes after two quick searches; the rest is read once.
    """
    first_map = _find_map(data)
    if first_map is None or _find_array(data, first_map.end()) is None:
        return
    try:
        unpack(data)
    except TypeError:
        raise TypeError("a dict has a tuple as a key; use text or numbers as keys") from None


def unpack(data: bytes) -> Any:
    """The value that `pack` wrote. Raises ValueError, TypeError or OverflowError.

    Check the bytes first with `aztask.message.bounds.check_msgpack`.
    """
    return msgpack.unpackb(data, ext_hook=_from_ext, strict_map_key=False, timestamp=3)


def _to_ext(value: Any) -> Any:
    """Encode a value that msgpack cannot write itself; msgpack calls this."""
    value = exact(value)
    for kind, code, write in _WRITERS:
        if isinstance(value, kind):
            return msgpack.ExtType(code, write(value))
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(_no_encoding(value, _instead_of(value) or "plain data"))


def explain_refusal(value: Any, depth: int = 20) -> str:
    """Why `value`, which a serializer refused, cannot be written; "" if that is not known.

    * `depth`: how deep to look into lists and dicts.
    """
    if instead := _instead_of(value):
        return _no_encoding(value, instead)
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    reasons = (explain_refusal(each, depth - 1) for each in inside if depth)
    return next(filter(None, reasons), "")


def _no_encoding(value: Any, instead: str) -> str:
    name = type(value).__qualname__
    return f"a value of type {name} has no encoding; pass {instead} instead"


def _instead_of(value: Any) -> str:
    """The plain data that stands for a value without an encoding, "" if none is known."""
    if isinstance(value, Set):
        return "a list, such as sorted(value),"
    if isinstance(value, PurePath):
        return "str(path)"
    if isinstance(value, Enum):
        return "its .value"
    if isinstance(value, StoredValue):
        return 'the value itself, or use serializer="msgpack",'
    if is_dataclass(value):
        return "dataclasses.asdict(value)"
    return ""


def _from_ext(code: int, data: bytes) -> Any:
    read = _READERS.get(code)
    if read is None:
        raise ValueError(f"extension type {code} is not known")
    if len(data) > TEXT_BYTES:
        raise ValueError(f"extension type {code} holds {len(data)} bytes, more than {TEXT_BYTES}")
    return read(data)


def _write_text(value: date | time) -> bytes:
    return value.isoformat().encode("ascii")


def _write_decimal(value: Decimal) -> bytes:
    text = Decimal.__str__(value).encode("ascii")
    if len(text) > TEXT_BYTES:
        raise ValueError(f"a Decimal of {len(text)} digits is too long; at most {TEXT_BYTES}")
    return text


def _write_integer(value: int) -> bytes:
    size = (value if value >= 0 else ~value).bit_length() // 8 + 1
    if size > INTEGER_BYTES:
        raise OverflowError(f"an integer of {size} bytes is too long; at most {INTEGER_BYTES}")
    return value.to_bytes(size, "big", signed=True)


def _write_timedelta(value: timedelta) -> bytes:
    return _TIMEDELTA.pack(value.days, value.seconds, value.microseconds)


def _read_integer(data: bytes) -> int:
    if len(data) > INTEGER_BYTES:
        raise ValueError(f"an integer of {len(data)} bytes is too long; at most {INTEGER_BYTES}")
    return int.from_bytes(data, "big", signed=True)


def _read_timedelta(data: bytes) -> timedelta:
    try:
        days, seconds, microseconds = _TIMEDELTA.unpack(data)
        return timedelta(days, seconds, microseconds)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"not a timedelta: {error}") from None


def _read_decimal(data: bytes) -> Decimal:
    try:
        return Decimal(data.decode("ascii"))
    except ArithmeticError:
        raise ValueError("not a decimal number") from None


# In this order: a datetime is also a date, and a bool never gets here.
def _read_stored(data: bytes) -> StoredValue:
    if not data.startswith(MARK):
        raise ValueError("extension type 8 holds no reference to a payload")
    return StoredValue.parse(data.removeprefix(MARK).decode("ascii"))


_WRITERS: tuple[tuple[type, int, Callable[[Any], bytes]], ...] = (
    (datetime, 1, _write_text),
    (date, 2, _write_text),
    (time, 3, _write_text),
    (timedelta, 4, _write_timedelta),
    (UUID, 5, lambda value: value.bytes),
    (Decimal, 6, _write_decimal),
    (int, 7, _write_integer),
    (StoredValue, 8, lambda value: MARK + str(value).encode("ascii")),
)

_READERS: dict[int, Callable[[bytes], Any]] = {
    1: lambda data: datetime.fromisoformat(data.decode("ascii")),
    2: lambda data: date.fromisoformat(data.decode("ascii")),
    3: lambda data: time.fromisoformat(data.decode("ascii")),
    4: _read_timedelta,
    5: lambda data: UUID(bytes=data),
    6: _read_decimal,
    7: _read_integer,
    8: _read_stored,
}
