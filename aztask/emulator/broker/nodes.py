"""The two nodes that answer requests: ``$cbs`` takes tokens, ``$management`` runs operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aztask.emulator.amqp import encode, outgoing
from aztask.emulator.amqp.errors import DECODE_ERROR, NOT_FOUND, NOT_IMPLEMENTED, AmqpError
from aztask.emulator.amqp.link import Inbound, ReceivingLink
from aztask.emulator.broker.access import Claims, Right
from aztask.emulator.broker.address import Address, parse_address
from aztask.emulator.broker.broker import Broker
from aztask.emulator.broker.committer import Change
from aztask.emulator.broker.conditions import as_amqp
from aztask.emulator.broker.consumer import Consumer
from aztask.emulator.broker.management import ManagementCall, Operation, operation
from aztask.emulator.broker.requests import (
    CBS_NAMES,
    MANAGEMENT_NAMES,
    Request,
    Responder,
    failure,
    request_of,
    responder_for,
    response,
)
from aztask.emulator.broker.rules import RULE_OPERATIONS, rule_operation
from aztask.errors import AztaskError

ACCEPTED_STATUS = 202
SENDING = ("com.microsoft:schedule-message", "com.microsoft:cancel-scheduled-message")
"""Operations that need the right to send; all others need that to listen."""


class RequestLink:
    """A link on which a client sends requests to a node."""

    def __init__(self, link: ReceivingLink, node: str, responders: list[Responder]) -> None:
        self.link = link
        self._node = node
        self._responders = responders

    def received(self, inbound: Inbound) -> None:
        """Accept the request's transfer, and answer it."""
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

    def handle(self, request: Request) -> None:
        """What the node does with a request."""
        raise NotImplementedError

    def reply(self, request: Request, message: bytes) -> None:
        """Send a response; when nobody listens for it, it is dropped."""
        responder = responder_for(self._responders, self._node, self.link, request.reply_to)
        if responder is not None:
            responder.send(message)


class CbsLink(RequestLink):
    """Requests to ``$cbs``: put-token."""

    def __init__(
        self,
        link: ReceivingLink,
        node: str,
        responders: list[Responder],
        broker: Broker,
        claims: Claims,
    ) -> None:
        super().__init__(link, node, responders)
        self._broker = broker
        self._claims = claims

    def handle(self, request: Request) -> None:
        """Verify the token and remember what it entitles to.

        The service refuses a token for an entity that does not exist with status 404, after it has
        verified the token: clients learn here that a queue is missing.
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
            self.reply(request, failure(request, CBS_NAMES, error))
            return
        body = encode.NULL
        self.reply(request, response(request, CBS_NAMES, ACCEPTED_STATUS, "Accepted", body=body))


class ManagementLink(RequestLink):
    """Requests to an entity's ``$management``."""

    def __init__(
        self,
        link: ReceivingLink,
        node: str,
        responders: list[Responder],
        *,
        broker: Broker,
        address: Address,
        consumers: Callable[[], Sequence[Consumer]],
        check: Callable[[Right], None],
    ) -> None:
        """check: raises AmqpError where the connection lacks the right."""
        super().__init__(link, node, responders)
        self._check = check
        self._broker = broker
        self._address = address
        self._consumers = consumers

    def handle(self, request: Request) -> None:
        """Start the operation, or say why not."""
        try:
            entity = self._broker.namespace.find(self._address.entity)
            if entity is None:
                path = self._address.entity[:300]
                raise AmqpError(NOT_FOUND, f"the messaging entity {path!r} could not be found")
            body = request.body if isinstance(request.body, dict) else {}
            self._check(Right.SEND if request.operation in SENDING else Right.LISTEN)
            if request.operation in RULE_OPERATIONS:
                self.done(request, *self._rule(entity.path, request.operation, body))
                return
            call = ManagementCall(self._broker, entity, self._address.dead, body, self._consumers())
            work = _RunOperation(self, request, operation(request.operation), call)
            self._broker.committer.submit(work)
        except AmqpError as error:
            self.failed(request, error)

    def _rule(self, path: str, name: str, body: dict[str, object]) -> tuple[int, bytes]:
        namespace = self._broker.namespace
        try:
            return rule_operation(namespace, namespace.get(path), name, body)
        except AztaskError as error:
            raise as_amqp(error) from error

    def done(self, request: Request, status: int, body: bytes) -> None:
        """Answer with the result."""
        self.reply(request, response(request, MANAGEMENT_NAMES, status, "OK", body=body))

    def failed(self, request: Request, error: AmqpError) -> None:
        """Answer with the error."""
        self.reply(request, failure(request, MANAGEMENT_NAMES, error))


class _RunOperation(Change):
    """One management request."""

    def __init__(
        self, node: ManagementLink, request: Request, function: Operation, call: ManagementCall
    ) -> None:
        self._node = node
        self._request = request
        self._function = function
        self._call = call
        self._result: tuple[int, bytes] | None = None
        self._error: AmqpError | None = None

    def execute(self) -> None:
        """Run it; what it changed before it failed is taken back, and nothing else."""
        database = self._call.broker.namespace.database
        self._result = self._error = None
        with database.transaction() as connection:
            connection.execute("SAVEPOINT request")
            try:
                self._result = self._function(self._call)
            except AmqpError as error:
                self._error = error
                connection.execute("ROLLBACK TO request")
            connection.execute("RELEASE request")

    def succeed(self) -> None:
        """Answer."""
        if self._result is not None:
            self._node.done(self._request, *self._result)
        elif self._error is not None:
            self._node.failed(self._request, self._error)

    def fail(self, error: AztaskError) -> None:
        """Answer with the error."""
        self._node.failed(self._request, as_amqp(error))
