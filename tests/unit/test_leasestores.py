"""Where the lease document is kept, from a setting."""

import pytest

from aztask.errors import ConfigurationError
from aztask.leaseadvice import Evidence, decide
from aztask.leasedocument import publish_advice
from aztask.leasestores import open_lease_store
from aztask.results.leaseblob import LeaseBlob
from aztask.results.leasefile import LeaseFile

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
