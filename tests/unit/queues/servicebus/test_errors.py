"""The SDK's errors as ours."""

import pytest
from azure.core.exceptions import ClientAuthenticationError, HttpResponseError
from azure.servicebus import exceptions as sdk
from azure.servicebus._pyamqp.error import TokenAuthFailure

from aztask.errors import (
    BrokerUnavailable,
    ConfigurationError,
    LeaseLost,
    MessageTooLarge,
    QueueFull,
    QueueNotFound,
)
from aztask.queues.servicebus.errors import error_of, is_lost, is_no_session, is_refusal


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (sdk.MessagingEntityNotFoundError(), QueueNotFound),
        (sdk.MessageSizeExceededError(), MessageTooLarge),
        (sdk.ServiceBusQuotaExceededError(), QueueFull),
        (sdk.ServiceBusAuthenticationError(), ConfigurationError),
        (sdk.ServiceBusAuthorizationError(), ConfigurationError),
        (sdk.ServiceBusServerBusyError(), BrokerUnavailable),
        (sdk.ServiceBusConnectionError(), BrokerUnavailable),
        (ConnectionResetError(), BrokerUnavailable),
    ],
)
def test_each_error_is_named(error, kind):
    made = error_of(error, "orders")
    assert type(made) is kind
    assert "orders" in str(made)
    assert "\n" not in str(made)


@pytest.mark.parametrize("kind", [ValueError, TypeError, AttributeError, KeyError, RuntimeError])
def test_an_error_of_python_is_no_outage(kind):
    bug = kind("a bug")
    with pytest.raises(kind) as caught:
        error_of(bug, "orders")
    assert caught.value is bug


def test_our_own_errors_pass():
    ours = LeaseLost("it was")
    assert error_of(ours, "orders") is ours


def test_missing_rights_over_http_say_which():
    error = HttpResponseError("no")
    error.status_code = 401
    assert "permission to manage" in str(error_of(error, "orders"))


def test_no_key_is_shown():
    error = sdk.ServiceBusError("Endpoint=sb://x/;SharedAccessKeyName=a;SharedAccessKey=c2VjcmV0")
    assert "c2VjcmV0" not in str(error_of(error, "orders"))


def test_what_is_known_of_the_effect():
    assert is_lost(sdk.MessageLockLostError())
    assert is_lost(sdk.SessionLockLostError())
    assert is_lost(sdk.MessageNotFoundError())
    assert not is_lost(sdk.ServiceBusConnectionError())
    assert is_refusal(sdk.ServiceBusServerBusyError())
    busy = error_of(sdk.ServiceBusServerBusyError(), "bulk")
    assert busy.retry_after == 10.0
    assert not is_refusal(sdk.OperationTimeoutError())
    assert is_no_session(sdk.SessionCannotBeLockedError())


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, ConfigurationError), (403, ConfigurationError), (404, QueueNotFound), (500, None)],
)
def test_a_token_that_the_service_refuses_is_no_outage(status, kind):
    """The SDK says of a token of Entra ID that the connection was lost."""
    inner = TokenAuthFailure(status, b"the identity has no role here")
    error = sdk.ServiceBusConnectionError(message="it has encountered an error", error=inner)
    found = error_of(error, "orders")
    assert type(found) is (kind or BrokerUnavailable)
    if kind is ConfigurationError:
        assert "refuses access to 'orders': the identity has no role here; check" in str(found)


@pytest.mark.parametrize(
    ("why", "kind", "advice"),
    [
        ("AADSTS7000222: the secret has expired", ConfigurationError, "; check the identity"),
        ("no response from the IMDS endpoint", BrokerUnavailable, ""),
    ],
)
def test_a_token_service_that_gives_none_is_told_in_one_line(why, kind, advice):
    """It may be away, or it has answered and refuses the identity."""
    inner = ClientAuthenticationError(f"{why}\nand pages of help")
    error = sdk.ServiceBusError(message=f"Handler failed: {inner}.", error=inner)
    found = error_of(error, "orders")
    assert type(found) is kind
    assert str(found) == f"no token for 'orders': {why}{advice}"
