"""A container's client: its credential and its limits, and one line of an error."""

import pytest
from azure.core.credentials import AzureSasCredential
from azure.core.exceptions import AzureError, HttpResponseError, ResourceExistsError

from aztask.address.addresses import BlobAddress
from aztask.azure import container
from aztask.azure.container import container_client, create, reason_of
from aztask.support.display import Secret

URL = "https://shop.blob.core.windows.net"


def client(**options):
    return container_client(BlobAddress("shop", URL, "events", **options))


def test_a_key_a_signature_or_a_given_credential(monkeypatch):
    assert client(key=Secret("a2V5")).credential.account_key == "a2V5"
    signed = client(signature=Secret("?sv=1&sig=x")).credential
    assert isinstance(signed, AzureSasCredential) and signed.signature == "sv=1&sig=x"

    class Token:
        def get_token(self, *scopes, **options):
            raise NotImplementedError

    given, found = Token(), Token()
    monkeypatch.setattr(container, "default_credential", lambda: found)
    address = BlobAddress("shop", URL, "events")
    assert container_client(address, given=given).credential is given
    assert container_client(address).credential is found


def test_the_sdk_retries_nothing():
    made = client(key=Secret("a2V5"))
    retries = [getattr(each, "total_retries", None) for each in made._pipeline._impl_policies]
    assert [each for each in retries if each is not None] == [0]
    assert made._config.max_single_put_size == container.SINGLE_PUT_BYTES


def test_a_container_that_another_worker_created():
    class Container:
        def __init__(self, error=None):
            self.error, self.created = error, 0

        def create_container(self):
            self.created += 1
            if self.error:
                raise self.error

    new = Container()
    create(new)
    assert new.created == 1
    create(Container(ResourceExistsError("it is there")))
    with pytest.raises(AzureError):
        create(Container(HttpResponseError("refused")))


def test_an_error_in_one_line_without_secrets():
    error = HttpResponseError("it failed: ?sv=1&sig=c2VjcmV0c2VjcmV0\nheaders\n<xml/>")
    error.error_code = "BlobNotFound"
    text = reason_of(error)
    assert text.startswith("BlobNotFound: it failed")
    assert "c2VjcmV0" not in text and "\n" not in text
    assert len(reason_of(AzureError("x" * 1000))) == 300
