"""Limits of a message's content, checked on the bytes before a decoder reads them.

Rules
1. A check walks the bytes once, without recursion, and builds nothing, so a refused message costs
   no memory. It stops at the first limit that is exceeded, so its time is bounded, too.
2. A length field that claims more bytes than there are is refused before anything of that length is
   allocated. For msgpack, a body that passes is complete and has no surplus byte.
3. After a check the decoder needs at most about 80 bytes of memory per item, plus the body.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from aztask.errors import ConfigurationError, ContentRefused, DecodeError


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits of one message.

    * `body_bytes`: of one body, decompressed.
    * `depth`: how deeply lists and maps may be nested, counting the body's own list (in msgpack, an
      empty innermost one is not counted).
    * `items`: values and keys in one body.
    * `header_bytes`: of the text of one header that is passed on.
    """

    body_bytes: int = 16 * 1024 * 1024
    depth: int = 100
    items: int = 1_000_000
    header_bytes: int = 32 * 1024

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"Limits({limit.name}={value!r}): it must be an integer of at least 1"
                )
        if self.depth > MAX_DEPTH:
            raise ConfigurationError(
                f"Limits(depth={self.depth}): at most {MAX_DEPTH}, since decoders recurse"
            )


MAX_DEPTH = 500
"""msgpack refuses to write more than 511 levels, and Python's own recursion limit is 1,000."""


def check_size(size: int, limits: MessageLimits) -> None:
    """Raise ContentRefused if a body of `size` bytes is too long."""
    if size > limits.body_bytes:
        raise ContentRefused(
            f"the body has {size} bytes, more than the {limits.body_bytes} allowed;"
            " raise Limits.body_bytes or pass a reference to the data"
        )


def check_msgpack(data: bytes, limits: MessageLimits) -> None:
    """Check `data`, one msgpack value.

    Raises DecodeError (damaged) or ContentRefused (too much).
    """
    size, position, items, steps = len(data), 0, 0, _STEPS
    open_items: list[int] = []  # per open container: how many values are still missing
    left = 1
    while True:
        while not left:
            if not open_items:
                if position == size:
                    return
                raise _wrong_length(position, size)
            left = open_items.pop()
        left -= 1
        if position >= size:
            raise _wrong_length(size + 1, size)
        skip, width, children = steps[data[position]]
        position += 1
        if width:  # the length, or the number of items, is in the next bytes
            count = int.from_bytes(data[position : position + width], "big")
            position += width + skip + (0 if children else count)
            children *= count
        else:
            position += skip
        if children:
            items += children
            if children > size - position:
                raise DecodeError(f"a list or map claims {children} items; the body is too short")
            if items > limits.items:
                raise _too_many(limits)
            if len(open_items) >= limits.depth:
                raise _too_deep(limits)
            open_items.append(left)
            left = children
        elif skip < 0:
            raise DecodeError("the body is not msgpack: byte 0xc1 is never used")


def _msgpack_steps() -> tuple[tuple[int, int, int], ...]:
    """Per first byte: (bytes to skip, width of the length field, children per counted item).

    From the msgpack specification's table of formats. For a format without a length field, the last
    number is the number of children itself.
    """
    table = [(0, 0, 0)] * 256  # integers of one byte, nil, booleans
    for low in range(16):
        table[0x80 + low] = (0, 0, 2 * low)
        table[0x90 + low] = (0, 0, low)
    for low in range(32):
        table[0xA0 + low] = (low, 0, 0)
    for exponent in range(3):
        width = 2**exponent
        table[0xC4 + exponent] = table[0xD9 + exponent] = (0, width, 0)  # bin, str
        table[0xC7 + exponent] = (1, width, 0)  # ext: and its type
    for exponent in range(4):
        table[0xCC + exponent] = table[0xD0 + exponent] = (2**exponent, 0, 0)  # uint, int
    table[0xCA], table[0xCB] = (4, 0, 0), (8, 0, 0)
    for exponent in range(5):
        table[0xD4 + exponent] = (1 + 2**exponent, 0, 0)  # fixext
    table[0xDC], table[0xDD] = (0, 2, 1), (0, 4, 1)
    table[0xDE], table[0xDF] = (0, 2, 2), (0, 4, 2)
    table[0xC1] = (-1, 0, 0)
    return tuple(table)


_STEPS = _msgpack_steps()
_JSON_MARKS = re.compile(rb'"(?:[^"\\]+|\\.)*+"?|[\[\]{},:]', re.DOTALL)


def check_json(data: bytes, limits: MessageLimits) -> None:
    """Count the brackets, commas and colons of `data` outside of strings. Raises ContentRefused."""
    opened = data.count(b"[") + data.count(b"{")
    marks = opened + data.count(b",") + data.count(b":")
    if opened <= limits.depth and marks <= limits.items:
        return  # even if every mark counted, neither limit would be exceeded
    depth = items = 0
    for match in _JSON_MARKS.finditer(data):
        mark = data[match.start()]
        if mark in b"[{":
            depth += 1
            items += 1
        elif mark in b"]}":
            depth -= 1
        elif mark in b",:":
            items += 1
        if depth > limits.depth:
            raise _too_deep(limits)
        if items > limits.items:
            raise _too_many(limits)


def _wrong_length(position: int, size: int) -> DecodeError:
    if position > size:
        return DecodeError(f"the body breaks off after {size} bytes; it claims to be longer")
    return DecodeError(f"{size - position} bytes follow the end of the body")


def _too_many(limits: MessageLimits) -> ContentRefused:
    return ContentRefused(
        f"the body holds more than {limits.items} values; raise Limits.items or pass a reference"
    )


def _too_deep(limits: MessageLimits) -> ContentRefused:
    return ContentRefused(
        f"the body is nested more than {limits.depth} levels deep; raise Limits.depth or flatten it"
    )
