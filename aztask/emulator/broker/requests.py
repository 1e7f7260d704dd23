"""Request and response over two links: ``$cbs`` and ``$management`` work this way.

Rules
1. A response goes to the link whose target is the request's reply-to; where no target matches,
   to the latest response link of the same node, of the same session before others.
2. Responses leave when the peer has granted credit; at most `MAX_WAITING` of a link wait.
3. A request is answered always: what goes wrong becomes its status and condition.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from aztask.emulator.amqp import encode, sections
from aztask.emulator.amqp.decode import skip
from aztask.emulator.amqp.errors import RESOURCE_LIMIT_EXCEEDED, AmqpError
from aztask.emulator.amqp.link import Inbound, Link, SendingLink
from aztask.emulator.amqp.sections import Sections
from aztask.emulator.amqp.terminus import raw_fields
from aztask.emulator.broker.conditions import status_of

MAX_WAITING = 1000


@dataclass(frozen=True, slots=True)
class Request:
    """message: taken apart. message_id: as it was encoded. body: the amqp-value, undescribed."""

    message: Sections
    message_id: bytes
    reply_to: str
    operation: str
    body: Any

    def parameter(self, name: str) -> Any:
        """An application property of the request."""
        return self.message.application_properties.get(name)


def request_of(inbound: Inbound) -> Request:
    """Take a request apart. Raises AmqpError when it is malformed."""
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
    """What a node calls the application properties of its responses."""

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
    """An encoded response message; `body` is the encoded value."""
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
    """The response that tells of an error."""
    status = status_of(error.condition)
    return response(
        request, names, status, error.description, condition=error.condition, body=encode.NULL
    )


class Responder:
    """A link on which a client reads responses. node: what it is attached to."""

    def __init__(self, link: SendingLink, node: str) -> None:
        self.link = link
        self.node = node
        self._waiting: deque[bytes] = deque()

    @property
    def address(self) -> str:
        """The reply-to that means this link."""
        return self.link.target.address if self.link.target else ""

    def send(self, message: bytes) -> None:
        """Send now or when there is credit."""
        self._waiting.append(message)
        self.credited()
        if len(self._waiting) > MAX_WAITING:
            self._waiting.clear()
            self.link.detach(AmqpError(RESOURCE_LIMIT_EXCEEDED, "responses are not read"))

    def credited(self) -> None:
        """The peer granted credit, or drains."""
        while self._waiting and self.link.credit and self.link.attached:
            self.link.send(self._waiting.popleft(), uuid4().bytes)
        if self.link.draining and self.link.attached:
            self.link.drained()


def responder_for(
    responders: list[Responder], node: str, link: Link, reply_to: str
) -> Responder | None:
    """Where to answer a request that came on `link`; None when nobody listens."""
    here = [responder for responder in responders if responder.node == node]
    exact = [responder for responder in here if reply_to and responder.address == reply_to]
    same = [responder for responder in exact or here if responder.link.session is link.session]
    found = same or exact or here
    return found[-1] if found else None
