"""The lease document in a blob on Azurite: shared, conditional, and bad news said plainly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest
from azurite import Azurite
from proxy import Proxy

from aztask.address.urls import parse_container
from aztask.azure.container import container_client
from aztask.errors import BrokerUnavailable, DecodeError
from aztask.leaseadvice.advice import Evidence, Observation, decide
from aztask.leaseadvice.blob import LeaseBlob
from aztask.leaseadvice.document import NAME, SIZE_LIMIT, LeaseDocument, QueueEntry

ADVICE = decide(Evidence(1000, 10.0, 60.0), 30.0, at=5.0)
SERVICE = "blob"
_containers = count(1)


@pytest.fixture
def address(azurite: Azurite):
    """A folder in a container that does not exist yet."""
    return parse_container(f"leases-{next(_containers)}/shop", azurite.connection_string)


@pytest.fixture
def store(address) -> Iterator[LeaseBlob]:
    made = LeaseBlob(address)
    yield made
    made.close()


def test_it_is_empty_at_first_and_then_what_was_published(store, address):
    empty = store.load()
    assert empty.document == LeaseDocument()
    assert store.publish(LeaseDocument().with_advice("slow", ADVICE), empty)
    other = LeaseBlob(address)
    found = other.load()
    assert found.document.revision == 1
    assert found.document.entry("slow").advice == ADVICE
    other.close()


def test_a_stale_writer_is_refused(store):
    empty = store.load()
    assert store.publish(LeaseDocument().with_advice("slow", ADVICE), empty)
    assert not store.publish(LeaseDocument(), empty)
    first = store.load()
    assert store.publish(first.document, first)
    assert not store.publish(LeaseDocument(), first)
    assert store.load().document.entry("slow").advice == ADVICE


def test_after_the_blob_was_deleted_a_writer_reads_again(store, address):
    assert store.publish(LeaseDocument(), store.load())
    found = store.load()
    with container_client(address) as container:
        container.delete_blob(address.name_of(NAME))
    assert not store.publish(found.document, found)
    assert store.load().document.revision == 0


def test_what_is_no_document_is_refused(store, address):
    assert store.publish(LeaseDocument(), store.load())
    with container_client(address) as container:
        container.upload_blob(address.name_of(NAME), b"<xml/>", overwrite=True)
    with pytest.raises(DecodeError, match="delete it to begin anew"):
        store.load()


@pytest.mark.parametrize("data", [b"", b"{", b" " * (SIZE_LIMIT + 1)], ids=["empty", "cut", "long"])
def test_a_damaged_document_is_set_aside_and_a_new_one_begins(store, address, data):
    assert store.set_aside() is None, "there is none"
    assert store.publish(LeaseDocument(), store.load())
    assert store.set_aside() is None, "it is not damaged"
    container = container_client(address)
    container.upload_blob(address.name_of(NAME), data, overwrite=True)
    with pytest.raises(DecodeError):
        store.load()
    assert store.set_aside() == f"shop/{NAME}.damaged"
    assert container.download_blob(f"shop/{NAME}.damaged").readall() == data[: SIZE_LIMIT + 1]
    assert store.load().document == LeaseDocument()
    assert store.publish(LeaseDocument().with_advice("slow", ADVICE), store.load())
    container.upload_blob(address.name_of(NAME), b'{"version": 2}', overwrite=True)
    assert store.set_aside() is None, "a newer release wrote it"
    container.close()


def test_a_store_that_is_away_is_unavailable(azurite):
    proxy = Proxy(azurite.port)
    store = LeaseBlob(parse_container("leases", azurite.connection_string_at(proxy.port)))
    proxy.set("reset")
    with pytest.raises(BrokerUnavailable, match="lease document"):
        store.load()
    proxy.close()
    store.close()


def test_no_count_of_two_writers_is_lost(address):
    def add(times: int) -> None:
        store = LeaseBlob(address)
        for _ in range(times):
            while True:
                stored = store.load()
                seen = stored.document.entry("q").observed
                more = QueueEntry(None, seen.plus(Observation(lost_ever=1)))
                if store.publish(stored.document.with_entry("q", more), stored):
                    break
        store.close()

    threads = [threading.Thread(target=add, args=(15,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store = LeaseBlob(address)
    document = store.load().document
    assert (document.revision, document.entry("q").observed.lost_ever) == (30, 30)
    store.close()
