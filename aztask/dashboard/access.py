"""Who may see the page: passwords in a file, one link for one person, or a proxy that logs in.

Logins with Entra ID are in `aztask.dashboard.entra`; they lead to a session as passwords do.

Rules
1. Without a password file, a proxy and Entra ID there is one link with a random key, for the person
   who started the server. It is printed once and never logged.
2. A session is a signed cookie. Its key is made anew in each process: after a restart people log in
   again.
3. Names that a proxy sends count only from a Unix socket, or from a listed peer that sends the
   shared secret too. Without that the server does not start.
4. A check of a password costs the same for an unknown name, and at most `CHECKS` run at a time.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore
from typing import Final

from aztask.errors import ConfigurationError
from aztask.operate.requests import Role
from aztask.support.display import Secret

COOKIE: Final = "aztask-session"
LOGIN_COOKIE: Final = "aztask-login"
"""Which login with Entra ID is this browser's, while it lasts."""

LOGIN_SECONDS: Final = 600.0
SESSION_SECONDS: Final = 12 * 3600.0
CHECKS: Final = 2
LONGEST_PASSWORD: Final = 1024

# 16 MB and about 50 ms for each check, as OWASP recommends for scrypt.
_COST, _BLOCK, _PARALLEL = 2**14, 8, 1
_MEMORY: Final = 64 * 1024 * 1024
_FIELDS: Final = 3
SECRET_HEADER: Final = b"x-aztask-proxy-secret"


@dataclass(frozen=True, slots=True)
class Visitor:
    """A person who is logged in. csrf: must be in each of the person's forms."""

    name: str
    role: Role
    csrf: str = ""

    def wrote(self, token: str) -> bool:
        """Whether a form with this token came from one of this person's pages."""
        given, wanted = token.encode("utf-8", "replace"), self.csrf.encode()
        return bool(wanted) and hmac.compare_digest(given, wanted)


@dataclass(frozen=True, slots=True)
class LoginRefusal:
    """A login that does not go on: the status of its page, and the one line on it."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Account:
    """A line of the password file. hash: "" for a person whom the proxy logs in."""

    role: Role
    hash: str


@dataclass(frozen=True, slots=True)
class ProxyLogin:
    """A proxy that logs people in.

    * `header`: in which it sends the name, in lower case.
    * `peers`: the addresses from which it comes; empty if the server listens on a Unix socket.
    * `secret`: what it must send in ``X-Aztask-Proxy-Secret``; None on a Unix socket.
    * `role`: of people who are not in the password file; None refuses them.
    """

    header: str
    peers: frozenset[str] = frozenset()
    secret: Secret | None = None
    role: Role | None = Role.READ

    def trusts(self, peer: str | None, headers: Mapping[bytes, bytes]) -> bool:
        """True for a request that the proxy itself sent. peer: None on a Unix socket."""
        if not self.peers:
            return peer is None
        given = headers.get(SECRET_HEADER, b"")
        wanted = self.secret.reveal().encode() if self.secret is not None else b""
        return peer in self.peers and bool(wanted) and hmac.compare_digest(given, wanted)


def hash_password(password: str) -> str:
    """The hash of a password, for the third field of a line of the password file."""
    salt = secrets.token_bytes(16)
    parts = (_COST, _BLOCK, _PARALLEL, salt.hex(), _scrypt(password, salt).hex())
    return "$".join(["scrypt", *map(str, parts)])


def read_accounts(path: Path) -> dict[str, Account]:
    """The accounts of a password file: lines of ``NAME:ROLE:HASH``. Raises ConfigurationError.

    A line without a hash (``ann:act:``) gives a role to a person whom the proxy logs in.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the password file {path} cannot be read: {error}") from None
    found: dict[str, Account] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.strip().rsplit(":", _FIELDS - 1)
        if len(parts) != _FIELDS or not parts[0] or parts[0] in found:
            raise ConfigurationError(
                f"line {number} of {path} is not NAME:ROLE:HASH with a name of its own; aztask "
                "dashboard --hash-password makes the hash"
            )
        name, role, hashed = parts
        if hashed and not _is_hash(hashed):
            raise ConfigurationError(
                f"line {number} of {path} has no hash of aztask dashboard --hash-password"
            )
        found[name] = Account(Role.named(role), hashed)
    return found


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(
        password.encode("utf-8", "surrogatepass"),
        salt=salt,
        n=_COST,
        r=_BLOCK,
        p=_PARALLEL,
        maxmem=_MEMORY,
        dklen=32,
    )


def _is_hash(text: str) -> bool:
    start = f"scrypt${_COST}${_BLOCK}${_PARALLEL}$"
    salt, _, digest = text.removeprefix(start).partition("$")
    shape = len(salt) == 2 * 16 and len(digest) == 2 * 32
    return text.startswith(start) and shape and set(salt + digest) <= set("0123456789abcdef")


def _same(password: str, hashed: str) -> bool:
    salt, digest = hashed.split("$")[-2:]
    return hmac.compare_digest(_scrypt(password, bytes.fromhex(salt)).hex(), digest)


@dataclass
class Logins:
    """Decides who a request comes from.

    * `accounts`: from the password file. `proxy`: None without one.
    * `link_role`: the role of the person with the link; None if there is no link.
    """

    accounts: Mapping[str, Account] = field(default_factory=dict)
    proxy: ProxyLogin | None = None
    link_role: Role | None = None
    link_key: Secret = field(default_factory=lambda: Secret(secrets.token_urlsafe(24)))
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _checks: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(CHECKS), repr=False)
    _unknown: str = field(default_factory=lambda: hash_password(secrets.token_hex(8)), repr=False)

    @property
    def most(self) -> Role:
        """The highest role that a person may have."""
        roles = [each.role for each in self.accounts.values()]
        roles += [each for each in (self.link_role, self.proxy and self.proxy.role) if each]
        return max(roles, default=Role.READ)

    @property
    def passwords(self) -> bool:
        """Whether people log in with a password."""
        return any(each.hash for each in self.accounts.values())

    def login(self, name: str, password: str) -> Visitor | None:
        """The person with this password; None if it is wrong, or the name is unknown."""
        account = self.accounts.get(name)
        hashed = account.hash if account is not None else ""
        with self._checks:
            right = _same(password[:LONGEST_PASSWORD], hashed or self._unknown)
        if account is None or not hashed or not right:
            return None
        return Visitor(name, account.role)

    def by_link(self, key: str) -> Visitor | None:
        """The person who opened the link of the server's start; None for a wrong key."""
        right = hmac.compare_digest(key.encode(), self.link_key.reveal().encode())
        return Visitor("local", self.link_role) if right and self.link_role is not None else None

    def by_proxy(self, peer: str | None, headers: Mapping[bytes, bytes]) -> Visitor | None:
        """The person whom the proxy names; None if it is not the proxy, or it names none."""
        if self.proxy is None or not self.proxy.trusts(peer, headers):
            return None
        name = headers.get(self.proxy.header.encode(), b"").decode("utf-8", "replace").strip()
        account = self.accounts.get(name)
        role = account.role if account is not None else self.proxy.role
        if not name or role is None:
            return None
        return Visitor(name, role, self._sign("csrf", f"proxy {name}"))

    # -- sessions ----------------------------------------------------------------------------

    def session(self, visitor: Visitor) -> str:
        """A cookie's value for a person who has just logged in."""
        data = {
            "name": visitor.name,
            "role": int(visitor.role),
            "until": time.time() + SESSION_SECONDS,
            "nonce": secrets.token_hex(8),
        }
        body = base64.urlsafe_b64encode(json.dumps(data).encode()).decode()
        return f"{body}.{self._sign('session', body)}"

    def by_session(self, cookie: str) -> Visitor | None:
        """The person whose session it is; None if it is wrong, expired or of a former process.

        An account that was removed from the password file, or has another role there now, keeps
        its session until the server is restarted.
        """
        body, _, signature = cookie.partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign("session", body).encode()):
            return None
        data = json.loads(base64.urlsafe_b64decode(body))
        if data["until"] < time.time():
            return None
        return Visitor(data["name"], Role(data["role"]), self._sign("csrf", body))

    def _sign(self, purpose: str, text: str) -> str:
        data = f"{purpose}\0{text}".encode("utf-8", "surrogatepass")
        return hmac.new(self._key, data, "sha256").hexdigest()
