"""Typed payloads from the send to the result: inline, in workflows, schedules, keys and limits."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

from aztask import App, Context, RetryPolicy, chain, chord, group
from aztask.errors import EncodeError
from aztask.message.codec import Codec
from aztask.message.foreign import RAW
from aztask.message.message import TaskMessage
from aztask.uniqueness.rules import key_of, unique_rules


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Order:
    id: int
    price: Decimal = Decimal(1)
    color: Color = Color.RED


class Receipt(pydantic.BaseModel):
    order: int
    at: datetime


AT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def app():
    return App("shop", broker="local://", results="local://")


def test_the_function_gets_what_was_passed_and_the_sender_what_was_returned(app):
    got = []

    @app.task
    def bill(order: Order, folder: Path, *, colors: set[Color]) -> Receipt:
        got.append((order, folder, colors))
        return Receipt(order=order.id, at=AT)

    @app.task_with_context
    async def pack(context: Context, order: Order) -> tuple[int, Color]:
        got.append(order)
        return order.id, order.color

    with app.inline() as inline:
        sent = bill.delay(Order(1), Path("a"), colors={Color.BLUE})
        assert sent.get(timeout=0) == Receipt(order=1, at=AT)
        assert got.pop() == (Order(1), Path("a"), {Color.BLUE})
        assert pack.delay(order=Order(2)).get(timeout=0) == (2, Color.RED)
        assert [each.get(timeout=0) for each in pack.map([(Order(3),)])] == [(3, Color.RED)]
        assert got == [Order(2), Order(3)]
        inline.assert_sent(bill, Order(1), Path("a"), colors={Color.BLUE})


def test_coroutines_send_them_too(app):
    @app.task
    def color(order: Order) -> Color:
        return order.color

    async def send():
        first = await color.adelay(Order(1))
        (second,) = await color.with_options(delay=0).amap([(Order(1),)])
        return [await each.aget(timeout=0) for each in (first, second)]

    with app.inline():
        assert asyncio.run(send()) == [Color.RED, Color.RED]


def test_a_reader_that_does_not_know_the_task_gets_plain_data(app):
    @app.task
    def bill(order: Order) -> Receipt:
        return Receipt(order=order.id, at=AT)

    with app.inline():
        sent = bill.delay(Order(1))
        assert app.result(sent.id).get(timeout=0) == Receipt(order=1, at=AT)
        del app.tasks["shop.bill"]
        assert app.result(sent.id).get(timeout=0) == {"order": 1, "at": AT}


def test_plain_data_by_name_is_sent_unchanged_and_read_as_the_type(app):
    got = []

    @app.task
    def bill(order: Order) -> None:
        got.append(order)

    with app.inline() as inline:
        app.send("shop.bill", [{"id": 1, "price": "2.5"}])
        assert inline.sent[0].args == ({"id": 1, "price": "2.5"},)
        assert got == [Order(1, Decimal("2.5"))]


def test_each_task_of_a_workflow_gets_its_type(app):
    @app.task
    def place(number: int) -> Order:
        return Order(number)

    @app.task
    def paint(order: Order, color: Color) -> Order:
        return Order(order.id, order.price, color)

    @app.task
    def colors(orders: list[Order]) -> dict[int, Color]:
        return {order.id: order.color for order in orders}

    blue = Order(1, color=Color.BLUE)
    with app.inline() as inline:
        chained = chain(place.s(1), paint.s(Color.BLUE)).delay()
        assert chained.get(timeout=0) == blue
        assert [sent.args for sent in inline.sent_to(paint)] == [(Color.BLUE,)]
        members = [each.get(timeout=0) for each in chained.members()]
        assert members == [Order(1), blue]
        grouped = group(paint.s(Order(n), Color.RED) for n in range(3)).delay()
        assert grouped.get(timeout=0) == [Order(n) for n in range(3)]
        nested = group(group(place.s(1)), chain(place.s(2), paint.s(Color.BLUE))).delay()
        assert nested.get(timeout=0) == [[Order(1)], Order(2, color=Color.BLUE)]
        joined = chord([place.s(n) | paint.s(Color.BLUE) for n in range(2)], colors.s()).delay()
        assert joined.get(timeout=0) == {0: Color.BLUE, 1: Color.BLUE}


def test_errors_of_members_stand_beside_typed_values(app):
    got = []

    @app.task(retry=RetryPolicy(max_retries=0))
    def place(number: int) -> Order:
        if number:
            raise ValueError("no")
        return Order(number)

    @app.task
    def collect(orders: list[Order]) -> None:
        got.extend(orders)

    with app.inline():
        chord([place.s(0), place.s(1)], collect.s(), return_errors=True).delay()
    assert got[0] == Order(0)
    assert "no" in str(got[1])


def test_strict_refuses_at_the_send_and_dead_letters_in_a_worker(app):
    @app.task(strict=True)
    def bill(order: Order, count: int) -> None: ...

    with app.inline() as inline:
        with pytest.raises(EncodeError, match=r"task shop.bill: count is a str, not int"):
            bill.delay(Order(1), "2")
        with pytest.raises(EncodeError, match=r"order.price is a float, not Decimal"):
            bill.map([(Order(1, 2.5), 2)])
        with pytest.raises(EncodeError, match=r"order.id is missing"):
            app.send("shop.bill", [{}, 1])
        with pytest.raises(EncodeError, match=r"count is a str"):
            chain(bill.s(Order(1), "2")).delay()
        assert inline.sent == []
        other = App("other", broker=app.broker, results=app._connections.results())
        sent = other.send("shop.bill", [{"id": "x"}, 1])
        inline.run()
        (letter,) = inline.dead_letters()
        assert letter.reason == "undecodable"
        assert letter.description == "task shop.bill: order.id is a str, not int"
        assert sent.state == "failed"


def test_strict_of_the_app_holds_for_tasks_that_do_not_set_it():
    app = App("shop", broker="local://", results="local://", strict=True)

    @app.task
    def first(count: int) -> None: ...

    @app.task(strict=False)
    def second(count: int) -> None: ...

    with app.inline():
        with pytest.raises(EncodeError):
            first.delay("1")
        second.delay("1")


def test_a_message_that_was_accepted_before_runs_whatever_its_types(app):
    """As an older release sent it: the task gets what that would have given it."""
    got = []

    @app.task
    def bill(order: Order, color: Color, when: datetime, count: int) -> None:
        got.append((order, color, when, count))

    with app.inline() as inline:
        sender = App("old", broker=app.broker)
        sender.send("shop.bill", ["no order", "green", "2026-01-02", None])
        sender.send("shop.bill", [{"price": 1}, 3, 4, 5])
        inline.run()
        assert inline.dead_letters() == []
    assert got == [("no order", "green", "2026-01-02", None), ({"price": 1}, 3, 4, 5)]


def test_an_older_worker_gets_plain_data(app):
    """It has no converter: nothing on the wire needs one."""

    @app.task
    def bill(order: Order, folder: Path, colors: set[Color]) -> None: ...

    with app.inline(run=False):
        bill.delay(Order(1), Path("a"), {Color.RED})
        (peeked,) = app.broker.peek("default")
        message = Codec().from_envelope(peeked.envelope, "default")
        plain = {"id": 1, "price": Decimal(1), "color": "red"}
        assert Codec().decode_arguments(message) == ((plain, "a", ["red"]), {})


# -- what looks at arguments beside the function ---------------------------------------------


def test_the_key_of_equal_arguments_is_one_key(app):
    runs = []

    @app.task(unique="arguments")
    def bill(order: Order, colors: set[Color], color: Color = Color.RED) -> None:
        runs.append(order)

    with app.inline(run=False) as inline:
        first = bill.delay(Order(1), {Color.RED, Color.BLUE})
        again = bill.delay(Order(1), {Color.BLUE, Color.RED}, color=Color.RED)
        other = bill.delay(Order(2), {Color.RED})
        assert first.id == again.id != other.id
        inline.run()
    assert runs == [Order(1), Order(2)]


@pytest.mark.parametrize("key", ["arguments", lambda path, size, when: [path, size, when]])
def test_keys_of_arguments_that_could_be_sent_before_do_not_change(key):
    def untyped(path, size, when): ...

    def typed(path: Path, size: tuple[int, int], when: datetime): ...

    rules = unique_rules({"unique": key}, "task")
    before = App("a", broker="local://").task(name="shop.one")(untyped)
    now = App("b", broker="local://").task(name="shop.one")(typed)
    for args in (("a/b", (1, 2), AT), ("a", [1, 2], "2026")):
        assert key_of(Codec(), before, rules, args, {}) == key_of(Codec(), now, rules, args, {})


def test_functions_for_keys_limits_and_leases_get_the_types(app):
    seen = []

    def by_color(order: Order) -> Color:
        seen.append(order)
        return order.color

    app.limit("color", concurrency=1, key=lambda order: by_color(order).value)

    def lease_of(order: Order) -> float:
        return 30.0 if by_color(order) is Color.RED else 60.0

    @app.task(unique=by_color, limits=["color"], lease=lease_of)
    def bill(order: Order) -> None: ...

    with app.inline(run=False) as inline:
        sent = [bill.delay(Order(n)) for n in (1, 2)]
        assert sent[0].id == sent[1].id, "one color"
        inline.run()
        assert sent[0].state == "succeeded"
    assert len(seen) >= 3
    assert all(isinstance(each, Order) for each in seen)


def test_a_schedule_sends_them(app):
    got = []

    @app.task
    def bill(order: Order, colors: frozenset[Color]) -> None:
        got.append((order, colors))

    call = bill.s(Order(1), frozenset([Color.RED]))
    plan = app.schedules.plan("nightly", call, every=60)
    definition = app.schedules._definition(plan)
    assert app.codec.decode_arguments(definition.message)[0][1] == ["red"]
    args, kwargs = app.codec.decode_arguments(definition.message)
    with app.inline() as inline:
        options = {"queue": "default", "task_id": "occurrence-1"}
        app.sends.send_occurrence("shop.bill", args, kwargs, options, {})
        inline.run()
    assert got == [(Order(1), frozenset([Color.RED]))]


class Corner(Enum):
    LEFT = (0, 1)


@dataclass
class Part:
    size: tuple[int, Path]
    wait: timedelta = timedelta(1)


@dataclass
class Event:
    at: datetime
    raw: bytes
    price: Decimal
    number: int = field(metadata={"name": "OrderNumber"})
    corner: Corner = Corner.LEFT
    colors: set[Color] = field(default_factory=set)
    parts: list[Part] = field(default_factory=list)
    counts: dict[int, float] = field(default_factory=dict)


class StructEvent(msgspec.Struct):
    at: datetime
    raw: bytes
    price: Decimal
    number: int = msgspec.field(name="OrderNumber")
    colors: set[Color] = set()
    folder: Path = Path("a")


class ModelEvent(pydantic.BaseModel):
    at: datetime
    raw: bytes
    price: Decimal
    number: int = pydantic.Field(alias="OrderNumber")
    colors: set[Color] = set()
    folder: Path = Path("a")


GIVEN = {"at": AT, "raw": b"abc", "price": Decimal("1.50")}
EVENTS = [
    Event(
        **GIVEN, number=7, colors={Color.RED}, parts=[Part((1, Path("a")))], counts={1: 2.5, 2: 3.0}
    ),
    StructEvent(**GIVEN, number=7, colors={Color.RED, Color.BLUE}),
    ModelEvent(**GIVEN, OrderNumber=7, colors={Color.RED, Color.BLUE}),
    {"a": [1, Decimal("1.5")]},
    [1, b"x"],
    "text",
    b"bytes",
]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("serializer", ["msgpack", "json"])
def test_a_handler_takes_from_aztask_what_its_model_is(event, serializer):
    """Its converter is that of tasks: whatever can be sent to a task with that annotation."""
    if isinstance(event, Event) and serializer == "json":
        event = replace(event, parts=[])  # JSON has no timedelta
    app = App("shop", broker="local://", results="local://", serializer=serializer)
    got = []

    @app.handler(queue="events", model=type(event))
    def on_event(event: Any) -> None:
        got.append(event)

    with app.inline() as inline:
        on_event.delay(event)
        chain(on_event.s(event)).delay()
        on_event.map([(event,)])
        assert inline.dead_letters("events") == []
    assert got == [event] * 3


def test_a_handler_reads_other_programs_and_aztask_alike(app):
    got = []

    @app.handler(queue="events", model=Event)
    def on_event(event: Event) -> None:
        got.append(event)

    event = Event(AT, b"\xff", Decimal("1.5"), 7)
    with app.inline() as inline:
        on_event.delay(event)
        body = {"at": AT.isoformat(), "raw": "/w==", "price": "1.5", "OrderNumber": 7}
        inline.deliver("events", body)
        inline.deliver("events", {**body, "price": []})
        (letter,) = inline.dead_letters("events")
    assert letter.description == "task shop.on_event: event.price is a list, not Decimal"
    assert got == [event, event]


@pytest.mark.parametrize("annotated", [Any, "Event", "Missing"])
def test_the_unique_key_of_a_foreign_body_is_that_of_its_model(app, annotated):
    def on_event(event): ...

    on_event.__annotations__ = {"event": annotated}
    handler = app.handler(queue="events", model=Event, unique="arguments")(on_event)
    body = json.dumps({"at": AT.isoformat(), "raw": "/w==", "price": "1.5", "OrderNumber": 7})
    foreign = TaskMessage("1", handler.name, "events", body.encode(), RAW, "")
    event = Event(AT, b"\xff", Decimal("1.5"), 7)
    rules = unique_rules({"unique": "arguments"}, "task")
    keys = {
        key_of(app.codec, handler, rules, *arguments)
        for arguments in (
            handler.arguments(app.codec, foreign),
            handler.conversion.written((event,), {}),
        )
    }
    assert len(keys) == 1


def test_a_value_that_no_message_can_hold_names_the_task(app):
    @app.task
    def bill(order: Order, anything: object) -> None: ...

    with app.inline(), pytest.raises(EncodeError, match=r"task shop.bill: .* of type Order"):
        bill.delay(Order(1), Order(2))


def test_a_call_with_types_that_were_sent_before_is_still_checked_for_its_number(app):
    """The types of a call stand for its check against the signature: of plain calls alone."""

    @app.task
    def add(a: int, b: int = 0) -> int:
        return a + b

    with app.inline(run=False) as inline:
        App("other", broker=app.broker).send("shop.add", [1, 2, 3])
        inline.run()
        for _ in range(2):
            add.delay(1)
            add.delay(1, b=2)
            with pytest.raises(TypeError):
                add.delay(1, 2, 3)
            with pytest.raises(TypeError):
                add.delay(1, c=2)
            with pytest.raises(TypeError):
                add.delay(1, a=2)
        assert len(inline.sent) == 4


def test_calls_of_several_types_are_each_looked_at(app, caplog):
    """The types of the usual plain call stand for that call alone."""

    @app.task
    def add(a: int | Path, b: int = 0) -> None: ...

    with app.inline(run=False) as inline:
        for _ in range(2):
            add.delay(1)
            add.delay(Path("a"))
            add.delay(1, 2)
            add.delay(1, b=2)
            with pytest.raises(EncodeError):
                add.delay(object())
        assert [sent.args for sent in inline.sent] == [(1,), (Path("a"),), (1, 2), (1,)] * 2
        assert [each.kwargs for each in inline.sent] == [{}, {}, {}, {"b": 2}] * 2
        inline.run()
    assert len(caplog.messages) >= 1
