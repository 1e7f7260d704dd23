"""Event files as blobs: stored once, completely, in a container that is made when needed."""

import pytest
from azure.core.exceptions import (
    ResourceExistsError,
    ResourceNotFoundError,
    ServiceRequestError,
)

from aztask.address.urls import parse_container
from aztask.errors import BrokerUnavailable
from aztask.stores.events.blobs import EventBlobs

ACCOUNT = "DefaultEndpointsProtocol=https;AccountName=shop;AccountKey=c2VjcmV0"


class Container:
    """A container in a dict; None while it does not exist."""

    def __init__(self, blobs):
        self.blobs = blobs
        self.error = None

    def create_container(self, **options):
        self.blobs = {}

    def get_blob_client(self, name):
        return Blob(self, name)

    def close(self):
        pass


class Blob:
    """One blob of it."""

    def __init__(self, container, name):
        self.container, self.name = container, name

    def upload_blob(self, stream, *, overwrite, content_settings):
        if self.container.error:
            raise self.container.error
        if self.container.blobs is None:
            raise ResourceNotFoundError
        assert not overwrite
        if self.name in self.container.blobs:
            raise ResourceExistsError
        self.container.blobs[self.name] = stream.read()

    def get_blob_properties(self):
        self.size = len(self.container.blobs[self.name])
        return self


@pytest.fixture
def blobs():
    made = EventBlobs(parse_container("events/prod", ACCOUNT))
    made._container = Container({})
    return made


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "w-1.jsonl"
    path.write_bytes(b'{"event":"received"}\n')
    return path


def test_a_file_is_stored_once_and_again_does_no_harm(blobs, file):
    assert blobs.upload("w-1.jsonl", file)
    assert blobs.upload("w-1.jsonl", file)
    assert blobs._container.blobs == {"prod/w-1.jsonl": file.read_bytes()}
    file.write_bytes(b"another file\n")
    assert not blobs.upload("w-1.jsonl", file)


def test_a_missing_container_is_created(blobs, file):
    blobs._container.blobs = None
    assert blobs.upload("w-1.jsonl", file)
    assert list(blobs._container.blobs) == ["prod/w-1.jsonl"]


def test_an_unreachable_service_is_one_error_and_a_missing_file_another(blobs, file, tmp_path):
    with pytest.raises(OSError):
        blobs.upload("x", tmp_path / "missing")
    blobs._container.error = ServiceRequestError("refused")
    with pytest.raises(BrokerUnavailable):
        blobs.upload("w-1.jsonl", file)
    blobs.close()
