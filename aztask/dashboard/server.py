"""The server: routes around the pages, the login, the stream that says when to read again."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import uvicorn
from markupsafe import escape
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from aztask.dashboard import pages
from aztask.dashboard.access import (
    COOKIE,
    LOGIN_COOKIE,
    LOGIN_SECONDS,
    SESSION_SECONDS,
    LoginRefusal,
    Logins,
    ProxyLogin,
    Visitor,
    read_accounts,
)
from aztask.dashboard.acting import HIDDEN, PageRequest, act, confirmation, edit_form
from aztask.dashboard.guard import ENTRA, ENTRA_BACK, Guard, cookie_in
from aztask.dashboard.render import Pages
from aztask.dashboard.site import Ask, Making, Shown, Site
from aztask.errors import ConfigurationError
from aztask.operate.jobrunner import working
from aztask.operate.requests import Role
from aztask.support.display import Secret, mask, visible
from aztask.support.listen import BoundSockets, bind
from aztask.version import __version__

if TYPE_CHECKING:  # it needs an extra of its own
    from aztask.dashboard.entra import EntraLogin

STATIC: Final = {
    "dash.css": "text/css; charset=utf-8",
    "dash.js": "text/javascript; charset=utf-8",
    "htmx.min.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "uplot.min.css": "text/css; charset=utf-8",
    "uplot.min.js": "text/javascript; charset=utf-8",
}
MOST_STREAMS: Final = 500
NICENESS: Final = 10
"""About a ninth of the share of a core that others get while all cores are busy: sched(7)."""

SHORTEST_SECRET: Final = 16
MOST_FIELDS: Final = 50
STALE: Final = (
    "This form is of an earlier login, or of another page. Go back, reload the page, and try again."
)
Answer = TypeVar("Answer")
Failure: TypeAlias = tuple[int, Shown]
WRONG: Final = "The name or the password is wrong."
NO_ENTRA: Final = "This page has no login with Entra ID."
THIS_MACHINE: Final = ("localhost", "127.0.0.1", "[::1]")


@dataclass
class Dashboard:
    """The routes of one site.

    * `interval`: seconds between two notes of the stream. `entra`: None without Entra ID.
    """

    site: Site
    access: Logins
    interval: float = 5.0
    entra: EntraLogin | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _pages: Pages = field(default_factory=Pages)
    _streams: int = 0

    @property
    def most(self) -> Role:
        """The highest role that a person may have."""
        theirs = self.access.most
        return theirs if self.entra is None else max(theirs, self.entra.settings.most)

    def routes(self) -> list[Route]:
        """Every route. Those of `guard.PUBLIC` are open, all others need a visitor."""
        shown = [Route(path, self._page, methods=["GET"]) for path in pages.PAGES]
        return [
            *shown,
            Route("/history.json", self._history, methods=["GET"]),
            Route("/live", self._live, methods=["GET"]),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route(ENTRA, self._entra, methods=["GET"]),
            Route(ENTRA_BACK, self._entra_back, methods=["GET"]),
            Route("/logout", self._change, methods=["POST"]),
            Route("/act", self._question, methods=["GET"]),
            Route("/act", self._change, methods=["POST"]),
            Route("/edit", self._edit, methods=["GET"]),
            Route("/static/{name}", self._static, methods=["GET"]),
            Route("/healthz", self._health, methods=["GET"]),
        ]

    def application(self, hosts: Sequence[str]) -> Guard:
        """The ASGI application. hosts: what the header Host may be."""
        inner = Starlette(
            routes=self.routes(),
            exception_handlers={404: self._no_page, Exception: self._broken},
        )
        return Guard(inner, self.access, frozenset(each.lower() for each in hosts))

    # -- pages -------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        page = pages.PAGES[request.url.path]
        ask = self._ask(request)
        try:
            shown, status = await run_in_threadpool(self.site.answer, page, ask), 200
        except Making as error:
            status, shown = 200, pages.failed(error)[1]  # htmx shows no page of another status
        except Exception as error:  # noqa: BLE001  # an SDK may raise anything; the page says it
            status, shown = pages.failed(error)
        return self._html(request, shown, status)

    async def _history(self, request: Request) -> Response:
        ask = self._ask(request)
        try:
            return JSONResponse(await run_in_threadpool(pages.charts, self.site, ask))
        except Exception as error:  # noqa: BLE001  # as in `_page`
            status, shown = pages.failed(error)
            return JSONResponse({"problem": visible(mask(shown.values["text"]))}, status)

    def _ask(self, request: Request) -> Ask:
        visitor: Visitor = request.scope["visitor"]
        query = dict(request.query_params)
        sees = visitor.role >= self.site.values_role
        return Ask(request.url.path, query, visitor, sees)

    def _html(self, request: Request, shown: Shown, status: int = 200) -> Response:
        visitor: Visitor | None = request.scope.get("visitor")
        query = request.url.query
        context = {
            "title": shown.title,
            "made_at": shown.at,
            "live": shown.live,
            "visitor": visitor,
            "menu": pages.MENU,
            "path": request.url.path,
            # Not through `mask`: an address that is cut leads elsewhere.
            "here": escape(request.url.path + (f"?{query}" if query else "")),
            "address": self.site.app.address if visitor is not None else "",
            "name": self.site.app.name if visitor is not None else "aztask",
            "version": __version__,
            **shown.values,
        }
        return HTMLResponse(self._pages.fill(shown.template, context), status)

    async def _no_page(self, request: Request, error: Exception) -> Response:
        values = {"text": "There is no such page."}
        return self._html(request, Shown("failed", "Not found", values), 404)

    async def _broken(self, request: Request, error: Exception) -> Response:
        return PlainTextResponse("this page failed; the server's log has the reason\n", 500)

    # -- the stream --------------------------------------------------------------------------

    async def _live(self, request: Request) -> Response:
        if self._streams >= MOST_STREAMS:
            return PlainTextResponse("too many pages are open\n", 503)
        return StreamingResponse(self._notes(), media_type="text/event-stream")

    async def _notes(self) -> AsyncIterator[str]:
        """A note whenever a page may have changed. It holds no data: the page asks for that."""
        self._streams += 1
        number = 0
        try:
            yield "retry: 3000\n\n"
            while not self.stopping.is_set():
                try:
                    await asyncio.wait_for(self.stopping.wait(), self.interval)
                except TimeoutError:
                    number += 1
                    yield f"event: figures\ndata: {number}\n\n"
        finally:
            self._streams -= 1

    # -- login -------------------------------------------------------------------------------

    async def _login(self, request: Request) -> Response:
        following = _local(request.query_params.get("next", "/"))
        if request.method == "GET":
            if "key" not in request.query_params:
                return self._login_page(request)
            visitor = self.access.by_link(request.query_params["key"])
        else:
            form = await request.form(max_files=0, max_fields=MOST_FIELDS)
            name, password = str(form.get("name", "")), str(form.get("password", ""))
            visitor = await run_in_threadpool(self.access.login, name, password)
        if visitor is None:
            return self._login_page(request, WRONG, 401)
        return self._logged_in(request, visitor, following)

    def _logged_in(self, request: Request, visitor: Visitor, following: str) -> Response:
        answer = RedirectResponse(following, 303)
        answer.set_cookie(
            COOKIE,
            self.access.session(visitor),
            max_age=int(SESSION_SECONDS),
            httponly=True,
            secure=_is_secure(request),
            samesite="lax",
        )
        return answer

    def _login_page(self, request: Request, problem: str = "", status: int = 200) -> Response:
        values = {
            "problem": problem,
            "passwords": self.access.passwords,
            "entra": self.entra is not None,
            "following": _local(request.query_params.get("next", "/")),
        }
        return self._html(request, Shown("login", "Log in", values), status)

    async def _entra(self, request: Request) -> Response:
        """Send a person to Entra ID."""
        entra = self.entra
        if entra is None:
            return self._login_page(request, NO_ENTRA, 404)
        following = _local(request.query_params.get("next", "/"))
        begun = await run_in_threadpool(entra.begin, _back(request), following)
        if isinstance(begun, LoginRefusal):
            return self._login_page(request, begun.text, begun.status)
        answer = RedirectResponse(begun.address, 303)
        answer.set_cookie(
            LOGIN_COOKIE,
            begun.key,
            max_age=int(LOGIN_SECONDS),
            path=ENTRA_BACK,
            httponly=True,
            secure=_is_secure(request),
            samesite="lax",  # the answer comes from another site, by a link that is followed
        )
        return answer

    async def _entra_back(self, request: Request) -> Response:
        """Entra ID has sent the person back: check its answer, and begin a session."""
        if self.entra is None:
            return self._login_page(request, NO_ENTRA, 404)
        key = cookie_in(dict(request.scope["headers"]), LOGIN_COOKIE)
        person = await run_in_threadpool(self.entra.finish, key, dict(request.query_params))
        if isinstance(person, LoginRefusal):
            answer = self._login_page(request, person.text, person.status)
        else:
            visitor = Visitor(person.name, person.role)
            answer = self._logged_in(request, visitor, person.following)
        answer.delete_cookie(LOGIN_COOKIE, path=ENTRA_BACK)
        return answer

    # -- changes -----------------------------------------------------------------------------

    async def _change(self, request: Request) -> Response:
        """Everything that a visitor sends comes here: the form's token is checked first."""
        visitor: Visitor = request.scope["visitor"]
        form = await request.form(max_files=0, max_fields=MOST_FIELDS)
        if not visitor.wrote(str(form.get("csrf", ""))):
            return self._html(request, Shown("failed", "Nothing was done", {"text": STALE}), 403)
        if request.url.path == "/logout":
            return self._logout()
        asked = self._asked(request, form)
        answer = await self._worked(act, asked)
        if isinstance(answer, str):
            return RedirectResponse(answer, 303)
        return self._html(request, answer[1], answer[0])

    async def _question(self, request: Request) -> Response:
        """What an action would do, counted."""
        status, shown = await self._worked(confirmation, self._asked(request, {}))
        return self._html(request, shown, status)

    async def _edit(self, request: Request) -> Response:
        query = request.query_params
        given = query.get("queue", ""), query.get("id", "")
        status, shown = await self._worked(edit_form, self.site, request.scope["visitor"], *given)
        return self._html(request, shown, status)

    def _asked(self, request: Request, form: Mapping[str, Any]) -> PageRequest:
        values = {name: value for name, value in request.query_params.items() if name != "action"}
        values |= {name: str(form[name]) for name in HIDDEN if name in form}
        count = str(form.get("confirmed", ""))
        confirmed = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else None
        name = request.query_params.get("action", "")
        return PageRequest(self.site, request.scope["visitor"], name, values, confirmed)

    async def _worked(self, function: Callable[..., Answer], *given: Any) -> Answer | Failure:
        try:
            return await run_in_threadpool(function, *given)
        except Exception as error:  # noqa: BLE001  # as in `_page`
            return pages.failed(error)

    def _logout(self) -> Response:
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE)
        return answer

    # -- the rest ----------------------------------------------------------------------------

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            return PlainTextResponse("there is no such file\n", 404)
        data = files("aztask.dashboard").joinpath("static", name).read_bytes()
        headers = {"cache-control": "public, max-age=3600"}
        return Response(data, media_type=STATIC[name], headers=headers)

    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")


def _is_secure(request: Request) -> bool:
    return request.headers.get("x-forwarded-proto") == "https" or request.url.is_secure


def _back(request: Request) -> str:
    """Where Entra ID sends the browser: to this server, under the name that `Guard` has checked.

    Entra ID takes an address without TLS for this machine alone, so a proxy in front that does not
    say that it ended TLS did so.
    """
    host = request.headers["host"]
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    plain = name in THIS_MACHINE and not _is_secure(request)
    return f"{'http' if plain else 'https'}://{host}{ENTRA_BACK}"


def _local(address: str) -> str:
    """An address on this server; anything else becomes the first page."""
    inside = address.startswith("/") and not address.startswith("//") and "\\" not in address
    return address if inside and address.isprintable() else "/"


# -- starting ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a server listens, and under which names it answers.

    * `host`, `port`: of a TCP address. `socket`: of a Unix socket instead.
    * `names`: host names beside those of the address, with a port or without.
    """

    host: str = "127.0.0.1"
    port: int = 9467
    socket: Path | None = None
    names: Sequence[str] = ()

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        if self.socket is not None:
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def hosts(self) -> list[str]:
        """What the header Host may be."""
        own = [self.host] if ":" not in self.host else [f"[{self.host}]"]
        if self.local:
            own += ["localhost", "127.0.0.1", "[::1]"]
        return [*self.names, *(each for name in (*own, *self.names) for each in self._both(name))]

    def _both(self, name: str) -> list[str]:
        return [f"{name}:{self.port}", *([name] if self.port in (80, 443) else [])]


def access_of(
    listening: Listening,
    *,
    password_file: Path | None,
    link_role: str,
    proxy_header: str | None,
    proxy_peers: Sequence[str],
    proxy_secret: Path | None,
    proxy_role: str,
    entra: bool = False,
) -> Logins:
    """Who may come in. Raises ConfigurationError for what would let in everyone.

    proxy_role: of people who are not in the password file; ``none`` refuses them. entra: whether
    people log in with Entra ID.
    """
    accounts = read_accounts(password_file) if password_file is not None else {}
    proxy = None
    if proxy_header is not None:
        secret = secret_in(proxy_secret) if proxy_secret is not None else None
        if listening.socket is None and not (proxy_peers and secret):
            raise ConfigurationError(
                "a proxy's header counts only on a Unix socket (--socket), or from a listed peer "
                "with a shared secret (--proxy-peer and --proxy-secret-file): anyone could send it"
            )
        peers = frozenset(proxy_peers) if listening.socket is None else frozenset()
        role = None if proxy_role == "none" else Role.named(proxy_role)
        proxy = ProxyLogin(proxy_header.lower(), peers, secret, role)
    alone = password_file is None and proxy is None and not entra
    link = Role.named(link_role) if alone else None
    if link is not None and not listening.local:
        raise ConfigurationError(
            f"{listening.host} is reached from other machines: add --password-file, --entra-tenant "
            "or a proxy that logs people in, or listen on 127.0.0.1"
        )
    return Logins(accounts, proxy, link)


def secret_in(path: Path) -> Secret:
    """The secret in a file, without the space around it. Raises ConfigurationError."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the secret file {path} cannot be read: {error}") from None
    if len(text) < SHORTEST_SECRET or not text.isascii():
        raise ConfigurationError(
            f"the secret in {path} needs at least {SHORTEST_SECRET} ASCII characters; make one "
            "with: openssl rand -hex 32"
        )
    return Secret(text)


def bound(listening: Listening) -> tuple[Listening, BoundSockets | None]:
    """Where a server will listen, with the port that the system chose for port 0, and its sockets.

    None for a Unix socket. Raises ConfigurationError for a port that is taken.
    """
    if listening.socket is not None:
        return listening, None
    sockets = bind(listening.host, listening.port)
    return replace(listening, port=sockets.port), sockets


def serve(dashboard: Dashboard, listening: Listening, sockets: BoundSockets | None) -> None:
    """Serve until a signal ends it; open pages are told first. Raises BrokerUnavailable.

    A Unix socket that is in use is an error of the configuration. From now on this process runs
    below the priority of others, so that it takes no time from workers on the same machine.
    """
    if sys.platform != "win32":
        with suppress(OSError):  # a sandbox may not allow it
            os.nice(NICENESS)
    config = uvicorn.Config(
        dashboard.application(listening.hosts()),
        uds=None if listening.socket is None else str(listening.socket),
        # The names that a proxy sends are read by `Logins`, which knows whom it trusts.
        proxy_headers=False,
        server_header=False,
        log_level="error",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # People who may act make jobs; a dashboard that only reads has no permission to work on them.
    acts = dashboard.most >= Role.ACT and dashboard.site.app.results is not None
    try:
        with working(dashboard.site.app) if acts else nullcontext():
            server.run(None if sockets is None else list(sockets.sockets))
    except SystemExit:
        raise ConfigurationError(
            f"cannot listen on {listening.socket or listening.host}; is the address in use?"
        ) from None
