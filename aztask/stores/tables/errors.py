"""Errors of requests to the table and blob services, and whether the request took effect.

Rules
1. The service's answers are distinguished by their error *code*, never by the HTTP status alone: a
   missing table, a missing row and a missing container are all 404.
2. A request that may have been carried out although it failed is `OutcomeUnknown`: the caller reads
   the row to find out.

Source of the codes: the service's documentation, "Table service error codes", "Blob service error
codes" and "Common REST API error codes"; which of them Azurite 3.35 sends was measured.
"""

from __future__ import annotations

import json
from typing import Any, Final

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
)

from aztask.azure.access import token_trouble
from aztask.errors import BrokerError, BrokerUnavailable, ConfigurationError, QueueNotFound
from aztask.queues.storagequeue.errors import code_of
from aztask.support.display import mask

TABLE_ROLE: Final = "Storage Table Data Contributor"
BLOB_ROLE: Final = "Storage Blob Data Contributor"
HOW_TO_CREATE: Final = "create it with: aztask -A MODULE:APP queues create QUEUE"

_NO_PLACE: Final = (
    "TableNotFound",
    "TableBeingDeleted",
    "ContainerNotFound",
    "ContainerBeingDeleted",
)
_GONE: Final = ("ResourceNotFound", "EntityNotFound", "BlobNotFound")
_THERE: Final = (
    "EntityAlreadyExists",
    "TableAlreadyExists",
    "ContainerAlreadyExists",
    "BlobAlreadyExists",
)
_CHANGED: Final = ("UpdateConditionNotSatisfied", "ConditionNotMet", "TargetConditionNotMet")
_FULL: Final = ("EntityTooLarge", "TooManyProperties")
_BUSY: Final = ("ServerBusy", "TooManyRequests", "AccountIsDisabled")


class OutcomeUnknown(Exception):
    """The request failed, but may have been carried out.

    `error` is the error for the caller, if it gives up.
    """

    def __init__(self, error: BrokerUnavailable) -> None:
        super().__init__(str(error))
        self.error = error


class RowNotFound(Exception):
    """The row or blob does not exist."""


class AlreadyExists(Exception):
    """The row, table or container exists already."""


class RowConflict(Exception):
    """Another writer changed the row since it was read."""


class RowFull(Exception):
    """The row would become too large, or have too many properties."""


class NotExecuted(Exception):
    """The request was certainly not carried out and may be tried again.

    `error` is the error for the caller, if it gives up.
    """

    def __init__(self, error: BrokerUnavailable) -> None:
        super().__init__(str(error))
        self.error = error


_VERDICTS: Final[tuple[tuple[tuple[str, ...], type[Exception]], ...]] = (
    (_GONE, RowNotFound),
    (_THERE, AlreadyExists),
    (_CHANGED, RowConflict),
    (_FULL, RowFull),
)


def verdict(error: AzureError, place: str, role: str) -> Exception:
    """What `error` means: one of the classes above, or the error for the caller.

    * `place`: the table or container, for the error's text.
    * `role`: the role that access to it needs.
    """
    text = _one_line(error)
    if isinstance(error, ClientAuthenticationError) and error.response is None:
        return ConfigurationError(f"no credential for {place}: {token_trouble(error.message)}")
    if isinstance(error, HttpResponseError) and error.response is not None:
        return _answered(error, place, role, text)
    if isinstance(error, ServiceRequestError):
        return NotExecuted(_unavailable(place, text))
    return OutcomeUnknown(_unavailable(place, text))


def _answered(error: HttpResponseError, place: str, role: str, text: str) -> Exception:
    code, status = code_of(error) or _code_in(error.response), error.status_code or 0
    kind = next((kind for codes, kind in _VERDICTS if code in codes), None)
    if kind is not None:
        return kind(code)
    if code in _NO_PLACE:
        return QueueNotFound(f"{place} does not exist; {HOW_TO_CREATE}")
    if status in (401, 403):
        return ConfigurationError(
            f"the service refused the credential for {place} ({code or status}): check the key or "
            f"signature and its expiry, or assign the role {role}"
        )
    if code in _BUSY or status in (429, 503):
        return NotExecuted(_unavailable(place, text))
    if status >= 500 or status == 408:
        return OutcomeUnknown(_unavailable(place, text))
    return BrokerError(f"{place}: {code or status}: {text}")


def _code_in(response: Any) -> str:
    """The error code in the answer's body, if the table service sent one."""
    try:
        return str(json.loads(response.text())["odata.error"]["code"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _unavailable(place: str, text: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"{place} cannot be reached now ({text}); try again")


def _one_line(error: AzureError) -> str:
    """The first line of the SDK's text, without secrets."""
    text = mask(str(getattr(error, "message", None) or error)).strip()
    return (text.splitlines() or [type(error).__name__])[0][:300]
