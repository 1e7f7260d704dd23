"""User code that raises inside a converter: a misfit of that field, and its text is hidden."""

import inspect
from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from pydantic_core import PydanticCustomError

from aztask import App, RetryPolicy
from aztask.errors import DecodeError, EncodeError
from aztask.message.codec import Codec
from aztask.typed.containers import ArrayShape, MapShape, TupleShape, UnionShape
from aztask.typed.conversion import Conversion
from aztask.typed.libraries import ModelShape, StructShape
from aztask.typed.records import DataclassShape, NamedTupleShape, RecordShape, TypedDictShape
from aztask.typed.shapes import (
    AnyShape,
    EnumShape,
    LiteralShape,
    ScalarShape,
    Shape,
    TextShape,
)

SECRET = "4111-1111"
ARMED: list[bool] = []


@pytest.fixture
def armed() -> Iterator[None]:
    """The methods of `Armed` raise."""
    ARMED.append(True)
    yield
    ARMED.clear()


class Missing(Enum):
    A = "a"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise RuntimeError(f"{SECRET} {value}")


class Armed(Enum):
    A = "a"
    B = "b"

    def __eq__(self, other: object) -> bool:
        if ARMED:
            raise RuntimeError(SECRET)
        return self is other

    def __hash__(self) -> int:
        if ARMED:
            raise RuntimeError(SECRET)
        return 1


class Folder(PurePosixPath):
    def __new__(cls, *parts: Any) -> "Folder":
        if SECRET in parts:
            raise OSError(SECRET)
        return super().__new__(cls, *parts)


@dataclass
class Checked:
    number: str

    def __post_init__(self) -> None:
        if SECRET in self.number:
            raise KeyError(self.number)


@dataclass(frozen=True)
class Hashed:
    number: str

    def __hash__(self) -> int:
        raise RuntimeError(SECRET)


class Pair(namedtuple("Pair", ["number"])):  # a class with __new__ of its own
    def __new__(cls, number: str) -> "Pair":
        if SECRET in number:
            raise LookupError(number)
        return super().__new__(cls, number)


class Struct(msgspec.Struct):
    number: str
    kinds: dict[str, Literal["a"]] = {}

    def __post_init__(self) -> None:
        if SECRET in self.number:
            raise ValueError(f"Expected `{self.number}`")


class Raising(msgspec.Struct):
    number: str

    def __post_init__(self) -> None:
        raise RuntimeError(self.number)


class Model(pydantic.BaseModel):
    number: str
    labels: dict[str, int] = {}
    rows: dict[int, list[int]] = {}
    kind: Literal["a"] = "a"

    @pydantic.field_validator("number")
    @classmethod
    def check(cls, value: str) -> str:
        if SECRET in value:
            raise ValueError(f"not {value}")
        return value


class Named(pydantic.BaseModel):
    number: str

    @pydantic.field_validator("number")
    @classmethod
    def check(cls, value: str) -> str:
        raise PydanticCustomError("missing", f"not {value}")


class Custom(pydantic.BaseModel):
    number: str

    @pydantic.model_validator(mode="after")
    def check(self) -> "Custom":
        raise RuntimeError(self.number)


class Tagged(pydantic.BaseModel):
    kind: Literal["t"]


class Other(pydantic.BaseModel):
    kind: Literal["o"]


class Closed(pydantic.BaseModel, extra="forbid"):
    rows: list[Annotated[Tagged | Other, pydantic.Field(discriminator="kind")]] = []


class ClosedStruct(msgspec.Struct, forbid_unknown_fields=True):
    number: int = 1


HIDDEN = {"number": SECRET}
READS: list[tuple[type[Shape], Any, Any, str]] = [
    (EnumShape, Missing, SECRET, "value is a str, not Missing (A)"),
    (TextShape, Folder, SECRET, "value is a str, not Folder"),
    (TextShape, ZoneInfo, "../" + SECRET, "value is a str, not ZoneInfo"),
    (TextShape, ZoneInfo, "Europe", "value is a str, not ZoneInfo"),
    (ArrayShape, set[Hashed], [HIDDEN], "value makes no set[Hashed]: RuntimeError was raised"),
    (ArrayShape, set[Any], [[SECRET]], "value makes no set[Any]: TypeError was raised"),
    (MapShape, dict[Armed, int], {"a": 1}, "value makes no dict[Armed, int]: RuntimeError"),
    (MapShape, dict[str, int], {SECRET: "x"}, "value[...] is a str, not int"),
    (MapShape, dict[int, int], {SECRET: 1}, "value (a key) is a str, not int"),
    (MapShape, dict[str, list[int]], {SECRET: ["x"]}, "value[...][0] is a str, not int"),
    (DataclassShape, Checked, HIDDEN, "value makes no Checked: KeyError was raised"),
    (DataclassShape, list[Checked], [HIDDEN], "value[0] makes no Checked: KeyError was raised"),
    (NamedTupleShape, Pair, [SECRET], "value makes no Pair: LookupError was raised"),
    (StructShape, Struct, HIDDEN, "value does not fit Struct"),
    (StructShape, Raising, HIDDEN, "value makes no Raising: RuntimeError was raised"),
    (StructShape, Struct, {"number": "", "kinds": {SECRET: SECRET}}, "value.kinds[...] does not"),
    (StructShape, ClosedStruct, {SECRET: 1}, "value does not fit ClosedStruct"),
    (ModelShape, Model, HIDDEN, "value.number: it does not fit (value_error)"),
    (ModelShape, Model, {"number": "", "labels": {SECRET: "x"}},
     "value.labels[...]: Input should be a valid integer, unable to parse string as an integer"),
    (ModelShape, Model, {"number": "", "rows": {41111111: [1, SECRET]}},
     "value.rows[...][1]: Input should be a valid integer, unable to parse string as an integer"),
    (ModelShape, Model, {}, "value.number: Field required"),
    (ModelShape, Model, {"number": "", "kind": SECRET}, "value.kind: it does not fit (literal_er"),
    (ModelShape, Named, HIDDEN, "value.number: Field required"),
    (ModelShape, Custom, HIDDEN, "value makes no Custom: RuntimeError was raised"),
    (ModelShape, Closed, {SECRET: 1}, "value[...]: Extra inputs are not permitted"),
    (ModelShape, Closed, {"rows": [{"kind": SECRET}]},
     "value.rows[0]: it does not fit (union_tag_invalid)"),
    (UnionShape, Missing | Checked, HIDDEN, "value is a dict, not Missing | Checked"),
    (UnionShape, Checked | None, HIDDEN, "value makes no Checked: KeyError was raised"),
]  # fmt: skip

SILENT = {AnyShape, ScalarShape, LiteralShape, TupleShape, TypedDictShape, RecordShape}
"""Shapes that call nothing of the user, and what others have in common."""


def of(annotation: Any, *, strict: bool) -> Conversion:
    def task(value: Any) -> Any: ...

    task.__annotations__ = {"value": annotation, "return": annotation}
    return Conversion("t", task, inspect.signature(task), with_context=False, strict=strict)


def shapes(kind: Any = Shape) -> set[type[Shape]]:
    """All classes of shapes."""
    return {each for sub in kind.__subclasses__() for each in (sub, *shapes(sub))}


def test_each_shape_that_calls_the_users_code_is_tried():
    assert shapes() == SILENT | {case[0] for case in READS}


@pytest.mark.parametrize(("annotation", "plain", "text"), [case[1:] for case in READS])
def test_what_is_raised_while_reading_is_a_misfit_without_its_text(
    annotation, plain, text, caplog, request
):
    strict, loose = (of(annotation, strict=strict) for strict in (True, False))
    request.getfixturevalue("armed")
    with pytest.raises(DecodeError) as refused:
        strict.read((plain,), {})
    assert str(refused.value).startswith(f"task t: {text}")
    assert SECRET not in str(refused.value)
    assert "41111111" not in str(refused.value)
    assert loose.read((plain,), {})[0][0] == plain
    assert loose.peek((plain,), {})[0][0] == plain
    assert loose.result(plain) == plain
    assert strict.why_not("value", plain)

    assert SECRET not in caplog.text


@dataclass
class Chain:
    after: "Chain | None" = None


def test_what_is_nested_too_deeply_to_be_read_stays_as_it_is():
    plain: Any = None
    for _ in range(5000):
        plain = {"after": plain}
    assert of(Chain, strict=False).peek((plain,), {})[0][0] is plain
    with pytest.raises(DecodeError, match="value cannot be read as Chain: RecursionError"):
        of(Chain, strict=True).read((plain,), {})


# -- writing ---------------------------------------------------------------------------------


class Property:
    """A field whose value cannot be had."""

    def __get__(self, one: object, kind: object) -> str:
        if one is None:
            return ""
        raise RuntimeError(SECRET)

    def __set__(self, one: object, value: object) -> None: ...


@dataclass
class Unreadable:
    number: Property = Property()  # type: ignore[assignment]


class Odd(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        raise RuntimeError(SECRET)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(SECRET)

    def __len__(self) -> int:
        return 1


class Point(NamedTuple):
    x: int
    color: Armed = Armed.A


class Options(TypedDict):
    parent: "Options | None"


@dataclass
class Once:
    """It can be made, and not be made again."""

    number: str

    def __post_init__(self) -> None:
        if ARMED:
            raise RuntimeError(SECRET)


@dataclass
class Twice:
    number: str


class Writer(pydantic.BaseModel):
    number: str

    @pydantic.field_serializer("number")
    def write(self, value: str) -> str:
        raise RuntimeError(value)


class Holder(msgspec.Struct):
    number: Any


def cyclic() -> Chain:
    one = Chain()
    one.after = one
    return one


def cyclic_list() -> list[Any]:
    one: list[Any] = []
    one.append(one)
    return one


Deep = list["Deep"] | Armed

WRITES: list[tuple[Any, Any]] = [
    (Literal[Armed.A, Armed.B], Armed.B),
    (Unreadable, Unreadable()),
    (Mapping[str, int], Odd()),
    (Mapping[str, Armed], Odd()),
    (dict[Point, int], {Point(1): 1}),
    (dict[frozenset[int], int], {frozenset([1]): 1}),
    (Once | Twice, Once(SECRET)),
    (Chain, cyclic()),
    (Deep, cyclic_list()),
    (Writer, Writer(number=SECRET)),
    (Holder, Holder(object())),
    (Holder, Holder({SECRET: object()})),
    (set[Any], {object()}),
    (dict[PurePosixPath | str, int], {PurePosixPath(SECRET): 1, SECRET: 2}),
]


@pytest.mark.parametrize(("annotation", "value"), WRITES)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_raised_while_writing_is_an_encode_error_without_its_text(
    annotation, value, strict, armed
):
    conversion = of(annotation, strict=strict)
    with pytest.raises(EncodeError) as refused:
        Codec().encode_arguments(*(conversion.written((value,), {}) or ((value,), {})))
    assert SECRET not in str(refused.value)
    with pytest.raises(EncodeError) as refused:
        Codec().encode_value(conversion.written_result(value))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("coroutine", [False, True])
@pytest.mark.parametrize(("annotation", "value"), WRITES)
def test_a_task_whose_result_cannot_be_written_has_run_once(annotation, value, coroutine, armed):
    """Its work is done: it is dead-lettered, as one whose result no message can hold."""
    app = App("shop", broker="local://", results="local://", retry=RetryPolicy(3, delay=1.0))
    runs = []

    def plain() -> Any:
        runs.append(1)
        return value

    async def waited() -> Any:
        return plain()

    function = waited if coroutine else plain
    function.__annotations__ = {"return": annotation}
    task = app.task(function)
    with app.inline() as inline:
        sent = task.delay()
        assert sent.state == "failed"
        (letter,) = inline.dead_letters()
    assert letter.reason == "unserialisable-result"
    assert SECRET not in letter.description
    assert runs == [1]


# -- __post_init__ ---------------------------------------------------------------------------


@dataclass
class Taxed:
    """It is not the same when it is made again: what the documentation warns of."""

    price: int
    seen: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.price += 1
        self.seen.append(self.price)


def test_post_init_runs_again_where_the_instance_is_read_and_nowhere_else():
    sender, worker = (of(Taxed, strict=True) for _ in range(2))
    taxed = Taxed(1)
    plain = sender.written((taxed,), {})
    assert taxed == Taxed(1), "it is not touched"
    assert plain == (({"price": 2},), {})
    ((read,), _) = worker.read(*plain)
    assert (read.price, read.seen) == (3, [3]), "once more, and fields with init=False are new"
