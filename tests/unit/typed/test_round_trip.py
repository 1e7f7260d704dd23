"""Whatever annotation a task has: what a caller passes arrives equal, with the same types.

The annotations are drawn, with values of them; the values go through the converter of a sender, the
bytes of the message, and the converter of a worker.
"""

import collections
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from pathlib import Path, PurePosixPath
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    TypedDict,
    TypeVar,
)
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from aztask.errors import EncodeError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.typed.conversion import Conversion

T = TypeVar("T")
Number = NewType("Number", int)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Corner(Enum):
    LEFT = (0, 1)
    RIGHT = (1, 1)


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Unit(StrEnum):
    KG = "kg"
    LB = "lb"


class Rights(Flag):
    READ = 1
    WRITE = 2


class Wait(timedelta, Enum):
    SHORT = 1
    LONG = (0, 5)


class Start(time, Enum):
    NOON = 12


class Place(tuple, Enum):  # type: ignore[type-arg]
    HERE = (1, 2)
    THERE = (3, 4)


class Planet(int, Enum):
    """Its values are not what an int of it is."""

    EARTH = (3, 30)
    MARS = (4, 3)

    def __new__(cls, number: int, value: int) -> "Planet":
        found = int.__new__(cls, number)
        found._value_ = value
        return found


class Delay(Enum):
    SHORT = timedelta(seconds=1)


class Point(NamedTuple):
    x: int
    color: Color = Color.RED


class Options(TypedDict):
    width: int
    folder: NotRequired[Path]


@dataclass(frozen=True)
class Line:
    price: Decimal
    at: datetime | None = None
    tags: frozenset[str] = frozenset()


@dataclass
class Tree:
    name: str
    children: "list[Tree]" = field(default_factory=list)
    parent_id: UUID | None = None


@dataclass
class Page(Generic[T]):
    items: list[T]
    total: int = 0


class Struct(msgspec.Struct):
    id: UUID
    at: datetime
    parts: dict[str, Decimal]
    folder: Path


class Model(pydantic.BaseModel):
    number: int = pydantic.Field(alias="Number")
    color: Color
    line: Line
    raw: bytes = b""
    names: set[str] = set()


class StrictModel(pydantic.BaseModel, strict=True):
    color: Color
    at: datetime
    names: set[str]


def zoned() -> st.SearchStrategy[datetime]:
    """A zone is kept as its offset: `==` of two datetimes in one offset is exact."""
    offsets = st.integers(-1439, 1439).map(lambda each: timezone(timedelta(minutes=each)))
    return st.datetimes(timezones=st.just(UTC) | offsets)


def lines() -> st.SearchStrategy[Line]:
    numbers = st.decimals(allow_nan=False, allow_infinity=False)  # as pydantic wants them
    return st.builds(Line, numbers, st.none() | zoned(), st.frozensets(st.text()))


WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
SIMPLE: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (None, st.none()),
    (bool, st.booleans()),
    (int, st.integers()),
    (float, st.floats(allow_nan=False)),
    (str, WORDS),
    (bytes, st.binary(max_size=8)),
    (datetime, zoned() | st.datetimes()),
    (date, st.dates()),
    (time, st.times()),
    (timedelta, st.timedeltas()),
    (UUID, st.uuids()),
    (Decimal, st.decimals(allow_nan=False)),
    (Color, st.sampled_from(Color)),
    (Corner, st.sampled_from(Corner)),
    (Size, st.sampled_from(Size)),
    (Unit, st.sampled_from(Unit)),
    (Wait, st.sampled_from(Wait)),
    (Start, st.sampled_from(Start)),
    (Place, st.sampled_from(Place)),
    (Planet, st.sampled_from(Planet)),
    (Delay, st.sampled_from(Delay)),
    (Rights, st.sampled_from([Rights.READ, Rights.READ | Rights.WRITE, Rights(0)])),
    (Number, st.integers()),
    (Annotated[int, "rows"], st.integers()),
    (Literal["a", 1, True], st.sampled_from(["a", 1, True])),
    (Literal[Color.RED, "x"], st.sampled_from([Color.RED, "x"])),
    (PurePosixPath, WORDS.map(PurePosixPath)),
    (Path, WORDS.map(Path)),
    (ZoneInfo, st.sampled_from(["Europe/Berlin", "UTC"]).map(ZoneInfo)),
    (Point, st.builds(Point, st.integers(), st.sampled_from(Color))),
    (Line, lines()),
    (
        Options,
        st.fixed_dictionaries({"width": st.integers()}, optional={"folder": WORDS.map(Path)}),
    ),
    (
        Tree,
        st.recursive(
            st.builds(Tree, WORDS),
            lambda trees: st.builds(Tree, WORDS, st.lists(trees, max_size=2), st.uuids()),
            max_leaves=5,
        ),
    ),
    (Page[Line], st.builds(Page, st.lists(lines(), max_size=2), st.integers())),
    (
        Struct,
        st.builds(
            Struct,
            st.uuids(),
            zoned(),
            st.dictionaries(WORDS, st.decimals(allow_nan=False), max_size=2),
            WORDS.map(Path),
        ),
    ),
    (
        Model,
        st.builds(
            Model,
            Number=st.integers(),
            color=st.sampled_from(Color),
            line=lines(),
            raw=st.binary(max_size=8),
            names=st.sets(WORDS, max_size=3),
        ),
    ),
    (
        StrictModel,
        st.builds(
            StrictModel,
            color=st.sampled_from(Color),
            at=zoned(),
            names=st.sets(WORDS, max_size=3),
        ),
    ),
]


def hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def containers(inner: Any) -> Any:
    """Around each (annotation, values): the containers of it."""

    def around(pair: Any) -> Any:
        annotation, values = pair
        keys = values.filter(hashable)
        few = st.lists(values, max_size=3)
        choices = [
            (list[annotation], few),
            (Sequence[annotation], few),
            (tuple[annotation, ...], few.map(tuple)),
            (tuple[int, annotation], st.tuples(st.integers(), values)),
            (dict[str, annotation], st.dictionaries(WORDS, values, max_size=3)),
            (Mapping[str, annotation], st.dictionaries(WORDS, values, max_size=3)),
            (collections.deque[annotation], few.map(collections.deque)),
            (annotation | None if annotation is not None else None, st.none() | values),
            (Annotated[annotation, "unit"], values),
        ]
        if pair in HASHABLE:
            choices += [
                (set[annotation], st.sets(keys, max_size=3)),
                (frozenset[annotation], st.frozensets(keys, max_size=3)),
            ]
        return st.sampled_from(choices)

    return inner.flatmap(around)


HASHABLE = [pair for pair in SIMPLE if pair[0] not in (Options, Tree, Page[Line], Struct, Model)]
HASHABLE = [pair for pair in HASHABLE if pair[0] is not StrictModel]
ANNOTATED = st.recursive(st.sampled_from(SIMPLE), containers, max_leaves=3)


def task_of(annotation: Any) -> Callable[..., Any]:
    def task(value: Any) -> Any: ...

    task.__annotations__ = {"value": annotation, "return": annotation}
    return task


def conversion_of(function: Callable[..., Any], *, strict: bool = False) -> Conversion:
    signature = inspect.signature(function)
    return Conversion("shop.task", function, signature, with_context=False, strict=strict)


def sent(codec: Codec, args: Any, kwargs: Any) -> Any:
    body, kind, encoding = codec.encode_arguments(args, kwargs)
    return codec.decode_arguments(TaskMessage("1", "shop.task", "q", body, kind, encoding))


def types_in(value: Any) -> Any:
    """The types in a value, in its order."""
    if isinstance(value, dict):
        return [type(value), *((types_in(k), types_in(v)) for k, v in value.items())]
    if isinstance(value, list | tuple | collections.deque):
        return [type(value), *map(types_in, value)]
    if isinstance(value, set | frozenset):
        return [type(value), sorted(repr(types_in(each)) for each in value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value), *(types_in(getattr(value, f.name)) for f in dataclasses.fields(value))]
    return type(value)


@pytest.mark.parametrize("strict", [False, True])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=ANNOTATED, data=st.data())
def test_what_is_passed_arrives(strict, drawn, data):
    annotation, values = drawn
    value = data.draw(values)
    sender, worker = (conversion_of(task_of(annotation), strict=strict) for _ in range(2))
    written = sender.written((value,), {}) or ((value,), {})
    (arrived,), _ = worker.read(*sent(Codec(), *written))
    assert arrived == value
    assert types_in(arrived) == types_in(value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=ANNOTATED, data=st.data())
def test_what_is_returned_arrives(drawn, data):
    annotation, values = drawn
    value = data.draw(values)
    worker, reader = (conversion_of(task_of(annotation)) for _ in range(2))
    encoded = Codec().encode_value(worker.written_result(value))
    arrived = reader.result(Codec().decode_value(encoded))
    assert arrived == value
    assert types_in(arrived) == types_in(value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=ANNOTATED, data=st.data())
def test_json_carries_it_too_unless_it_refuses_a_value(drawn, data):
    annotation, values = drawn
    value = data.draw(values)
    conversion = conversion_of(task_of(annotation))
    written = conversion.written((value,), {}) or ((value,), {})
    try:
        plain = sent(Codec(serializer="json"), *written)
    except EncodeError:  # a timedelta, an infinity: as before there were converters
        assume(False)
    (arrived,), _ = conversion.read(*plain)
    assert arrived == value
    assert types_in(arrived) == types_in(value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=ANNOTATED, data=st.data())
def test_what_could_be_sent_before_is_the_same_bytes(drawn, data):
    """Rule 1 of `aztask.typed`; unique keys are made of the same values."""
    annotation, values = drawn
    value, codec = data.draw(values), Codec()
    try:
        before, *_ = codec.encode_arguments((value,), {})
    except EncodeError:
        assume(False)
    conversion = conversion_of(task_of(annotation))
    now, *_ = codec.encode_arguments(*(conversion.written((value,), {}) or ((value,), {})))
    assert now == before


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=ANNOTATED,
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | WORDS | st.dates(),
        lambda each: st.lists(each, max_size=3) | st.dictionaries(WORDS, each, max_size=3),
        max_leaves=6,
    ),
)
def test_plain_data_of_whatever_type_is_sent_and_run_as_before(drawn, value):
    """Rule 3: nothing is refused, and only plain data that fits becomes something else."""
    conversion = conversion_of(task_of(drawn[0]))
    assert conversion.written((value,), {}) in (None, ((value,), {}))
    (arrived,), _ = conversion.read((value,), {})
    again = conversion_of(task_of(drawn[0])).written((arrived,), {}) or ((arrived,), {})
    Codec().encode_arguments(*again)


def test_what_is_on_the_wire_is_json():
    """A reader in another language needs no library of ours: maps, lists, text and numbers."""

    @dataclass
    class Invoice:
        id: int
        color: Color
        folder: Path
        tags: set[str]
        lines: tuple[Point, ...]

    invoice = Invoice(1, Color.RED, Path("a/b"), {"x", "y"}, (Point(1), Point(2, Color.BLUE)))
    written = conversion_of(task_of(Invoice)).written((invoice,), {})
    assert json.loads(json.dumps(written)) == [
        [
            {
                "id": 1,
                "color": "red",
                "folder": "a/b",
                "tags": ["x", "y"],
                "lines": [[1, "red"], [2, "blue"]],
            }
        ],
        {},
    ]
