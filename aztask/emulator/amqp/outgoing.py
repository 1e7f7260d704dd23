"""The performatives and outcomes that this server writes, as bytes ready for a frame.

Rules
1. An error list always has three elements; info is an explicit null. One SDK reads all three
   without a check ([seen] azure-servicebus 7.15: an error of two elements makes its send hang
   without end).
2. Every performative has all of its fields, trailing nulls included. Older SDKs read fields by
   position and fail when one is missing ([seen] azure-servicebus 7.10 to 7.14: `frame[7]` of a
   begin, `frame[11]` for the payload of a transfer).
3. A transfer that carries a complete message is packed in one step, because it is the hot path.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TypeAlias

from aztask.emulator.amqp import FRAMING_ERROR, AmqpError, encode

# -- Frames ----------------------------------------------------------------------------------------
#
# Framing: protocol headers and frames (specification parts 2.2, 2.3, 5.3).
#
# Rules
# 1. A frame's size is checked as soon as its header is there; nothing over the limit is buffered.
# 2. The splitter holds at most one incomplete frame.

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


# -- Performatives and outcomes --------------------------------------------------------------------


ACCEPTED = encode.described(0x24, encode.EMPTY_LIST)
REJECTED = encode.described(0x25, encode.EMPTY_LIST)
RELEASED = encode.described(0x26, encode.EMPTY_LIST)
MODIFIED = encode.described(0x27, encode.EMPTY_LIST)

TAG_SIZE = 16
_FIELDS = {0x10: 10, 0x11: 8, 0x12: 14, 0x13: 11, 0x14: 11, 0x15: 6, 0x16: 3, 0x17: 1, 0x18: 1}
"""How many fields each performative has (specification part 2.7), by its descriptor."""
_TRANSFER = Struct(f">IBBH7sIBI2s{TAG_SIZE}s8s")  # frame header, list8 of eleven fields
_TRANSFER_SIZE = _TRANSFER.size
_TRANSFER_START = b"\x00\x53\x14\xc0" + bytes((_TRANSFER_SIZE - 8 - 5, _FIELDS[0x14], 0x70))
_TAG_HEAD = bytes((0xA0, TAG_SIZE))
_UNTAGGED = Struct(">IBBH7sIBI2s8s")  # the same with an empty tag
_UNTAGGED_SIZE = _UNTAGGED.size
_UNTAGGED_START = b"\x00\x53\x14\xc0" + bytes((_UNTAGGED_SIZE - 8 - 5, _FIELDS[0x14], 0x70))
_NO_TAG = b"\xa0\x00"
_ONE_DISPOSITION = Struct(">4sBBBBIBB")  # descriptor and list8, role, first, no last, settled
_ONE_DISPOSITION_SIZE = _ONE_DISPOSITION.size - 5 + 1  # what follows the list's size
_DISPOSITION = b"\x00\x53\x15\xc0"
_NO_MORE = b"\x42" + 5 * encode.NULL  # more: false, and what follows it
_SETTLED, _UNSETTLED = b"\x43\x41" + _NO_MORE, b"\x43\x42" + _NO_MORE  # format 0, settled or not


def _performative(code: int, items: Sequence[bytes]) -> bytes:
    """Return the performative with all of its fields; fields beyond `items` are null."""
    nulls = [encode.NULL] * (_FIELDS[code] - len(items))
    return encode.described(code, encode.list_of([*items, *nulls]))


def error(condition: str, description: str) -> bytes:
    """Return an amqp:error with its three fields."""
    text = description[:1024]
    items = [encode.symbol(condition), encode.string(text), encode.NULL]
    return encode.described(0x1D, encode.list_of(items))


def rejected(condition: str, description: str) -> bytes:
    """Return the outcome rejected, with an error."""
    return encode.described(0x25, encode.list_of([error(condition, description)]))


def sasl_mechanisms(names: list[str]) -> bytes:
    """Return the SASL frame that offers these mechanisms."""
    return frame(0, encode.fields(0x40, [encode.symbol_array(names)]), TYPE_SASL)


def sasl_outcome(code: int) -> bytes:
    """Return the SASL frame with the outcome: 0 ok, 1 authentication failed."""
    return frame(0, encode.fields(0x44, [encode.ubyte(code)]), TYPE_SASL)


def open_(container: str, max_frame_size: int, channel_max: int, idle_timeout: int) -> bytes:
    """Return an open. idle_timeout: milliseconds."""
    properties = encode.map_of([(encode.symbol("product"), encode.string("aztask emulator"))])
    return _performative(
        0x10,
        [
            *(encode.string(container), encode.NULL, encode.uint(max_frame_size)),
            *(encode.ushort(channel_max), encode.uint(idle_timeout)),
            *(encode.NULL, encode.NULL, encode.NULL, encode.NULL, properties),
        ],
    )


def begin(channel: int, next_id: int, window: int, handle_max: int) -> bytes:
    """Return a begin that answers the peer's begin on `channel`."""
    return _performative(
        0x11,
        [
            *(encode.ushort(channel), encode.uint(next_id), encode.uint(window)),
            *(encode.uint(window), encode.uint(handle_max)),
        ],
    )


def attach(
    name: str,
    handle: int,
    *,
    receiver: bool,
    modes: tuple[int, int],
    source: bytes,
    target: bytes,
    max_message_size: int,
    properties: bytes = encode.NULL,
) -> bytes:
    """Return an attach. modes: the sender's and the receiver's settle mode."""
    count = encode.NULL if receiver else encode.uint(0)
    return _performative(
        0x12,
        [
            *(encode.string(name), encode.uint(handle), encode.boolean(receiver)),
            *(encode.ubyte(modes[0]), encode.ubyte(modes[1]), source, target),
            *(encode.NULL, encode.NULL, count, encode.ulong(max_message_size)),
            *(encode.NULL, encode.NULL, properties),
        ],
    )


def flow(
    session: tuple[int, int, int, int],
    link: tuple[int, int, int] | None = None,
    *,
    drain: bool = False,
    echo: bool = False,
) -> bytes:
    """Return a flow.

    session: (next-incoming-id, incoming-window, next-outgoing-id, outgoing-window).
    link: (handle, delivery-count, link-credit), or None for a flow of the session alone.
    """
    items = [encode.uint(number) for number in session]
    if link:
        items += [encode.uint(number) for number in link]
        items += [encode.uint(0), encode.boolean(drain), encode.boolean(echo)]
    return _performative(0x13, items)


def transfer_frame(
    channel: int, handle: int, delivery_id: int, tag: bytes, *, settled: bool, payload: bytes
) -> bytes:
    """Return a complete frame with a complete message. tag: TAG_SIZE bytes, or empty."""
    flags = _SETTLED if settled else _UNSETTLED
    if not tag:
        size = _UNTAGGED_SIZE + len(payload)
        head = (size, 2, 0, channel, _UNTAGGED_START, handle, 0x70, delivery_id, _NO_TAG, flags)
        return _UNTAGGED.pack(*head) + payload
    size = _TRANSFER_SIZE + len(payload)
    return (
        _TRANSFER.pack(
            size, 2, 0, channel, _TRANSFER_START, handle, 0x70, delivery_id, _TAG_HEAD, tag, flags
        )
        + payload
    )


def transfer_start(handle: int, delivery_id: int, tag: bytes, settled: bool) -> bytes:
    """Return the transfer of a message's first frame when more frames follow."""
    return _performative(
        0x14,
        [
            *(encode.uint(handle), encode.uint(delivery_id), encode.binary(tag)),
            *(encode.uint(0), encode.boolean(settled), encode.TRUE),
        ],
    )


def transfer_continued(handle: int, more: bool) -> bytes:
    """Return the transfer of a message's second or later frame."""
    nulls = (encode.NULL, encode.NULL, encode.NULL, encode.NULL)
    return _performative(0x14, [encode.uint(handle), *nulls, encode.boolean(more)])


def disposition(receiver: bool, first: int, last: int, state: bytes) -> bytes:
    """Return a settled disposition of the deliveries from `first` to `last`."""
    size = _ONE_DISPOSITION_SIZE + len(state)
    if first == last and size < 256:
        role = 0x41 if receiver else 0x42
        head = _ONE_DISPOSITION.pack(
            _DISPOSITION, size, _FIELDS[0x15], role, 0x70, first, 0x40, 0x41
        )
        return head + state + encode.NULL
    end = encode.NULL if last == first else encode.uint(last)
    return _performative(
        0x15, [encode.boolean(receiver), encode.uint(first), end, encode.TRUE, state]
    )


def detach(handle: int, closed: bool, reason: AmqpError | None = None) -> bytes:
    """Return a detach, with an error if there is a reason."""
    return _performative(0x16, [encode.uint(handle), encode.boolean(closed), _reason(reason)])


def end(reason: AmqpError | None = None) -> bytes:
    """Return an end, with an error if there is a reason."""
    return _performative(0x17, [_reason(reason)])


def close(reason: AmqpError | None = None) -> bytes:
    """Return a close, with an error if there is a reason."""
    return _performative(0x18, [_reason(reason)])


def _reason(reason: AmqpError | None) -> bytes:
    return error(reason.condition, reason.description) if reason else encode.NULL
