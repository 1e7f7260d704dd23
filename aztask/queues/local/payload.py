"""How the local broker writes an envelope into the engine's payload, and reads it again.

A payload is one msgpack array: a version, then the envelope's fields except its delay. Any other
payload (another program wrote it to the same file) becomes an envelope of plain bytes, and one with
a field of a wrong type an envelope with a problem. The decoder refuses both with a reason, so they
do not block the queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Final

import msgpack

from aztask.errors import (
    ConfigurationError,
    ContentRefused,
    DecodeError,
    EncodeError,
    MessageTooLarge,
)
from aztask.message.bounds import MessageLimits, check_msgpack
from aztask.message.envelope import Envelope
from aztask.message.message import build
from aztask.queues.engine import NewMessage

MESSAGE_LIMIT: Final = 64 * 1024 * 1024
"""Most bytes of a packed envelope. The engine could store more, but reads a payload as a whole."""

_VERSION: Final = 1
_ORDER: Final = (
    "body",
    "headers",
    "message_id",
    "content_type",
    "content_encoding",
    "subject",
    "correlation_id",
    "session",
    "partition_key",
    "expires_at",
    "properties",
)
_LIMITS: Final = MessageLimits(body_bytes=MESSAGE_LIMIT, depth=16, items=4096)
_SMALL: Final = 4096
"""Bytes of a payload that cannot hold more than `_LIMITS` allows, so that it needs no check."""
_UNREADABLE: Final = "application/octet-stream"
_TEXT: Final[frozenset[type]] = frozenset({str})
_TEXT_OR_NONE: Final[frozenset[type]] = frozenset({str, type(None)})
_TYPES: Final[tuple[frozenset[type], ...]] = (
    frozenset({bytes}),
    frozenset({dict}),
    *[_TEXT] * 3,
    *[_TEXT_OR_NONE] * 4,
    frozenset({int, float, type(None)}),
    frozenset({dict}),
)
"""The types of each field, in the order of `_ORDER`."""
_SHAPES: Final = frozenset(product(*_TYPES))
"""All types together that an envelope can have: 48, so that one look at them suffices."""


def payload_of(envelope: Envelope, limit: int = MESSAGE_LIMIT) -> bytes:
    """The envelope as bytes. Raises EncodeError, or MessageTooLarge for more than `limit` bytes."""
    fields = (
        _VERSION,
        envelope.body,
        envelope.headers,
        envelope.message_id,
        envelope.content_type,
        envelope.content_encoding,
        envelope.subject,
        envelope.correlation_id,
        envelope.session,
        envelope.partition_key,
        envelope.expires_at,
        envelope.properties,
    )
    try:
        payload: bytes = msgpack.packb(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(
            f"the headers of message {envelope.message_id!r} cannot be written ({error}); "
            "use text, numbers, bytes, and lists and maps of those"
        ) from error
    if len(payload) > limit:
        raise MessageTooLarge(
            f"message {envelope.message_id!r} has {len(payload)} bytes, but the local broker "
            f"accepts at most {limit}; store the data elsewhere and send a reference to it"
        )
    return payload


def envelope_of(payload: bytes, limits: MessageLimits = _LIMITS) -> Envelope:
    """The envelope that `payload_of` packed, without a delay.

    limits: other ones, for what another service has taken.
    """
    try:
        if len(payload) > _SMALL:
            check_msgpack(payload, limits)
        version, *fields = msgpack.unpackb(payload, strict_map_key=False)
    except (TypeError, ValueError, DecodeError, ContentRefused, msgpack.UnpackException):
        return Envelope(payload, content_type=_UNREADABLE)
    if version != _VERSION or len(fields) != len(_ORDER):
        return Envelope(payload, content_type=_UNREADABLE)
    if tuple(map(type, fields)) not in _SHAPES:
        return _damaged(payload, fields)
    return build(Envelope, dict(zip(_ORDER, fields, strict=True), delay=0.0, problem=""))


def _damaged(payload: bytes, fields: Sequence[object]) -> Envelope:
    """An envelope that says which field of the payload has a wrong type."""
    wrong = [
        f"its {name} is {type(value).__name__}"
        for name, value, types in zip(_ORDER, fields, _TYPES, strict=True)
        if type(value) not in types
    ]
    problem = f"the message's payload is damaged: {', '.join(wrong)}"
    return Envelope(payload, content_type=_UNREADABLE, problem=problem)


def new_message(envelope: Envelope, delay: float, now: float) -> NewMessage:
    """The engine's message for `envelope`, to be received `delay` seconds after `now`."""
    if not 0 <= delay < math.inf:
        raise ConfigurationError(f"a delay is a number of seconds of at least 0, not {delay!r}")
    due = now + delay if delay else None
    return NewMessage(payload_of(envelope), envelope.message_id, envelope.session, due)
