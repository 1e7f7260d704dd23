"""The SDK's client as the broker sets it up."""

import logging

import pytest
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.servicebus import ServiceBusReceiveMode

from aztask.address.addresses import ServiceBusAddress
from aztask.queues.base import ANY_SESSION
from aztask.queues.servicebus import client as client_module
from aztask.queues.servicebus.client import BusClient, credential_of
from aztask.support.display import Secret

HOST = "shop.servicebus.windows.net"
ADDRESS = ServiceBusAddress(HOST, key_name="k", key=Secret("a2V5"))


@pytest.fixture
def client():
    made = BusClient(ADDRESS)
    yield made
    made.finish()


def test_a_key_a_signature_or_a_given_credential(monkeypatch):
    key = credential_of(ADDRESS, None)
    assert isinstance(key, AzureNamedKeyCredential)
    assert tuple(key.named_key) == ("k", "a2V5")
    signed = credential_of(ServiceBusAddress(HOST, signature=Secret("sig")), None)
    assert isinstance(signed, AzureSasCredential)
    given, found = object(), object()
    monkeypatch.setattr(client_module, "default_credential", lambda: found)
    assert credential_of(ServiceBusAddress(HOST), given) is given
    assert credential_of(ServiceBusAddress(HOST), None) is found


def test_the_sdk_retries_nothing_and_fetches_nothing_ahead(client):
    receiver = client.receiver("q", request_seconds=3.0)
    assert receiver._config.retry_total == 0
    assert receiver._config.try_timeout == 3.0
    assert receiver._prefetch_count == 0
    assert client.sender("q")._config.retry_total == 0


def test_how_a_receiver_receives(client):
    plain, gone = client.receiver("q"), client.receiver("q", delete=True)
    assert plain._receive_mode == ServiceBusReceiveMode.PEEK_LOCK
    assert gone._receive_mode == ServiceBusReceiveMode.RECEIVE_AND_DELETE
    assert client.receiver("q", dead_letter=True).entity_path.endswith("$DeadLetterQueue")
    assert client.receiver("q", session="a").session.session_id == "a"
    assert client.receiver("q", session=ANY_SESSION, session_wait=2.0)._max_wait_time == 2.0


def test_the_sdks_own_lines_stay_out_of_the_log(client):
    assert not logging.getLogger("azure.servicebus").isEnabledFor(logging.ERROR)


def test_handlers_are_closed_in_the_background_also_when_it_fails(client):
    class Handler:
        closed = False

        def close(self):
            self.closed = True
            raise OSError("gone already")

        _close_handler = close

    first, late, broken = Handler(), Handler(), Handler()
    client.close(first)
    client.finish()
    assert first.closed
    client.close(late)  # came back after the app was closed: no connection is left open
    client.drop(broken)
    assert late.closed
    assert broken.closed
