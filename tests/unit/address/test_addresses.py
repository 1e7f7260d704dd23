"""Addresses: what they connect with, and what is shown of them."""

import pytest

from aztask.address.urls import parse_broker, parse_container, parse_results

KEY = "c2VjcmV0"
BUS = f"Endpoint=sb://shop.example/;SharedAccessKeyName=k;SharedAccessKey={KEY}"
ACCOUNT = f"DefaultEndpointsProtocol=https;AccountName=shop;AccountKey={KEY}"


@pytest.mark.parametrize(
    ("address", "entra"),
    [
        (parse_broker("servicebus://shop-bus"), True),
        (parse_broker(BUS), False),
        (parse_broker("storagequeue://shop"), True),
        (parse_broker(ACCOUNT), False),
        (parse_results("tables://shop"), True),
        (parse_results(ACCOUNT), False),
        (parse_container("blob://shop/events"), True),
        (parse_container("events/2026", ACCOUNT), False),
    ],
    ids=str,
)
def test_a_key_stands_in_for_entra_and_is_never_shown(address, entra):
    assert address.uses_entra is entra
    assert KEY not in f"{address} {address!r}"


def test_a_connection_string_is_what_the_sdk_takes():
    text = parse_broker(BUS).connection_string().reveal()
    assert text.startswith("Endpoint=sb://shop.example")
    assert f"SharedAccessKey={KEY}" in text


def test_a_local_address_says_where_and_how_safely():
    assert parse_broker("local://:memory:").in_memory
    assert str(parse_broker("local:///tmp/q.db?durable=full")) == "local:///tmp/q.db?durable=full"


def test_a_folder_is_a_part_of_each_blobs_name():
    place = parse_container("events/2026", ACCOUNT)
    assert place.name_of("a.jsonl") == "2026/a.jsonl"
    assert place.name_of_container() == "events/2026"
    assert parse_container("events", ACCOUNT).name_of("a.jsonl") == "a.jsonl"
