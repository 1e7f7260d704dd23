"""Where the lease document is kept, from a setting."""

import pytest

from aztask.errors import ConfigurationError, DecodeError
from aztask.leaseadvice.advice import Evidence, decide
from aztask.leaseadvice.blob import LeaseBlob
from aztask.leaseadvice.document import publish_advice
from aztask.leaseadvice.stores import LeaseFile, open_lease_store

ACCOUNT = "DefaultEndpointsProtocol=https;AccountName=shop;AccountKey=c2VjcmV0;"


def test_a_path_is_a_file(tmp_path):
    store = open_lease_store(str(tmp_path / "leases.json"))
    assert isinstance(store, LeaseFile)
    assert not store.remote


@pytest.mark.parametrize(
    ("place", "account", "broker"),
    [
        ("leases/shop", ACCOUNT, None),
        ("auto", ACCOUNT, "servicebus://shop-bus"),
        ("auto", None, ACCOUNT),
        ("auto", None, "UseDevelopmentStorage=true"),
        ("auto", None, "storagequeue://shop"),
        ("blob://shop/leases", None, "servicebus://shop-bus"),
    ],
)
def test_a_container_is_a_blob(place, account, broker):
    store = open_lease_store(place, account=account, broker=broker)
    assert isinstance(store, LeaseBlob)
    assert store.remote
    store.close()


def test_auto_is_beside_the_local_queues(tmp_path):
    store = open_lease_store("auto", broker=f"local://{tmp_path}/queues.db")
    assert isinstance(store, LeaseFile)
    assert store.path == tmp_path / "queues.db.leases.json"


@pytest.mark.parametrize(
    ("place", "broker"),
    [
        ("auto", "servicebus://shop-bus"),
        ("auto", "local://:memory:"),
        ("auto", None),
        ("", None),
        ("local:///x", None),
        ("a\0b", None),
    ],
)
def test_no_place(place, broker):
    with pytest.raises(ConfigurationError, match="give"):
        open_lease_store(place, broker=broker)


def test_advice_from_a_stale_document_is_refused(tmp_path):
    store = open_lease_store(str(tmp_path / "leases.json"))
    advice = {"slow": decide(Evidence(1000, 10.0, 60.0), 30.0, source="pipeline", at=5.0)}
    based_on = store.load()
    assert publish_advice(store, advice, based_on)
    assert not publish_advice(store, advice, based_on)
    assert store.load().document.entry("slow").advice == advice["slow"]


DAMAGED = [b"", b"{", b"[]", b"\xff", b'{"version": "one"}', b'{"version": 1, "queues": []}']


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_document_is_set_aside_and_a_new_one_begins(tmp_path, data):
    store = open_lease_store(str(tmp_path / "leases.json"))
    store.path.write_bytes(data)
    with pytest.raises(DecodeError):
        store.load()
    aside = store.set_aside()
    assert aside == f"{tmp_path}/leases.json.damaged"
    assert (tmp_path / "leases.json.damaged").read_bytes() == data, "kept for a person"
    assert store.set_aside() is None, "there is none any more"
    empty = store.load()
    assert store.publish(empty.document, empty)
    assert store.set_aside() is None, "it is not damaged"
    assert store.load().document.revision == 1


def test_the_document_of_a_newer_release_is_left_alone(tmp_path):
    store = open_lease_store(str(tmp_path / "leases.json"))
    newer = b'{"version": 2, "revision": "2026-11", "queues": {}}'
    store.path.write_bytes(newer)
    assert store.set_aside() is None
    assert store.path.read_bytes() == newer
    with pytest.raises(DecodeError, match="has version 2, known here is 1; update aztask"):
        store.load()
