"""The storage client: its credentials, its transport, and the service's time."""

import pytest
from azure.core.credentials import AzureSasCredential
from azure.core.pipeline.transport import RequestsTransport

from aztask.address.addresses import StorageQueueAddress
from aztask.azure.transport import LeanTransport
from aztask.queues.storagequeue.messages import StorageClient
from aztask.support.clock import Clock
from aztask.support.display import Secret

URL = "https://shop.queue.core.windows.net"
KEY = Secret("a2V5")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def client(**options):
    return StorageClient(StorageQueueAddress("shop", URL, **options))


def test_a_key_a_signature_or_a_given_credential():
    given = object()
    assert client(key=KEY).service.credential.account_name == "shop"
    signed = client(signature=Secret("?sv=1&sig=x")).service.credential
    assert isinstance(signed, AzureSasCredential) and signed.signature == "sv=1&sig=x"

    class Token:
        def get_token(self, *scopes, **options):
            raise NotImplementedError

    given = Token()
    address = StorageQueueAddress("shop", URL)
    assert StorageClient(address, credential=given).service.credential is given


def test_the_lean_transport_unless_a_proxy_is_asked_for(monkeypatch):
    assert isinstance(client(key=KEY).transport, LeanTransport)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    assert isinstance(client(key=KEY).transport, RequestsTransport)
    monkeypatch.setenv("no_proxy", "shop.queue.core.windows.net")
    assert isinstance(client(key=KEY).transport, LeanTransport)


def test_one_client_for_each_queue():
    made = client(key=KEY)
    assert made.queue("a") is made.queue("a")
    assert made.queue("a") is not made.queue("b")


def test_the_services_time_is_learned_from_an_answer():
    address = StorageQueueAddress("shop", URL, KEY)
    made = StorageClient(address, clock=Clock(wall=lambda: 1_800_000_000.0))
    made.learn_time({})
    assert made.offset == 0.0
    made.learn_time({"Date": "Fri, 15 Jan 2027 08:01:40 GMT"})
    assert made.offset == 100.0
