"""Encrypts what messages, rows and payloads contain, and decrypts it.

Rules
1. Of several keys the first encrypts, if encryption is on, and every key decrypts. So keys come
   first, everywhere, and encryption is switched on afterwards; and a key is replaced as a signing
   key is: added at the end, moved to the front, removed when nothing needs it.
2. Each piece has a key of its own: HKDF-SHA256 (RFC 5869) of the named key and 16 random bytes. It
   encrypts once, so its nonce is constant. Random nonces under one key would have to be counted:
   NIST allows 2**32 of them, which a busy app sends in a few days.
3. The identity of a piece (environment, what it is, the id of its task, its place) is associated
   data of AES-256-GCM: a piece that was moved to another message, row or field is not decrypted.
4. The first byte is 0xC1, which neither msgpack nor JSON begins with. So what is not encrypted is
   read as before, and needs no mark.
5. References to payloads stay readable, in front of the encrypted bytes: what removes payloads that
   nothing needs looks for them, and has no key (`aztask.stores.payloads.holders`).

A piece::

    C1 "AZ" 01 | name of the key, 8 | random, 16 | length, 4 | references | encrypted | tag, 16
"""

from __future__ import annotations

import hmac
import importlib
import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, TypeGuard

import msgpack

from aztask.errors import BrokerUnavailable, ConfigurationError, DecodeError, KeyMissing
from aztask.message.payload import MARK, references_in
from aztask.support.late import install_command

MARKER: Final = b"\xc1AZ\x01"
_NAME_END: Final = len(MARKER) + 8
_SALT_END: Final = _NAME_END + 16
_HEAD: Final = _SALT_END + 4
_TAG_BYTES: Final = 16
_NONCE: Final = bytes(12)
_EXTRACT_SALT: Final = b"aztask-encryption"

ADDED_BYTES: Final = _HEAD + _TAG_BYTES
"""A piece without references is longer than what is in it by so many bytes."""

KEY_BYTES: Final = 32
"""Bytes of the shortest accepted key."""

CHANGED: Final = (
    "it cannot be decrypted: it was changed, or copied from another message, row or environment"
)


class Locked(BrokerUnavailable):
    """What is stored is encrypted with a key that this program does not have; another may have it.

    It is one row's trouble, so unlike other kinds of BrokerUnavailable it stops no neighbour.
    """


def is_encrypted(data: object) -> TypeGuard[bytes]:
    """True for what `Cipher.encrypt` made."""
    return isinstance(data, bytes) and data.startswith(MARKER)


class Cipher:
    """Encrypts and decrypts with one or several keys; without a key it does neither.

    Any thread may call. `encrypts`: False if it only decrypts.
    """

    __slots__ = ("_aead", "_environment", "_first", "_invalid", "_keys", "encrypts")

    def __init__(
        self, keys: Sequence[bytes] = (), *, encrypt: bool = False, environment: str = ""
    ) -> None:
        """Raises ConfigurationError for a wrong key, and if the extra ``crypto`` is missing."""
        for number, key in enumerate(keys, start=1):
            if not isinstance(key, bytes) or len(key) < KEY_BYTES:
                raise ConfigurationError(
                    f"encryption key {number} must have at least {KEY_BYTES} bytes;"
                    " for example from secrets.token_urlsafe(32)"
                )
        if encrypt and not keys:
            raise ConfigurationError(
                "encrypt=True needs encryption_keys: give them to all programs first, in"
                " AZTASK_ENCRYPTION_KEYS or in the file that AZTASK_ENCRYPTION_KEYS_FILE names"
            )
        self.encrypts = encrypt
        self._environment = environment
        self._keys: dict[bytes, bytes] = {}
        for key in keys:
            secret = hmac.digest(_EXTRACT_SALT, key, "sha256")  # HKDF's first step, once per key
            self._keys.setdefault(hmac.digest(secret, b"name", "sha256")[:8], secret)
        self._first = next(iter(self._keys), b"")
        if keys:
            self._aead, self._invalid = _library()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __repr__(self) -> str:
        return f"<Cipher: {len(self._keys)} keys>"

    def encrypt(self, data: bytes, *identity: str | int) -> bytes:
        """The data, encrypted for this identity with the first key.

        What is encrypted already is returned as it is: a program without its key carries it on.
        """
        if data.startswith(MARKER):
            return data
        name = self._first
        salt = secrets.token_bytes(16)
        shown = references_in(data) if MARK in data else b""
        head = MARKER + name + salt + len(shown).to_bytes(4, "big") + shown
        own = hmac.digest(self._keys[name], salt + b"\x01", "sha256")  # HKDF's second step
        sealed: bytes = self._aead(own).encrypt(_NONCE, data, head + self._bound(identity))
        return head + sealed

    def decrypt(self, data: bytes, *identity: str | int) -> bytes:
        """What was encrypted for this identity; data that is not encrypted is returned as it is.

        Raises KeyMissing without the key, and DecodeError for what was changed or moved.
        """
        if not data.startswith(MARKER):
            return data
        secret = self._keys.get(data[len(MARKER) : _NAME_END])
        if secret is None:
            raise KeyMissing(self.missing(data))
        own = hmac.digest(secret, data[_NAME_END:_SALT_END] + b"\x01", "sha256")
        end = _HEAD + int.from_bytes(data[_SALT_END:_HEAD], "big")
        try:
            opened: bytes = self._aead(own).decrypt(
                _NONCE, data[end:], data[:end] + self._bound(identity)
            )
        except (self._invalid, ValueError):
            raise DecodeError(CHANGED) from None
        return opened

    def missing(self, data: bytes) -> str:
        """Why encrypted data cannot be read here, on one line; "" if its key is known.

        The line names the key and never shows one.
        """
        name = data[len(MARKER) : _NAME_END]
        if name in self._keys:
            return ""
        have = "other keys" if self._keys else "no encryption keys"
        return (
            f"it is encrypted with the key {name.hex()}, and this program has {have}: add the key"
            " to encryption_keys (AZTASK_ENCRYPTION_KEYS)"
        )

    def names(self) -> list[str]:
        """The names of the keys, in order, as `missing` says them."""
        return [name.hex() for name in self._keys]

    def _bound(self, identity: Sequence[str | int]) -> bytes:
        packed: bytes = msgpack.packb(
            [self._environment, *identity], unicode_errors="surrogatepass"
        )
        return packed


NO_CIPHER: Final = Cipher()
"""Neither encrypts nor decrypts."""


HIDDEN: Final = "keyed-"
"""What a key begins with that `KeyDigests` has hidden."""


class KeyDigests:
    """Digests of the keys that functions make of arguments: of unique tasks, limits and tenants.

    With encryption they are keyed: without the secret, a reader of the store cannot try out which
    customer or order a key is. The secret is not rotated, since equal keys have to stay equal.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes = b"") -> None:
        """secret: of the app, b"" without encryption: then digests need no key."""
        self._secret = hmac.digest(secret, b"aztask-keys:1", "sha256") if secret else b""

    def of(self, data: bytes) -> str:
        """The digest of a key: 40 hexadecimal digits."""
        return self.long(data)[:40]

    def long(self, data: bytes) -> str:
        """The digest of a definition: 64 hexadecimal digits."""
        if self._secret:
            return hmac.digest(self._secret, data, "sha256").hex()
        return sha256(data).hexdigest()

    def hidden(self, key: str) -> str:
        """The key as it is stored and shown: itself without encryption."""
        if not self._secret or not key:
            return key
        return f"{HIDDEN}{self.of(key.encode('utf-8', 'surrogatepass'))}"


PLAIN_DIGESTS: Final = KeyDigests()
"""Those without encryption."""


def _library() -> tuple[Any, type[Exception]]:
    """AES-GCM of ``cryptography``, and its error for what was changed.

    It is imported for the first key: it takes a program without keys 30 ms to import.
    """
    try:
        ciphers = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
        errors = importlib.import_module("cryptography.exceptions")
    except ImportError:
        raise ConfigurationError(
            "encryption needs the package cryptography; install it with: "
            + install_command("crypto")
        ) from None
    return ciphers.AESGCM, errors.InvalidTag
