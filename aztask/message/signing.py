"""Signatures: an HMAC-SHA256 over everything that decides which code runs on which data.

Rules
1. It covers the body, task, id, queue, generation and hop; also the content type and encoding (how
   the body is read) and the checkpoint, because a task reads that too. Every part is preceded by
   its length, so that two different messages never give the same bytes.
2. The first key signs; every key verifies. To rotate: add the new key at the end everywhere, then
   move it to the front everywhere, then remove the old one.
3. Verification happens before anything is decoded, and takes the same time for every wrong
   signature. No error shows a key.

A signature hides nothing. It does not prevent that an attacker sends the same message again,
either: the recorded outcome of ``(id, generation, hop)`` does that if a result store is configured.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from aztask.errors import ConfigurationError, ContentRefused

SCHEME = "hmac-sha256:"
KEY_BYTES = 16
"""Bytes of the shortest accepted key."""


class Signer:
    """Signs and verifies with one or several keys; without a key it does neither."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """Raises ConfigurationError if a key is not bytes or has fewer than 16."""
        if isinstance(keys, bytes | str):
            raise ConfigurationError("signing_keys must be a list of keys; write [key]")
        for number, key in enumerate(keys, start=1):
            if not isinstance(key, bytes) or len(key) < KEY_BYTES:
                raise ConfigurationError(
                    f"signing key {number} must be bytes, at least {KEY_BYTES} of them;"
                    " for example from secrets.token_bytes(32)"
                )
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __repr__(self) -> str:
        return f"<Signer: {len(self._keys)} keys>"

    def sign(self, parts: Sequence[bytes]) -> str:
        """The signature of `parts`: ``hmac-sha256:`` and 64 hexadecimal digits."""
        return SCHEME + hmac.digest(self._keys[0], _frame(parts), "sha256").hex()

    def verify(self, parts: Sequence[bytes], signature: object) -> None:
        """Raise ContentRefused unless one of the keys made `signature` over `parts`."""
        if not isinstance(signature, str) or not signature:
            raise ContentRefused(
                "the message is not signed; give the sender a signing key, or remove the keys"
            )
        framed, given = _frame(parts), signature.encode("utf-8", "replace")
        matches = [
            hmac.compare_digest((SCHEME + hmac.digest(key, framed, "sha256").hex()).encode(), given)
            for key in self._keys
        ]
        if not any(matches):
            raise ContentRefused(
                "the signature does not match: the message was changed on its way or to another"
                " queue, or its sender signs with a key that is not configured here"
            )


def _frame(parts: Sequence[bytes]) -> bytes:
    return b"aztask:1" + b"".join([len(part).to_bytes(8, "big") + part for part in parts])
