"""Who a row belongs to: names made from addresses, and where the owner reaches the stores."""

import pytest

from aztask import App
from aztask.address.addresses import ServiceBusAddress, StorageQueueAddress
from aztask.address.owner import NO_OWNER, Owner, service_name
from aztask.address.urls import parse_broker
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker

KEY = "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "servicebus://Shop-Prod",
            "Endpoint=sb://shop-prod.servicebus.windows.net/;SharedAccessKeyName=a;"
            f"SharedAccessKey={KEY}",
        ),
        (
            "servicebus://shop-prod.servicebus.windows.net",
            "Endpoint=sb://SHOP-PROD.servicebus.windows.net:5671/;SharedAccessKeyName=b;"
            f"SharedAccessKey={KEY};EntityPath=orders",
        ),
        (
            "storagequeue://shopstore",
            f"DefaultEndpointsProtocol=https;AccountName=shopstore;AccountKey={KEY};"
            "EndpointSuffix=core.windows.net",
        ),
    ],
)
def test_entra_id_and_a_connection_string_give_the_same_owner(one, other):
    assert service_name(parse_broker(one)) == service_name(parse_broker(other))


def test_other_brokers_have_other_owners():
    names = {
        service_name(ServiceBusAddress("shop.servicebus.windows.net")),
        service_name(ServiceBusAddress("shop.servicebus.chinacloudapi.cn")),
        service_name(ServiceBusAddress("127.0.0.1", 5672, emulator=True)),
        service_name(ServiceBusAddress("127.0.0.1", 5673, emulator=True)),
        service_name(StorageQueueAddress("shop", "https://shop.queue.core.windows.net")),
        service_name(StorageQueueAddress("shop", "https://shop.queue.core.chinacloudapi.cn")),
        service_name(StorageQueueAddress("one", "http://127.0.0.1:10001/one")),
        service_name(StorageQueueAddress("two", "http://127.0.0.1:10001/two")),
    }
    assert len(names) == 8


def test_the_id_of_a_local_file_stays_when_it_is_opened_again(tmp_path):
    first = Database(str(tmp_path / "a.db"))
    other = Database(str(tmp_path / "b.db"))
    identity = LocalBroker(first).identity
    assert identity != LocalBroker(other).identity
    first.close()
    assert LocalBroker(Database(str(tmp_path / "a.db"))).identity == identity


def test_an_app_opens_its_store_for_its_owner(tmp_path, monkeypatch):
    results = f"local://{tmp_path}/results.db"
    app = App("shop", broker=f"local://{tmp_path}/a.db", results=results)
    same = App("shop", broker=f"local://{tmp_path}/a.db", results=results)
    other = App("shop", broker=f"local://{tmp_path}/b.db", results=results)
    assert app.results.owner == app.owner == same.owner != other.owner
    assert app.owner.app == "shop"
    monkeypatch.setenv("AZTASK_OWNER", "everywhere")
    named = App("shop", broker=f"local://{tmp_path}/a.db", results=results)
    assert named.owner == Owner("everywhere", "shop")
    assert App("shop", owner="here", results=results).results.owner == Owner("here", "shop")


def test_without_a_broker_there_is_no_owner(tmp_path):
    app = App("shop", results=f"local://{tmp_path}/results.db")
    assert app.results.owner is NO_OWNER
    assert not app.owner.known
    assert app.owner.mark == ""


def test_marks_differ_by_broker_and_app():
    owners = [Owner("a"), Owner("a", "x"), Owner("a", "y"), Owner("b", "x"), Owner("ax")]
    assert len({each.mark for each in owners}) == 5
    assert Owner("a", "x").of_broker == Owner("a")
