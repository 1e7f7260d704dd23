"""Translates the errors of the Service Bus SDK, and classifies what the request may have done.

Rules
1. Three functions classify an error: was the lease lost (`is_lost`), had the request certainly no
   effect (`is_refusal`), and which error does the caller get (`error_of`).
2. The errors of a request are the SDK's own, and those of the socket underneath (`SDK_ERRORS`). An
   error of Python is a bug and is not caught as an outage; the module `symptoms` has turned those
   that show a broken connection into the SDK's own.
3. No text shows a secret: secrets in the SDK's texts are masked.
"""

from __future__ import annotations

from typing import Final

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ResourceNotFoundError,
)
from azure.servicebus.exceptions import (
    MessageAlreadySettled,
    MessageLockLostError,
    MessageNotFoundError,
    MessageSizeExceededError,
    MessagingEntityDisabledError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusError,
    ServiceBusQuotaExceededError,
    ServiceBusServerBusyError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)

from aztask.azure.access import token_trouble
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
from aztask.queues.servicebus.private import refused_status
from aztask.support.display import mask, one_line

SDK_ERRORS: Final = (AzureError, MessageAlreadySettled, OSError)
"""The errors of the SDK's calls (rule 2)."""

BUSY_SECONDS: Final = 10.0
"""The pause after "server busy" (the service's documentation, "Throttling operations")."""

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
    """Whether the service says that we no longer hold the lock."""
    return isinstance(error, _LOST)


def is_refusal(error: Exception) -> bool:
    """Whether the service refused the request, so that it certainly had no effect."""
    return isinstance(error, _REFUSALS)


def is_no_session(error: Exception) -> bool:
    """Whether no session was available: another receiver holds it, or none has messages."""
    return isinstance(error, SessionCannotBeLockedError | OperationTimeoutError)


def error_of(error: Exception, queue: str | None) -> AztaskError:
    """The error for the caller: one line, without secrets.

    queue: the queue of the request; None for a request about all queues. Raises an error that is
    none of a request (rule 2).
    """
    if isinstance(error, AztaskError):
        return error
    if not isinstance(error, SDK_ERRORS):
        raise error
    text = one_line(mask(str(error)), 300) or type(error).__name__
    name = "all queues" if queue is None else repr(queue)
    if isinstance(error, HttpResponseError) and error.status_code in _MANAGING:
        return ConfigurationError(
            _MANAGING[error.status_code].format(name=name, queue=queue, text=text)
        )
    if isinstance(error, ServiceBusError) and (found := _of_token(error, name, queue)):
        return found
    for kinds, kind, sentence in _ERRORS:
        if isinstance(error, kinds):
            return kind(sentence.format(name=name, queue=queue, text=text))
    if "amqp:not-allowed" in text:
        return BrokerError(f"queue {name} does not allow this: {text}")
    unavailable = BrokerUnavailable(
        f"Service Bus does not answer for {name}: {text.rstrip('.')}; check the address, and "
        "that the service or the emulator runs"
    )
    if isinstance(error, ServiceBusServerBusyError):
        unavailable.retry_after = BUSY_SECONDS
        unavailable.busy = True
    return unavailable


def _of_token(error: ServiceBusError, name: str, queue: str | None) -> AztaskError | None:
    """The error if there is no token, or the service refused it; None for any other error."""
    inner, status = error.inner_exception, refused_status(error)
    if isinstance(inner, ClientAuthenticationError):  # the token service gave none
        why = token_trouble(str(inner))
        if "AADSTS" in why:  # Entra ID answered, and refuses the identity
            return ConfigurationError(f"no token for {name}: {why}; check the identity")
        return BrokerUnavailable(f"no token for {name}: {why}")
    if status == _MISSING:
        return QueueNotFound(_NOT_FOUND.format(name=name, queue=queue))
    if status in _UNAUTHORIZED:
        # Of a token of Entra ID, the SDK says so as if the connection were lost ([seen]
        # azure-servicebus 7.15).
        why = str(inner).partition("Description: ")[2] or str(error)
        return ConfigurationError(_REFUSED.format(name=name, text=one_line(mask(why), 300)))
    return None


_NOT_PERMITTED: Final = (
    "managing {name} needs the permission to manage: {text}; request it, or ask an "
    "administrator to create the queue"
)
_MANAGING: Final = {
    400: "the service refused these settings of {name}: {text}",
    401: _NOT_PERMITTED,
    403: _NOT_PERMITTED,
}
"""Texts for the administration's answers, by HTTP status."""

_NOT_FOUND: Final = "there is no queue {name}; create it with: aztask queues create {queue}"
_MISSING: Final = 404
"""The status with which the service refuses a token for a queue that does not exist."""

_UNAUTHORIZED: Final = (401, 403)
_REFUSED: Final = (
    "Service Bus refuses access to {name}: {text}; check the key, the permissions (Send and "
    "Listen) and this machine's clock"
)

_ERRORS: Final[tuple[tuple[tuple[type[Exception], ...], type[AztaskError], str], ...]] = (
    (
        (MessagingEntityNotFoundError, ResourceNotFoundError),
        QueueNotFound,
        _NOT_FOUND,
    ),
    (
        (MessageSizeExceededError,),
        MessageTooLarge,
        "a message for {name} is too large: {text}; send a reference to the data instead",
    ),
    (
        (ServiceBusQuotaExceededError,),
        QueueFull,
        "queue {name} is full: {text}; empty it, or raise its quota",
    ),
    (
        (MessagingEntityDisabledError,),
        QueueDisabled,
        "queue {name} is disabled: {text}; enable it in the service",
    ),
    (
        (ServiceBusAuthenticationError, ServiceBusAuthorizationError, ClientAuthenticationError),
        ConfigurationError,
        _REFUSED,
    ),
)
