"""What an answer of the service means, and whether its request took effect."""

from __future__ import annotations

import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    ServiceRequestError,
    ServiceResponseError,
)
from tableanswers import answered

from aztask.errors import BrokerError, ConfigurationError, QueueNotFound
from aztask.stores.tables.errors import (
    AlreadyExists,
    NotExecuted,
    OutcomeUnknown,
    RowConflict,
    RowFull,
    RowNotFound,
    verdict,
)

PLACE, ROLE = "the table 't' of tables://shop", "Storage Table Data Contributor"


@pytest.mark.parametrize("in_header", [True, False])
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "ResourceNotFound", RowNotFound),
        (404, "BlobNotFound", RowNotFound),
        (404, "TableNotFound", QueueNotFound),
        (404, "ContainerNotFound", QueueNotFound),
        (409, "EntityAlreadyExists", AlreadyExists),
        (409, "TableBeingDeleted", QueueNotFound),
        (412, "UpdateConditionNotSatisfied", RowConflict),
        (403, "AuthorizationPermissionMismatch", ConfigurationError),
        (401, "", ConfigurationError),
        (503, "ServerBusy", NotExecuted),
        (429, "", NotExecuted),
        (500, "InternalError", OutcomeUnknown),
        (500, "OperationTimedOut", OutcomeUnknown),
        (400, "EntityTooLarge", RowFull),
        (404, "", BrokerError),
    ],
)
def test_answers_are_told_by_their_codes(
    status: int, code: str, kind: type[Exception], in_header: bool
) -> None:
    found = verdict(answered(status, code, in_header=in_header), PLACE, ROLE)
    assert type(found) is kind
    assert "\n" not in str(found)


def test_failures_without_an_answer() -> None:
    assert type(verdict(ServiceRequestError("refused"), PLACE, ROLE)) is NotExecuted
    assert type(verdict(ServiceResponseError("reset"), PLACE, ROLE)) is OutcomeUnknown
    no_token = ClientAuthenticationError("DefaultAzureCredential failed\nand why, for pages")
    found = verdict(no_token, PLACE, ROLE)
    assert isinstance(found, ConfigurationError)
    assert str(found) == f"no credential for {PLACE}: DefaultAzureCredential failed"
