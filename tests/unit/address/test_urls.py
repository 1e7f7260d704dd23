"""Broker and result URLs: what each form means, and one clear line for every other text."""

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.address import urls
from aztask.address.addresses import (
    BlobAddress,
    LocalAddress,
    ServiceBusAddress,
    StorageQueueAddress,
    TablesAddress,
)
from aztask.address.urls import parse_broker, parse_container, parse_results
from aztask.errors import ConfigurationError

SECRET = "dGhlIHNlY3JldCBvZiB0aGlzIHRlc3QsIG5ldmVyIHNob3du"


def refusal(parse, text):
    """The message with which `text` is refused; it is one printable line."""
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.isprintable()
    assert caught.value.__cause__ is None
    return message


@pytest.mark.parametrize("parse", [parse_broker, parse_results])
def test_local_names_a_file_under_the_working_directory(parse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("local://") == LocalAddress(str(tmp_path / ".aztask" / "queues.db"))


@pytest.mark.parametrize("parse", [parse_broker, parse_results])
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("local:///var/lib/q.db", LocalAddress("/var/lib/q.db")),
        ("LOCAL:///var/lib/q.db", LocalAddress("/var/lib/q.db")),
        ("local:///a%20b/q%23.db", LocalAddress("/a b/q#.db")),
        ("local:///größe/q.db", LocalAddress("/größe/q.db")),
        ("local:///q.db?durable=full", LocalAddress("/q.db", full_durability=True)),
        ("local:///q.db?durable=normal", LocalAddress("/q.db")),
        ("local://:memory:", LocalAddress(":memory:")),
    ],
)
def test_local_forms(parse, text, address):
    assert parse(text) == address
    assert parse(text).in_memory == (address.path == ":memory:")


def test_the_working_directory_counts_when_the_url_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = parse_broker("local://?durable=full")
    monkeypatch.chdir("/")
    assert Path(address.path).parent.parent == tmp_path
    assert address.full_durability


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("servicebus://my-shop", "my-shop.servicebus.windows.net"),
        ("servicebus://My-Shop/", "my-shop.servicebus.windows.net"),
        (
            "servicebus://my-shop.servicebus.chinacloudapi.cn",
            "my-shop.servicebus.chinacloudapi.cn",
        ),
    ],
)
def test_service_bus_by_name_uses_entra_id(text, host):
    address = parse_broker(text)
    assert address == ServiceBusAddress(host)
    assert address.uses_entra


def test_storage_accounts_by_name_use_entra_id():
    queue = parse_broker("storagequeue://shopdata")
    assert queue == StorageQueueAddress("shopdata", "https://shopdata.queue.core.windows.net")
    assert queue == parse_broker("storagequeue://shopdata.queue.core.windows.net")
    tables = parse_results("tables://shopdata")
    assert tables == TablesAddress(
        "shopdata",
        "https://shopdata.table.core.windows.net",
        "https://shopdata.blob.core.windows.net",
    )
    assert tables == parse_results("tables://shopdata.table.core.windows.net")
    assert queue.uses_entra
    assert tables.uses_entra


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty; use local://"),
        ("   ", "empty; use local://"),
        ("shop", "neither a URL nor a connection string"),
        ("local://data/q.db", "absolute path.*local:///"),
        ("local:///data/", "not a file name"),
        ("local:///a%00b", "not a file name"),
        ("local:///a%ff", "not UTF-8"),
        ("local:///q.db#x", "%23"),
        ("local:///q.db?durable=ful", r"durable=full"),
        ("local:///q.db?durable", r"durable=full"),
        ("local:///q.db?durabel=full", "Did you mean 'durable'"),
        ("local:///q.db?durable=full&x=1", "has no option 'x'"),
        ("local:///q.db?group=a&group=b", "an option twice"),
        ("local:///q.db?group=", "not a group's name"),
        ("local:///q.db?group=../x", "not a group's name"),
        ("servicebus://", "names nothing"),
        ("servicebus://a/b", "ends after the name"),
        ("servicebus://shop-1?sig=x", "ends after the name"),
        ("servicebus://shop-1:5671", "no port"),
        ("servicebus://shop-1:99999", "from 1 to 65535"),
        ("servicebus://sh", "6 to 50 letters"),
        ("servicebus://-shop-", "6 to 50 letters"),
        ("servicebus://a..b", "host name"),
        (f"servicebus://root:{SECRET}@shop-1", "no user name and no key"),
        (f"servicebus://{SECRET}{SECRET}", "6 to 50 letters"),
        ("storagequeue://Shop", "3 to 24 lower-case"),
        ("storagequeue://x", "3 to 24 lower-case"),
        ("tables://shopdata", "storagequeue://"),
        ("servicbus://shop-1", "Did you mean 'servicebus'"),
        ("sb://shop-1.servicebus.windows.net", "Did you mean servicebus://NAMESPACE"),
        ("https://shop.queue.core.windows.net", "storagequeue://ACCOUNT"),
        ("redis://localhost", "no broker of the kind 'redis'"),
        (SECRET, "neither a URL nor a connection string"),
        ("local://\r\n", "line break"),
        ("local:///a\x00b", "NUL"),
        ("local:///a\x1b[31mb", "control character"),
        ("local:///a\ud800b", "control character"),
        (" local://", "begins or ends with a space"),
        (None, "not as NoneType"),
        (5, "not as int"),
        (b"local://", "not as bytes"),
    ],
)
def test_what_is_wrong_with_a_broker_is_said_in_one_line(text, words):
    message = refusal(parse_broker, text)
    assert re.search(words, message)
    assert SECRET not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("servicebus://shop-1", "stores no results"),
        ("storagequeue://shopdata", "stores no results"),
        (
            "Endpoint=sb://h/;SharedAccessKeyName=n;SharedAccessKey=c2VjcmV0c2VjcmV0",
            "Service Bus stores no results",
        ),
        ("table://x", "Did you mean 'tables'"),
        ("redis://localhost", "no result store of the kind 'redis'"),
    ],
)
def test_what_is_wrong_with_a_result_store(text, words):
    assert re.search(words, refusal(parse_results, text))


@given(
    st.text()
    | st.builds(
        str.__add__,
        st.sampled_from(["local://", "servicebus://", "storagequeue://", "Endpoint=sb://"]),
        st.text(),
    )
)
def test_any_text_is_an_address_or_one_clear_line(text):
    for parse in (parse_broker, parse_results):
        try:
            parse(text)
        except ConfigurationError as error:
            assert str(error).isprintable()
        else:
            with contextlib.suppress(UnicodeEncodeError):
                assert text.encode()


def test_a_container_is_named_with_its_account():
    address = parse_container("blob://shopdata/events/workers/eu")
    assert address == BlobAddress(
        "shopdata", "https://shopdata.blob.core.windows.net", "events", "workers/eu"
    )
    assert address.uses_entra
    assert str(address) == "blob://shopdata/events/workers/eu"
    assert address.name_of("a/b.jsonl") == "workers/eu/a/b.jsonl"


def test_a_container_beside_a_connection_string():
    account = f"AccountName=shopdata;AccountKey={SECRET}"
    address = parse_container("events", account)
    assert address.endpoint == "https://shopdata.blob.core.windows.net"
    assert address.name_of("a.jsonl") == "a.jsonl"
    assert SECRET not in repr(address)
    emulated = parse_container("events", "UseDevelopmentStorage=true")
    assert emulated.endpoint == "http://127.0.0.1:10000/devstoreaccount1"


@pytest.mark.parametrize(
    ("text", "account", "words"),
    [
        ("events", None, "has no account"),
        ("", None, "is empty"),
        ("https://shopdata.blob.core.windows.net/events", None, "no container of the kind"),
        ("blob://shopdata", None, "not a name of a blob container"),
        ("blob://shopdata/Events", None, "not a name of a blob container"),
        ("blob://shopdata/a--b", None, "not a name of a blob container"),
        ("blob://shopdata/$root", None, "not a name of a blob container"),
        ("blob://shopdata/events/../x", None, "is not plain"),
        ("blob://shopdata/events/_x", None, "is not plain"),
        ("blob://sh/events", None, "not a name of this service"),
        ("blob://me@shopdata/events", None, "no user name"),
        ("blob://shopdata/events", f"AccountName=shopdata;AccountKey={SECRET}", "Entra ID"),
        ("events", "AccountName=shopdata;AccountKey=%%%", "is not base64"),
        ("events", SECRET, "neither a URL nor a connection string"),
    ],
)
def test_a_wrong_container_is_one_line(text, account, words):
    message = refusal(lambda given: parse_container(given, account), text)
    assert words in message
    assert SECRET not in message


@pytest.mark.parametrize("text", ["local:///C:/shop/queues.db", "local://C:/shop/queues.db"])
def test_on_windows_a_path_begins_with_its_drive(monkeypatch, text):
    assert "local:///" in refusal(parse_broker, "local://C:/shop/queues.db")
    monkeypatch.setattr(urls, "WINDOWS", True)
    assert parse_broker(text) == LocalAddress("C:/shop/queues.db")
