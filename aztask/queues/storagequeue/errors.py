"""Classifies failed requests to the queue service: the error, and the request's possible effect.

Rules
1. The service's answer is judged by its error *code*, never by the HTTP status: a missing queue and
   a message that another worker deleted are both 404.
2. A failure says what is known about the effect: certainly none, refused, or unsure.

Source of the codes: the service's documentation, "Queue service error codes" and "Common REST API
error codes"; which of them Azurite 3.35 sends was measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any, Final

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
)

from aztask.azure.access import token_trouble
from aztask.errors import (
    AztaskError,
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    MessageTooLarge,
    QueueNotFound,
)
from aztask.support.display import mask

MESSAGE_NOT_FOUND: Final = "MessageNotFound"
RECEIPT_MISMATCH: Final = "PopReceiptMismatch"

_GONE: Final = (MESSAGE_NOT_FOUND, RECEIPT_MISMATCH)
_NO_QUEUE: Final = ("QueueNotFound", "QueueBeingDeleted", "QueueDisabled")
_DENIED: Final = (
    "AuthenticationFailed",
    "AuthorizationFailure",
    "AuthorizationPermissionMismatch",
    "AuthorizationProtocolMismatch",
    "AuthorizationResourceTypeMismatch",
    "AuthorizationServiceMismatch",
    "AuthorizationSourceIPMismatch",
    "InsufficientAccountPermissions",
    "InvalidAuthenticationInfo",
    "NoAuthenticationInformation",
)
_BUSY: Final = ("ServerBusy", "AccountIsDisabled", "TooManyRequests")
_SKEW_SECONDS: Final = 300.0


class Effect(Enum):
    """What a failed request may have done."""

    NONE = "certainly nothing, so it may be retried"
    REFUSED = "nothing: the service refused it"
    UNSURE = "perhaps everything: the answer is missing"


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A failed request.

    * code: the service's error code, or "".
    * error: the error for the caller.
    * answered: the service answered, so the request is not still on its way.
    """

    effect: Effect
    code: str
    error: AztaskError
    answered: bool = False

    @property
    def gone(self) -> bool:
        """Whether the service says that we no longer hold the lease."""
        return self.code in _GONE


def failure_of(error: AzureError, queue: str | None) -> RequestFailure:
    """Classify `error`, which the SDK raised for a request to `queue`; None for all queues."""
    text = _one_line(error)
    name = "all queues" if queue is None else f"queue {queue!r}"
    if isinstance(error, ClientAuthenticationError) and error.response is None:
        why = token_trouble(error.message)
        return RequestFailure(
            Effect.REFUSED, "", ConfigurationError(f"no credential for {name}: {why}")
        )
    if isinstance(error, HttpResponseError) and error.response is not None:
        return _answered(error, queue or "", name, text)
    if isinstance(error, ServiceRequestError):
        return RequestFailure(Effect.NONE, "", _unavailable(text))
    return RequestFailure(Effect.UNSURE, "", _unavailable(text))


def code_of(error: HttpResponseError) -> str:
    """The service's error code, or ""."""
    code = getattr(error, "error_code", None) or _header(error, "x-ms-error-code")
    return str(getattr(code, "value", code) or "")


def _header(error: HttpResponseError, name: str) -> str | None:
    response: Any = error.response
    value: str | None = response.headers.get(name) if response is not None else None
    return value


def _answered(error: HttpResponseError, queue: str, name: str, text: str) -> RequestFailure:
    code, status = code_of(error), error.status_code or 0
    if code in _NO_QUEUE:
        return RequestFailure(Effect.REFUSED, code, _not_found(queue))
    if code in _DENIED or status in (401, 403):
        return RequestFailure(Effect.REFUSED, code, ConfigurationError(_denied(error, name, code)))
    if code == "RequestBodyTooLarge" or status == 413:
        return RequestFailure(Effect.REFUSED, code, MessageTooLarge())
    if code in _BUSY or status in (429, 503):
        unavailable = _unavailable(text, _retry_after(error))
        unavailable.busy = code != "AccountIsDisabled"
        return RequestFailure(Effect.NONE, code, unavailable)
    if status >= 500 or status == 408:
        return RequestFailure(Effect.UNSURE, code, _unavailable(text), answered=True)
    return RequestFailure(Effect.REFUSED, code, BrokerError(f"{name}: {code or status}: {text}"))


def _not_found(queue: str) -> QueueNotFound:
    return QueueNotFound(
        f"the queue {queue!r} does not exist; create it with: aztask queues create {queue}"
    )


def _unavailable(text: str, retry_after: float | None = None) -> BrokerUnavailable:
    error = BrokerUnavailable(f"the queue service is unreachable ({text}); try again")
    error.retry_after = retry_after
    return error


def _retry_after(error: HttpResponseError) -> float | None:
    """The pause that the service asks for, in seconds (RFC 9110, Retry-After), or None."""
    text = _header(error, "Retry-After")
    return float(text) if text is not None and text.strip().isdecimal() else None


def _denied(error: HttpResponseError, name: str, code: str) -> str:
    skew = ""
    if date := _header(error, "Date"):
        ahead = time.time() - parsedate_to_datetime(date).timestamp()
        if abs(ahead) > _SKEW_SECONDS:
            direction = "ahead of" if ahead > 0 else "behind"
            off = f"{abs(ahead):.0f} s {direction}"
            skew = f" This machine's clock is {off} the service's: correct it."
    return (
        f"the service refused the credential for {name} ({code or error.status_code}): "
        f"check the key or signature, its expiry, and the role (docs: deployment).{skew}"
    )


def _one_line(error: AzureError) -> str:
    """The first line of the SDK's error text, with secrets masked."""
    text = mask(str(getattr(error, "message", None) or error)).strip()
    return (text.splitlines() or [type(error).__name__])[0][:300]
