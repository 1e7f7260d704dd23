"""One error for every breach of the protocol, and the conditions it may carry.

Rule: an `AmqpError` says which endpoint it ends by where it is caught: a link's error detaches the
link, a session's ends the session, anything else closes the connection.
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
RESOURCE_DELETED = "amqp:resource-deleted"
UNAUTHORIZED_ACCESS = "amqp:unauthorized-access"
PRECONDITION_FAILED = "amqp:precondition-failed"
CONNECTION_FORCED = "amqp:connection:forced"
HANDLE_IN_USE = "amqp:session:handle-in-use"
UNATTACHED_HANDLE = "amqp:session:unattached-handle"
ERRANT_LINK = "amqp:session:errant-link"
WINDOW_VIOLATION = "amqp:session:window-violation"
MESSAGE_SIZE_EXCEEDED = "amqp:link:message-size-exceeded"
LINK_STOLEN = "amqp:link:stolen"


class AmqpError(Exception):
    """The peer broke a rule, or asked for what it cannot have: `condition` and `description`."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = condition
        self.description = description


class SessionError(AmqpError):
    """An `AmqpError` that ends one session; the connection goes on."""


class LinkError(AmqpError):
    """An `AmqpError` that detaches one link; its session goes on."""
