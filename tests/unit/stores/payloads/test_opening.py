"""Which store an app has, from its settings and its broker."""

import sys

import pytest

from aztask import App
from aztask.address.addresses import BlobAddress
from aztask.address.urls import parse_payloads
from aztask.errors import ConfigurationError
from aztask.stores.payloads.opening import FolderPayloads

ACCOUNT = "DefaultEndpointsProtocol=https;AccountName=shop;AccountKey=c2VjcmV0;"


def store_of(broker, **options):
    payloads = App("shop", broker=broker, **options).payloads
    return None if payloads is None else payloads.store


def test_local_has_a_folder_beside_its_file(tmp_path):
    store = store_of(f"local://{tmp_path}/q.db")
    assert isinstance(store, FolderPayloads)
    assert str(store.folder) == f"{tmp_path}/q.db.payloads"


@pytest.mark.parametrize("broker", ["local://:memory:", "servicebus://shop-prod", None])
def test_others_have_none_by_default(broker):
    assert store_of(broker) is None


def test_off_is_off(tmp_path):
    assert store_of(f"local://{tmp_path}/q.db", payloads="off") is None


def test_a_container_with_entra_or_an_account(monkeypatch):
    address = parse_payloads("blob://shop/payloads", None)
    assert isinstance(address, BlobAddress)
    assert address.uses_entra
    store = store_of("servicebus://shop-prod", payloads="large/here", payloads_account=ACCOUNT)
    assert str(store.address) == "blob://shop/large/here"


def test_the_environment_sets_it(tmp_path, monkeypatch):
    monkeypatch.setenv("AZTASK_PAYLOADS", f"{tmp_path}/large")
    monkeypatch.setenv("AZTASK_PAYLOAD_THRESHOLD", "1234")
    app = App("shop", broker="servicebus://shop-prod")
    assert app.payloads.store.folder == tmp_path / "large"
    assert (app.payloads.threshold, app.payloads.result_threshold) == (1234, 1234)


def test_thresholds_follow_the_broker(tmp_path):
    large = {"payloads": "./large"}
    thresholds = [
        App("shop", broker=broker, **large).payloads.threshold
        for broker in (f"local://{tmp_path}/q.db", "servicebus://shop-prod", "storagequeue://shop")
    ]
    assert thresholds == [16 << 20, 192 << 10, 32 << 10]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"payloads": "large"}, "write blob://ACCOUNT/CONTAINER"),
        ({"payloads": "s3://large"}, "write blob://ACCOUNT/CONTAINER"),
        ({"payloads": ""}, "payloads is the path"),
        ({"payloads": "blob://shop"}, "is not a name of a blob container"),
        ({"payloads_account": ACCOUNT}, "without payloads"),
        ({"payloads": "blob://shop/large", "payloads_account": ACCOUNT}, "means Entra ID"),
        ({"payload_threshold": 0}, "payload_threshold"),
        ({"payload_threshold": 17 << 20}, "payload_threshold"),
        ({"payload_lifetime": 60}, "payload_lifetime"),
    ],
)
def test_wrong_settings_are_refused_at_once(options, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        App("shop", broker="local://:memory:", **options)
    assert "c2VjcmV0" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_threshold_that_is_no_number(monkeypatch):
    monkeypatch.setenv("AZTASK_PAYLOAD_THRESHOLD", "1 MB")
    with pytest.raises(ConfigurationError, match="not a whole number"):
        App("shop", broker="local://:memory:")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "aztask.stores.payloads.blob", None)
    app = App("shop", broker="servicebus://shop-prod", payloads="blob://shop/large")
    with pytest.raises(ConfigurationError, match=r"pip install .*aztask\[blob\]"):
        app.payloads.store  # noqa: B018


def test_tests_never_use_the_container(tmp_path, monkeypatch):
    monkeypatch.setenv("AZTASK_TEST_BROKER", f"local://{tmp_path}/test.db")
    store = store_of("servicebus://shop-prod", payloads="blob://shop/large")
    assert isinstance(store, FolderPayloads)
