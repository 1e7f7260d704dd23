"""An envelope as the text of a Storage queue message, and back.

A text is one msgpack map ``{v, headers, properties, body}`` as base64: the service accepts text
that fits into XML, at most 64 KiB. The first send keeps 4 KiB free for the counters, checkpoint and
reason that are added later.

Rules
1. A text of another program becomes an envelope of plain bytes. The decoder refuses it with a
   reason, so it does not block the queue. The dead letters keep its bytes unchanged.
2. If a dead letter does not fit with its reasons, the reasons are truncated, never the content.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from aztask.errors import (
    CapabilityError,
    ConfigurationError,
    ContentRefused,
    DecodeError,
    EncodeError,
    MessageTooLarge,
)
from aztask.message.bounds import MessageLimits, check_msgpack
from aztask.message.envelope import Envelope
from aztask.settlement import DeadLetter

TEXT_LIMIT: Final = 64 * 1024
"""Characters of a message's text: 65,536 are accepted, 65,537 are not [measured on Azurite]."""

FREE: Final = 4 * 1024
SEND_LIMIT: Final = TEXT_LIMIT - FREE
ENVELOPE_LIMIT: Final = SEND_LIMIT // 4 * 3
"""The most bytes of a packed envelope that fit into the first send."""

LONGEST_DELAY: Final = 7 * 86400
"""The longest time in seconds that the service hides a message; longer delays are chained."""

UNREADABLE: Final = "application/octet-stream"

_VERSION: Final = 1
_LIMITS: Final = MessageLimits()
_NAMES: Final = (
    "message_id",
    "content_type",
    "content_encoding",
    "subject",
    "correlation_id",
    "partition_key",
    "expires_at",
)
_DEFAULTS: Final = {name: getattr(Envelope(b""), name) for name in _NAMES}
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("message_id", "content_type", "content_encoding"), (str,)),
    **dict.fromkeys(("subject", "correlation_id", "partition_key"), (str,)),
    "expires_at": (int, float),
}


@dataclass(frozen=True, slots=True)
class WireMessage:
    """The content of a message's text.

    due: do not deliver the message before this time, UTC epoch seconds.
    delay: the same, in seconds since it was put.
    hidden: how often it was received too early and hidden again.
    dead: why it is a dead letter.
    """

    envelope: Envelope
    due: float | None = None
    delay: float | None = None
    hidden: int = 0
    dead: DeadLetter | None = None


def text_of(
    envelope: Envelope,
    *,
    limit: int = SEND_LIMIT,
    due: float | None = None,
    delay: float | None = None,
    hidden: int = 0,
) -> str:
    """The envelope as text. Raises EncodeError, or MessageTooLarge beyond `limit` characters.

    due, delay, hidden: as in `WireMessage`.
    """
    if envelope.session is not None:
        raise CapabilityError(
            f"message {envelope.message_id!r} belongs to a session, but Storage queues have none; "
            "send it without a session, or use Service Bus"
        )
    text = _pack(envelope, {"due": due, "delay": delay, "hidden": hidden or None})
    if len(text) > limit:
        raise MessageTooLarge(
            f"message {envelope.message_id!r} has {len(text)} bytes on the wire, but a Storage "
            f"queue accepts at most {limit}; store the data elsewhere and send a reference to it"
        )
    return text


def dead_text_of(envelope: Envelope, original: str, dead: DeadLetter) -> str:
    """The text of a dead letter: the envelope with its reasons, truncated to fit.

    If another program's text does not fit into our format, it is kept unchanged, without reasons.
    """
    if (text := _dead(envelope, dead)) is not None:
        return text
    if _dead(envelope, DeadLetter("")) is None:
        return original
    longest, shortest = max(len(dead.reason), len(dead.description)), 0
    while longest - shortest > 1:  # bisect for the longest reasons that fit
        middle = (longest + shortest) // 2
        if _dead(envelope, _cut(dead, middle)) is None:
            longest = middle
        else:
            shortest = middle
    return _dead(envelope, _cut(dead, shortest)) or original


def _cut(dead: DeadLetter, characters: int) -> DeadLetter:
    return DeadLetter(dead.reason[:characters], dead.description[:characters])


def _dead(envelope: Envelope, dead: DeadLetter) -> str | None:
    text = _pack(envelope, {"dead": [dead.reason, dead.description]})
    return text if len(text) <= TEXT_LIMIT else None


def _pack(envelope: Envelope, more: Mapping[str, Any]) -> str:
    properties = {
        name: value
        for name in _NAMES
        if (value := getattr(envelope, name)) is not None and value != _DEFAULTS[name]
    }
    properties |= {name: value for name, value in more.items() if value is not None}
    if envelope.properties:
        properties["properties"] = envelope.properties
    fields = {
        "v": _VERSION,
        "headers": envelope.headers,
        "properties": properties,
        "body": envelope.body,
    }
    try:
        return base64.b64encode(msgpack.packb(fields)).decode("ascii")
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(
            f"the headers of message {envelope.message_id!r} cannot be written ({error}); "
            "use text, numbers, bytes, and lists and maps of those"
        ) from error


def read_text(text: str) -> WireMessage:
    """Read a text of `text_of` or `dead_text_of`; any other text becomes plain bytes (rule 1)."""
    try:
        data = base64.b64decode(text, validate=True)
        check_msgpack(data, _LIMITS)
        fields = msgpack.unpackb(data)
        return _written(fields)
    except (binascii.Error, DecodeError, ContentRefused, _NotOurs):
        pass
    except (ValueError, TypeError, msgpack.UnpackException):
        pass
    return WireMessage(Envelope(text.encode("utf-8", "surrogatepass"), content_type=UNREADABLE))


class _NotOurs(Exception):
    """The text was not written by `text_of`."""


def _written(fields: Any) -> WireMessage:
    if not isinstance(fields, dict) or fields.get("v") != _VERSION:
        raise _NotOurs
    body, headers, properties = (fields.get(name) for name in ("body", "headers", "properties"))
    if not (isinstance(body, bytes) and isinstance(headers, dict) and isinstance(properties, dict)):
        raise _NotOurs
    given = {name: properties[name] for name in _NAMES if name in properties}
    if any(type(value) not in _TYPES[name] for name, value in given.items()):  # True is no time
        raise _NotOurs
    foreign = properties.get("properties", {})
    if not isinstance(foreign, dict):
        raise _NotOurs
    return WireMessage(
        Envelope(body, headers, properties=foreign, **given),
        _seconds(properties.get("due")),
        _seconds(properties.get("delay")),
        int(_seconds(properties.get("hidden")) or 0),
        _dead_letter(properties.get("dead")),
    )


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _NotOurs
    return float(value)


def _dead_letter(value: object) -> DeadLetter | None:
    if value is None:
        return None
    match value:
        case [str(reason), str(description)]:
            return DeadLetter(reason, description)
    raise _NotOurs


def whole_seconds(delay: float) -> int:
    """The delay in whole seconds, rounded up, at most seven days. Raises ConfigurationError."""
    if not 0 <= delay < math.inf:
        raise ConfigurationError(f"a delay is a number of seconds of at least 0, not {delay!r}")
    return min(math.ceil(delay), LONGEST_DELAY)
