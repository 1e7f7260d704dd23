"""The sections of a message (specification part 3.2); data sections are not decoded.

Rules
1. `cut` checks the complete message: the order and the kinds of its sections. Every section except
   data is decoded once, so that no malformed section reaches another client.
2. The bare message (properties to footer) is kept as the bytes that the sender wrote.
3. Two violations of part 3.2 are accepted, because SDKs commit them. Delivery annotations may come
   late: when you send a message that you received, the Python SDK writes them after the body. The
   body may be absent: `ServiceBusMessage(None)` encodes to no bytes at all.
"""

from __future__ import annotations

from typing import Any

from aztask.emulator.amqp import DECODE_ERROR, MESSAGE_SIZE_EXCEEDED, AmqpError
from aztask.emulator.amqp.decode import decode, skip
from aztask.emulator.amqp.encode import Described, Symbol

MAX_PROPERTIES = 64 * 1024
"""What the service takes before the body, in bytes."""
HEADER = 0x70
DELIVERY_ANNOTATIONS = 0x71
MESSAGE_ANNOTATIONS = 0x72
PROPERTIES = 0x73
APPLICATION_PROPERTIES = 0x74
DATA = 0x75
AMQP_SEQUENCE = 0x76
AMQP_VALUE = 0x77
FOOTER = 0x78

_NAMES = {
    "amqp:header:list": HEADER,
    "amqp:delivery-annotations:map": DELIVERY_ANNOTATIONS,
    "amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION_PROPERTIES,
    "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": AMQP_SEQUENCE,
    "amqp:amqp-value:*": AMQP_VALUE,
    "amqp:footer:map": FOOTER,
}
_TYPES: dict[int, type] = {
    **dict.fromkeys((HEADER, PROPERTIES), list),
    **dict.fromkeys((DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, APPLICATION_PROPERTIES), dict),
    FOOTER: dict,
}
_REPEATABLE = frozenset((DATA, AMQP_SEQUENCE))
_USUAL = {bytes((0x00, 0x53, code)): code for code in range(HEADER, FOOTER + 1)}
"""The usual first bytes of each section."""
_BINARY_WIDTHS = {b"\xa0": 1, b"\xb0": 4}


class Sections:
    """A message split into its sections. All positions refer to `raw`; 0 for an absent section.

    raw: the message, without delivery annotations that came late (rule 3).
    header, properties: the decoded lists.
    annotations, application_properties: the decoded maps.
    annotation_items: the encoded keys and values of the message annotations.
    delivery_items: the encoded keys and values of the delivery annotations.
    bare: the position of the bare message. body: of its first body section; -1 without one.
    application_start, application_end: the encoded application-properties section.
    data_items: the positions of the data sections' contents.
    """

    __slots__ = (
        *("raw", "header", "annotations", "annotation_items", "annotation_count", "properties"),
        *("application_properties", "bare", "application_start", "application_end"),
        *("data_items", "value", "footer", "delivery_items", "body"),
    )

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.header: list[Any] = []
        self.annotations: dict[Any, Any] = {}
        self.annotation_items = b""
        self.annotation_count = 0
        self.delivery_items = b""
        self.properties: list[Any] = []
        self.application_properties: dict[Any, Any] = {}
        self.bare = 0
        self.body = -1
        self.application_start = self.application_end = 0
        self.data_items: list[tuple[int, int]] = []
        self.value: Any = None
        self.footer: dict[Any, Any] = {}

    def property(self, index: int) -> Any:
        """Return the properties section's field at `index`, None if it is absent."""
        return self.properties[index] if index < len(self.properties) else None


MESSAGE_ID, USER_ID, TO, SUBJECT, REPLY_TO, CORRELATION_ID, CONTENT_TYPE = range(7)
CONTENT_ENCODING, EXPIRY_TIME, CREATION_TIME, GROUP_ID, GROUP_SEQUENCE, REPLY_TO_GROUP = range(
    7, 13
)


def cut(raw: bytes) -> Sections:
    """Split a message into its sections. Raises AmqpError (amqp:decode-error) if malformed."""
    sections = Sections(raw)
    position, last, annotated = 0, 0, False
    bare, size = -1, len(raw)
    while position < size:
        start = position
        position += 3
        code = _USUAL.get(raw[start:position])
        if code is None:
            code, position = _section_code(raw, start)
        if code == DELIVERY_ANNOTATIONS and not annotated:
            annotated = True
            if last > DELIVERY_ANNOTATIONS:
                end = _decoded(sections, code, start, position)
                raw = sections.raw = raw[:start] + raw[end:]
                position, size = start, len(raw)
                continue
        if code < last or (code == last and code not in _REPEATABLE):
            raise AmqpError(DECODE_ERROR, f"section 0x{code:02x} follows 0x{last:02x}")
        if bare < 0 and code >= PROPERTIES:
            bare = start
        if code >= DATA > last:
            sections.body = start
        if code == DATA:
            position = _data(sections, position)
        else:
            position = _decoded(sections, code, start, position)
        last = code
    sections.bare = size if bare < 0 else bare
    return sections


def check_properties(message: Sections) -> None:
    """Refuse a message with more bytes before its body than the service takes. Raises AmqpError."""
    if len(message.raw) <= MAX_PROPERTIES:
        return
    size = message.body if message.body >= 0 else len(message.raw)
    if size > MAX_PROPERTIES:
        raise AmqpError(
            MESSAGE_SIZE_EXCEEDED,
            f"{size} bytes of properties; a message has at most {MAX_PROPERTIES}",
        )


def _section_code(raw: bytes, position: int) -> tuple[int, int]:
    """Return (section code, position of its value), for any encoding of the descriptor."""
    if raw[position] != 0:
        raise AmqpError(DECODE_ERROR, f"no section begins at byte {position} of the message")
    descriptor, position = decode(raw, position + 1)
    code = _NAMES.get(descriptor) if isinstance(descriptor, Symbol) else descriptor
    if not isinstance(code, int) or not HEADER <= code <= FOOTER:
        raise AmqpError(DECODE_ERROR, f"unknown section {str(code)[:40]!r}")
    return code, position


def _data(sections: Sections, position: int) -> int:
    """Note a data section's position and return its end.

    This does the work of `skip` itself, because each message has a data section and a batch has
    thousands.
    """
    raw = sections.raw
    kind = raw[position : position + 1]
    width = _BINARY_WIDTHS.get(kind, 0)
    start = position + 1 + width
    end = start + int.from_bytes(raw[position + 1 : start])
    if not width or end > len(raw):
        skip(raw, position)  # raises a more exact error if the value is malformed
        raise AmqpError(DECODE_ERROR, "a data section that is not binary")
    sections.data_items.append((start, end))
    return end


def _decoded(sections: Sections, code: int, start: int, position: int) -> int:
    raw = sections.raw
    value, end = decode(raw, position)
    expected = _TYPES.get(code)
    if expected is not None and type(value) is not expected:
        raise AmqpError(DECODE_ERROR, f"section 0x{code:02x} holds a {type(value).__name__}")
    if code == HEADER:
        sections.header = value
    elif code == MESSAGE_ANNOTATIONS:
        sections.annotations = value
        sections.annotation_items = _items(raw, position, end)
        sections.annotation_count = _count(raw, position)
    elif code == DELIVERY_ANNOTATIONS:
        sections.delivery_items = _items(raw, position, end)
    elif code == PROPERTIES:
        sections.properties = value
    elif code == APPLICATION_PROPERTIES:
        sections.application_properties = value
        sections.application_start, sections.application_end = start, end
    elif code == AMQP_VALUE:
        sections.value = value
    elif code == FOOTER:
        sections.footer = value
    return end


def _items(raw: bytes, position: int, end: int) -> bytes:
    """Return the encoded keys and values of the map at `position`."""
    return raw[position + (3 if raw[position] == 0xC1 else 9) : end]


def _count(raw: bytes, position: int) -> int:
    """Return how many keys and values the map at `position` has.

    Its dict may have fewer: the wire allows the same key twice.
    """
    if raw[position] == 0xC1:
        return raw[position + 2]
    return int.from_bytes(raw[position + 5 : position + 9])


def map_body(raw: bytes, section: int) -> bytes:
    """Return the encoded keys and values of the map section that begins at `section`."""
    position = skip(raw, section + 1)
    return _items(raw, position, skip(raw, position))


def pairs_of(items: bytes) -> list[tuple[Any, bytes]]:
    """Return (key, encoded key and value) for a map's encoded items.

    The items must have been decoded before: nothing is checked here.
    """
    pairs, position = [], 0
    while position < len(items):
        key, middle = decode(items, position)
        end = skip(items, middle)
        pairs.append((key, items[position:end]))
        position = end
    return pairs


def value_body(sections: Sections) -> Any:
    """Return the amqp-value body without its outer descriptor."""
    value = sections.value
    return value.value if isinstance(value, Described) else value
