"""Encodes the messages of a batch once, and faster than the SDK.

`ServiceBusMessageBatch.add_message` encodes a message to learn its size, and encodes it again to
add it ([seen] in azure-servicebus 7.15). It asks its transport for both, and encoding is
most of what a send costs.

Rules
1. The transport of a batch keeps the bytes of the first answer for the second.
2. The sections that our messages have are encoded here. What they have rarely (header, annotations,
   times, values of other types) is left to the SDK.
3. The bytes are those of the SDK, which a property test compares.
4. An SDK without these two calls, or whose messages have other properties, keeps its transport.

Source: OASIS AMQP 1.0, part 1 (types) and part 3, section 3.2 (messages).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from struct import Struct
from typing import Any, Final

from azure.servicebus import ServiceBusMessageBatch
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._pyamqp.message import Message, Properties
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport

_PROPERTIES: Final = b"\x00\x53\x73"
_APPLICATION_PROPERTIES: Final = b"\x00\x53\x74"
_DATA: Final = b"\x00\x53\x75"
_NULL: Final = b"\x40"
_DOUBLE: Final = Struct(">Bd")
_INT: Final = Struct(">Bi")


class _OtherTypeError(Exception):
    """A value of a type that the SDK has to encode."""


class OnceEncoding(PyamqpTransport):
    """The transport of one batch, which only one thread fills."""

    def __init__(self) -> None:
        self._message: Any = None
        self._encoded = bytearray()

    def get_message_encoded_size(self, message: Any) -> int:  # type: ignore[override]
        """The size of an encoded message, in bytes."""
        self._message, self._encoded = message, encoded(message)
        return len(self._encoded)

    def add_batch(  # type: ignore[override]
        self, sb_message_batch: Any, outgoing_sb_message: Any
    ) -> None:
        """Add the message whose size was asked for last; another one is encoded now."""
        if outgoing_sb_message._message is not self._message:
            self.get_message_encoded_size(outgoing_sb_message._message)
        sb_message_batch._message[5].append(self._encoded)


@cache
def _supported() -> bool:
    """True if the SDK's batch asks its transport as `OnceEncoding` answers, with our fields."""
    calls = {
        "get_message_encoded_size": ["message"],
        "add_batch": ["sb_message_batch", "outgoing_sb_message"],
    }
    for name, parameters in calls.items():
        function = getattr(PyamqpTransport, name, None)
        if function is None or list(inspect.signature(function).parameters) != parameters:
            return False
    return len(Properties._fields) == len(_FIELDS)


def encode_once(batch: ServiceBusMessageBatch) -> ServiceBusMessageBatch:
    """Have this new batch encode its messages once; returns it."""
    own: Any = batch
    if _supported() and getattr(own, "_amqp_transport", None) is PyamqpTransport:
        own._amqp_transport = OnceEncoding()
    return batch


def encoded(message: Message) -> bytearray:
    """The bytes of a message of the SDK. Raises what its encoder raises."""
    output = bytearray()
    header, before, annotations, properties, application, data, *others = message
    if before or any(others) or not isinstance(data, list):
        encode_payload(output, message)
        return output
    if header or annotations:
        encode_payload(output, Message(header=header, message_annotations=annotations))
    if properties:
        try:
            output += _properties(properties)
        except _OtherTypeError:
            encode_payload(output, Message(properties=properties))
    if application:
        try:
            output += _application_properties(application)
        except _OtherTypeError:
            encode_payload(output, Message(application_properties=application))
    for each in data:
        output += _DATA
        output += _sized(0xA0, each)
        output += each
    return output


# -- sections -------------------------------------------------------------------------------------


def _properties(fields: Sequence[Any]) -> bytes:
    items = [
        _NULL if value is None else encode(value)
        for value, encode in zip(fields, _FIELDS, strict=True)
    ]
    return _PROPERTIES + _compound(0xC0, b"".join(items), len(items))


def _application_properties(pairs: Mapping[Any, Any]) -> bytes:
    items = []
    for name, value in pairs.items():
        items.append(_name(name) if type(name) is str else _other(name))
        items.append(_ENCODERS.get(type(value), _other)(value))
    return _APPLICATION_PROPERTIES + _compound(0xC1, b"".join(items), len(items))


def _compound(small: int, content: bytes, count: int) -> bytes:
    """A list or a map. small: the constructor for up to 255 bytes."""
    if count <= 255 and len(content) < 255:
        return bytes((small, len(content) + 1, count)) + content
    head = bytes((small + 0x10,)) + (len(content) + 4).to_bytes(4, "big")
    return head + count.to_bytes(4, "big") + content


# -- values ---------------------------------------------------------------------------------------


def _sized(small: int, data: bytes) -> bytes:
    """The constructor and the size of `data`. small: the constructor for up to 255 bytes."""
    size = len(data)
    if size <= 255:
        return bytes((small, size))
    return bytes((small + 0x10,)) + size.to_bytes(4, "big")


def _string(value: Any) -> bytes:
    if type(value) is not str:
        _other(value)
    data: bytes = value.encode()
    return _sized(0xA1, data) + data


def _symbol(value: Any) -> bytes:
    if type(value) is not str:
        _other(value)
    return _cached_symbol(value)


@lru_cache(256)
def _cached_symbol(value: str) -> bytes:
    """The same few content types and encodings, again and again."""
    data = value.encode()
    return _sized(0xA3, data) + data


_name: Final = lru_cache(1024)(_string)
"""The same few names of properties, again and again."""


def _number(value: int) -> bytes:
    if -128 <= value <= 127:
        return bytes((0x54, value & 0xFF))
    if -(2**31) <= value < 2**31:
        return _INT.pack(0x71, value)
    return _other(value)


def _double(value: float) -> bytes:
    return _DOUBLE.pack(0x82, value)


def _boolean(value: bool) -> bytes:
    return b"\x56\x01" if value else b"\x56\x00"


def _null(_: None) -> bytes:
    return _NULL


def _other(_: object) -> bytes:
    raise _OtherTypeError


_ENCODERS: Final[dict[type, Callable[[Any], bytes]]] = {
    str: _string,
    bool: _boolean,
    int: _number,
    float: _double,
    type(None): _null,
}

_FIELDS: Final[tuple[Callable[[Any], bytes], ...]] = (
    _string,  # message-id
    _other,  # user-id
    _string,  # to
    _string,  # subject
    _string,  # reply-to
    _string,  # correlation-id
    _symbol,  # content-type
    _symbol,  # content-encoding
    _other,  # absolute-expiry-time
    _other,  # creation-time
    _string,  # group-id
    _other,  # group-sequence
    _string,  # reply-to-group-id
)
"""The encoders of the properties section, in the order of its fields (part 3, section 3.2.4)."""
