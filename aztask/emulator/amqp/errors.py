"""One error for every violation of the protocol, and the conditions that it may carry.

Rule: the class of an error decides what ends. A `LinkError` detaches the link, a `SessionError`
ends the session, any other `AmqpError` closes the connection.
"""

from __future__ import annotations

DECODE_ERROR = "amqp:decode-error"
FRAMING_ERROR = "amqp:connection:framing-error"
FRAME_SIZE_TOO_SMALL = "amqp:frame-size-too-small"
ILLEGAL_STATE = "amqp:illegal-state"
INTERNAL_ERROR = "amqp:internal-error"
INVALID_FIELD = "amqp:invalid-field"
NOT_ALLOWED = "amqp:not-allowed"
NOT_FOUND = "amqp:not-found"
NOT_IMPLEMENTED = "amqp:not-implemented"
RESOURCE_LIMIT_EXCEEDED = "amqp:resource-limit-exceeded"
UNAUTHORIZED_ACCESS = "amqp:unauthorized-access"
CONNECTION_FORCED = "amqp:connection:forced"
HANDLE_IN_USE = "amqp:session:handle-in-use"
UNATTACHED_HANDLE = "amqp:session:unattached-handle"
WINDOW_VIOLATION = "amqp:session:window-violation"
MESSAGE_SIZE_EXCEEDED = "amqp:link:message-size-exceeded"


class AmqpError(Exception):
    """The peer violated the protocol or asked for something that it may not have.

    condition: a constant of this module or of the service. description: one sentence for the peer.
    """

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = condition
        self.description = description


class SessionError(AmqpError):
    """An `AmqpError` that ends one session; the connection continues."""


class LinkError(AmqpError):
    """An `AmqpError` that detaches one link; its session continues."""
