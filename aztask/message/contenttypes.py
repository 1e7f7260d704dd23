"""The content types and encodings of message bodies, and which of them are accepted."""

from __future__ import annotations

from typing import Final

from aztask.errors import ConfigurationError, ContentRefused, did_you_mean
from aztask.message import serializer as formats
from aztask.message.foreign import RAW
from aztask.message.payload import inner_type
from aztask.support.display import one_line

CONTENT_TYPES: Final = {"msgpack": formats.MSGPACK, "json": formats.JSON}
"""The content type that each serializer writes."""

_ENCODINGS: Final = frozenset({"binary", "utf-8", "utf8", "us-ascii", "ascii"})


def content_type_of(name: object) -> str:
    """The content type of a serializer's name. Raises ConfigurationError for an unknown one."""
    content_type = CONTENT_TYPES.get(name) if isinstance(name, str) else None
    if content_type is None:
        near = did_you_mean(str(name), list(CONTENT_TYPES))
        raise ConfigurationError(
            f"serializer {one_line(repr(name), 60)} is not available;"
            f" there are {' and '.join(CONTENT_TYPES)}.{near}"
        )
    return content_type


def checked_content_type(content_type: object, encoding: object, accept: frozenset[str]) -> str:
    """The content type without its parameters. Raises ContentRefused for what is not accepted."""
    name = content_type.partition(";")[0].strip().lower() if isinstance(content_type, str) else ""
    if name not in accept and name != RAW and inner_type(name) not in accept:
        accepted = ", ".join(sorted(accept))
        raise ContentRefused(
            f"content type {one_line(repr(content_type), 60)} is not accepted; send {accepted}"
        )
    if not isinstance(encoding, str) or encoding.lower() not in _ENCODINGS:
        raise ContentRefused(
            f"content encoding {one_line(repr(encoding), 60)} is not accepted; send binary or utf-8"
        )
    return name
