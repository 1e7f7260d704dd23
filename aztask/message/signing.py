"""Signatures: an HMAC-SHA256 over what decides which code runs on which data.

Rules
1. Covered are the body, task, id, queue, generation and hop, and with them the content type and
   encoding (how the body is read) and the checkpoint, since a task reads that too. Every part is
   preceded by its length, so that no two different messages give the same bytes.
2. The first key signs; any key verifies. To rotate: add the new key at the end everywhere, then
   move it to the front everywhere, then remove the old one.
3. Verification comes before anything is decoded, takes the same time for every wrong signature,
   and no error shows a key.

A signature does not hide anything, and it does not stop a message from being sent again as it
was: the recorded outcome of ``(id, generation, hop)`` does that where a result store is configured.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from aztask.errors import ConfigurationError, ContentRefused

SCHEME = "hmac-sha256:"
KEY_BYTES = 16
"""Shortest key that is accepted."""


class Signer:
    """Signs and verifies with one or several keys; without a key it does neither."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """Raises ConfigurationError for keys that are not bytes or shorter than 16 bytes."""
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
        """Raises ContentRefused unless one of the keys made `signature` over `parts`."""
        if not isinstance(signature, str) or not signature:
            raise ContentRefused(
                "the message is not signed; give the sender a signing key, or take the keys away"
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
