"""The two nodes that answer requests: ``$cbs`` accepts tokens, ``$management`` runs operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from aztask.emulator.amqp import encode, outgoing
from aztask.emulator.amqp.errors import DECODE_ERROR, NOT_FOUND, NOT_IMPLEMENTED, AmqpError
from aztask.emulator.amqp.link import Inbound
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
    Replies,
    Request,
    failure,
    request_of,
    response,
)
from aztask.emulator.broker.rules import RULE_OPERATIONS, rule_operation
from aztask.errors import AztaskError

ACCEPTED_STATUS = 202
SENDING = ("com.microsoft:schedule-message", "com.microsoft:cancel-scheduled-message")
"""Operations that need the permission Send; all others need Listen."""


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

    def __init__(self, replies: Replies, broker: Broker, claims: Claims) -> None:
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

    claims: the client's permissions. consumers: returns its receiving links.
    """

    def __init__(
        self,
        replies: Replies,
        broker: Broker,
        address: Address,
        claims: Claims,
        consumers: Callable[[], Sequence[Consumer]],
    ) -> None:
        super().__init__(replies)
        self._broker = broker
        self._address = address
        self._claims = claims
        self._consumers = consumers

    def handle(self, request: Request) -> None:
        """Submit the operation, or reply with the reason for refusing it."""
        try:
            entity = self._broker.namespace.find(self._address.entity)
            if entity is None:
                path = self._address.entity[:300]
                raise AmqpError(NOT_FOUND, f"the messaging entity {path!r} could not be found")
            body = request.body if isinstance(request.body, dict) else {}
            right = Right.SEND if request.operation in SENDING else Right.LISTEN
            self._claims.check(self._address.claimed, right)
            if request.operation in RULE_OPERATIONS:
                self.done(request, *self._rule(entity.path, request.operation, body))
                return
            call = ManagementCall(self._broker, entity, self._address.dead, body, self._consumers())
            function = operation(request.operation)
            self._broker.committer.submit(_RunOperation(self, request, function, call))
        except AmqpError as error:
            self.failed(request, error)

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


class _RunOperation(Change):
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
        """Reply with the result, or with the operation's own error."""
        if self._result is not None:
            self._link.done(self._request, *self._result)
        elif self._error is not None:
            self._link.failed(self._request, self._error)

    def fail(self, error: AztaskError) -> None:
        """Reply with the error of the transaction."""
        self._link.failed(self._request, as_amqp(error))
