"""The lease document in a file."""

import pytest

from aztask.errors import BrokerUnavailable, DecodeError
from aztask.leaseadvice.document import LeaseDocument, QueueEntry
from aztask.leaseadvice.stores import LeaseFile


@pytest.fixture
def store(tmp_path):
    return LeaseFile(tmp_path / "shared" / "leases.json")


def test_each_publication_is_the_next_revision(store):
    empty = store.load()
    assert empty.document == LeaseDocument()
    document = LeaseDocument().with_entry("orders", QueueEntry())
    assert store.publish(document, empty)
    found = store.load()
    assert (found.document.revision, list(found.document.queues)) == (1, ["orders"])
    assert not store.publish(document, empty), "another revision is stored"
    assert store.publish(document, found)
    assert store.load().document.revision == 2


def test_a_damaged_document_is_renamed_and_a_good_one_is_not(store):
    assert store.set_aside() is None
    store.path.parent.mkdir(exist_ok=True)
    store.path.write_text("{")
    with pytest.raises(DecodeError):
        store.load()
    aside = store.set_aside()
    assert aside is not None
    assert not store.path.exists()
    store.publish(LeaseDocument(), store.load())
    assert store.set_aside() is None
    assert store.path.exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "leases.json").mkdir()
    with pytest.raises(BrokerUnavailable, match=r"leases\.json"):
        LeaseFile(tmp_path / "leases.json").load()
