"""Framing: protocol headers and frames (specification parts 2.2, 2.3, 5.3).

Rules
1. A frame's size is checked as soon as its header is there; nothing over the limit is buffered.
2. The splitter holds at most one incomplete frame.
"""

from __future__ import annotations

from struct import Struct
from typing import TypeAlias

from aztask.emulator.amqp.errors import FRAMING_ERROR, AmqpError

HEADER_AMQP = b"AMQP\x00\x01\x00\x00"
HEADER_TLS = b"AMQP\x02\x01\x00\x00"
HEADER_SASL = b"AMQP\x03\x01\x00\x00"
HEADER_SIZE = 8
MIN_MAX_FRAME_SIZE = 512
TYPE_AMQP = 0
TYPE_SASL = 1
EMPTY_FRAME = b"\x00\x00\x00\x08\x02\x00\x00\x00"

FRAME_HEAD = Struct(">IBBH")
"""Size in bytes with this header, data offset in units of 4 bytes, type, channel."""


Frame: TypeAlias = tuple[int, int, bytes]
"""(type, channel, bytes after the header and the extended header)"""


class Splitter:
    """Cuts a stream of bytes into protocol headers and frames.

    max_frame_size: bytes; a larger frame is an error.
    """

    def __init__(self, max_frame_size: int) -> None:
        self.max_frame_size = max_frame_size
        self._buffer = b""
        self._position = 0

    def feed(self, data: bytes) -> None:
        """Append bytes from the peer."""
        rest = self._buffer[self._position :]
        self._buffer = rest + data if rest else data
        self._position = 0

    def header(self) -> bytes | None:
        """Return the next eight bytes, or None while there are fewer."""
        end = self._position + HEADER_SIZE
        if len(self._buffer) < end:
            return None
        header = self._buffer[self._position : end]
        self._position = end
        return header

    def frame(self) -> Frame | None:
        """Return the next frame, or None while it is incomplete. Raises AmqpError on a bad size."""
        position, buffer = self._position, self._buffer
        if len(buffer) - position < HEADER_SIZE:
            return None
        size, offset, kind, channel = FRAME_HEAD.unpack_from(buffer, position)
        if not HEADER_SIZE <= size <= self.max_frame_size:
            raise AmqpError(
                FRAMING_ERROR,
                f"a frame of {size} bytes; {HEADER_SIZE} to {self.max_frame_size} are allowed",
            )
        if offset < 2 or 4 * offset > size:
            raise AmqpError(FRAMING_ERROR, f"data offset {offset} in a frame of {size} bytes")
        end = position + size
        if len(buffer) < end:
            return None
        self._position = end
        return kind, channel, buffer[position + 4 * offset : end]


def frame(channel: int, body: bytes, kind: int = TYPE_AMQP) -> bytes:
    """Return the bytes of one frame with this body."""
    return FRAME_HEAD.pack(len(body) + HEADER_SIZE, 2, kind, channel) + body
