"""Texts as parts of keys in Azure Tables, and the shards that spread many rows.

Keys contain only letters, digits and a few signs: all other characters are escaped, and a long text
is hashed. (The service forbids ``/ \\ # ?`` and control characters, and more than 1 KiB.)
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final
from zlib import crc32

SHARDS: Final = 4
"""A partition serves 2,000 requests a second, an account 20,000: at four requests for each task,
this many shards are enough."""

LONGEST_KEY: Final = 250
_PLAIN: Final = re.compile(r"[^A-Za-z0-9.:-]")


class KeyText(str):
    """A text that is a part of a key already: one that was read from a key, and may be hashed."""

    __slots__ = ()


def key_text(text: str) -> str:
    """`text` as a part of a key; two texts never give the same."""
    if isinstance(text, KeyText):
        return text
    escaped = _PLAIN.sub(lambda match: f"_{ord(match[0]):x}_", text)
    if len(escaped) <= LONGEST_KEY:
        return escaped
    return f"~{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def shard_of(text: str) -> int:
    """The number of the shard that a key belongs to."""
    return crc32(text.encode()) % SHARDS
