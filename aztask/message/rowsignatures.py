"""Signatures of what a result store keeps, each row or piece of a row alone.

Rules
1. A signature says what it is for (`Purpose`), and covers the environment, the owner of the row,
   its place, and what is in it. So a row that was copied to another place, to another owner or to
   another environment does not fit. None of them is a signature of a message.
2. It says the owner's mark in clear, so that a reader knows whose row it was before it was adopted.
3. Rows are unsigned if a release before 0.2, or a program without keys, wrote them. They count
   until `old` is false. An environment ends that, as it does for messages.

What no signature shows: that a row was deleted, or that an older one was put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgpack

from aztask.message.encryption import NO_CIPHER, Cipher
from aztask.message.signatures import Signer

VERSION: Final = 3
"""Those of messages are versions 1 and 2."""

_FORM: Final = b"\x01"
_MARK_BYTES: Final = 8
_NO_MARK: Final = bytes(_MARK_BYTES)
_LENGTH: Final = 1 + _MARK_BYTES + 32


class Purpose(StrEnum):
    """What a signature is for."""

    RESULT = "result"
    WORKFLOW = "workflow"
    PIECE = "piece"
    CONTROL = "control"
    CHECKPOINT = "checkpoint"
    ADOPTION = "adoption"


class RowSignatures:
    """Signs rows and verifies them; without a key it does neither.

    `cipher`: encrypts what is in the rows before they are signed.
    """

    __slots__ = ("_environment", "_signer", "cipher", "old")

    def __init__(
        self,
        keys: Sequence[bytes] = (),
        *,
        old: bool = True,
        environment: str = "",
        cipher: Cipher = NO_CIPHER,
    ) -> None:
        """old: whether unsigned rows count. Raises ConfigurationError for a wrong key."""
        self.cipher = cipher
        self._signer = Signer(keys)
        self._environment = environment
        self.old = old and not environment

    def __bool__(self) -> bool:
        return bool(self._signer)

    def sign(
        self, purpose: Purpose, mark: str, place: Sequence[str | int], parts: Sequence[bytes]
    ) -> bytes:
        """The signature of a row.

        * `mark`: of its owner, "" for none. `place`: where the row is. `parts`: what is in it.
        """
        raw = _raw(mark)
        text = self._signer.sign(self._parts(purpose, raw, place, parts), VERSION)
        return _FORM + raw + bytes.fromhex(text[-64:])

    def matches(
        self,
        purpose: Purpose,
        place: Sequence[str | int],
        parts: Sequence[bytes],
        signature: bytes,
    ) -> bool:
        """Whether one of the keys made this signature, for the owner whose mark is in it."""
        if len(signature) != _LENGTH or signature[:1] != _FORM:
            return False
        raw = signature[1 : 1 + _MARK_BYTES]
        text = self._signer.scheme(signature[1 + _MARK_BYTES :])
        return self._signer.matches(self._parts(purpose, raw, place, parts), text, VERSION)

    def _parts(
        self, purpose: Purpose, raw: bytes, place: Sequence[str | int], parts: Sequence[bytes]
    ) -> list[bytes]:
        at: bytes = msgpack.packb(
            [purpose.value, self._environment, *place], unicode_errors="surrogatepass"
        )
        return [raw, at, *parts]


def mark_in(signature: bytes) -> str:
    """The mark of the owner that a signature was made for; "" for none."""
    raw = signature[1 : 1 + _MARK_BYTES]
    return "" if raw == _NO_MARK else raw.hex()


def _raw(mark: str) -> bytes:
    return bytes.fromhex(mark) if mark else _NO_MARK
