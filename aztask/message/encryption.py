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
6. A team's own codec takes the place of the keys for what is written. Its name stays readable, so a
   program without it can say which one it lacks; what keys have encrypted is still decrypted.

A piece, encrypted with a key or by a codec::

    C1 "AZ" 01 | name of the key, 8 | random, 16 | length, 4 | references | encrypted | tag, 16
    C1 "AZ" 02 | name of the codec, 24           | length, 4 | references | encoded
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, Protocol, TypeGuard

import msgpack

from aztask.errors import (
    BrokerUnavailable,
    ConfigurationError,
    DecodeError,
    EncodeError,
    KeyMissing,
)
from aztask.message.payload import MARK, references_in
from aztask.support.display import safe_str
from aztask.support.keyed import KeyedDigest
from aztask.support.late import install_command

MARKER: Final = b"\xc1AZ\x01"
CODED: Final = b"\xc1AZ\x02"
_MARKERS: Final = (MARKER, CODED)
_NAME_END: Final = len(MARKER) + 8
_SALT_END: Final = _NAME_END + 16
_HEAD: Final = _SALT_END + 4
_TAG_BYTES: Final = 16
_NO_REFERENCES: Final = bytes(4)
_NONCE: Final = bytes(12)
_EXTRACT_SALT: Final = b"aztask-encryption"
_CODEC_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,23}")

ADDED_BYTES: Final = _HEAD + _TAG_BYTES
"""A piece without references is longer than what is in it by so many bytes."""

CODEC_ADDS: Final = 1024
"""A codec's output may be longer than its input by so many bytes: room for a wrapped key."""

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
    return isinstance(data, bytes) and data.startswith(_MARKERS)


class ContentCodec(Protocol):
    """A team's own encryption, set with ``App(content_codec=...)``. Any thread may call it.

    `bound` names the message, row or field that the data is for, and its environment. It is not
    stored: use it as associated data, so that nothing can be moved elsewhere. What is encoded is
    compressed already, if it is; what is large is stored apart after it was encoded.

    Both methods may raise BrokerUnavailable, if what they need is unreachable, and `decode` may
    raise KeyMissing: then the data waits, as for a missing key. Any other error means that the data
    cannot be written, or was changed.
    """

    @property
    def name(self) -> str:
        """1 to 24 letters, digits, dots, dashes and underscores; stored in clear, never change it.

        The codec rotates its keys itself, under the same name.
        """
        ...

    def encode(self, data: bytes, bound: bytes) -> bytes:
        """What is sent or stored: at most 1,024 bytes longer than `data`."""
        ...

    def decode(self, data: bytes, bound: bytes) -> bytes:
        """The data of which `encode` made this for the same `bound`."""
        ...


def check_codec(name: str, value: Any) -> ContentCodec | None:
    """A codec, or None. Raises ConfigurationError."""
    if value is None:
        return None
    for method in ("encode", "decode"):
        if isinstance(value, type) or not callable(getattr(value, method, None)):
            raise ConfigurationError(
                f"{name} is an object with a name and the methods encode and decode, not {value!r}"
            )
    own = getattr(value, "name", None)
    if not isinstance(own, str) or not _CODEC_NAME.fullmatch(own):
        raise ConfigurationError(
            f"{name}: its name is 1 to 24 letters, digits, dots, dashes and underscores, not"
            f" {own!r}"
        )
    codec: ContentCodec = value
    return codec


class WrappedKey(Protocol):
    """A key that something else keeps and gives out, such as Azure Key Vault."""

    def unwrapped(self) -> bytes:
        """The key, kept in memory from the first call on. Raises BrokerUnavailable."""
        ...


class Cipher:
    """Encrypts and decrypts with one or several keys, or a codec; without them it does neither.

    Any thread may call. `encrypts`: False if it only decrypts.
    """

    __slots__ = (
        "_aead",
        "_codec",
        "_codec_head",
        "_environment",
        "_first",
        "_first_head",
        "_invalid",
        "_keys",
        "_sources",
        "encrypts",
    )

    def __init__(
        self,
        keys: Sequence[bytes | WrappedKey] = (),
        *,
        encrypt: bool = False,
        environment: str = "",
        codec: ContentCodec | None = None,
    ) -> None:
        """Raises ConfigurationError for a wrong key, and if the extra ``crypto`` is missing.

        Wrapped keys are unwrapped when the first piece needs one, or by `unlock`.
        """
        for number, key in enumerate(keys, start=1):
            wrapped = callable(getattr(key, "unwrapped", None))
            if not wrapped and (not isinstance(key, bytes) or len(key) < KEY_BYTES):
                raise ConfigurationError(
                    f"encryption key {number} must have at least {KEY_BYTES} bytes;"
                    " for example from secrets.token_urlsafe(32)"
                )
        if encrypt and not keys and codec is None:
            raise ConfigurationError(
                "encrypt=True needs encryption_keys: give them to all programs first, in"
                " AZTASK_ENCRYPTION_KEYS or in the file that AZTASK_ENCRYPTION_KEYS_FILE names;"
                " or a content_codec"
            )
        self.encrypts = encrypt
        self._environment = environment
        self._codec = codec
        self._codec_head = b"" if codec is None else CODED + codec.name.encode().ljust(24, b"\0")
        self._keys: dict[bytes, KeyedDigest] = {}
        self._first: KeyedDigest | None = None
        self._first_head = b""
        self._sources = tuple(keys)
        """The keys, while one of them is wrapped; then none."""
        if all(isinstance(key, bytes) for key in keys):
            self._unwrap()
        if keys:
            self._aead, self._invalid = _library()

    def __bool__(self) -> bool:
        return bool(self._keys or self._sources) or self._codec is not None

    def __repr__(self) -> str:
        return f"<Cipher: {len(self._keys or self._sources)} keys>"

    def unlock(self) -> None:
        """Unwrap the keys that are wrapped. Raises BrokerUnavailable if one cannot be had now."""
        if trouble := self._unwrap():
            raise BrokerUnavailable(f"an encryption key is missing: {trouble}")

    def _unwrap(self) -> str:
        """Fill the keys, in order; why one of them is missing, or "".

        Threads that do so at the same time come to the same keys.
        """
        keys: dict[bytes, KeyedDigest] = {}
        names: list[bytes] = []
        trouble = ""
        sources = self._sources
        for source in sources:
            try:
                key = source if isinstance(source, bytes) else source.unwrapped()
            except BrokerUnavailable as error:
                names.append(b"")
                trouble = trouble or safe_str(error)
                continue
            # HKDF's first step, once per key
            secret = KeyedDigest(KeyedDigest(_EXTRACT_SALT).digest(key))
            names.append(secret.digest(b"name")[:8])
            keys.setdefault(names[-1], secret)
        if sources:
            self._keys = keys
            self._first, self._first_head = keys.get(names[0]), MARKER + names[0]
        if not trouble:
            self._sources = ()
        return trouble

    @property
    def added_bytes(self) -> int:
        """By how many bytes a piece without references is longer, at most; 0 without encryption."""
        if not self.encrypts:
            return 0
        return ADDED_BYTES if self._codec is None else _HEAD + CODEC_ADDS

    def encrypt(self, data: bytes, *identity: str | int) -> bytes:
        """The data, encrypted for this identity with the first key.

        What is encrypted already is returned as it is: a program without its key carries it on.
        """
        if data.startswith(_MARKERS):
            return data
        tail = _NO_REFERENCES
        if MARK in data:
            shown = references_in(data)
            tail = len(shown).to_bytes(4, "big") + shown
        if self._codec is not None:
            return self._encoded(self._codec, data, self._codec_head + tail, identity)
        first = self._first or self._unwrapped_first()
        salt = os.urandom(16)
        head = self._first_head + salt + tail
        own = self._aead(_derived(first, salt))
        sealed: bytes = own.encrypt(_NONCE, data, head + self._bound(identity))
        return head + sealed

    def _unwrapped_first(self) -> KeyedDigest:
        trouble = self._unwrap()
        if self._first is None:
            raise BrokerUnavailable(f"nothing can be encrypted: {trouble}")
        return self._first

    def _encoded(
        self, codec: ContentCodec, data: bytes, head: bytes, identity: Sequence[str | int]
    ) -> bytes:
        """A piece that the codec has made. Raises EncodeError, BrokerUnavailable."""
        try:
            made = codec.encode(data, head + self._bound(identity))
        except BrokerUnavailable:
            raise
        except Exception as error:  # a team's code may raise anything
            raise EncodeError(
                f"the content codec {codec.name!r} raised {type(error).__name__}"
            ) from error
        if not isinstance(made, bytes):
            raise EncodeError(
                f"the content codec {codec.name!r} returned {type(made).__name__}, not bytes"
            )
        if len(made) > len(data) + CODEC_ADDS:
            raise EncodeError(
                f"the content codec {codec.name!r} made {len(made)} bytes of {len(data)};"
                f" {CODEC_ADDS} more are allowed"
            )
        return head + made

    def decrypt(self, data: bytes, *identity: str | int) -> bytes:
        """What was encrypted for this identity; data that is not encrypted is returned as it is.

        Raises KeyMissing without the key, DecodeError for what was changed or moved, and `Locked`
        if the codec or the vault cannot be reached now.
        """
        if not data.startswith(_MARKERS):
            return data
        end = _HEAD + int.from_bytes(data[_SALT_END:_HEAD], "big")
        if data.startswith(CODED):
            return self._decoded(data, end, identity)
        name = data[len(MARKER) : _NAME_END]
        key = self._keys.get(name)
        if key is None:
            if missing := self.missing(data):
                raise (Locked if self._sources else KeyMissing)(missing)
            key = self._keys[name]
        own = self._aead(_derived(key, data[_NAME_END:_SALT_END]))
        try:
            opened: bytes = own.decrypt(_NONCE, data[end:], data[:end] + self._bound(identity))
        except (self._invalid, ValueError):
            raise DecodeError(CHANGED) from None
        return opened

    def _decoded(self, data: bytes, end: int, identity: Sequence[str | int]) -> bytes:
        codec = self._codec
        if codec is None or data[:_SALT_END] != self._codec_head:
            raise KeyMissing(self.missing(data))
        try:
            opened = codec.decode(data[end:], data[:end] + self._bound(identity))
        except (BrokerUnavailable, KeyMissing) as error:
            raise Locked(
                f"the content codec {codec.name!r} cannot decode it now: {safe_str(error)}"
            ) from error
        except Exception as error:  # noqa: BLE001  # its text may hold anything, too
            raise DecodeError(
                f"{CHANGED}: the content codec {codec.name!r} raised {type(error).__name__}"
            ) from None
        if not isinstance(opened, bytes):
            raise DecodeError(
                f"the content codec {codec.name!r} returned {type(opened).__name__}, not bytes"
            )
        return opened

    def missing(self, data: bytes) -> str:
        """Why encrypted data cannot be read here, on one line; "" if its key is known.

        The line names the key and never shows one.
        """
        if data.startswith(CODED):
            return self._missing_codec(data)
        name = data[len(MARKER) : _NAME_END]
        if name in self._keys:
            return ""
        if self._sources and (trouble := self._unwrap()) and name not in self._keys:
            return (
                f"it is encrypted with the key {name.hex()}, and this program has not all of its"
                f" keys yet: {trouble}"
            )
        if name in self._keys:
            return ""
        have = "other keys" if self._keys else "no encryption keys"
        return (
            f"it is encrypted with the key {name.hex()}, and this program has {have}: add the key"
            " to encryption_keys (AZTASK_ENCRYPTION_KEYS)"
        )

    def _missing_codec(self, data: bytes) -> str:
        codec = self._codec
        if codec is not None and data[:_SALT_END] == self._codec_head:
            return ""
        name = data[len(CODED) : _SALT_END].rstrip(b"\0").decode("latin-1")
        have = "no content codec" if codec is None else f"the codec {codec.name!r}"
        return (
            f"it is encoded by the content codec {name!a}, and this program has {have}: set"
            " the codec with App(content_codec=...)"
        )

    def not_now(self, data: bytes) -> str:
        """Why a piece that is still encrypted after it was read was not decrypted, on one line."""
        return self.missing(data) or "its content codec cannot decode it now"

    def names(self) -> list[str]:
        """The names of the keys that are unwrapped, in order, as `missing` says them."""
        return [name.hex() for name in self._keys]

    def _bound(self, identity: Sequence[str | int]) -> bytes:
        packed: bytes = _PACKING.packer.pack((self._environment, *identity))
        return packed


def _derived(secret: KeyedDigest, salt: bytes) -> bytes:
    """The key of one piece: HKDF's second step."""
    return secret.digest(salt + b"\x01")


class _Packing(threading.local):
    """A packer for each thread: making one takes longer than packing."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(unicode_errors="surrogatepass")


_PACKING: Final = _Packing()


NO_CIPHER: Final = Cipher()
"""Neither encrypts nor decrypts."""


HIDDEN: Final = "keyed-"
"""What a key begins with that `KeyDigests` has hidden."""


class KeyDigests:
    """Digests of the keys that functions make of arguments: of unique tasks, limits and tenants.

    With encryption they are keyed: without the secret, a reader of the store cannot try out which
    customer or order a key is. The secret is not rotated, since equal keys have to stay equal.
    """

    __slots__ = ("_keyed",)

    def __init__(self, secret: bytes = b"") -> None:
        """secret: of the app, b"" without encryption: then digests need no key."""
        self._keyed = KeyedDigest(KeyedDigest(secret).digest(b"aztask-keys:1")) if secret else None

    def of(self, data: bytes) -> str:
        """The digest of a key: 40 hexadecimal digits."""
        return self.long(data)[:40]

    def long(self, data: bytes) -> str:
        """The digest of a definition: 64 hexadecimal digits."""
        if self._keyed is not None:
            return self._keyed.digest(data).hex()
        return sha256(data).hexdigest()

    def hidden(self, key: str) -> str:
        """The key as it is stored and shown: itself without encryption."""
        if self._keyed is None or not key:
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
