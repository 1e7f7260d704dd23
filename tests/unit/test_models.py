"""Bodies of foreign messages as models: what fits, and what is said of the rest."""

import base64
import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask import App
from aztask.errors import CodecError, ConfigurationError, DecodeError
from aztask.handler import Handler, check_model


class Colour(Enum):
    RED = "red"


@dataclass
class Item:
    name: str
    price: Decimal
    count: int = 1


@dataclass
class Order:
    id: int
    items: list[Item]
    at: datetime | None = None
    day: date | None = None
    key: UUID | None = None
    colour: Colour | None = None
    kind: Literal["new", "old"] = "new"
    weight: float = 0.0
    note: str | int = ""
    labels: dict[str, list[str]] = field(default_factory=dict)
    customer: str = field(default="", metadata={"name": "CustomerName"})
    data: bytes = b""
    counts: dict[int, str] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    anything: Any = None


def handler_of(model: Any) -> Handler[Any, Any]:
    @App("shop", broker="local://").handler(queue="orders", model=model)
    def on_order(order: Any) -> None: ...

    return on_order


def read(body: Any, model: Any = Order) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler = handler_of(model)
    return handler.conversion.read((handler.body(data),), {})[0][0]


FULL = {
    "id": 7,
    "items": [{"name": "tea", "price": "2.50"}, {"name": "cup", "price": 4, "count": 2}],
    "at": "2026-11-23T10:00:00+00:00",
    "day": "2026-11-23",
    "key": "12345678-1234-5678-1234-567812345678",
    "colour": "red",
    "kind": "old",
    "weight": 3,
    "note": 5,
    "labels": {"a": ["b"]},
    "CustomerName": "Ann",
    "data": "aGk=",
    "counts": {"7": "seven"},
    "folders": ["a/b"],
    "anything": [1, {"x": None}],
    "AField": "of a later version",
}


def test_every_kind_of_field():
    order = read(FULL)
    assert order.items == [Item("tea", Decimal("2.50")), Item("cup", Decimal("4"), 2)]
    assert order.at == datetime(2026, 11, 23, 10, tzinfo=UTC)
    assert order.day == date(2026, 11, 23)
    assert order.key == UUID("12345678-1234-5678-1234-567812345678")
    assert (order.colour, order.kind, order.weight, order.note) == (Colour.RED, "old", 3.0, 5)
    assert (order.labels, order.customer, order.data) == ({"a": ["b"]}, "Ann", b"hi")
    assert (order.counts, order.folders) == ({7: "seven"}, {Path("a/b")})
    assert order.anything == [1, {"x": None}]


def test_another_name_in_the_json_goes_before_a_field_of_the_same_map():
    @dataclass
    class Event:
        number: int = field(metadata={"name": "OrderNumber"})
        other: int = field(default=0, metadata={"name": "number"})

    assert read({"OrderNumber": 1}, Event) == Event(1)
    assert read({"number": 1}, Event) == Event(1), "as aztask writes it"
    assert read({"number": 2, "OrderNumber": 1}, Event) == Event(1), "a field has its own name"
    with pytest.raises(DecodeError, match=r"order.OrderNumber is missing"):
        read({}, Event)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text,
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: b" \n" + text + b"\n",
        base64.b64encode,
        lambda text: base64.b64encode(b"\xef\xbb\xbf" + text),
    ],
)
def test_a_byte_order_mark_and_base64_are_removed(encode):
    body = encode(json.dumps({"id": 1, "items": []}).encode())
    assert read(body) == Order(1, [])
    assert read(body, dict) == {"id": 1, "items": []}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "7"}, "order.id is a str, not int"),
        ({"items": [{"name": "tea"}]}, r"order.items\[0\].price is missing"),
        ({"items": [{"name": 1, "price": 1}]}, r"order.items\[0\].name is an int, not str"),
        ({"items": [{"name": "x", "price": "much"}]}, r"order.items\[0\].price is a str, not Dec"),
        ({"items": {}}, r"order.items is a dict, not list\[Item\]"),
        ({"at": "yesterday"}, "order.at is a str, not datetime | None"),
        ({"colour": "blue"}, "order.colour is a str, not Colour"),
        ({"kind": "other"}, "order.kind is a str, not one of 'new', 'old'"),
        ({"labels": {"a": "b"}}, r"order.labels\[...\] is a str, not list\[str\]"),
        ({"note": None}, r"order.note is None, not str \| int"),
        ({"CustomerName": 1}, "order.CustomerName is an int, not str"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place_and_not_shown(change, words):
    with pytest.raises(DecodeError, match=f"on_order: {words}") as refused:
        read({**FULL, **change})
    assert not {"much", "yesterday", "blue", "other"} & set(str(refused.value).split())


@pytest.mark.parametrize("body", [b"", b"hello", b"{", b"[1]", b'"x"', b"\xff\xfe", b"null"])
def test_bodies_that_are_no_object(body):
    with pytest.raises(CodecError):
        read(body)


def test_plain_models():
    assert read(b"\x00\xff", bytes) == b"\x00\xff"
    assert read("\ufeffgrüße".encode(), str) == "grüße"
    assert read([1, 2], list) == [1, 2]
    assert read([1], None) == [1]
    with pytest.raises(DecodeError, match="order is a list, not dict"):
        read([1], dict)
    with pytest.raises(DecodeError, match="the body cannot be read as text"):
        read(b"\xff", str)
    with pytest.raises(DecodeError, match="the body cannot be read as JSON: Expecting"):
        read(b"{", None)


def test_models_of_libraries_are_read_as_their_own_json():
    msgspec = pytest.importorskip("msgspec")

    class Struct(msgspec.Struct):
        id: int
        price: Decimal = Decimal(0)
        counts: dict[int, str] = msgspec.field(default_factory=dict)

    body = b'{"id": 7, "price": 0.12345678901234567890, "counts": {"1": "a"}}'
    assert read(body, Struct) == Struct(7, Decimal("0.12345678901234567890"), {1: "a"})
    with pytest.raises(DecodeError, match=r"order\.id: Expected `int`, got `str`"):
        read({"id": "x"}, Struct)
    with pytest.raises(DecodeError, match="the body cannot be read as JSON"):
        read(b"{", Struct)


def test_models_of_pydantic():
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel, strict=True):
        id: int
        at: date = date(2026, 1, 1)
        labels: dict[str, int] = pydantic.Field(default_factory=dict)

    assert read({"id": 7, "at": "2026-02-03"}, Model) == Model(id=7, at=date(2026, 2, 3))
    with pytest.raises(DecodeError, match=r"order\.id: Input should be a valid integer"):
        read({"id": "x"}, Model)
    with pytest.raises(DecodeError, match=r"order.labels\[...\]: Input should be a valid integer"):
        read({"id": 1, "labels": {"a": "x"}}, Model)
    with pytest.raises(DecodeError, match="the body cannot be read as JSON"):
        read(b"{", Model)


@pytest.mark.parametrize("model", [7, int, "Order", object(), [], {}])
def test_an_unknown_model_is_refused(model):
    with pytest.raises(ConfigurationError, match="a handler's model is a dataclass"):
        check_model(model)


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_any_bytes_are_read_or_refused(body):
    for model in (Order, dict, str, None):
        try:
            read(body, model)
        except CodecError as error:
            assert "\n" not in str(error)
