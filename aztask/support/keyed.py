"""HMAC-SHA256 with a key that is used many times."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

_BLOCK: Final = 64
_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))


class KeyedDigest:
    """The HMAC-SHA256 (RFC 2104) of data under one key. Any thread may call.

    Why not `hmac.digest`: it takes the key in anew each time, and a short message costs two and a
    half times as much [measured: 4.3 µs against 1.7 µs]; copies of ``hmac.new`` take 3 µs.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        padded = (sha256(key).digest() if len(key) > _BLOCK else key).ljust(_BLOCK, b"\0")
        self._inner = sha256(padded.translate(_INNER))
        self._outer = sha256(padded.translate(_OUTER))

    def digest(self, data: bytes) -> bytes:
        """The 32 bytes for `data`."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(data)
        outer.update(inner.digest())
        return outer.digest()
