"""A blob that several writers change: who has read an old revision is refused.

A made-up container keeps blobs in memory and judges conditions as the service documents them; the
integration tests ask Azurite.
"""

from types import SimpleNamespace

import pytest
from azure.core import MatchConditions
from azure.core.exceptions import (
    HttpResponseError,
    ResourceExistsError,
    ResourceModifiedError,
    ResourceNotFoundError,
    ServiceRequestError,
)

from aztask.address.addresses import BlobAddress
from aztask.azure.container import TaggedBlob
from aztask.errors import BrokerUnavailable


class Container:
    """Blobs with ETags; `exists` says whether the container itself is there."""

    def __init__(self):
        self.blobs, self.exists, self.failure, self.revision = {}, False, None, 0

    def create_container(self):
        self.exists = True

    def get_blob_client(self, name):
        return Blob(self, name)

    def upload_blob(self, name, data, **options):
        Blob(self, name).upload_blob(data, **options)

    def close(self):
        self.exists = None


class Blob:
    def __init__(self, container, name):
        self._container, self._name = container, name

    def _check(self, etag=None, match_condition=None):
        if self._container.failure:
            raise self._container.failure
        if not self._container.exists:
            raise ResourceNotFoundError("no container")
        if match_condition is MatchConditions.IfNotModified:
            if self._name not in self._container.blobs:
                raise ResourceNotFoundError("no blob")
            if self._container.blobs[self._name][1] != etag:
                raise ResourceModifiedError("changed")

    def upload_blob(self, data, *, overwrite, content_settings, **conditions):
        self._check(**conditions)
        if not overwrite and self._name in self._container.blobs:
            raise ResourceExistsError("exists")
        self._container.revision += 1
        self._container.blobs[self._name] = (data, f"tag-{self._container.revision}")

    def delete_blob(self, **conditions):
        self._check(**conditions)
        del self._container.blobs[self._name]

    def download_blob(self, offset=None, length=None):
        self._check()
        if self._name not in self._container.blobs:
            raise ResourceNotFoundError("no blob")
        data, tag = self._container.blobs[self._name]
        if length is not None and not data:
            error = HttpResponseError("no such range")
            error.status_code = 416
            raise error
        content = data if length is None else data[:length]
        return SimpleNamespace(readall=lambda: content, properties=SimpleNamespace(etag=tag))


@pytest.fixture
def container(monkeypatch):
    made = Container()
    monkeypatch.setattr("aztask.azure.container.container_client", lambda address, **options: made)
    return made


@pytest.fixture
def blob(container):
    address = BlobAddress("shop", "https://shop.blob.core.windows.net", "c", "folder")
    return TaggedBlob(address, "state", what="the state", content_type="text/plain")


def test_a_blob_that_is_not_there_is_empty(blob):
    assert blob.read(10) == (b"", None)


def test_the_first_write_creates_the_container(blob, container):
    assert blob.write(b"one", None)
    assert container.exists
    data, tag = blob.read(2)
    assert (data, tag) == (b"on", "tag-1")
    assert list(container.blobs) == ["folder/state"]


def test_a_writer_of_an_old_revision_is_refused(blob):
    blob.write(b"one", None)
    _, tag = blob.read(10)
    assert blob.write(b"two", tag)
    assert not blob.write(b"three", tag)
    assert not blob.write(b"three", None)
    assert blob.read(10)[0] == b"two"


def test_a_blob_that_was_deleted_is_not_written_under_its_old_tag(blob, container):
    blob.write(b"one", None)
    container.blobs.clear()
    assert not blob.write(b"two", "tag-1")
    assert not container.blobs


def test_an_empty_blob_is_read_without_a_range(blob):
    blob.write(b"", None)
    assert blob.read(10) == (b"", "tag-1")


def test_a_blob_is_moved_only_as_it_was_read(blob, container):
    blob.write(b"damaged", None)
    assert blob.move(b"damaged", "another", ".bad") is None
    assert blob.move(b"damaged", "tag-1", ".bad") == "folder/state.bad"
    assert list(container.blobs) == ["folder/state.bad"]


def test_a_service_that_is_down_is_unavailable(blob, container):
    container.failure = ServiceRequestError("down")
    for call in (
        lambda: blob.read(1),
        lambda: blob.write(b"", None),
        lambda: blob.move(b"", "t", ""),
    ):
        with pytest.raises(BrokerUnavailable, match="the state: "):
            call()
