"""The service's own error conditions, and the condition for each of our errors.

SDKs compare these texts (azure-servicebus 7.15, exceptions.py).
"""

from __future__ import annotations

from aztask.emulator.amqp import (
    INTERNAL_ERROR,
    NOT_ALLOWED,
    NOT_FOUND,
    RESOURCE_LIMIT_EXCEEDED,
    AmqpError,
)
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    ConfigurationError,
    LeaseLost,
    QueueFull,
    QueueNotFound,
)

ARGUMENT_ERROR = "com.microsoft:argument-error"
DEAD_LETTER = "com.microsoft:dead-letter"
ENTITY_DISABLED = "com.microsoft:entity-disabled"
ENTITY_EXISTS = "com.microsoft:entity-already-exists"
MESSAGE_LOCK_LOST = "com.microsoft:message-lock-lost"
MESSAGE_NOT_FOUND = "com.microsoft:message-not-found"
SERVER_BUSY = "com.microsoft:server-busy"
SESSION_CANNOT_BE_LOCKED = "com.microsoft:session-cannot-be-locked"
SESSION_LOCK_LOST = "com.microsoft:session-lock-lost"
TIMEOUT = "com.microsoft:timeout"

_CONDITIONS: tuple[tuple[type[AztaskError], str], ...] = (
    (QueueFull, RESOURCE_LIMIT_EXCEEDED),
    (QueueNotFound, NOT_FOUND),
    (BrokerUnavailable, SERVER_BUSY),
    (ConfigurationError, NOT_ALLOWED),
    (LeaseLost, SESSION_LOCK_LOST),
)
_STATUS = {
    RESOURCE_LIMIT_EXCEEDED: 403,
    NOT_FOUND: 404,
    MESSAGE_NOT_FOUND: 404,
    ENTITY_EXISTS: 409,
    MESSAGE_LOCK_LOST: 410,
    SESSION_LOCK_LOST: 410,
    SERVER_BUSY: 503,
    INTERNAL_ERROR: 500,
    "amqp:unauthorized-access": 401,
    "amqp:not-implemented": 501,
}


def as_amqp(error: AztaskError) -> AmqpError:
    """Return the AMQP error that reports `error` to a client."""
    for kind, condition in _CONDITIONS:
        if isinstance(error, kind):
            return AmqpError(condition, str(error))
    return AmqpError(INTERNAL_ERROR, str(error))


def status_of(condition: str) -> int:
    """Return the status code of a management response with this condition."""
    return _STATUS.get(condition, 400)


BUSY = AmqpError(SERVER_BUSY, "the emulator was told to be busy; wait and try again")
LOCK_LOST = AmqpError(
    MESSAGE_LOCK_LOST,
    "the lock is invalid: it has expired, or the message was settled or removed already",
)
SESSION_LOST = AmqpError(SESSION_LOCK_LOST, "the session lock has expired or was released")
