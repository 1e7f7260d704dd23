"""Routes administration requests: a path and a method read or change the namespace.

Rule: without a key, only requests that name this machine are answered. A web page in a browser of
this machine can let its own host name point to 127.0.0.1 and send requests here (DNS rebinding),
but it cannot change the `Host` header, which keeps that name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from aztask.emulator.admin import atom, descriptions, rules
from aztask.emulator.admin.descriptions import EntitySnapshot
from aztask.emulator.amqp.errors import AmqpError
from aztask.emulator.broker.broker import Broker
from aztask.emulator.broker.entities import SUBSCRIPTIONS, Entity, Kind, SubscriptionRule
from aztask.emulator.broker.filters import CorrelationFilter
from aztask.emulator.broker.namespace import EntityExists
from aztask.emulator.options import is_loopback
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    ConfigurationError,
    QueueFull,
    QueueNotFound,
)

MAX_PAGE = 1000
_ATOM_ENTRY = "application/atom+xml;type=entry;charset=utf-8"
_ATOM_FEED = "application/atom+xml;type=feed;charset=utf-8"
_HEALTHY = '{"status":"healthy","message":"Service is healthy."}'
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. headers: by lower-case name. query: the last value of each name."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response: status, document and its content type."""

    status: int
    body: str = ""
    content_type: str = _ATOM_ENTRY
    headers: dict[str, str] = field(default_factory=dict)


def failed(status: int, detail: str) -> HttpResponse:
    """Return a response with the service's error document."""
    return HttpResponse(status, atom.error(status, detail), "application/xml; charset=utf-8")


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

    def __init__(self, broker: Broker, deleted: Callable[[str], None], secure: bool) -> None:
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
            kind = Kind.QUEUE if lowered.endswith("queues") else Kind.TOPIC
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
            changed = descriptions.updated_from(atom.description(request.body, name), existing)
            return self._shown(request, self._namespace.update(changed))
        if current is not None:
            raise EntityExists(f"the messaging entity {current.path!r} exists already")
        kind = Kind.SUBSCRIPTION if subscription else self._kind(request.body)
        element = atom.description(request.body, descriptions.NAMES[kind])
        created = self._namespace.create(descriptions.created_from(element, path, kind))
        return self._shown(request, created, 201)

    @staticmethod
    def _kind(body: bytes) -> Kind:
        return Kind.TOPIC if b"TopicDescription" in body else Kind.QUEUE

    def _shown(self, request: HttpRequest, entity: Entity, status: int = 200) -> HttpResponse:
        return HttpResponse(status, self._entry(request, entity))

    def _entry(self, request: HttpRequest, entity: Entity) -> str:
        below = self._namespace.subscriptions(entity) if entity.kind is Kind.TOPIC else []
        host = request.headers.get("host", "localhost")
        counts = self._broker.engine.stats(entity.path)
        filters = _filter_counts(below)
        lost = self._namespace.transfer_dead(entity)
        shown = EntitySnapshot(entity, counts, len(below), f"sb://{host}", filters, lost)
        url = f"{self._scheme}://{host}/{entity.path}"
        times = (entity.created, entity.updated)
        return atom.entry(url, entity.name, times, descriptions.description_of(shown))

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
        body = atom.feed(url, title, now, map(write, page), following)
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
            rule = rules.rule_from(atom.description(request.body, "RuleDescription"), name)
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
        return atom.entry(url, rule.name, times, rules.rule_description(rule))

    def _namespace_info(self, request: HttpRequest) -> HttpResponse:
        now = self._broker.clock.wall()
        host = request.headers.get("host", "localhost")
        content = "".join(
            (
                f'<NamespaceInfo xmlns="{atom.CONNECT}">',
                atom.tag("CreatedTime", atom.instant(0)),
                atom.tag("MessagingSKU", "Premium"),
                atom.tag("MessagingUnits", "1"),
                atom.tag("ModifiedTime", atom.instant(now)),
                atom.tag("Name", "aztask-emulator"),
                atom.tag("NamespaceType", "Messaging"),
                "</NamespaceInfo>",
            )
        )
        url = f"{self._scheme}://{host}/$namespaceinfo"
        return HttpResponse(200, atom.entry(url, "aztask-emulator", (0, now), content))


def _filter_counts(subscriptions: Sequence[Entity]) -> tuple[int, int]:
    """Return the numbers of SQL filters and of correlation filters.

    The service counts true and false filters as SQL filters.
    """
    filters = [rule.filter for subscription in subscriptions for rule in subscription.rules]
    correlation = sum(isinstance(each, CorrelationFilter) for each in filters)
    return len(filters) - correlation, correlation


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else default
