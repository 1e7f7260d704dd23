"""Tokens of Entra ID: JSON Web Tokens of a token service, and what each identity may do.

Rules
1. A token counts if it is signed with RS256 by one of the keys, is for Service Bus, and is valid
   now by the emulator's clock.
2. Its permissions are those that its identity is granted at the time it is shown. A link that is
   open stays open until its token expires, as on the service.
3. Nothing is fetched: the keys and the grants are given, and the grants may be changed at any time.

Source: RFC 7515 (JWS), RFC 7517 (JWK), RFC 8017 section 8.2.2 (RSASSA-PKCS1-v1_5).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from aztask.errors import ConfigurationError
from aztask.support.display import printable

AUDIENCE = "https://servicebus.azure.net"
_SHA256 = bytes.fromhex("3031300d060960864801650304020105000420")
"""The DigestInfo of SHA-256, which precedes the digest."""


class Right(Enum):
    """A permission of a key or an identity, by the service's name for it."""

    LISTEN = "Listen"
    SEND = "Send"
    MANAGE = "Manage"


class TokenRefused(Exception):
    """Why a token does not count."""


@dataclass(frozen=True, slots=True)
class EntraTokens:
    """What verifies tokens, and what their identities may do.

    * `keys`: the public keys, as the list ``keys`` of a JWKS document.
    * `grants`: the permissions by the id of the identity: the claim ``oid``, else ``appid``. You
      may change it while the emulator runs.
    """

    keys: Iterable[Mapping[str, Any]]
    grants: Mapping[str, frozenset[Right]] = field(default_factory=dict)

    def verified(self, token: str, now: float) -> tuple[float, frozenset[Right]]:
        """When the token expires, and what its identity may do. Raises TokenRefused.

        * `now`: UTC epoch seconds.
        """
        claims = self._claims(token)
        audience = str(claims.get("aud", "")).rstrip("/")
        if audience != AUDIENCE:
            raise TokenRefused(f"the token is for {audience[:200]!r}, not for {AUDIENCE}")
        try:
            begins, expires = float(claims.get("nbf", 0)), float(claims["exp"])
        except (KeyError, TypeError, ValueError):
            raise TokenRefused("the token lacks exp, or exp or nbf is not a number") from None
        if not expires > now:
            raise TokenRefused(
                f"the token expired {now - expires:.0f} s ago by the emulator's clock"
            )
        if not begins <= now:
            raise TokenRefused(
                f"the token is valid in {begins - now:.0f} s by the emulator's clock"
            )
        identity = str(claims.get("oid") or claims.get("appid") or "")
        rights = self.grants.get(identity)
        if not rights:
            raise TokenRefused(f"the identity {identity[:100]!r} has no role here")
        return expires, rights

    def _claims(self, token: str) -> Mapping[str, Any]:
        head, _, rest = token.partition(".")
        body, _, signature = rest.partition(".")
        try:
            header, claims = json.loads(_bytes(head)), json.loads(_bytes(body))
            given = _bytes(signature)
        except (ValueError, RecursionError):
            raise TokenRefused("it is no JSON Web Token") from None
        if not isinstance(header, dict) or not isinstance(claims, dict):
            raise TokenRefused("it is no JSON Web Token")
        if header.get("alg") != "RS256":  # "none" above all
            raise TokenRefused(f"the token is signed with {header.get('alg')!r}, not with RS256")
        for key in self.keys:
            if key.get("kid") == header.get("kid"):
                if not _signed(f"{head}.{body}".encode(), given, key):
                    raise TokenRefused("the token's signature does not match its key")
                return claims
        raise TokenRefused("the token is signed with a key that is not known here")


def read_keys(path: Path) -> Sequence[Mapping[str, Any]]:
    """The public keys in a file with a JWKS document (RFC 7517). Raises ConfigurationError.

    Other keys than those of RSA for signatures are skipped: no token of Entra ID has them.
    """
    try:
        document = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: cannot be read as JSON: {error}") from error
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ConfigurationError(
            f'{path} is no JWKS document: write {{"keys": [...]}}, as jwks_uri of the token '
            "service answers"
        )
    keys = [each for each in listed if isinstance(each, dict) and _verifies(each)]
    if not keys:
        raise ConfigurationError(f"{path} has no RSA key with kid, n and e that verifies tokens")
    return keys


def _verifies(key: Mapping[str, Any]) -> bool:
    if key.get("kty") != "RSA" or key.get("use", "sig") != "sig" or not key.get("kid"):
        return False
    try:
        return all(int.from_bytes(_bytes(str(key[part])), "big") > 1 for part in "ne")
    except (KeyError, ValueError):
        return False


def parse_grants(texts: Iterable[str]) -> dict[str, frozenset[Right]]:
    """The permissions by identity, from texts such as ``IDENTITY=send,listen``.

    Raises ConfigurationError.
    """
    grants: dict[str, frozenset[Right]] = {}
    for text in texts:
        identity, _, names = text.partition("=")
        wanted = [each.strip().lower() for each in names.split(",")]
        rights = frozenset(right for right in Right if right.value.lower() in wanted)
        if not identity.strip() or len(rights) != len(set(wanted)):
            known = ", ".join(right.value.lower() for right in Right)
            raise ConfigurationError(
                f"{printable(text, 80)} grants nothing: write IDENTITY=send,listen, of {known}"
            )
        if identity.strip() in grants:
            raise ConfigurationError(
                f"{printable(identity.strip(), 80)} is granted twice: write all of it at once, "
                "such as IDENTITY=send,listen"
            )
        grants[identity.strip()] = rights
    return grants


def _signed(data: bytes, signature: bytes, key: Mapping[str, Any]) -> bool:
    """Whether the owner of an RSA key has signed the data (RFC 8017, section 8.2.2)."""
    modulus = int.from_bytes(_bytes(str(key["n"])), "big")
    exponent = int.from_bytes(_bytes(str(key["e"])), "big")
    size = (modulus.bit_length() + 7) // 8
    number = int.from_bytes(signature, "big")
    if len(signature) != size or number >= modulus:
        return False
    wanted = _SHA256 + hashlib.sha256(data).digest()
    padded = b"\x00\x01" + b"\xff" * (size - len(wanted) - 3) + b"\x00" + wanted
    return hmac.compare_digest(pow(number, exponent, modulus).to_bytes(size, "big"), padded)


def _bytes(text: str) -> bytes:
    """Base64 for URLs, without padding. Raises ValueError."""
    return base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
