"""Who may do what: shared access signatures, verified when the emulator has a key.

Rules
1. Without a key everything is allowed; the server then listens on loopback only.
2. With a key a token must carry our signature over its resource and expiry (the service's
   format: HMAC-SHA256 over ``<url-encoded resource>\\n<expiry>``), be in date, cover the audience.
3. A JWT cannot be verified here, so with a key it is refused, with a sentence that says so.
4. Further keys have names and fewer rights, as the service's authorization rules do: Listen
   receives, settles and looks, Send sends and schedules, Manage administers. The main key has all.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from urllib.parse import parse_qs, unquote, urlsplit

from aztask.emulator.amqp.errors import UNAUTHORIZED_ACCESS, AmqpError

SAS_PREFIX = "SharedAccessSignature "
ROOT_KEY_NAME = "RootManageSharedAccessKey"
MAX_CLAIMS = 10_000


class Right(Enum):
    """What a key may be good for; the service's words."""

    LISTEN = "Listen"
    SEND = "Send"
    MANAGE = "Manage"


ALL_RIGHTS = frozenset(Right)


@dataclass(frozen=True, slots=True)
class Rule:
    """A key that is good for some rights."""

    key: str
    rights: frozenset[Right] = ALL_RIGHTS

    def __repr__(self) -> str:
        """Without the key."""
        return f"Rule(***, {sorted(right.value for right in self.rights)})"


@dataclass(frozen=True, slots=True)
class Claim:
    """Rights to every entity at or below `path`, until `expires` (UTC epoch seconds)."""

    path: str
    expires: float
    rights: frozenset[Right] = ALL_RIGHTS

    def covers(self, path: str) -> bool:
        """Whether an entity's path is this claim's or lies below it."""
        path = path.lower()
        return not self.path or path == self.path or path.startswith(self.path + "/")


def resource_path(resource: str) -> str:
    """The entity path of a resource URI, in lower case: "" for the whole namespace."""
    return unquote(urlsplit(resource).path if "://" in resource else resource).strip("/").lower()


def denied(what: str) -> AmqpError:
    """The refusal of rules 2 and 3."""
    return AmqpError(UNAUTHORIZED_ACCESS, what)


def missing(right: Right, path: str) -> AmqpError:
    """The refusal of rule 4."""
    return denied(f"'{right.value}' claim is required to do this with {path[:200]!r}")


class Access:
    """Verifies tokens. key: None allows everything. wall: UTC epoch seconds. rules: by name."""

    def __init__(
        self, key: str | None, wall: Callable[[], float], rules: Mapping[str, Rule] | None = None
    ) -> None:
        self._key = key
        self._wall = wall
        self._rules = dict(rules or {})

    @property
    def required(self) -> bool:
        """Whether a token is needed at all."""
        return self._key is not None

    def password(self, _name: str, password: str) -> bool:
        """Whether SASL PLAIN's password is the key."""
        return self._key is None or hmac.compare_digest(password.encode(), self._key.encode())

    def claim(self, token: str, kind: str, audience: str) -> Claim:
        """What a token put to ``$cbs`` entitles to. Raises AmqpError (unauthorized-access)."""
        if self._key is None:
            return Claim("", float("inf"))
        if not token.startswith(SAS_PREFIX):
            raise denied(
                f"a token of type {kind[:40]!r} cannot be verified here: connect with the"
                " emulator's shared access key"
            )
        claim = self._verified(token)
        if not claim.covers(resource_path(audience)):
            raise denied(f"the token's resource does not cover {audience[:200]!r}")
        return claim

    def _verified(self, token: str) -> Claim:
        fields = {name: values[0] for name, values in parse_qs(token[len(SAS_PREFIX) :]).items()}
        raw = dict(
            part.split("=", 1) for part in token[len(SAS_PREFIX) :].split("&") if "=" in part
        )
        try:
            resource, expiry = fields["sr"], float(fields["se"])
            signed = f"{raw['sr']}\n{raw['se']}"
            signature = fields["sig"]
        except (KeyError, ValueError):
            raise denied("the token lacks sr, sig or se, or se is not a number") from None
        rule = self._rules.get(fields.get("skn", "")) or Rule(self._key or "")
        expected = sign(rule.key, signed)
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise denied("the token's signature does not match: check the shared access key")
        if not expiry > self._wall():  # nan is no time either
            raise denied(
                f"the token expired {self._wall() - expiry:.0f} s ago by the emulator's clock"
            )
        return Claim(resource_path(resource), expiry, rule.rights)

    def bearer(self, header: str | None, audience: str) -> None:
        """Check an HTTP Authorization header. Raises AmqpError (unauthorized-access)."""
        if self._key is None:
            return
        claim = self.claim(header or "", "none" if not header else "bearer", audience)
        if Right.MANAGE not in claim.rights:
            raise missing(Right.MANAGE, audience)


def sign(key: str, text: str) -> str:
    """The base64 HMAC-SHA256 of `text`."""
    return base64.b64encode(hmac.digest(key.encode(), text.encode(), hashlib.sha256)).decode()


class Claims:
    """What one connection has shown to ``$cbs``."""

    def __init__(self, access: Access, wall: Callable[[], float]) -> None:
        self._access = access
        self._wall = wall
        self._claims: dict[str, Claim] = {}
        self.trusted = False

    def add(self, audience: str, claim: Claim) -> None:
        """Remember a claim; a newer one for the same audience replaces it."""
        if len(self._claims) >= MAX_CLAIMS and audience not in self._claims:
            raise denied("too many tokens on one connection")
        self._claims[audience] = claim

    def expiry(self, path: str, right: Right | None = None) -> float:
        """Until when `path` may be used, with this right or any; 0 when it may not."""
        if self.trusted or not self._access.required:
            return float("inf")
        covering = [
            claim.expires
            for claim in self._claims.values()
            if claim.covers(path) and (right is None or right in claim.rights)
        ]
        return max(covering, default=0.0)

    def check(self, path: str, right: Right | None = None) -> None:
        """Raises AmqpError (unauthorized-access) when `path` may not be used so now."""
        if self.expiry(path) <= self._wall():
            raise denied(f"no valid token was shown for {path!r}")
        if right is not None and self.expiry(path, right) <= self._wall():
            raise missing(right, path)
