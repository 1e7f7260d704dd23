"""The two nodes that answer requests: ``$cbs`` accepts tokens, ``$management`` runs operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from aztask.emulator.amqp import (
    DECODE_ERROR,
    NOT_ALLOWED,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    RESOURCE_LIMIT_EXCEEDED,
    AmqpError,
    encode,
    outgoing,
    sections,
)
from aztask.emulator.amqp.decode import skip
from aztask.emulator.amqp.encode import undescribed
from aztask.emulator.amqp.link import Inbound, ReceivingLink, SendingLink, raw_fields
from aztask.emulator.amqp.sections import Sections
from aztask.emulator.broker.access import TokenClaims
from aztask.emulator.broker.broker import Service
from aztask.emulator.broker.conditions import (
    ARGUMENT_ERROR,
    BUSY,
    SERVER_BUSY,
    as_amqp,
    status_of,
)
from aztask.emulator.broker.consumer import Consumer
from aztask.emulator.broker.dispatch import StoreChange, undone
from aztask.emulator.broker.entities import (
    Address,
    Entity,
    EntityKind,
    SubscriptionRule,
    parse_address,
)
from aztask.emulator.broker.entra import Right
from aztask.emulator.broker.filters import (
    CorrelationFilter,
    FalseFilter,
    Filter,
    RuleAction,
    SqlFilter,
    TrueFilter,
)
from aztask.emulator.broker.management import (
    Joining,
    ManagementCall,
    Operation,
    joining,
    operation,
    requested_settlement,
)
from aztask.emulator.broker.namespace import Namespace
from aztask.emulator.broker.settlement import transaction_of
from aztask.emulator.broker.transactions import SettledLocks, Transactions
from aztask.errors import AztaskError

# -- Requests and responses ------------------------------------------------------------------------
#
# Request and response over two links, as ``$cbs`` and ``$management`` use them.
#
# Rules
# 1. A response goes to the link whose target is the request's reply-to. If no target matches, it
#    goes to the latest response link of the same node, preferably in the same session.
# 2. Responses wait until the client grants credit. At most `MAX_WAITING` wait per link, and
#    `MAX_WAITING_BYTES`. Requests whose results would exceed `MAX_UNANSWERED` bytes in one turn are
#    refused as by a busy service: else a client that asks and does not read fills the memory.
# 3. Every request gets a response. An error becomes the status and condition of the response.

MAX_WAITING = 1000
MAX_WAITING_BYTES = 16 * 1024 * 1024
MAX_UNANSWERED = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    message: its sections. message_id: the encoded bytes. body: the amqp-value without descriptor.
    transaction: the id of the one that it belongs to.
    """

    message: Sections
    message_id: bytes
    reply_to: str
    operation: str
    body: Any
    transaction: bytes | None = None

    def parameter(self, name: str) -> Any:
        """Return an application property of the request, or None."""
        return self.message.application_properties.get(name)


def request_of(inbound: Inbound) -> Request:
    """Parse a request. Raises AmqpError if it is malformed."""
    message = sections.cut(inbound.payload)
    message_id = encode.NULL
    if message.properties:
        message_id = _first_property(message.raw, message.bare)
    properties = message.application_properties
    reply_to = message.property(sections.REPLY_TO)
    return Request(
        message,
        message_id,
        reply_to if isinstance(reply_to, str) else "",
        str(properties.get("operation", "")),
        sections.value_body(message),
        transaction_of(inbound.state),
    )


def _first_property(raw: bytes, position: int) -> bytes:
    return raw_fields(raw[position : skip(raw, position)])[0]


@dataclass(frozen=True, slots=True)
class PropertyNames:
    """The names that a node gives to the application properties of its responses."""

    status: str
    description: str
    condition: str


CBS_NAMES = PropertyNames("status-code", "status-description", "error-condition")
MANAGEMENT_NAMES = PropertyNames("statusCode", "statusDescription", "errorCondition")


def response(
    request: Request,
    names: PropertyNames,
    status: int,
    text: str,
    *,
    condition: str = "",
    body: bytes,
) -> bytes:
    """Return an encoded response. body: the encoded value."""
    properties = [encode.NULL] * 5 + [request.message_id]
    application = [
        (encode.string(names.status), encode.int32(status)),
        (encode.string(names.description), encode.string(text)),
    ]
    if condition:
        application.append((encode.string(names.condition), encode.symbol(condition)))
    tracking = request.parameter("com.microsoft:tracking-id")
    if isinstance(tracking, str):
        pair = (encode.string("com.microsoft:tracking-id"), encode.string(tracking))
        application.append(pair)
    return b"".join(
        (
            encode.fields(sections.PROPERTIES, properties),
            encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(application)),
            encode.described(sections.AMQP_VALUE, body),
        )
    )


def failure(request: Request, names: PropertyNames, error: AmqpError) -> bytes:
    """Return an encoded response that reports an error."""
    status = status_of(error.condition)
    return response(
        request, names, status, error.description, condition=error.condition, body=encode.NULL
    )


class Responder:
    """A link on which a client receives responses. node: the node that it is attached to."""

    def __init__(self, link: SendingLink, node: str) -> None:
        self.link = link
        self.node = node
        self._waiting: deque[bytes] = deque()
        self._bytes = 0

    @property
    def address(self) -> str:
        """The reply-to that names this link."""
        return self.link.target.address if self.link.target else ""

    def send(self, message: bytes) -> None:
        """Send a response now, or later when the client grants credit."""
        self._waiting.append(message)
        self._bytes += len(message)
        self.credited()
        if len(self._waiting) > MAX_WAITING or self._bytes > MAX_WAITING_BYTES:
            self._waiting.clear()
            self.link.detach(AmqpError(RESOURCE_LIMIT_EXCEEDED, "responses are not read"))

    def credited(self) -> None:
        """Send waiting responses: the client granted credit or drains the link."""
        while self._waiting and self.link.credit and self.link.attached:
            message = self._waiting.popleft()
            self._bytes -= len(message)
            self.link.send(message, uuid4().bytes)
        if self.link.draining and self.link.attached:
            self.link.drained()


class Responders(list[Responder]):
    """All response links of a client. unanswered: the bytes of this turn's results so far."""

    unanswered = 0


@dataclass(frozen=True, slots=True)
class Replies:
    """Sends the responses to the requests of one link.

    node: the node that the link is attached to. responders: all response links of the client.
    """

    link: ReceivingLink
    node: str
    responders: Responders

    def send(self, request: Request, message: bytes) -> None:
        """Send a response; it is dropped if the client has no link for it."""
        responder = self._responder(request.reply_to)
        if responder is not None:
            responder.send(message)

    def _responder(self, reply_to: str) -> Responder | None:
        """Choose the response link, as in rule 1."""
        session = self.link.session
        same_node = [each for each in self.responders if each.node == self.node]
        named = [each for each in same_node if reply_to and each.address == reply_to]
        near = [each for each in named or same_node if each.link.session is session]
        found = near or named or same_node
        return found[-1] if found else None


# -- ``$management`` operations on a subscription's rules: add, remove, enumerate ----------
#
# The descriptors are those of the service's request-response protocol
# (learn.microsoft.com, "AMQP 1.0 in Azure Service Bus: request-response-based operations").


_RULE, _EMPTY_ACTION = 0x0000013700000004, 0x0000013700000005
_SQL_ACTION = 0x0000013700000006
_SQL, _TRUE, _FALSE, _CORRELATION = (0x0000001370000000 + code for code in (6, 7, 8, 9))
_CORRELATION_NAMES = {
    "correlation-id": "CorrelationId",
    "message-id": "MessageId",
    "to": "To",
    "reply-to": "ReplyTo",
    "label": "Label",
    "session-id": "SessionId",
    "reply-to-session-id": "ReplyToSessionId",
    "content-type": "ContentType",
}

RULE_OPERATIONS = frozenset(
    f"com.microsoft:{name}" for name in ("add-rule", "remove-rule", "enumerate-rules")
)


def rule_operation(
    namespace: Namespace, entity: Entity, operation: str, body: dict[str, Any]
) -> tuple[int, bytes]:
    """Run one operation at once; return status and body. Raises AmqpError, AztaskError."""
    if entity.kind is not EntityKind.SUBSCRIPTION:
        raise AmqpError(NOT_ALLOWED, f"{entity.path!r} is not a subscription: it has no rules")
    if operation.endswith("enumerate-rules"):
        return _enumerate(entity, body)
    name = body.get("rule-name")
    if not isinstance(name, str) or not name:
        raise AmqpError(ARGUMENT_ERROR, "'rule-name' must be a string")
    if operation.endswith("remove-rule"):
        namespace.remove_rule(entity.path, name)
    else:
        namespace.add_rule(entity.path, _described_rule(name, body.get("rule-description")))
    return 200, encode.NULL


_FILTERS = frozenset(("sql-filter", "correlation-filter", "true-filter", "false-filter"))


def _described_rule(name: str, description: Any) -> SubscriptionRule:
    """Return the rule of a request; without a filter it matches everything.

    Raises AmqpError, ConfigurationError.
    """
    description = undescribed(description)
    if not isinstance(description, dict):
        raise AmqpError(ARGUMENT_ERROR, "'rule-description' must be a map")
    filters = sorted(str(key) for key in description.keys() & _FILTERS)
    if len(filters) > 1:
        raise AmqpError(ARGUMENT_ERROR, f"a rule has one filter, not {' and '.join(filters)}")
    action = undescribed(description.get("sql-rule-action"))
    text = action.get("expression") if isinstance(action, dict) else None
    return SubscriptionRule(
        name,
        _filter(description),
        action=RuleAction(str(text), _named_values(action)) if text else None,
    )


def _named_values(described: dict[Any, Any]) -> dict[str, Any]:
    given = undescribed(described.get("parameters"))
    return {str(key): v for key, v in given.items()} if isinstance(given, dict) else {}


def _filter(description: dict[Any, Any]) -> Filter:
    sql = undescribed(description.get("sql-filter"))
    if isinstance(sql, dict):
        return SqlFilter(str(sql.get("expression", "")), _named_values(sql))
    correlation = undescribed(description.get("correlation-filter"))
    if isinstance(correlation, dict):
        unknown = sorted(set(correlation) - set(_CORRELATION_NAMES) - {"properties"})
        if unknown:
            raise AmqpError(ARGUMENT_ERROR, f"no message has the property {unknown[0][:60]!r}")
        system = {
            ours: str(correlation[theirs])
            for theirs, ours in _CORRELATION_NAMES.items()
            if correlation.get(theirs) is not None
        }
        properties = correlation.get("properties")
        return CorrelationFilter(
            system, {str(k): v for k, v in properties.items()} if properties else {}
        )
    if "false-filter" in description:
        return FalseFilter()
    return TrueFilter()


def _enumerate(entity: Entity, body: dict[str, Any]) -> tuple[int, bytes]:
    skip = body.get("skip")
    top = body.get("top")
    start = skip if isinstance(skip, int) and skip > 0 else 0
    count = top if isinstance(top, int) and top > 0 else len(entity.rules)
    rules = entity.rules[start : start + count]
    if not rules:
        return 204, encode.NULL
    described = [
        encode.map_of([(encode.string("rule-description"), _description(rule))]) for rule in rules
    ]
    return 200, encode.map_of([(encode.string("rules"), encode.list_of(described))])


def _long_described(code: int, items: list[bytes]) -> bytes:
    return b"\x00" + encode.ulong(code) + encode.list_of(items)


def _description(rule: SubscriptionRule) -> bytes:
    return _long_described(
        _RULE,
        [
            _encoded(rule.filter),
            _encoded_action(rule.action),
            encode.string(rule.name),
            encode.timestamp(int(rule.created * 1000)),
        ],
    )


def _encoded_action(action: RuleAction | None) -> bytes:
    if action is None:
        return _long_described(_EMPTY_ACTION, [])
    return _long_described(_SQL_ACTION, [encode.string(action.text), encode.int32(20)])


def _encoded(rule_filter: Filter) -> bytes:
    match rule_filter:
        case SqlFilter(text, _):
            return _long_described(_SQL, [encode.string(text), encode.int32(20)])
        case CorrelationFilter(system, properties):
            values = [
                encode.string(system[name]) if name in system else encode.NULL
                for name in _CORRELATION_NAMES.values()
            ]
            pairs = [(encode.string(name), encode.simple(v)) for name, v in properties.items()]
            return _long_described(_CORRELATION, [*values, encode.map_of(pairs)])
        case FalseFilter():
            return _long_described(_FALSE, [])
        case TrueFilter():
            return _long_described(_TRUE, [])


ACCEPTED_STATUS = 202
SENDING = ("com.microsoft:schedule-message", "com.microsoft:cancel-scheduled-message")
"""Operations that need the permission Send; all others need Listen."""
SETTLING = "com.microsoft:update-disposition"


class RequestLink(ABC):
    """A link on which a client sends requests to a node."""

    def __init__(self, replies: Replies) -> None:
        self.replies = replies
        self.link = replies.link

    def received(self, inbound: Inbound) -> None:
        """Accept the transfer of a request, and process the request."""
        if not inbound.settled:
            first = inbound.delivery_id
            self.link.session.write(outgoing.disposition(True, first, first, outgoing.ACCEPTED))
        try:
            if inbound.too_large:
                raise AmqpError(DECODE_ERROR, "the request is too large")
            request = request_of(inbound)
        except AmqpError as error:
            self.link.detach(AmqpError(DECODE_ERROR, error.description))
            return
        self.handle(request)

    @abstractmethod
    def handle(self, request: Request) -> None:
        """Process one request and reply to it."""


class CbsLink(RequestLink):
    """Requests to ``$cbs``; the one operation is put-token."""

    def __init__(self, replies: Replies, broker: Service, claims: TokenClaims) -> None:
        super().__init__(replies)
        self._broker = broker
        self._claims = claims

    def handle(self, request: Request) -> None:
        """Verify the token and remember the claim that it proves.

        A valid token for an entity that does not exist is refused with status 404, as on the
        service. This is where clients notice that a queue is missing.
        """
        try:
            if request.operation != "put-token":
                raise AmqpError(NOT_IMPLEMENTED, f"$cbs does not do {request.operation[:100]!r}")
            audience = str(request.parameter("name") or "")
            kind = str(request.parameter("type") or "")
            token = request.body if isinstance(request.body, str) else ""
            claim = self._broker.access.claim(token, kind, audience)
            entity = parse_address(audience).entity
            if entity and self._broker.namespace.find(entity) is None:
                raise AmqpError(
                    NOT_FOUND, f"the messaging entity {audience[:300]!r} could not be found"
                )
            self._claims.add(audience, claim)
        except AmqpError as error:
            self.replies.send(request, failure(request, CBS_NAMES, error))
            return
        message = response(request, CBS_NAMES, ACCEPTED_STATUS, "Accepted", body=encode.NULL)
        self.replies.send(request, message)


class ManagementLink(RequestLink):
    """Requests to an entity's ``$management``.

    claims: the client's permissions. consumers: returns its receiving links. in_use: the names of
    links that requests were made for; a request keeps such a link from becoming idle.
    """

    def __init__(
        self,
        replies: Replies,
        broker: Service,
        address: Address,
        claims: TokenClaims,
        consumers: Callable[[], Sequence[Consumer]],
        transactions: Transactions,
        in_use: set[str],
    ) -> None:
        super().__init__(replies)
        self._in_use = in_use
        self._transactions = transactions
        self._broker = broker
        self._address = address
        self._claims = claims
        self._consumers = consumers

    def handle(self, request: Request) -> None:
        """Submit the operation, or reply with the reason for refusing it."""
        name = request.parameter("associated-link-name")
        if isinstance(name, str):
            self._in_use.add(name)
        try:
            if self._broker.faults.is_busy():
                raise BUSY
            entity = self._broker.namespace.find(self._address.entity)
            if entity is None:
                path = self._address.entity[:300]
                raise AmqpError(NOT_FOUND, f"the messaging entity {path!r} could not be found")
            if self._address.transfer:
                entity = self._broker.namespace.transfer(entity)
            body = request.body if isinstance(request.body, dict) else {}
            right = Right.SEND if request.operation in SENDING else Right.LISTEN
            self._claims.check(self._address.claimed, right)
            if request.operation in RULE_OPERATIONS:
                self.done(request, *self._rule(entity.path, request.operation, body))
                return
            call = ManagementCall(self._broker, entity, self._address.dead, body, self._consumers())
            function = operation(request.operation)
            if request.transaction is not None:
                self._join(request.transaction, request, call)
                return
            self._broker.committer.submit(_RunOperation(self, request, function, call))
        except AmqpError as error:
            self.failed(request, error)

    def _join(self, transaction: bytes, request: Request, call: ManagementCall) -> None:
        """Make an operation part of a transaction, and reply. Raises AmqpError."""
        name = request.operation
        if name == SETTLING:
            action, locks = requested_settlement(call)
            if locks:
                self._transactions.add(transaction, SettledLocks(self._broker, locks, action))
            self.done(request, 200, encode.NULL)
            return
        kind = joining(name)
        work = kind(call, self._transactions.work(transaction))
        self._transactions.add(transaction, work)
        self._broker.committer.submit(_JoinTransaction(self, request, work, call))

    def _rule(self, path: str, name: str, body: dict[str, object]) -> tuple[int, bytes]:
        namespace = self._broker.namespace
        try:
            return rule_operation(namespace, namespace.get(path), name, body)
        except AztaskError as error:
            raise as_amqp(error) from error

    def done(self, request: Request, status: int, body: bytes) -> None:
        """Reply with the result of the operation."""
        self.replies.send(request, response(request, MANAGEMENT_NAMES, status, "OK", body=body))

    def failed(self, request: Request, error: AmqpError) -> None:
        """Reply with the error of the operation."""
        self.replies.send(request, failure(request, MANAGEMENT_NAMES, error))


class _RunOperation(StoreChange):
    """Runs the operation of one management request and replies to it."""

    def __init__(
        self, link: ManagementLink, request: Request, function: Operation, call: ManagementCall
    ) -> None:
        self._link = link
        self._request = request
        self._function = function
        self._call = call
        self._result: tuple[int, bytes] | None = None
        self._error: AmqpError | None = None

    def execute(self) -> None:
        """Run the operation; if it fails, only its own changes are rolled back."""
        self._forget()
        self._result = None
        responders = self._link.replies.responders
        with undone(self._call.broker.namespace.database) as failure:
            if responders.unanswered > MAX_UNANSWERED:
                raise AmqpError(SERVER_BUSY, "too many requests at once; read their responses")
            self._result = self._function(self._call)
            responders.unanswered += len(self._result[1])
        self._error = failure.error

    def _forget(self) -> None:
        if self._result is not None:
            self._link.replies.responders.unanswered -= len(self._result[1])

    def succeed(self) -> None:
        """Reply with the result, or with the operation's own error."""
        self._forget()
        if self._result is not None:
            self._link.done(self._request, *self._result)
        elif self._error is not None:
            self._link.failed(self._request, self._error)

    def fail(self, error: AztaskError) -> None:
        """Reply with the error of the transaction."""
        self._forget()
        self._link.failed(self._request, as_amqp(error))


class _JoinTransaction(_RunOperation):
    """Begins an operation under a transaction and replies to its request.

    Its work has joined at the request already, so that a discharge right behind it finds it.
    """

    def __init__(
        self, link: ManagementLink, request: Request, work: Joining, call: ManagementCall
    ) -> None:
        super().__init__(link, request, work.begin, call)
        self._work = work

    def fail(self, error: AztaskError) -> None:
        """Reply with the error of the store; the work does not join."""
        self._work.joined = False
        super().fail(error)
