"""What the queue service's answers mean: by their error code, and with what is known."""

from types import SimpleNamespace

import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)

from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    MessageTooLarge,
    QueueNotFound,
)
from aztask.queues.storagequeue.errors import Effect, code_of, failure_of


def answered(status, code="", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if code:
        headers["x-ms-error-code"] = code
    response = SimpleNamespace(status_code=status, reason="Because", headers=headers)
    return HttpResponseError("text", response=response)


@pytest.mark.parametrize(
    ("status", "code", "effect", "kind"),
    [
        (404, "QueueNotFound", Effect.REFUSED, QueueNotFound),
        (404, "MessageNotFound", Effect.REFUSED, BrokerError),
        (400, "PopReceiptMismatch", Effect.REFUSED, BrokerError),
        (403, "AuthenticationFailed", Effect.REFUSED, ConfigurationError),
        (401, "", Effect.REFUSED, ConfigurationError),
        (413, "RequestBodyTooLarge", Effect.REFUSED, MessageTooLarge),
        (503, "ServerBusy", Effect.NONE, BrokerUnavailable),
        (429, "", Effect.NONE, BrokerUnavailable),
        (500, "InternalError", Effect.UNSURE, BrokerUnavailable),
        (408, "", Effect.UNSURE, BrokerUnavailable),
        (400, "InvalidQueryParameterValue", Effect.REFUSED, BrokerError),
    ],
)
def test_the_code_decides(status, code, effect, kind):
    failure = failure_of(answered(status, code), "q")
    assert (failure.effect, failure.code) == (effect, code)
    assert type(failure.error) is kind


def test_only_two_codes_say_that_the_lease_is_lost():
    gone = {"MessageNotFound", "PopReceiptMismatch"}
    for code in (*gone, "QueueNotFound", "ServerBusy", ""):
        assert failure_of(answered(404, code), "q").gone is (code in gone)


def test_what_was_not_sent_had_no_effect_and_a_lost_answer_is_unsure():
    assert failure_of(ServiceRequestError("x"), "q").effect is Effect.NONE
    assert failure_of(ServiceResponseError("x"), "q").effect is Effect.UNSURE


def test_without_a_credential_nothing_was_asked():
    failure = failure_of(ClientAuthenticationError("no token\nand pages of text"), "q")
    assert failure.effect is Effect.REFUSED
    assert isinstance(failure.error, ConfigurationError)
    assert "\n" not in str(failure.error)


def test_the_pause_that_the_service_asks_for():
    busy = failure_of(answered(503, "ServerBusy", Retry_After="7"), "q").error
    assert busy.retry_after == 7.0
    assert (
        failure_of(answered(503, "ServerBusy", Retry_After="soon"), "q").error.retry_after is None
    )


def test_a_clock_that_is_far_off_is_named():
    denied = failure_of(
        answered(403, "AuthenticationFailed", Date="Sat, 01 Jan 2000 00:00:00 GMT"), "q"
    )
    assert "clock is" in str(denied.error) and "ahead of" in str(denied.error)


def test_a_code_may_be_an_enum_of_the_sdk():
    error = answered(404, "Other")
    error.error_code = SimpleNamespace(value="QueueNotFound")
    assert code_of(error) == "QueueNotFound"
    assert code_of(HttpResponseError("no response")) == ""
