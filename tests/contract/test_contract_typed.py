"""Typed arguments arrive as they were passed on every broker, and are plain data in between."""

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from uuid import UUID

import pydantic
import pytest

from aztask import App
from aztask.message.codec import Codec


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Line:
    price: Decimal
    colors: frozenset[Color] = frozenset()


class Order(pydantic.BaseModel):
    id: UUID
    at: datetime
    raw: bytes = b"\x00\xff"
    lines: list[Line] = []


LINES = [Line(Decimal("1.50"), frozenset(Color)), Line(Decimal(2))]
ORDER = Order(id=UUID(int=7), at=datetime(2026, 1, 2, tzinfo=UTC), lines=LINES)
ARGUMENTS = ((ORDER, Path("a/b")), {"colors": {Color.BLUE, Color.RED}, "size": (3, None)})
PLAIN_LINES = [
    {"price": Decimal("1.50"), "colors": ["red", "blue"]},
    {"price": Decimal(2), "colors": []},
]


@pytest.mark.parametrize("serializer", ["msgpack", "json"])
def test_what_is_passed_arrives_and_plain_data_is_on_the_wire(subject, serializer):
    queue = subject.queue()
    app = App("shop", broker=subject.broker, serializer=serializer, default_queue=queue)

    @app.task
    def pack(
        order: Order, folder: Path, *, colors: set[Color], size: tuple[int, Color | None]
    ) -> None: ...

    args, kwargs = ARGUMENTS
    pack.delay(*args, **kwargs)
    delivery = subject.one(subject.receiver(queue))
    codec = Codec()  # of a worker that has no converters
    message = codec.from_envelope(delivery.envelope, queue)
    plain_args, plain_kwargs = codec.decode_arguments(message)
    order = {"id": ORDER.id, "at": ORDER.at, "raw": ORDER.raw, "lines": PLAIN_LINES}
    assert plain_args == (order, "a/b")
    assert plain_kwargs == {"colors": ["red", "blue"], "size": [3, None]}
    assert pack.conversion.read(plain_args, plain_kwargs) == ARGUMENTS


def test_a_batch_arrives_in_the_same_way(subject):
    queue = subject.queue()
    app = App("shop", broker=subject.broker, default_queue=queue)

    @app.task
    def paint(line: Line) -> None: ...

    sent = [(Line(Decimal(number)),) for number in range(20)]
    paint.map(sent)
    taken = subject.take(subject.receiver(queue), len(sent))
    messages = [app.codec.from_envelope(each.envelope, queue) for each in taken]
    found = [paint.conversion.read(*app.codec.decode_arguments(each))[0] for each in messages]
    assert sorted(found, key=lambda args: args[0].price) == sent
