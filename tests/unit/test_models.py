"""Bodies of foreign messages as models: what fits, and what is said of the rest."""

import base64
import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.errors import CodecError, ConfigurationError, DecodeError
from aztask.handler import read_body, reader_of
from aztask.message.bounds import MessageLimits

LIMITS = MessageLimits()


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
    anything: Any = None


def read(body, model=Order):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_body(reader_of(model, LIMITS), data, model)


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
    assert order.anything == [1, {"x": None}]


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
        ({"id": "7"}, "id is a text, not int"),
        ({"id": True}, "id is a boolean, not int"),
        ({"items": [{"name": "tea"}]}, r"items\[0\].price is missing"),
        ({"items": [{"name": 1, "price": 1}]}, r"items\[0\].name is a number, not str"),
        ({"items": [{"name": "x", "price": "much"}]}, r"items\[0\].price is 'much', no Decimal"),
        ({"items": {}}, "items is a object, not list"),
        ({"at": "yesterday"}, "at is 'yesterday', no datetime"),
        ({"colour": "blue"}, "colour is 'blue', no Colour"),
        ({"kind": "other"}, "kind is 'other', not one of"),
        ({"labels": {"a": "b"}}, "labels.a is a text, not list"),
        ({"note": None}, "note is a null, not str or note is a null, not int"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change, words):
    with pytest.raises(DecodeError, match=f"the body cannot be read as Order: {words}"):
        read({**FULL, **change})


@pytest.mark.parametrize("body", [b"", b"hello", b"{", b"[1]", b'"x"', b"\xff\xfe", b"null"])
def test_bodies_that_are_no_object(body):
    with pytest.raises(CodecError):
        read(body)


def test_plain_models():
    assert read(b"\x00\xff", bytes) == b"\x00\xff"
    assert read("\ufeffgrüße".encode(), str) == "grüße"
    assert read([1, 2], list) == [1, 2]
    assert read([1], None) == [1]
    with pytest.raises(DecodeError, match="the body is a list, not a object"):
        read([1], dict)
    with pytest.raises(DecodeError, match="as str"):
        read(b"\xff", str)


def test_models_of_libraries():
    msgspec = pytest.importorskip("msgspec")

    class Struct(msgspec.Struct):
        id: int

    assert read({"id": 7}, Struct) == Struct(7)
    with pytest.raises(DecodeError, match="Expected `int`"):
        read({"id": "x"}, Struct)


def test_models_of_pydantic():
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):
        id: int

    assert read({"id": 7}, Model) == Model(id=7)
    with pytest.raises(DecodeError, match="valid integer"):
        read({"id": "x"}, Model)


@pytest.mark.parametrize("model", [7, int, "Order", object()])
def test_an_unknown_model_is_refused(model):
    with pytest.raises(ConfigurationError, match="a handler's model is a dataclass"):
        reader_of(model, LIMITS)


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_any_bytes_are_read_or_refused(body):
    for model in (Order, dict, str, None):
        try:
            read(body, model)
        except CodecError as error:
            assert "\n" not in str(error)
