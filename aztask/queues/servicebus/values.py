"""Reads AMQP 1.0 values into the same Python values as the SDK's decoder, but checks them strictly.

Why not the SDK's decoder: see `aztask.queues.servicebus.reading`.

Rules
1. Strings and symbols come out as bytes, timestamps as integers. In addition, a decimal is an exact
   `decimal.Decimal` and a char is a text of one character. A described value comes out without its
   descriptor.
2. Sizes, counts and nesting are checked against the available bytes before anything is built, so
   memory stays proportional to the bytes received.
3. Malformed bytes raise one of `ERRORS`.

Source: OASIS AMQP 1.0, part 1 (types).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from struct import Struct
from struct import error as struct_error
from typing import Any, Final
from uuid import UUID

MAX_DEPTH: Final = 64
MAX_WEIGHTLESS: Final = 16
"""Most items of an array whose items take no bytes (null, true, an empty list): against bombs."""

Reader = Callable[[bytes, int, int], tuple[Any, int]]
"""(buffer, position after the constructor, depth) -> (value, position after the value)"""


class UnreadableValue(ValueError):
    """These bytes are not an AMQP value, or exceed a limit."""


ERRORS: Final = (ValueError, IndexError, TypeError, OverflowError, struct_error)
"""The errors for malformed bytes, such as short buffers and map keys that cannot be hashed."""


def reason_of(error: Exception) -> str:
    """Describe one of `ERRORS` for a person."""
    short = isinstance(error, IndexError | struct_error)
    return "its bytes end too soon" if short else str(error)


def read_value(buffer: bytes, position: int, depth: int = 0) -> tuple[Any, int]:
    """(the value at `position`, where it ends). Raises one of `ERRORS`."""
    return _READERS[buffer[position]](buffer, position + 1, depth)


_WIDTHS: Final = (0, 0, 0, 0, 0, 1, 2, 4, 8, 16)
"""Bytes of a value by the upper half of its constructor (part 1, section 1.2)."""
_CUT: Final = "{} bytes are declared, {} are available"
_UINT: Final = Struct(">I")
_TWO_OCTETS: Final = Struct(">BB")
_TWO_UINTS: Final = Struct(">II")


def end_of(raw: bytes, position: int) -> int:
    """Where the value at `position` ends, by its declared size; at most the end of `raw`."""
    try:
        while raw[position] == 0:
            position = end_of(raw, position + 1)
        kind = raw[position] >> 4
        if kind >= len(_WIDTHS):
            size = (
                _UINT.unpack_from(raw, position + 1)[0] + 4 if kind & 1 else raw[position + 1] + 1
            )
        else:
            size = _WIDTHS[kind]
    except (IndexError, struct_error, RecursionError):
        return len(raw)
    return min(position + 1 + int(size), len(raw))


def check_items(buffer: bytes, position: int, limit: int) -> None:
    """Raise Unreadable if the value at `position` holds more than `limit` values, in all levels.

    It builds nothing and stops at the limit, so it costs little even for many megabytes. Malformed
    bytes raise one of `ERRORS`, or nothing: reading them finds the problem.
    """
    items, ends = 0, [end_of(buffer, position)]
    while ends:
        if position >= ends[-1]:
            position = max(position, ends.pop())
            continue
        items += 1
        while buffer[position] == 0:
            position = end_of(buffer, position + 1)
        code = buffer[position]
        if code >> 4 in (0xC, 0xD):
            ends.append(end_of(buffer, position))
            position += 3 if code >> 4 == 0xC else 9
        elif code >> 4 in (0xE, 0xF):
            width, end = 1 if code < 0xF0 else 4, end_of(buffer, position)
            _, count = (_TWO_OCTETS if width == 1 else _TWO_UINTS).unpack_from(buffer, position + 1)
            kind = buffer[position + 1 + 2 * width]
            # what is inside lists in an array is not counted: each of its bytes counts instead
            items += end - position if kind >= 0xC0 or kind == 0 else count
            position = end
        else:
            position = end_of(buffer, position)
        if items > limit:
            raise UnreadableValue(f"it holds more than {limit:,} values")


def _described(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    """A described value without its descriptor, which aztask does not need."""
    _check_depth(depth)
    _, position = read_value(buffer, position, depth + 1)
    return read_value(buffer, position, depth + 1)


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise UnreadableValue(f"values are nested more than {MAX_DEPTH} deep")


def _constant(value: Any) -> Reader:
    return lambda buffer, position, depth: (value, position)


def _empty_list(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    return [], position


def _fixed(layout: str) -> Reader:
    unpack, width = Struct(layout).unpack_from, Struct(layout).size

    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        return unpack(buffer, position)[0], position + width

    return read


def _octet(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    return buffer[position], position + 1


def _boolean(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    if buffer[position] > 1:
        raise UnreadableValue(f"0x{buffer[position]:02x} is not a boolean")
    return buffer[position] == 1, position + 1


def _char(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    """One Unicode character; half of a surrogate pair is refused."""
    number: int = _UINT.unpack_from(buffer, position)[0]
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise UnreadableValue(f"0x{number:x} is not a Unicode character")
    return chr(number), position + 4


def _uuid(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    return UUID(bytes=buffer[position : position + 16]), position + 16


def _decimal(width: int, exponent_bits: int, digits: int, bias: int) -> Reader:
    """IEEE 754-2008 decimals in the Binary Integer Decimal encoding (part 1, section 1.6).

    A coefficient of too many digits counts as 0, as the standard says (section 3.5.2).
    """
    bits = 8 * width
    low_bits = bits - 1 - exponent_bits

    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        data = buffer[position : position + width]
        if len(data) != width:
            raise UnreadableValue(f"a decimal has {width} bytes")
        number = int.from_bytes(data)
        sign, top = number >> (bits - 1), number >> (bits - 6) & 0x1F
        if top >= 0x1E:
            name = "NaN" if top == 0x1F else "Infinity"
            return Decimal(f"-{name}" if sign else name), position + width
        split = low_bits if top >> 3 != 3 else low_bits - 2
        coefficient = number & ((1 << split) - 1)
        if (
            split != low_bits
        ):  # the exponent starts with two set bits; the coefficient with an implied 100
            coefficient |= 4 << split
        if coefficient >= 10**digits:
            coefficient = 0
        exponent = (number >> split & ((1 << exponent_bits) - 1)) - bias
        return Decimal((sign, tuple(map(int, str(coefficient))), exponent)), position + width

    return read


_read_decimal128: Final = _decimal(16, 14, 34, 6176)
_SHIFTED: Final = 4608
_SCALES: Final = range(29)


def _decimal128(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    """A decimal128 of the standard, or of the .NET library before July 2026.

    That library shifted the exponent by 9 bits instead of 7 (github.com/Azure/azure-amqp, pull
    request 316), so a `System.Decimal` of scale 0 to 28 became a number around 1E-4608. Other
    producers do not write such numbers: a coefficient of at most 96 bits with that exponent.
    """
    value, position = _read_decimal128(buffer, position, depth)
    sign, digits, exponent = value.as_tuple()
    shifted = isinstance(exponent, int) and -exponent - _SHIFTED in _SCALES
    if shifted and int("".join(map(str, digits))) < 1 << 96:
        value = Decimal((sign, digits, int(exponent) + _SHIFTED))
    return value, position


def _short(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    """Bytes with a length prefix of one byte."""
    end = position + 1 + buffer[position]
    if end > len(buffer):
        raise UnreadableValue(_CUT.format(end - position - 1, len(buffer) - position - 1))
    return buffer[position + 1 : end], end


def _long(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    """Bytes with a length prefix of four bytes."""
    end = position + 4 + int(_UINT.unpack_from(buffer, position)[0])
    if end > len(buffer):
        raise UnreadableValue(_CUT.format(end - position - 4, len(buffer) - position - 4))
    return buffer[position + 4 : end], end


def _text(bytes_of: Reader, encoding: str) -> Reader:
    """The bytes of a text. Raises UnicodeDecodeError, a ValueError, if they do not decode."""

    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        data, position = bytes_of(buffer, position, depth)
        if not data.isascii():
            data.decode(encoding)
        return data, position

    return read


def _head(buffer: bytes, position: int, depth: int, width: int) -> tuple[int, int, int]:
    """(count, position of the first item, end). The size field does not count itself."""
    _check_depth(depth)
    size, count = (_TWO_OCTETS if width == 1 else _TWO_UINTS).unpack_from(buffer, position)
    end = position + width + size
    if end > len(buffer) or size < width:
        raise UnreadableValue(_CUT.format(size, len(buffer) - position - width))
    return count, position + 2 * width, end


def _items(buffer: bytes, start: int, end: int, count: int, depth: int) -> list[Any]:
    """Read `count` values, which must fill the bytes from `start` to `end` exactly."""
    if count > end - start:
        raise UnreadableValue(f"{count} values do not fit into {end - start} bytes")
    items, readers, position = [], _READERS, start
    for _ in range(count):
        item, position = readers[buffer[position]](buffer, position + 1, depth)
        items.append(item)
    if position != end:
        raise UnreadableValue("its values and its size disagree")
    return items


def _list(width: int) -> Reader:
    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        count, start, end = _head(buffer, position, depth, width)
        return _items(buffer, start, end, count, depth + 1), end

    return read


def _map(width: int) -> Reader:
    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        count, start, end = _head(buffer, position, depth, width)
        if count % 2:
            raise UnreadableValue("a map needs a value for every key")
        items = _items(buffer, start, end, count, depth + 1)
        return dict(zip(items[::2], items[1::2], strict=True)), end

    return read


def pairs_of(buffer: bytes, position: int) -> Iterator[tuple[Any, Any]]:
    """The readable pairs of the map at `position` that have a name; others are skipped."""
    width = {0xC1: 1, 0xD1: 4}.get(buffer[position] if position < len(buffer) else 0)
    if width is None:
        return
    with suppress(*ERRORS):
        _, position, end = _head(buffer, position + 1, 0, width)
        while position < end:
            key, position = read_value(buffer, position, 1)
            after = end_of(buffer, position)
            with suppress(*ERRORS):
                value, stop = read_value(buffer, position, 1)
                if stop == after <= end and isinstance(key, bytes):
                    yield key, value
            position = after


def _array(width: int) -> Reader:
    """Values of one type. Their constructor, perhaps described, comes once before them."""

    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        count, start, end = _head(buffer, position, depth, width)
        while buffer[start] == 0:
            _check_depth(depth)
            depth += 1
            _, start = read_value(buffer, start + 1, depth)
        reader, start = _READERS[buffer[start]], start + 1
        if count > max(end - start, MAX_WEIGHTLESS):
            raise UnreadableValue(f"{count} values do not fit into {end - start} bytes")
        items = []
        for _ in range(count):
            item, start = reader(buffer, start, depth + 1)
            items.append(item)
        if start != end:
            raise UnreadableValue("its values and its size disagree")
        return items, end

    return read


def _unknown(code: int) -> Reader:
    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        raise UnreadableValue(f"0x{code:02x} is not an AMQP type")

    return read


_READERS: Final[list[Reader]] = [_unknown(code) for code in range(256)]
for _code, _reader in {
    0x00: _described,
    0x40: _constant(None),
    0x41: _constant(True),
    0x42: _constant(False),
    0x43: _constant(0),
    0x44: _constant(0),
    0x45: _empty_list,
    0x50: _octet,
    0x51: _fixed(">b"),
    0x52: _octet,
    0x53: _octet,
    0x54: _fixed(">b"),
    0x55: _fixed(">b"),
    0x56: _boolean,
    0x60: _fixed(">H"),
    0x61: _fixed(">h"),
    0x70: _fixed(">I"),
    0x71: _fixed(">i"),
    0x72: _fixed(">f"),
    0x73: _char,
    0x74: _decimal(4, 8, 7, 101),
    0x80: _fixed(">Q"),
    0x81: _fixed(">q"),
    0x82: _fixed(">d"),
    0x83: _fixed(">q"),
    0x84: _decimal(8, 10, 16, 398),
    0x94: _decimal128,
    0x98: _uuid,
    0xA0: _short,
    0xA1: _text(_short, "utf-8"),
    0xA3: _text(_short, "ascii"),
    0xB0: _long,
    0xB1: _text(_long, "utf-8"),
    0xB3: _text(_long, "ascii"),
    0xC0: _list(1),
    0xC1: _map(1),
    0xD0: _list(4),
    0xD1: _map(4),
    0xE0: _array(1),
    0xF0: _array(4),
}.items():
    _READERS[_code] = _reader
