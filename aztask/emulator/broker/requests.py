"""Request and response over two links, as ``$cbs`` and ``$management`` use them.

Rules
1. A response goes to the link whose target is the request's reply-to. If no target matches, it goes
   to the latest response link of the same node, preferably in the same session.
2. Responses wait until the client grants credit. At most `MAX_WAITING` wait per link.
3. Every request gets a response. An error becomes the status and condition of the response.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from aztask.emulator.amqp import encode, sections
from aztask.emulator.amqp.decode import skip
from aztask.emulator.amqp.errors import RESOURCE_LIMIT_EXCEEDED, AmqpError
from aztask.emulator.amqp.link import Inbound, ReceivingLink, SendingLink, raw_fields
from aztask.emulator.amqp.sections import Sections
from aztask.emulator.broker.conditions import status_of

MAX_WAITING = 1000


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    message: its sections. message_id: the encoded bytes. body: the amqp-value without descriptor.
    """

    message: Sections
    message_id: bytes
    reply_to: str
    operation: str
    body: Any

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

    @property
    def address(self) -> str:
        """The reply-to that names this link."""
        return self.link.target.address if self.link.target else ""

    def send(self, message: bytes) -> None:
        """Send a response now, or later when the client grants credit."""
        self._waiting.append(message)
        self.credited()
        if len(self._waiting) > MAX_WAITING:
            self._waiting.clear()
            self.link.detach(AmqpError(RESOURCE_LIMIT_EXCEEDED, "responses are not read"))

    def credited(self) -> None:
        """Send waiting responses: the client granted credit or drains the link."""
        while self._waiting and self.link.credit and self.link.attached:
            self.link.send(self._waiting.popleft(), uuid4().bytes)
        if self.link.draining and self.link.attached:
            self.link.drained()


@dataclass(frozen=True, slots=True)
class Replies:
    """Sends the responses to the requests of one link.

    node: the node that the link is attached to. responders: all response links of the client.
    """

    link: ReceivingLink
    node: str
    responders: list[Responder]

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
