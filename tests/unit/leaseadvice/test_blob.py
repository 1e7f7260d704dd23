"""The lease document in a blob: what is read and written, and under which tag."""

import pytest

from aztask.address.urls import parse_container
from aztask.errors import DecodeError
from aztask.leaseadvice.blob import LeaseBlob
from aztask.leaseadvice.document import SIZE_LIMIT, LeaseDocument, QueueEntry, to_json

ACCOUNT = "DefaultEndpointsProtocol=https;AccountName=shop;AccountKey=c2VjcmV0"


class Tagged:
    """One blob with an ETag, as `aztask.azure.container.TaggedBlob` has it."""

    def __init__(self, data=b"", tag=None):
        self.data, self.tag, self.moved = data, tag, None

    def read(self, limit):
        return self.data[:limit], self.tag

    def write(self, data, tag):
        if tag != self.tag:
            return False
        self.data, self.tag = data, f"{self.tag or 'tag'}+"
        return True

    def move(self, data, tag, suffix):
        self.moved = suffix
        self.data, self.tag = b"", None
        return f"leases.json{suffix}"


@pytest.fixture
def store():
    store = LeaseBlob(parse_container("leases/shop", ACCOUNT))
    store.close()
    store._blob = Tagged()
    return store


def test_the_next_revision_is_written_over_the_one_that_was_read(store):
    empty = store.load()
    assert empty.document == LeaseDocument()
    document = LeaseDocument().with_entry("orders", QueueEntry())
    assert store.publish(document, empty)
    assert store.load().document.revision == 1
    assert not store.publish(document, empty)


def test_only_a_damaged_document_is_set_aside(store):
    assert store.set_aside() is None
    store._blob = Tagged(to_json(LeaseDocument()), "1")
    assert store.set_aside() is None
    store._blob = Tagged(b"{", "1")
    with pytest.raises(DecodeError):
        store.load()
    assert store.set_aside() == f"leases.json{store._blob.moved}"


def test_a_document_that_is_too_long_is_noticed(store):
    store._blob = Tagged(b" " * (2 * SIZE_LIMIT), "1")
    with pytest.raises(DecodeError, match="at most"):
        store.load()


def test_no_key_is_shown(store):
    assert "c2VjcmV0" not in repr(store)
    assert "leases" in repr(store)
