"""Routes administration requests, and serves the HTTP port: these, the page, and messages.

Rule: without a key, only requests that name this machine are answered. A web page in a browser of
this machine can let its own host name point to 127.0.0.1 and send requests here (DNS rebinding),
but it cannot change the `Host` header, which keeps that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from aztask.emulator import websocket
from aztask.emulator.admin import descriptions, page
from aztask.emulator.admin.descriptions import EntitySnapshot
from aztask.emulator.admin.http import (
    MAX_BODY,
    MAX_HEAD,
    BadRequest,
    HttpRequest,
    HttpResponse,
    failed,
    linger,
    read_body,
    read_head,
)
from aztask.emulator.admin.runtime import Requester, Runtime, RuntimeCall, call_of
from aztask.emulator.amqp import AmqpError
from aztask.emulator.broker.broker import Service
from aztask.emulator.broker.entities import (
    SUBSCRIPTIONS,
    Entity,
    EntityKind,
    SubscriptionRule,
    Tier,
)
from aztask.emulator.broker.filters import CorrelationFilter
from aztask.emulator.broker.namespace import EntityExists
from aztask.emulator.config import is_loopback
from aztask.emulator.server import Server
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    ConfigurationError,
    QueueFull,
    QueueNotFound,
)

MAX_PAGE = 1000
_ATOM_FEED = "application/atom+xml;type=feed;charset=utf-8"
_HEALTHY = '{"status":"healthy","message":"Service is healthy."}'
_Item = TypeVar("_Item")


def _names_this_machine(request: HttpRequest) -> bool:
    """Whether its Host header is a loopback address or missing; browsers always send one."""
    try:
        name = urlsplit(f"//{request.headers.get('host', 'localhost')}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)


_STATUS: tuple[tuple[type[AztaskError], int], ...] = (
    (EntityExists, 409),
    (QueueNotFound, 404),
    (ConfigurationError, 400),
    (QueueFull, 403),
    (BrokerUnavailable, 503),
)


class Routes:
    """Answers requests.

    deleted: called with the path of every deleted entity. secure: write URLs with https.
    """

    def __init__(self, broker: Service, deleted: Callable[[str], None], secure: bool) -> None:
        self._broker = broker
        self._namespace = broker.namespace
        self._deleted = deleted
        self._scheme = "https" if secure else "http"

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request. An error becomes a status and a document.

        Every client may ask for the health, as of Microsoft's emulator; a queue may have that name.
        """
        if request.path.strip("/") == "health" and "api-version" not in request.query:
            return HttpResponse(200, _HEALTHY, "application/json")
        if not (self._broker.access.required or _names_this_machine(request)):
            return failed(
                421,
                "without a key, only 127.0.0.1 and localhost are served: use one of these, or set"
                " AZTASK_EMULATOR_SHARED_ACCESS_KEY",
            )
        try:
            path = unquote(request.path).strip("/")
            self._broker.access.bearer(request.headers.get("authorization"), path)
            return self._route(request, path)
        except AmqpError as error:
            return failed(401, error.description)
        except AztaskError as error:
            status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
            return failed(status, str(error))

    def _route(self, request: HttpRequest, path: str) -> HttpResponse:
        lowered = path.lower()
        parts = path.split("/")
        if lowered == "$namespaceinfo":
            return self._namespace_info(request)
        if lowered in ("$resources/queues", "$resources/topics"):
            kind = EntityKind.QUEUE if lowered.endswith("queues") else EntityKind.TOPIC
            return self._list(request, self._namespace.all(kind))
        at = [part.lower() for part in parts]
        if "subscriptions" in at[1:]:
            index = at.index("subscriptions", 1)
            return self._subscriptions(request, "/".join(parts[:index]), parts[index + 1 :])
        return self._entity(request, path)

    def _subscriptions(self, request: HttpRequest, topic: str, rest: Sequence[str]) -> HttpResponse:
        if not rest:
            return self._list(request, self._namespace.subscriptions(self._namespace.get(topic)))
        path = f"{topic}{SUBSCRIPTIONS}{rest[0]}"
        if len(rest) == 1:
            return self._entity(request, path)
        if rest[1].lower() == "rules" and len(rest) <= 3:
            return self._rules(request, path, rest[2] if len(rest) == 3 else None)
        return failed(404, f"there is nothing at {request.path[:300]!r}")

    # -- entities

    def _entity(self, request: HttpRequest, path: str) -> HttpResponse:
        match request.method:
            case "GET":
                return self._shown(request, self._namespace.get(path))
            case "DELETE":
                for entity in self._namespace.delete(path):
                    self._deleted(entity.path)
                return HttpResponse(200)
            case "PUT":
                return self._put(request, path)
        return failed(405, f"{request.method} is not available here")

    def _put(self, request: HttpRequest, path: str) -> HttpResponse:
        subscription = SUBSCRIPTIONS in path
        current = self._namespace.find(path)
        if request.headers.get("if-match"):
            existing = self._namespace.get(path)
            name = descriptions.NAMES[existing.kind]
            changed = descriptions.updated_from(
                descriptions.description(request.body, name), existing
            )
            return self._shown(request, self._namespace.update(changed))
        if current is not None:
            raise EntityExists(f"the messaging entity {current.path!r} exists already")
        kind = EntityKind.SUBSCRIPTION if subscription else self._kind(request.body)
        element = descriptions.description(request.body, descriptions.NAMES[kind])
        created = self._namespace.create(descriptions.created_from(element, path, kind))
        return self._shown(request, created, 201)

    @staticmethod
    def _kind(body: bytes) -> EntityKind:
        return EntityKind.TOPIC if b"TopicDescription" in body else EntityKind.QUEUE

    def _shown(self, request: HttpRequest, entity: Entity, status: int = 200) -> HttpResponse:
        return HttpResponse(status, self._entry(request, entity))

    def _entry(self, request: HttpRequest, entity: Entity) -> str:
        below = self._namespace.subscriptions(entity) if entity.kind is EntityKind.TOPIC else []
        host = request.headers.get("host", "localhost")
        counts = self._broker.engine.stats(entity.path)
        filters = _filter_counts(below)
        lost = self._namespace.transfer_dead(entity)
        shown = EntitySnapshot(entity, counts, len(below), f"sb://{host}", filters, lost)
        url = f"{self._scheme}://{host}/{entity.path}"
        times = (entity.created, entity.updated)
        return descriptions.entry(url, entity.name, times, descriptions.description_of(shown))

    def _list(self, request: HttpRequest, entities: list[Entity]) -> HttpResponse:
        return self._feed(request, entities, lambda entity: self._entry(request, entity))

    def _feed(
        self, request: HttpRequest, items: Sequence[_Item], write: Callable[[_Item], str]
    ) -> HttpResponse:
        if request.method != "GET":
            return failed(405, f"{request.method} is not available here: the path lacks a name")
        skip = _number(request.query.get("$skip"), 0)
        top = min(_number(request.query.get("$top"), 100), MAX_PAGE)
        page = items[skip : skip + top]
        url = f"{self._scheme}://{request.headers.get('host', 'localhost')}{request.path}"
        following = None
        if skip + top < len(items):
            following = f"{url}?$skip={skip + top}&$top={top}"
        title = request.path.rsplit("/", 1)[-1]
        now = self._broker.clock.wall()
        body = descriptions.feed(url, title, now, map(write, page), following)
        return HttpResponse(200, body, _ATOM_FEED)

    # -- rules

    def _rules(self, request: HttpRequest, path: str, name: str | None) -> HttpResponse:
        entity = self._namespace.get(path)
        if name is None:
            return self._feed(
                request, entity.rules, lambda rule: self._rule_entry(request, path, rule)
            )
        if request.method == "DELETE":
            self._namespace.remove_rule(path, name)
            return HttpResponse(200)
        if request.method == "PUT":
            rule = descriptions.rule_from(
                descriptions.description(request.body, "RuleDescription"), name
            )
            if request.headers.get("if-match"):
                self._namespace.replace_rule(path, rule)
                return self._rule(request, path, name, 200)
            self._namespace.add_rule(path, rule)
            return self._rule(request, path, name, 201)
        return self._rule(request, path, name, 200)

    def _rule(self, request: HttpRequest, path: str, name: str, status: int) -> HttpResponse:
        entity = self._namespace.get(path)
        for rule in entity.rules:
            if rule.name.lower() == name.lower():
                return HttpResponse(status, self._rule_entry(request, path, rule))
        raise QueueNotFound(f"the rule {name[:100]!r} could not be found in {path!r}")

    def _rule_entry(self, request: HttpRequest, path: str, rule: SubscriptionRule) -> str:
        host = request.headers.get("host", "localhost")
        url = f"{self._scheme}://{host}/{path}/Rules/{rule.name}"
        times = (rule.created, rule.created)
        return descriptions.entry(url, rule.name, times, descriptions.rule_description(rule))

    def _namespace_info(self, request: HttpRequest) -> HttpResponse:
        now = self._broker.clock.wall()
        host = request.headers.get("host", "localhost")
        tier = self._namespace.tier or Tier.PREMIUM
        content = "".join(
            (
                f'<NamespaceInfo xmlns="{descriptions.CONNECT}">',
                descriptions.tag("CreatedTime", descriptions.instant(0)),
                descriptions.tag("MessagingSKU", tier.value),
                descriptions.tag("MessagingUnits", "1") if tier is Tier.PREMIUM else "",
                descriptions.tag("ModifiedTime", descriptions.instant(now)),
                descriptions.tag("Name", "aztask-emulator"),
                descriptions.tag("NamespaceType", "Messaging"),
                "</NamespaceInfo>",
            )
        )
        url = f"{self._scheme}://{host}/$namespaceinfo"
        return HttpResponse(200, descriptions.entry(url, "aztask-emulator", (0, now), content))


def _filter_counts(subscriptions: Sequence[Entity]) -> tuple[int, int]:
    """Return the numbers of SQL filters and of correlation filters.

    The service counts true and false filters as SQL filters.
    """
    filters = [rule.filter for subscription in subscriptions for rule in subscription.rules]
    correlation = sum(isinstance(each, CorrelationFilter) for each in filters)
    return len(filters) - correlation, correlation


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else default


# -- The server ------------------------------------------------------------------------------------
#
# A small HTTP/1.1 server for the administration and the runtime API.
#
# Rules
# 1. Head and body are limited before they are read. A connection is closed after `IDLE_SECONDS`
#    without a request, and `HEAD_SECONDS` after a request began and is not complete.
# 2. Each connection has one request at a time. It stays open unless the client asks to close it.
# 3. If there are `MAX_CONNECTIONS`, a new one takes the place of the one whose last request is the
#    oldest, of the address with the most. Slow clients, and receivers that wait, lock no other out.

log = logging.getLogger(__name__)

IDLE_SECONDS = 120.0
HEAD_SECONDS = 10.0
MAX_CONNECTIONS = 200
STOP_SECONDS = 1.0


class AdminServer:
    """Listens for administration clients, and for AMQP over WebSockets, which `amqp` serves."""

    def __init__(self, broker: Service, amqp: Server) -> None:
        self._broker = broker
        self._amqp = amqp
        self._routes = Routes(broker, amqp.entity_deleted, secure=False)
        self._runtime = Runtime(broker, secure=False)
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, str] = {}  # in the order of their last request
        self._serving: set[asyncio.Task[None] | None] = set()

    async def start(self, host: str, port: int, context: ssl.SSLContext | None = None) -> int:
        """Listen, with TLS if there is a `context`; return the bound port. Raises OSError."""
        self._routes = Routes(self._broker, self._amqp.entity_deleted, secure=context is not None)
        self._runtime = Runtime(self._broker, secure=context is not None)
        self._server = await asyncio.start_server(
            self._serve, host, port, ssl=context, limit=MAX_HEAD
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close all connections and wait until their tasks have ended.

        Connections are aborted. A close with TLS waits for the client's answer, which an idle
        client does not send.
        """
        if self._server:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        serving = [task for task in self._serving if task is not None]
        if serving:
            await asyncio.wait(serving, timeout=STOP_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if len(self._open) >= MAX_CONNECTIONS:
            self._make_room()
        self._open[writer] = str((writer.get_extra_info("peername") or ("?",))[0])
        self._serving.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, EOFError, TimeoutError):
            log.debug("an administration client disconnected or sent nothing in time")
        finally:
            if self._open.pop(writer, None) is not None or writer.transport.is_closing():
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            self._serving.discard(task)

    def _make_room(self) -> None:
        """Close one connection (rule 3). All wait: for their clients, or for a message."""
        peers = Counter(self._open.values())
        most = max(peers.values())
        writer = next(each for each, peer in self._open.items() if peers[peer] == most)
        del self._open[writer]
        writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        async with asyncio.timeout(IDLE_SECONDS):
            first = await reader.readexactly(1)
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                request = await read_head(first, reader)
                call = call_of(request.method, request.path)
                if call is None:
                    request = await read_body(request, reader, writer)
                else:
                    refusal, request = await self._checked(call, request, reader, writer)
        except BadRequest as error:
            writer.write(failed(error.status, str(error)).encoded(keep=False))
            await writer.drain()
            await linger(reader)
            return False
        if writer in self._open:  # now it is the one that was heard last
            self._open[writer] = self._open.pop(writer)
        if self._is_upgraded(request, writer):
            return False
        if call is None:
            response = self.answer(request)
        else:
            response = refusal or await self._answer(call, request, Requester(reader, writer))
            if not await self._meets_faults(writer):
                return False
        keep = request.headers.get("connection", "").lower() != "close"
        writer.write(response.encoded(keep=keep))
        await writer.drain()
        return keep

    async def _checked(
        self,
        call: RuntimeCall,
        request: HttpRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> tuple[HttpResponse | None, HttpRequest]:
        """Return why a request for messages is refused, or None, and the request with its body.

        What a refused client sends is read like the body of any other request, so that it gets its
        answer on a connection that stays open.
        """
        refusal = self._runtime.refusal(call, request)
        most = MAX_BODY if refusal else self._runtime.most_bytes(call)
        return refusal, await read_body(request, reader, writer, most, 403)

    async def _answer(
        self, call: RuntimeCall, request: HttpRequest, requester: Requester
    ) -> HttpResponse:
        """Return the response to a request for messages."""
        try:
            return await self._runtime.answer(call, request, requester)
        except Exception:
            log.exception("%s %s failed: a bug of the emulator", request.method, request.path)
            return failed(500, "a bug of the emulator, see its log")

    async def _meets_faults(self, writer: asyncio.StreamWriter) -> bool:
        """Delay an answer about messages, or break its connection, if the options say so."""
        faults = self._broker.faults
        if faults.on_output and faults.drops():
            writer.transport.abort()
            return False
        if faults.latency:
            await asyncio.sleep(faults.latency)
        return True

    def _is_upgraded(self, request: HttpRequest, writer: asyncio.StreamWriter) -> bool:
        """Hand a connection over that asks for a WebSocket; return whether it did."""
        required = self._broker.access.required
        reply = websocket.answer(request.path, request.headers, key_required=required)
        if request.method != "GET" or reply is None:
            return False
        self._open.pop(writer, None)
        writer.transport.write(reply)
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # of a stream it always is
        websocket.WebSocketEndpoint(self._amqp, transport, writer)
        return True

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request: of the page, or of the administration."""
        try:
            if request.path in ("/", page.STYLE_PATH) or request.path.startswith("/$entity/"):
                return self._page(request)
            return self._routes.answer(request)
        except Exception:
            log.exception("%s %s failed: a bug of the emulator", request.method, request.path)
            return failed(500, "a bug of the emulator, see its log")

    def _page(self, request: HttpRequest) -> HttpResponse:
        """Answer a browser (the rules are in `page`)."""
        if request.method != "GET":
            return failed(405, "the page is for reading")
        if not (self._broker.access.required or websocket.from_here(request.headers)):
            return failed(421, "without a key, the page is for 127.0.0.1 and localhost")
        if not page.allowed(self._broker, request.headers):
            asked = {"WWW-Authenticate": 'Basic realm="aztask emulator", charset="UTF-8"'}
            return HttpResponse(401, "the key is the password", "text/plain", asked)
        if request.path == page.STYLE_PATH:
            return HttpResponse(200, page.STYLE, "text/css; charset=utf-8", page.HEADERS)
        text = page.render(self._broker, self._amqp.endpoints, request.path)
        if text is None:
            return failed(404, f"there is nothing at {request.path[:300]!r}")
        return HttpResponse(200, text, "text/html; charset=utf-8", page.HEADERS)
