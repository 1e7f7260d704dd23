"""References to payloads: large arguments, results and values that are stored beside the queue.

Rules
1. A reference says where the payload is, how many bytes it has, and their SHA-256. A reader that
   finds other bytes refuses them.
2. A message with a reference has an empty body and a content type of its own, so that a program
   that cannot fetch the payload refuses the message instead of running it without arguments.
3. A reference inside a value is an extension type of msgpack (`aztask.message.serializer`), so it
   may stand wherever a value may stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Self

from aztask.errors import DecodeError, PayloadDamaged

PAYLOAD_BYTES: Final = 1 << 30
"""Bytes of the largest payload: a worker holds about three copies of it in memory."""

MARK: Final = b"aztask-stored:"
"""The start of every encoded reference: bytes without it hold none."""

_TEXT: Final = re.compile(
    r"([1-9][0-9]{0,9}):([0-9a-f]{64}):([a-z]{1,16}/[0-9]{10}/[0-9a-f]{32})", re.ASCII
)
_INSIDE: Final = re.compile(
    rb"(?<![0-9])([1-9][0-9]{0,9}:[0-9a-f]{64}:([a-z]{1,16}/[0-9]{10}/[0-9a-f]{32}))"
)
_INNER: Final = {"application/x-msgpack": "msgpack", "application/json": "json"}
_PREFIX: Final = "application/x-aztask-payload+"
_OUTER: Final = {_PREFIX + short: inner for inner, short in _INNER.items()}


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A payload that is stored, as `App.put` returns it.

    Pass it as an argument of as many tasks as you like: each of them gets the value.

    * `name`: where it is in the store of the app's payloads: ``KIND/HOUR/ID``.
    * `size`: bytes. `digest`: their SHA-256, in hexadecimal digits.
    """

    name: str
    size: int
    digest: str

    @classmethod
    def of(cls, name: str, data: bytes) -> Self:
        """The reference to `data` that is stored under `name`."""
        return cls(name, len(data), sha256(data).hexdigest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """The reference that ``SIZE:DIGEST:NAME`` stands for. Raises DecodeError."""
        found = _TEXT.fullmatch(text)
        if found is None or int(found[1]) > PAYLOAD_BYTES:
            raise DecodeError("a reference to a payload is not SIZE:DIGEST:NAME, or too large")
        return cls(found[3], int(found[1]), found[2])

    def __str__(self) -> str:
        return f"{self.size}:{self.digest}:{self.name}"

    @property
    def described(self) -> str:
        """Size and name, for logs and listings."""
        return f"{self.size:,} bytes in {self.name}"

    def verify(self, data: bytes) -> None:
        """Raise PayloadDamaged unless `data` is what was stored."""
        if len(data) != self.size:
            more = "more than " if len(data) > self.size else ""
            size = self.size if more else len(data)
            raise PayloadDamaged(
                f"the payload {self.name} has {more}{size} bytes, and its message says {self.size}"
            )
        if sha256(data).hexdigest() != self.digest:
            raise PayloadDamaged(
                f"the payload {self.name} was changed: its SHA-256 is not what its message says"
            )


def wrapped_type(content_type: str) -> str:
    """The content type of a message whose body of type `content_type` is stored elsewhere."""
    return _PREFIX + _INNER[content_type]


def inner_type(content_type: str) -> str | None:
    """The type of the stored body; None if `content_type` is not one of `wrapped_type`."""
    return _OUTER.get(content_type)


def checked_reference(inner: str | None, body: bytes, values: Mapping[str, Any]) -> str:
    """The type of the body that is stored apart. Raises DecodeError if only a part says so."""
    if inner is None or "payload" not in values or body:
        raise DecodeError(
            "a message whose arguments are stored apart has an empty body, a content type that says"
            " so, and the header aztask-payload; one of them is wrong"
        )
    return inner


def names_in(data: bytes) -> Iterator[str]:
    """The names of all payloads that these bytes refer to, wherever a reference stands in them.

    Nothing is decoded, so a damaged or unknown row hides none: an encoded message, a checkpoint and
    a value all carry a reference as this text.
    """
    return (found[2].decode("ascii") for found in _INSIDE.finditer(data))


def references_in(data: bytes) -> bytes:
    """All references in these bytes, each behind a blank; `names_in` finds them in that, too."""
    return b"".join(b" " + found[1] for found in _INSIDE.finditer(data))


def stored_in(data: bytes | None) -> StoredValue | None:
    """The reference that the encoded value `data` consists of; None if it is another value."""
    if not data or data[:1] != b"\xc7" or not data.startswith(MARK, 3):  # ext 8, type 8
        return None
    try:
        return StoredValue.parse(data[3 + len(MARK) :].decode("ascii"))
    except (DecodeError, UnicodeDecodeError):
        return None
