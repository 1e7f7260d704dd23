"""AMQP 1.0 type system, reading (specification part 1).

Rules
1. Every size and count is checked against the available bytes before anything is built.
2. Nesting deeper than `MAX_DEPTH` and compounds of more than `MAX_COUNT` items are refused.
3. For any malformed input the caller gets an `AmqpError` with amqp:decode-error.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from struct import error as struct_error
from typing import Any
from uuid import UUID

from aztask.emulator.amqp import DECODE_ERROR, AmqpError
from aztask.emulator.amqp.encode import Described, Int32, Symbol, Timestamp

MAX_DEPTH = 64
MAX_COUNT = 65536
# Items of an array that take no bytes (null, true). Without a limit, a few bytes could claim
# thousands of them.
MAX_WEIGHTLESS = 16

Reader = Callable[[bytes, int, int], tuple[Any, int]]
"""(buffer, position after the constructor, depth) -> (value, position after the value)"""


def decode(buffer: bytes, position: int = 0) -> tuple[Any, int]:
    """Return the value at `position` and the position after it.

    Raises AmqpError (amqp:decode-error).
    """
    try:
        return _value(buffer, position, 0)
    except (IndexError, struct_error, OverflowError, TypeError, ValueError) as error:
        raise _malformed(f"malformed value near byte {position}: {error}") from None


def skip(buffer: bytes, position: int) -> int:
    """Return the position after the value at `position`, without decoding the value.

    Raises AmqpError (amqp:decode-error) if the value is cut off.
    """
    try:
        for _ in range(2 * MAX_DEPTH):
            code = buffer[position]
            if code:
                break
            position = _descriptor_end(buffer, position + 1)
        else:
            raise _malformed("descriptors nest too deeply")
        end = _end_of(code, buffer, position + 1)
    except (IndexError, struct_error):
        raise _malformed(f"the value at byte {position} is cut off") from None
    if end > len(buffer):
        raise _malformed(f"the value at byte {position} claims {end - position} bytes")
    return end


def _descriptor_end(buffer: bytes, position: int) -> int:
    """Return the position after a descriptor. It must be a number or a symbol."""
    if buffer[position] == 0:
        raise _malformed("a descriptor with a descriptor")
    return _end_of(buffer[position], buffer, position + 1)


_WIDTHS = (None, None, None, None, 0, 1, 2, 4, 8, 16)


def _end_of(code: int, buffer: bytes, position: int) -> int:
    kind = code >> 4
    if kind < len(_WIDTHS):
        width = _WIDTHS[kind]
        if width is None:
            raise _malformed(f"0x{code:02x} is not a type constructor")
        return position + width
    if kind & 1:
        return position + 4 + int(_UINT.unpack_from(buffer, position)[0])
    return position + 1 + buffer[position]


def _malformed(what: str) -> AmqpError:
    return AmqpError(DECODE_ERROR, what)


def _value(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    reader = _READERS[buffer[position]]
    if reader is None:
        raise _malformed(f"0x{buffer[position]:02x} is not a type constructor")
    return reader(buffer, position + 1, depth)


def _described(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    if depth >= MAX_DEPTH:
        raise _malformed(f"values nest more than {MAX_DEPTH} deep")
    descriptor, position = _value(buffer, position, depth + 1)
    value, position = _value(buffer, position, depth + 1)
    return Described(descriptor, value), position


def _constant(value: Any) -> Reader:
    def read(_buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
        return value, position

    return read


def _fixed(layout: str, convert: Callable[[Any], Any] | None = None) -> Reader:
    unpack = Struct(layout).unpack_from
    width = Struct(layout).size

    def read(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
        value = unpack(buffer, position)[0]
        return (value if convert is None else convert(value)), position + width

    return read


def _octet(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
    return buffer[position], position + 1


def _boolean(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
    if buffer[position] > 1:
        raise _malformed(f"0x{buffer[position]:02x} is not a boolean")
    return buffer[position] == 1, position + 1


def _char(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
    return chr(_UINT.unpack_from(buffer, position)[0]), position + 4


def _uuid(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
    return UUID(bytes=_slice(buffer, position, 16)), position + 16


def _slice(buffer: bytes, position: int, size: int) -> bytes:
    end = position + size
    if end > len(buffer):
        raise _malformed(f"{size} bytes are announced, {len(buffer) - position} are there")
    return buffer[position:end]


def _sized(width: int, convert: Callable[[bytes], Any]) -> Reader:
    def read8(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
        size = buffer[position]
        return convert(_slice(buffer, position + 1, size)), position + 1 + size

    def read32(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
        size: int = _UINT.unpack_from(buffer, position)[0]
        return convert(_slice(buffer, position + 4, size)), position + 4 + size

    return read8 if width == 1 else read32


def _symbol(data: bytes) -> Symbol:
    return Symbol(data.decode("ascii"))


_NULL = 0x40
_UINT = Struct(">I")
_TWO_OCTETS = Struct(">BB")
_TWO_UINTS = Struct(">II")


def _compound_head(buffer: bytes, position: int, depth: int, width: int) -> tuple[int, int, int]:
    """Return (count, position of the first item, end) of a list, map or array.

    The size on the wire counts the bytes after the size field.
    """
    if depth >= MAX_DEPTH:
        raise _malformed(f"values nest more than {MAX_DEPTH} deep")
    size, count = (_TWO_OCTETS if width == 1 else _TWO_UINTS).unpack_from(buffer, position)
    end = position + width + size
    if end > len(buffer) or size < width:
        raise _malformed(f"a compound of {size} bytes does not fit where it stands")
    if count > MAX_COUNT:
        raise _malformed(f"a compound of {count} items; {MAX_COUNT} are allowed")
    return count, position + 2 * width, end


def _list(width: int) -> Reader:
    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        count, position, end = _compound_head(buffer, position, depth, width)
        if count > end - position:
            raise _malformed(f"a list of {count} items in {end - position} bytes")
        items: list[Any] = []
        depth += 1
        for _ in range(count):
            code = buffer[position]
            if code == _NULL:  # inlined, because most fields of most lists are null
                items.append(None)
                position += 1
                continue
            item, position = _READERS_CHECKED[code](buffer, position + 1, depth)
            items.append(item)
        if position != end:
            raise _malformed("a list's items and its size disagree")
        return items, end

    return read


def _map(width: int) -> Reader:
    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        count, position, end = _compound_head(buffer, position, depth, width)
        if count % 2 or count > end - position:
            raise _malformed(f"a map of {count} items in {end - position} bytes")
        pairs: dict[Any, Any] = {}
        for _ in range(count // 2):
            key, position = _value(buffer, position, depth + 1)
            value, position = _value(buffer, position, depth + 1)
            pairs[key] = value  # an unhashable key is a TypeError, which decode() reports
        if position != end:
            raise _malformed("a map's items and its size disagree")
        return pairs, end

    return read


def _array(width: int) -> Reader:
    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        count, position, end = _compound_head(buffer, position, depth, width)
        descriptor: list[Any] = []
        while buffer[position] == 0 and len(descriptor) < MAX_DEPTH:
            described, position = _value(buffer, position + 1, depth + 1)
            descriptor.append(described)
        reader = _READERS_CHECKED[buffer[position]]
        if buffer[position] == 0:
            raise _malformed("an array's descriptors nest too deeply")
        items, position = [], position + 1
        if count > max(end - position, MAX_WEIGHTLESS):
            raise _malformed(f"an array of {count} items in {end - position} bytes")
        for _ in range(count):
            item, position = reader(buffer, position, depth + 1)
            for described in reversed(descriptor):
                item = Described(described, item)
            items.append(item)
        if position != end:
            raise _malformed("an array's items and its size disagree")
        return items, end

    return read


def _unknown(code: int) -> Reader:
    def read(_buffer: bytes, _position: int, _depth: int) -> tuple[Any, int]:
        raise _malformed(f"0x{code:02x} is not a type constructor")

    return read


_READERS: list[Reader | None] = [None] * 256
for _code, _reader in {
    0x00: _described,
    _NULL: _constant(None),
    0x41: _constant(True),
    0x42: _constant(False),
    0x43: _constant(0),
    0x44: _constant(0),
    0x45: lambda _buffer, position, _depth: ([], position),
    0x50: _octet,
    0x51: _fixed(">b"),
    0x52: _octet,
    0x53: _octet,
    0x54: _fixed(">b", Int32),
    0x55: _fixed(">b"),
    0x56: _boolean,
    0x60: _fixed(">H"),
    0x61: _fixed(">h"),
    0x70: _fixed(">I"),
    0x71: _fixed(">i", Int32),
    0x72: _fixed(">f"),
    0x73: _char,
    0x74: _fixed("4s"),
    0x80: _fixed(">Q"),
    0x81: _fixed(">q"),
    0x82: _fixed(">d"),
    0x83: _fixed(">q", Timestamp),
    0x84: _fixed("8s"),
    0x94: _fixed("16s"),
    0x98: _uuid,
    0xA0: _sized(1, bytes),
    0xA1: _sized(1, bytes.decode),
    0xA3: _sized(1, _symbol),
    0xB0: _sized(4, bytes),
    0xB1: _sized(4, bytes.decode),
    0xB3: _sized(4, _symbol),
    0xC0: _list(1),
    0xC1: _map(1),
    0xD0: _list(4),
    0xD1: _map(4),
    0xE0: _array(1),
    0xF0: _array(4),
}.items():
    _READERS[_code] = _reader
_READERS_CHECKED: list[Reader] = [reader or _unknown(code) for code, reader in enumerate(_READERS)]
