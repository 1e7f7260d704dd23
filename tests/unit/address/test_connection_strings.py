"""Azure connection strings: read completely or refused in one line that shows no secret."""

import re

import pytest

from aztask.address.addresses import ServiceBusAddress, StorageQueueAddress
from aztask.address.urls import parse_broker, parse_results
from aztask.errors import ConfigurationError
from aztask.support.display import Secret

KEY = "VGhpcyBrZXkgaXMgbmV2ZXIgc2hvd24gaW4gYW4gZXJyb3I="
SIGNATURE = "sv=2022-11-02&ss=q&srt=sco&sp=rwdl&se=2030-01-01T00:00:00Z&sig=bmV2ZXIgc2hvd24%3D"
BUS = f"Endpoint=sb://shop.servicebus.windows.net/;SharedAccessKeyName=all;SharedAccessKey={KEY}"
STORAGE = (
    f"DefaultEndpointsProtocol=https;AccountName=shopdata;AccountKey={KEY};"
    "EndpointSuffix=core.windows.net"
)


def test_a_service_bus_string_is_read_and_written_again():
    address = parse_broker(f"{BUS};EntityPath=orders")
    assert address == ServiceBusAddress(
        "shop.servicebus.windows.net", None, "all", Secret(KEY), entity="orders"
    )
    assert not address.uses_entra
    assert parse_broker(address.connection_string().reveal()) == address


def test_the_emulator_takes_any_key_and_keeps_its_port():
    text = "Endpoint=sb://localhost:5672;SharedAccessKeyName=x;SharedAccessKey=y_z;"
    address = parse_broker(f"{text}UseDevelopmentEmulator=true;")
    assert (address.host, address.port, address.emulator) == ("localhost", 5672, True)
    assert address.connection_string().reveal() == f"{text}UseDevelopmentEmulator=true"
    with pytest.raises(ConfigurationError, match="not base64"):
        parse_broker(text)


def test_a_service_bus_signature():
    address = parse_broker(
        "Endpoint=sb://shop.servicebus.windows.net/;"
        "SharedAccessSignature=SharedAccessSignature sr=x&sig=abc%3D&se=1&skn=n"
    )
    assert address.signature == Secret("SharedAccessSignature sr=x&sig=abc%3D&se=1&skn=n")
    assert parse_broker(address.connection_string().reveal()) == address


def test_a_storage_string_names_queues_tables_and_blobs():
    queue = parse_broker(STORAGE)
    assert queue == StorageQueueAddress(
        "shopdata", "https://shopdata.queue.core.windows.net", Secret(KEY)
    )
    tables = parse_results(STORAGE)
    assert tables.endpoint == "https://shopdata.table.core.windows.net"
    assert tables.blob_endpoint == "https://shopdata.blob.core.windows.net"
    assert tables.key == Secret(KEY)


def test_key_names_are_read_in_any_case_and_endpoints_as_given():
    address = parse_broker(
        f"defaultendpointsprotocol=http;accountname=devstoreaccount1;accountkey={KEY};"
        "queueendpoint=http://127.0.0.1:10001/devstoreaccount1/"
    )
    assert address.endpoint == "http://127.0.0.1:10001/devstoreaccount1"


def test_the_development_storage_is_azurite():
    assert (
        parse_broker("UseDevelopmentStorage=true").endpoint
        == "http://127.0.0.1:10001/devstoreaccount1"
    )
    tables = parse_results("UseDevelopmentStorage=true;")
    assert tables.endpoint == "http://127.0.0.1:10002/devstoreaccount1"
    assert tables.blob_endpoint == "http://127.0.0.1:10000/devstoreaccount1"


def test_a_storage_signature_is_kept_apart_from_the_endpoint():
    address = parse_broker(
        f"QueueEndpoint=https://shopdata.queue.core.windows.net/;SharedAccessSignature=?{SIGNATURE}"
    )
    assert address.account == "shopdata"
    assert address.endpoint == "https://shopdata.queue.core.windows.net"
    assert address.signature == Secret(SIGNATURE)
    assert not address.uses_entra


BAD = [
    (BUS.replace("Endpoint=sb://shop.servicebus.windows.net/;", ""), "no Endpoint"),
    (BUS.replace("SharedAccessKeyName=all;", ""), "no SharedAccessKeyName"),
    (BUS.replace(f";SharedAccessKey={KEY}", ""), "no SharedAccessKey;.*servicebus://"),
    (f"{BUS};SharedAccessKey={KEY}", "SharedAccessKey twice"),
    (f"{BUS};sharedaccesskey={KEY[:-4]}", "SharedAccessKey twice"),
    (f"{BUS};SharedAccessSignature={SIGNATURE}", "both"),
    (BUS.replace(KEY, KEY[:-1]), "SharedAccessKey .*not base64"),
    (BUS.replace(KEY, KEY[:20] + "!" + KEY[20:]), "not base64"),
    (BUS.replace(KEY, KEY[:20] + "é" + KEY[20:]), "not base64"),
    (BUS.replace(KEY, KEY[:20] + ";" + KEY[20:]), "part 4"),
    (BUS.replace(KEY, KEY[:20] + "\r\n" + KEY[20:]), "line break"),
    (BUS.replace(KEY, KEY[:20] + "\x00" + KEY[20:]), "NUL"),
    (f"{BUS}\r\n", "line break"),
    (BUS.replace(KEY, ""), "SharedAccessKey .*empty"),
    (BUS.replace("SharedAccessKey=", "SharedAccesKey="), "Did you mean 'SharedAccessKey'"),
    (BUS.replace("SharedAccessKey=", ""), "part 3 .*not known"),
    (BUS.replace("net/", "net:99999/"), "from 1 to 65535"),
    (BUS.replace("net/", "net:0/"), "from 1 to 65535"),
    (BUS.replace("net/", "net:port/"), "from 1 to 65535"),
    (BUS.replace("net/", "net/orders"), "after the host name"),
    (BUS.replace("shop.servicebus", "shop..servicebus"), "host name"),
    (BUS.replace("shop.servicebus", f"{KEY}@shop"), "user name"),
    (BUS.replace("shop.servicebus.windows.net", "[::x]"), "host name"),
    (BUS.replace("shop.servicebus.windows.net", "[1:2]"), "IPv6"),
    (BUS.replace("sb://", "https://"), "begin with sb://"),
    (BUS.replace("sb://shop.servicebus.windows.net/", "sb:///"), "host name"),
    (f"{BUS};UseDevelopmentEmulator=yes", "neither true nor false"),
    (f"{BUS};AccountName=shopdata", "AccountName does not belong"),
    (f"{BUS};;EntityPath=x", "part 4 .*no '='"),
    (STORAGE.replace("AccountName=shopdata;", ""), "no AccountName"),
    (STORAGE.replace("shopdata", "Shop Data"), "3 to 24"),
    (STORAGE.replace("shopdata", KEY), "3 to 24"),
    (STORAGE.replace(f"AccountKey={KEY};", ""), "neither AccountKey nor"),
    (f"{STORAGE};AccountKey={KEY}", "AccountKey twice"),
    (f"{STORAGE};SharedAccessSignature={SIGNATURE}", "both"),
    (STORAGE.replace(KEY, KEY[:-1]), "AccountKey .*not base64"),
    (STORAGE.replace(KEY, ""), "AccountKey .*empty"),
    (STORAGE.replace("https", "ftp"), "neither http nor https"),
    (STORAGE.replace("core.windows.net", "core/x"), "EndpointSuffix"),
    (f"{STORAGE};QueueEndpoint=https://h:99999/a", "from 1 to 65535"),
    (f"{STORAGE};QueueEndpoint=queue.net", "begin with https://"),
    (f"{STORAGE};QueueEndpoint=https://h/?{SIGNATURE}", "SharedAccessSignature="),
    (f"{STORAGE};Blobendpont=https://h/", "Did you mean 'BlobEndpoint'"),
    (f"{STORAGE};EntityPath=x", "EntityPath does not belong"),
    ("UseDevelopmentStorage=maybe", "neither true nor false"),
    (f"UseDevelopmentStorage=true;AccountKey={KEY}", "AccountKey does not belong"),
    ("AccountName=shopdata;SharedAccessSignature=sv=1&se=2", "no sig="),
    (f"SharedAccessSignature={SIGNATURE}", "AccountName nor an endpoint"),
    (f"BlobEndpoint=https://shopdata.blob.net;SharedAccessSignature={SIGNATURE}", "QueueEndpoint"),
    (KEY, "not known"),
    ("=" * 20, "not known"),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=range(len(BAD)))
def test_a_bad_string_is_refused_without_its_secret(text, words):
    with pytest.raises(ConfigurationError) as caught:
        parse_broker(text)
    shown = f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"
    assert re.search(words, str(caught.value))
    assert str(caught.value).isprintable()
    assert not reveals(shown)


def reveals(shown):
    """Whether eight characters in a row of a key or of a signature are in the text."""
    parts = (KEY, SIGNATURE.partition("&sig=")[2])
    return any(part[at : at + 8] in shown for part in parts for at in range(len(part) - 7))


def test_the_check_for_secrets_can_fail():
    assert reveals(f"... {KEY[10:20]} ...")


@pytest.mark.parametrize(
    "address",
    [
        parse_broker(BUS),
        parse_broker(STORAGE),
        parse_results(STORAGE),
        parse_broker(f"AccountName=shopdata;SharedAccessSignature={SIGNATURE}"),
    ],
    ids=lambda address: type(address).__name__,
)
def test_no_address_shows_its_secret(address):
    assert not reveals(f"{address} {address!r} {[address]}")
