"""What the wire's errors are to code above an Azure SDK: the SDK's own errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)

from aztask.azure.connection import Response

from .wire import Line, Refused, Service, Unanswered, Unconnected

Answer = TypeVar("Answer")

_REASONS: Final = {400: "Bad Request", 403: "Forbidden", 404: "Not Found", 409: "Conflict"}


def refusal_of(error: Refused) -> HttpResponseError:
    """The service's answer as an error."""
    headers = {"x-ms-error-code": error.code}
    request: Any = None
    reason = _REASONS.get(error.status, "Refused")
    response = Response(request, error.status, reason, headers, b"")
    kind = ClientAuthenticationError if error.status in (401, 403) else HttpResponseError
    return kind(message=f"{error.code}: {error}", response=response)


def ask(
    line: Line,
    service: Service,
    operation: str,
    execute: Callable[[], Answer],
    place: str,
    patience: float,
    touch: Callable[[], object] | None = None,
) -> Answer:
    """One request of an Azure SDK. Raises AzureError, as its pipeline does."""
    try:
        return line.request(
            service, operation, execute, place=place, patience=patience, touch=touch
        )
    except Refused as refused:
        raise refusal_of(refused) from None
    except Unconnected as error:
        raise ServiceRequestError(str(error)) from None
    except Unanswered as error:
        raise ServiceResponseError(str(error)) from None
