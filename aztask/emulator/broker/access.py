"""Access control: shared access signatures, verified if the emulator has a key.

Rules
1. Without a key everything is allowed, and the server listens on loopback only.
2. With a key, a token must be signed with it, must not be expired and must cover the audience. The
   signature has the service's format: HMAC-SHA256 over ``<url-encoded resource>\\n<expiry>``.
3. A token of Entra ID (`aztask.emulator.broker.entra`) counts if its keys are known here; else it
   is refused with an explanation. With these keys and no shared one, only such tokens count.
4. Further keys have names and fewer permissions, like the service's authorization rules. Listen
   allows to receive, settle and peek; Send to send and schedule; Manage to administer. The main key
   has all three.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from aztask.emulator.amqp import UNAUTHORIZED_ACCESS, AmqpError
from aztask.emulator.broker.entra import EntraTokens, Right, TokenRefused

SAS_PREFIX = "SharedAccessSignature "
ROOT_KEY_NAME = "RootManageSharedAccessKey"
MAX_CLAIMS = 10_000


ALL_RIGHTS = frozenset(Right)


@dataclass(frozen=True, slots=True)
class Rule:
    """A key with some permissions, like an authorization rule of the service."""

    key: str
    rights: frozenset[Right] = ALL_RIGHTS

    def __repr__(self) -> str:
        """Show the permissions, never the key."""
        names = sorted(right.value for right in self.rights)
        return f"Rule(***, {names})"


@dataclass(frozen=True, slots=True)
class TokenClaim:
    """Permissions for every entity at or below `path`.

    path: in lower case, "" for the whole namespace. expires: UTC epoch seconds.
    """

    path: str
    expires: float
    rights: frozenset[Right] = ALL_RIGHTS

    def covers(self, path: str) -> bool:
        """Return whether `path` is this claim's path or lies below it."""
        path = path.lower()
        return not self.path or path == self.path or path.startswith(self.path + "/")


def resource_path(resource: str, host: str = "") -> str:
    """Return the entity path of a resource URI in lower case, "" for the whole namespace.

    host: what the resource may begin with if it has no scheme. It must have a port: without one, a
    client could choose a host that is the name of an entity, and a token for this entity would
    become one for the namespace.
    """
    first, _, rest = resource.partition("/")
    if ":" in host and first.lower() == host.lower():
        resource = rest
    return unquote(urlsplit(resource).path if "://" in resource else resource).strip("/").lower()


def denied(description: str) -> AmqpError:
    """Return the error for a missing or invalid token (rules 2 and 3)."""
    return AmqpError(UNAUTHORIZED_ACCESS, description)


def missing(right: Right, path: str) -> AmqpError:
    """Return the error for a valid token without this permission (rule 4)."""
    return denied(f"'{right.value}' claim is required to do this with {path[:200]!r}")


class Access:
    """Verifies tokens.

    key: the main key; None allows everything. wall: a clock in UTC epoch seconds. rules: further
    keys, by name. entra: what verifies tokens of Entra ID.
    """

    def __init__(
        self,
        key: str | None,
        wall: Callable[[], float],
        rules: Mapping[str, Rule] | None = None,
        entra: EntraTokens | None = None,
    ) -> None:
        self._key = key
        self._wall = wall
        self._rules = dict(rules or {})
        self._entra = entra

    @property
    def required(self) -> bool:
        """Whether clients need a token at all."""
        return self._key is not None or self._entra is not None

    def password(self, _name: str, password: str) -> bool:
        """Return whether the password of SASL PLAIN is the main key."""
        if self._key is None:
            return not self.required
        return hmac.compare_digest(password.encode(), self._key.encode())

    def claim(self, token: str, kind: str, audience: str, host: str = "") -> TokenClaim:
        """Verify a token that was put to ``$cbs``, and return the claim that it proves.

        kind: the token's type. audience: the resource that the client asks for. host: see
        `bearer`. Raises AmqpError (unauthorized-access).
        """
        if not self.required:
            return TokenClaim("", float("inf"))
        if self._entra is not None and not token.startswith(SAS_PREFIX):
            try:
                return TokenClaim("", *self._entra.verified(token, self._wall()))
            except TokenRefused as why:
                raise denied(str(why)) from None
        if self._key is None:
            raise denied("shared access keys are off here: show a token of Entra ID")
        if not token.startswith(SAS_PREFIX):
            raise denied(
                f"a token of type {kind[:40]!r} cannot be verified here: connect with the"
                " emulator's shared access key"
            )
        claim = self._verified(token, host)
        if not claim.covers(resource_path(audience)):
            raise denied(f"the token's resource does not cover {audience[:200]!r}")
        return claim

    def _verified(self, token: str, host: str) -> TokenClaim:
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
        if not expiry > self._wall():  # written this way to refuse nan, too
            raise denied(
                f"the token expired {self._wall() - expiry:.0f} s ago by the emulator's clock"
            )
        return TokenClaim(resource_path(resource, host), expiry, rule.rights)

    def bearer(
        self, header: str | None, audience: str, right: Right = Right.MANAGE, host: str = ""
    ) -> None:
        """Check an HTTP Authorization header. Raises AmqpError (unauthorized-access).

        host: of the request. The resource of a token for it may begin with that, without a scheme,
        as in the examples of the service's runtime API.
        """
        if not self.required:
            return
        token = (header or "").removeprefix("Bearer ")
        claim = self.claim(token, "none" if not header else "bearer", audience, host)
        if right not in claim.rights:
            raise missing(right, audience)


def sign(key: str, text: str) -> str:
    """Return the HMAC-SHA256 of `text`, in base64."""
    return base64.b64encode(hmac.digest(key.encode(), text.encode(), hashlib.sha256)).decode()


class TokenClaims:
    """The claims that one connection has proved with tokens put to ``$cbs``."""

    def __init__(self, access: Access, wall: Callable[[], float]) -> None:
        self._access = access
        self._wall = wall
        self._claims: dict[str, TokenClaim] = {}
        self.trusted = False

    def add(self, audience: str, claim: TokenClaim) -> None:
        """Remember a claim; a newer one for the same audience replaces it."""
        if len(self._claims) >= MAX_CLAIMS and audience not in self._claims:
            raise denied("too many tokens on one connection")
        self._claims[audience] = claim

    def expiry(self, path: str, right: Right | None = None) -> float:
        """Return until when `path` may be used with this permission, or with any if None.

        UTC epoch seconds: 0 if it may not be used, infinity if no token is needed.
        """
        if self.trusted or not self._access.required:
            return float("inf")
        covering = [
            claim.expires
            for claim in self._claims.values()
            if claim.covers(path) and (right is None or right in claim.rights)
        ]
        return max(covering, default=0.0)

    def check(self, path: str, right: Right | None = None) -> None:
        """Raise AmqpError (unauthorized-access) unless `path` may be used now."""
        if self.expiry(path) <= self._wall():
            raise denied(f"no valid token was shown for {path!r}")
        if right is not None and self.expiry(path, right) <= self._wall():
            raise missing(right, path)
