"""What the Service Bus SDK raises, as aztask's errors, and what is known of the effect.

Rules
1. Three questions are asked of an error: is the lease gone (`is_lost`), did certainly nothing
   happen (`is_refusal`), and what is it to the caller (`error_of`).
2. Whatever the SDK lets out is understood: its own errors, those of its AMQP layer, and those of
   the socket underneath.
3. No text shows a secret: the SDK's texts go through the mask.
"""

from __future__ import annotations

import struct
from typing import Final

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ResourceNotFoundError,
)
from azure.servicebus.exceptions import (
    MessageLockLostError,
    MessageNotFoundError,
    MessageSizeExceededError,
    MessagingEntityDisabledError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusQuotaExceededError,
    ServiceBusServerBusyError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)

from aztask.brokers.servicebus.private import refused_status
from aztask.errors import (
    AztaskError,
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    MessageTooLarge,
    QueueDisabled,
    QueueFull,
    QueueNotFound,
)
from aztask.support.display import one_line
from aztask.support.masking import mask

SDK_ERRORS: Final = (
    *(AzureError, OSError, ValueError, RuntimeError),
    *(AttributeError, TypeError, LookupError, struct.error),
)
"""What SDK calls raise when a connection breaks at an awkward moment: AttributeError comes from
links that the SDK has closed under itself ([seen] azure-servicebus 7.15)."""

BUSY_SECONDS: Final = 10.0
"""How long to wait when it is busy: the service's documentation, "Throttling operations"."""

_LOST: Final = (MessageLockLostError, SessionLockLostError, MessageNotFoundError)
_REFUSALS: Final = (
    MessageSizeExceededError,
    MessagingEntityNotFoundError,
    MessagingEntityDisabledError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusQuotaExceededError,
    ServiceBusServerBusyError,
)


def is_lost(error: Exception) -> bool:
    """Whether the service says that the lock is not ours any more."""
    return isinstance(error, _LOST)


def is_refusal(error: Exception) -> bool:
    """Whether the service answered, and did certainly nothing."""
    return isinstance(error, _REFUSALS)


def is_no_session(error: Exception) -> bool:
    """Whether there was no session to be had: held by another receiver, or none with messages."""
    return isinstance(error, SessionCannotBeLockedError | OperationTimeoutError)


def error_of(error: Exception, queue: str) -> AztaskError:
    """The error for the caller; one line, without secrets."""
    if isinstance(error, AztaskError):
        return error
    text = one_line(mask(str(error)), 300) or type(error).__name__
    if isinstance(error, HttpResponseError) and error.status_code in _MANAGING:
        return ConfigurationError(_MANAGING[error.status_code].format(queue=queue, text=text))
    if isinstance(error, ServiceBusAuthenticationError) and refused_status(error) == _MISSING:
        return QueueNotFound(_NOT_FOUND.format(queue=queue))
    for kinds, made, sentence in _ERRORS:
        if isinstance(error, kinds):
            return made(sentence.format(queue=queue, text=text))
    if "amqp:not-allowed" in text:
        return BrokerError(f"queue {queue!r} does not allow it: {text}")
    unavailable = BrokerUnavailable(f"Service Bus does not answer for {queue!r}: {text}")
    if isinstance(error, ServiceBusServerBusyError):
        unavailable.retry_after = BUSY_SECONDS
    return unavailable


_NO_RIGHT: Final = (
    "managing {queue!r} needs the right to manage: {text}; ask for it, or have the queue created "
    "by somebody who has it"
)
_MANAGING: Final = {
    400: "the service does not take these settings of {queue!r}: {text}",
    401: _NO_RIGHT,
    403: _NO_RIGHT,
}
"""What the administration's answers mean, by their status."""

_NOT_FOUND: Final = "there is no queue {queue!r}; create it with: aztask queues create {queue}"
_MISSING: Final = 404
"""The status with which the service refuses a token for a queue that does not exist."""

_ERRORS: Final[tuple[tuple[tuple[type[Exception], ...], type[AztaskError], str], ...]] = (
    (
        (MessagingEntityNotFoundError, ResourceNotFoundError),
        QueueNotFound,
        _NOT_FOUND,
    ),
    (
        (MessageSizeExceededError,),
        MessageTooLarge,
        "a message for {queue!r} is too large: {text}; send a reference to the data instead",
    ),
    ((ServiceBusQuotaExceededError,), QueueFull, "queue {queue!r} takes nothing more: {text}"),
    (
        (MessagingEntityDisabledError,),
        QueueDisabled,
        "queue {queue!r} is disabled: {text}; enable it in the service",
    ),
    (
        (ServiceBusAuthenticationError, ServiceBusAuthorizationError, ClientAuthenticationError),
        ConfigurationError,
        "Service Bus refuses access to {queue!r}: {text}; check the key, the rights (Send and "
        "Listen) and this machine's clock",
    ),
)
