"""People log in with Microsoft Entra ID: MSAL's authorization-code flow, and what it leaves to us.

Rules
1. What a login needs until its answer (state, nonce, the secret of PKCE, the page to go on with)
   stays in this process. The browser has a random key to it, in a cookie. An answer counts once:
   its login is forgotten before anything else is done with it.
2. MSAL checks state and nonce, and no more of the ID token (since 1.38, as it says). So the token's
   signature, issuer, tenant, audience and times are checked here.
3. The role comes from the app roles in the token alone. A person without one is refused: everyone
   in the tenant may get a token.
4. No token is kept: the person has this server's own session from then on.
5. A service that does not answer is one line on the page. At most `CALLS` logins wait for it.

Sources: OpenID Connect Core 1.0, 3.1.3.7; RFC 7636 (PKCE); RFC 9700, 2.1.
"""

from __future__ import annotations

import hmac
import logging
import math
import re
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Lock
from typing import Any, Final

import jwt
import msal
import requests

from aztask.azure.access import quiet_sdk
from aztask.dashboard.access import LOGIN_SECONDS, LoginRefusal
from aztask.errors import ConfigurationError
from aztask.operate.requests import Role
from aztask.support import clock
from aztask.support.display import Secret

logger = logging.getLogger("aztask.dashboard")

AUTHORITY: Final = "https://login.microsoftonline.com"
MOST_LOGINS: Final = 5_000
"""Logins that wait for their answer. Each takes about 2 KB; the oldest ones make room."""

CALLS: Final = 8
ANSWER_SECONDS: Final = 10.0
KEYS_EVERY: Final = 60.0
"""A token that names an unknown key makes us ask for the keys again, but not more often than this:
anyone may send such a token."""

LINE_EVERY: Final = 60.0
"""Seconds between two lines of the log about errors of one kind."""

SKEW: Final = 60
"""Seconds that the clocks of this server and of the service may differ."""

LONGEST_NAME: Final = 200
_GUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ERROR: Final = re.compile(r"[a-z_]{1,40}")
_NUMBER: Final = re.compile(r"AADSTS\d{4,8}")


@dataclass(frozen=True, slots=True)
class EntraSettings:
    """The registration of this dashboard in Entra ID.

    * `tenant`, `client`: the IDs (GUIDs) of the directory and of the application.
    * `secret`: a client secret of the application.
    * `roles`: what a value of an app role means here.
    * `authority`: the service; that of another cloud, such as ``https://login.microsoftonline.us``.
    * `known`: whether Microsoft's list must know the authority; False for a service of one's own.
    """

    tenant: str
    client: str
    secret: Secret
    roles: Mapping[str, Role] = field(
        default_factory=lambda: {each.name.lower(): each for each in Role}
    )
    authority: str = AUTHORITY
    known: bool = True

    def __post_init__(self) -> None:
        for name, value in (("tenant", self.tenant), ("client", self.client)):
            if not _GUID.fullmatch(value):
                # Not "common" or a domain: the tenant in the token is compared with this one.
                raise ConfigurationError(
                    f"--entra-{name} needs the ID that the app registration shows, such as "
                    "2f1c4d3e-0000-4000-8000-123456789abc"
                )
        if not self.authority.startswith("https://"):
            raise ConfigurationError("--entra-authority needs an address with https://")
        if not self.secret:
            raise ConfigurationError("the client secret of Entra ID is empty")

    @property
    def most(self) -> Role:
        """The highest role that a person may have."""
        return max(self.roles.values())


@dataclass(frozen=True, slots=True)
class Begun:
    """A login that began. `address`: where the browser goes. `key`: for its cookie."""

    address: str
    key: str


@dataclass(frozen=True, slots=True)
class Person:
    """Who logged in. `following`: the page that they wanted to see."""

    name: str
    role: Role
    following: str


AWAY: Final = LoginRefusal(503, "Entra ID cannot be reached. Try again, or log in another way.")
BUSY: Final = LoginRefusal(503, "Many people log in at this moment. Try again.")
FOREIGN: Final = LoginRefusal(
    400, "This login was used already, is too old, or began in another browser. Start again."
)
DAMAGED: Final = LoginRefusal(502, "The answer of Entra ID cannot be checked. Start again.")
EXPIRED: Final = LoginRefusal(
    401, "The token of this login has expired, or is not valid yet. Check the clock of the server."
)
OTHERS: Final = LoginRefusal(403, "The token of this login is for another application or tenant.")
UNSET: Final = LoginRefusal(
    503, "Entra ID does not know this tenant, or answers wrongly. Check --entra-tenant."
)


_REFUSALS: Final = (
    (OSError, AWAY),  # requests' errors are some
    ((jwt.ExpiredSignatureError, jwt.ImmatureSignatureError), EXPIRED),
    ((jwt.InvalidAudienceError, jwt.InvalidIssuerError), OTHERS),
)


@dataclass(frozen=True, slots=True)
class _OpenLogin:
    """A login that waits for its answer: MSAL's flow, and until when (monotonic seconds)."""

    flow: dict[str, Any]
    following: str
    until: float


@dataclass(frozen=True, slots=True)
class _Http:
    """What MSAL asks of an HTTP client, with a time limit. Redirects are not followed.

    Raises OSError for a service that does not answer, or with an error of its own (5xx).
    """

    session: Any = field(default_factory=requests.Session)

    def get(self, url: str, **given: Any) -> Any:
        return self._answer("GET", url, given)

    def post(self, url: str, **given: Any) -> Any:
        return self._answer("POST", url, given)

    def _answer(self, method: str, url: str, given: Mapping[str, Any]) -> Any:
        limits = {"timeout": ANSWER_SECONDS, "allow_redirects": False}
        found = self.session.request(method, url, **given, **limits)
        if found.status_code >= 500:
            found.raise_for_status()
        return found

    def close(self) -> None:
        self.session.close()


class _NoCache(msal.TokenCache):
    """MSAL puts every token into a cache, and nothing here would ever read it (rule 4)."""

    def add(self, event: object, now: object = None) -> None:
        """Keep no token: none would be read."""


class _Service:
    """The token service of one tenant: MSAL's client, and the keys that sign its tokens.

    Made by the first login, since MSAL asks the service while it is made. Raises OSError if the
    service does not answer, and whatever MSAL raises for an answer that it cannot use.
    """

    def __init__(self, settings: EntraSettings, http: _Http) -> None:
        self._settings = settings
        self._http = http
        address = f"{settings.authority}/{settings.tenant}"
        self.client = msal.ConfidentialClientApplication(
            settings.client,
            client_credential=settings.secret.reveal(),
            authority=address,
            instance_discovery=None if settings.known else False,
            http_client=http,
            token_cache=_NoCache(),
            exclude_scopes=["offline_access"],  # no refresh token, which nothing would use
        )
        found = self._json(f"{address}/v2.0/.well-known/openid-configuration")
        self._issuer, self._keys_at = str(found["issuer"]), str(found["jwks_uri"])
        if not self._keys_at.startswith("https://"):
            raise ValueError("the keys of the token service have no https address")
        self._keys: dict[str, Any] = {}
        self._asked_at = float("-inf")
        self._lock = Lock()

    def claims(self, token: str) -> Mapping[str, Any]:
        """What the ID token says. Raises jwt.PyJWTError if it is not for us, now (rule 2)."""
        header = jwt.get_unverified_header(token)
        found: Mapping[str, Any] = jwt.decode(
            token,
            self._key(str(header.get("kid", ""))),
            algorithms=["RS256"],  # what Entra ID signs with; never what the token itself says
            audience=self._settings.client,
            issuer=self._issuer,
            leeway=SKEW,
            options={"require": ["aud", "exp", "iat", "iss", "nonce", "sub", "tid"]},
        )
        if found["tid"] != self._settings.tenant:
            raise jwt.InvalidIssuerError("another tenant")
        return found

    def _key(self, name: str) -> Any:
        with self._lock:
            now = clock.monotonic()
            if name not in self._keys and now - self._asked_at >= KEYS_EVERY:
                known = jwt.PyJWKSet.from_dict(self._json(self._keys_at))
                self._keys = {each.key_id: each.key for each in known.keys}
                # Not before: keys that could not be read are asked for again at once.
                self._asked_at = now
            if name not in self._keys:
                raise jwt.InvalidSignatureError("an unknown key")
            return self._keys[name]

    def _json(self, url: str) -> dict[str, Any]:
        answer = self._http.get(url)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


class EntraLogin:
    """Logs people in with Entra ID. Every method may be called from several threads."""

    def __init__(self, settings: EntraSettings, session: Any = None) -> None:
        """session: of `requests`; one with other certificates, for a service of one's own."""
        # MSAL logs a whole answer that is no JSON, and that may hold a token.
        quiet_sdk("msal")
        self.settings = settings
        self._http = _Http() if session is None else _Http(session)
        self._service: _Service | None = None
        self._making = Lock()
        self._calls = BoundedSemaphore(CALLS)
        self._open: dict[str, _OpenLogin] = {}
        self._logged_at: dict[str, float] = {}  # by the kind of the error: there are few
        self._lock = Lock()

    def begin(self, back: str, following: str) -> Begun | LoginRefusal:
        """Begin a login. back: where Entra ID sends the browser. following: the page after it."""
        if not self._calls.acquire(blocking=False):
            return BUSY
        try:
            flow = self._flow(self._known(), back)
        except OSError as error:  # requests' errors are some
            return self._logged(AWAY, error)
        except Exception as error:  # noqa: BLE001  # MSAL raises what its parsers raise for a foreign answer
            return self._logged(UNSET, error)
        finally:
            self._calls.release()
        key = secrets.token_urlsafe(32)
        now = clock.monotonic()
        with self._lock:
            while self._open and (
                len(self._open) >= MOST_LOGINS or next(iter(self._open.values())).until < now
            ):
                del self._open[next(iter(self._open))]  # the oldest is first
            self._open[key] = _OpenLogin(flow, following, now + LOGIN_SECONDS)
        return Begun(flow["auth_uri"], key)

    def _flow(self, service: _Service, back: str) -> dict[str, Any]:
        """MSAL's flow: the address for the browser, with state, nonce and PKCE.

        The answer comes as a query, and MSAL warns of that: a code in an address may stay in the
        browser's history. This code counts once, with our secret and for this flow alone. A form
        instead would come from another site, and so need a hole in `Guard` and a cookie that every
        site's forms send.
        """
        with self._lock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "response_mode='form_post'", UserWarning)
            # An account is chosen each time: on a shared machine, a logout would else be undone by
            # the next click.
            found: dict[str, Any] = service.client.initiate_auth_code_flow(
                [], redirect_uri=back, prompt="select_account"
            )
        return found

    def finish(self, key: str, answer: Mapping[str, str]) -> Person | LoginRefusal:
        """Who logged in. key: of the browser's cookie. answer: the query that Entra ID sent.

        The login ends in any case. If the process dies here, the person starts again.
        """
        with self._lock:
            login = self._open.pop(key, None)
        if login is None or login.until < clock.monotonic():
            return FOREIGN
        wanted, given = str(login.flow["state"]), answer.get("state", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode()):
            return FOREIGN
        if not self._calls.acquire(blocking=False):
            return BUSY
        try:
            return self._person(login, answer)
        except Exception as error:  # noqa: BLE001  # as in `begin`; a wrong nonce is a RuntimeError
            kinds = (refusal for kind, refusal in _REFUSALS if isinstance(error, kind))
            return self._logged(next(kinds, DAMAGED), error)
        finally:
            self._calls.release()

    def _person(self, login: _OpenLogin, answer: Mapping[str, str]) -> Person | LoginRefusal:
        service = self._known()
        found = service.client.acquire_token_by_auth_code_flow(login.flow, dict(answer))
        if "id_token" not in found:
            return _refused(found)
        claims = service.claims(found["id_token"])
        name = str(claims.get("preferred_username") or claims["sub"])[:LONGEST_NAME]
        known = self.settings.roles
        roles = [known[each] for each in _texts(claims.get("roles")) if each in known]
        if not roles:
            return LoginRefusal(
                403, f"{name} has no role here: ask for one of the app roles {', '.join(known)}."
            )
        return Person(name, max(roles), login.following)

    def _logged(self, refusal: LoginRefusal, error: Exception) -> LoginRefusal:
        """Say in the log why; each reason once in `LINE_EVERY`, because anyone may begin a login.

        The error's text stays out: it may hold a part of a token.
        """
        kind, now = type(error).__qualname__, clock.monotonic()
        with self._lock:
            due = now - self._logged_at.get(kind, -math.inf) >= LINE_EVERY
            if due:
                self._logged_at[kind] = now
        if due:
            logger.warning("a login with Entra ID failed (%s): %s", kind, refusal.text)
        return refusal

    def _known(self) -> _Service:
        with self._making:
            if self._service is None:
                self._service = _Service(self.settings, self._http)
            return self._service


def _texts(found: object) -> list[str]:
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _refused(answer: Mapping[str, Any]) -> LoginRefusal:
    """Why Entra ID gave no token: its words, without the text, which anyone may have written."""
    error = _ERROR.fullmatch(str(answer.get("error", "")))
    number = _NUMBER.search(str(answer.get("error_description", "")))
    shown = " ".join(each[0] for each in (error, number) if each)
    return LoginRefusal(401, f"Entra ID refused the login: {shown or 'it gives no reason'}.")
