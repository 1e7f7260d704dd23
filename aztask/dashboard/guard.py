"""What every request passes: the host that it names, its origin, its visitor; and its headers.

Rules
1. A request for another host is refused: a page of another site cannot reach this server under a
   name that its owner chose (DNS rebinding).
2. A request that another site's page made is refused, whatever its method; so is one that changes
   something and does not say where it comes from. A link on another page may be followed.
3. Without a visitor only `PUBLIC` and the files of `STATIC` answer, each by its whole path. The
   route decides nothing: one that is new is closed.
4. What a visitor sends must carry the token of the visitor's own pages: `aztask.dashboard.server`
   checks it before a form reaches anything. The login has no token; rule 2 protects it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import quote

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aztask.dashboard.access import COOKIE, Logins, Visitor

ENTRA: Final = "/login/entra"
ENTRA_BACK: Final = "/login/entra/back"
PUBLIC: Final = frozenset({"/login", ENTRA, ENTRA_BACK, "/healthz"})
STATIC: Final = "/static/"
SAFE: Final = ("GET", "HEAD")
LARGEST_BODY: Final = 256 * 1024

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Guard:
    """The ASGI application around the routes.

    * `hosts`: what ``Host`` may be, in lower case, with the port where it is not the scheme's own.
    """

    app: ASGIApp
    access: Logins
    hosts: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or hand it on with ``scope["visitor"]`` and the headers."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        answer = self._refusal(scope, headers)
        if answer is None:
            visitor = self._visitor(scope, headers)
            scope["visitor"] = visitor
            if visitor is None and not is_public(scope["path"]):
                answer = _unknown(scope, headers)
        await (answer or self.app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or _text(hosts[0]).lower() not in self.hosts:
            return _refused("this server does not answer to that host name; see --host", 421)
        changes = scope["method"] not in SAFE
        origin = headers.get(b"origin")
        if origin is not None:
            # Not the scheme: a proxy in front may have ended TLS.
            _, _, host = _text(origin).lower().partition("://")
            if host not in self.hosts:
                return _refused("a page of another site made this request", 403)
        elif changes and headers.get(b"sec-fetch-site") != b"same-origin":
            return _refused("the request does not say which page it comes from", 403)
        length = _text(headers.get(b"content-length", b"0"))
        if changes and not (length.isdigit() and int(length) <= LARGEST_BODY):
            return _refused("the form is too large", 413)
        if changes and b"transfer-encoding" in headers:
            return _refused("a form needs a Content-Length", 411)
        return None

    def _visitor(self, scope: Scope, headers: dict[bytes, bytes]) -> Visitor | None:
        client: Sequence[str] | None = scope.get("client")
        found = self.access.by_proxy(client[0] if client else None, headers)
        return found or self.access.by_session(cookie_in(headers, COOKIE))


def is_public(path: str) -> bool:
    """Whether a path answers without a visitor."""
    return path in PUBLIC or path.startswith(STATIC)


def cookie_in(headers: Mapping[bytes, bytes], name: str) -> str:
    """The cookie with this name in these headers, "" if there is none."""
    try:
        morsel = SimpleCookie(_text(headers.get(b"cookie", b""))).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""


def _unknown(scope: Scope, headers: dict[bytes, bytes]) -> Response:
    """Send a person to the login; answer a program or a script with 401."""
    page = scope["method"] in SAFE and b"text/html" in headers.get(b"accept", b"")
    if not page or b"hx-request" in headers:
        return _refused("log in first: open the page in a browser", 401)
    query = f"?{_text(scope['query_string'])}" if scope["query_string"] else ""
    return RedirectResponse(f"/login?next={quote(scope['path'] + query, safe='')}", 303)


def _refused(why: str, status: int) -> Response:
    return PlainTextResponse(f"{why}\n", status)


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name for name, _ in message.get("headers", ())}
            more = [
                (name.encode(), value.encode())
                for name, value in HEADERS.items()
                if name.encode() not in given
            ]
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return sent


def _text(data: bytes) -> str:
    return data.decode("latin-1")
