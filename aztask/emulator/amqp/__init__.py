"""AMQP 1.0 (OASIS, October 2012) as a sans-I/O server endpoint: bytes in, calls and bytes out.

Why our own code: the AMQP 1.0 libraries on PyPI are clients. The one with a server side,
python-qpid-proton (0.40), is C source that pip has to compile.

Rules
1. Nothing here opens a socket, reads a clock or knows what a queue is.
2. Input from the peer is never trusted: sizes, counts, types and states are checked before use.
   Every violation is one `AmqpError` with a condition of the specification.
3. Message bodies pass through as bytes. Only the parts that the broker needs are decoded.
"""

from __future__ import annotations

# -- Errors ----------------------------------------------------------------------------------------
#
# One error for every violation of the protocol, and the conditions that it may carry.
#
# Rule: the class of an error decides what ends. A `LinkError` detaches the link, a `SessionError`
# ends the session, any other `AmqpError` closes the connection.

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
DETACH_FORCED = "amqp:link:detach-forced"
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
