"""The HMAC-SHA256 of a message's parts, with one or several keys.

Rules
1. Every part is preceded by its length, so that two different messages never give the same bytes.
   The version comes first, so that a signature of one version never fits another.
2. The first key signs; every key verifies. To rotate: add the new key at the end everywhere, then
   move it to the front everywhere, then remove the old one.
3. Verification takes the same time for every wrong signature. No error shows a key.

`aztask.message.signatures` says what is signed and when a signature is accepted.
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
            check_key(key, f"signing key {number}")
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __repr__(self) -> str:
        return f"<Signer: {len(self._keys)} keys>"

    def sign(self, parts: Sequence[bytes], version: int = 1) -> str:
        """The signature of `parts`: ``hmac-sha256:`` and 64 hexadecimal digits."""
        return SCHEME + hmac.digest(self._keys[0], _frame(parts, version), "sha256").hex()

    def matches(self, parts: Sequence[bytes], signature: str, version: int = 1) -> bool:
        """Whether one of the keys made `signature` over `parts`."""
        framed, given = _frame(parts, version), signature.encode("utf-8", "replace")
        found = [
            hmac.compare_digest((SCHEME + hmac.digest(key, framed, "sha256").hex()).encode(), given)
            for key in self._keys
        ]
        return any(found)

    @staticmethod
    def scheme(digest: bytes) -> str:
        """The 32 bytes of a signature in the form that `sign` gives it."""
        return SCHEME + digest.hex()

    def verify(self, parts: Sequence[bytes], signature: object, version: int = 1) -> None:
        """Raise ContentRefused unless one of the keys made `signature` over `parts`."""
        if not signature or not isinstance(signature, str):
            raise refusal(None)
        if not self.matches(parts, signature, version):
            raise refusal(signature)


def refusal(signature: object) -> ContentRefused:
    """The error for a message whose signature is missing or does not match."""
    if not isinstance(signature, str) or not signature:
        return ContentRefused(
            "the message is not signed; give the sender a signing key, or remove the keys"
        )
    return ContentRefused(
        "the signature does not match: the message was changed on its way or to another queue, or"
        " its sender signs with a key that is not configured here"
    )


def check_key(key: object, what: str) -> None:
    """Raise ConfigurationError unless `key` is bytes, at least `KEY_BYTES` of them."""
    if not isinstance(key, bytes) or len(key) < KEY_BYTES:
        raise ConfigurationError(
            f"{what} must be bytes, at least {KEY_BYTES} of them;"
            " for example from secrets.token_bytes(32)"
        )


def _frame(parts: Sequence[bytes], version: int) -> bytes:
    framed = [len(part).to_bytes(8, "big") + part for part in parts]
    return b"aztask:%d" % version + b"".join(framed)
