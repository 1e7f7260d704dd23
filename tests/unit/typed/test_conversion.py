"""The converter of a task: what it refuses, what it leaves alone, and what it says."""

import inspect
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    TypedDict,
)
from uuid import UUID

import msgspec
import pydantic
import pytest

from aztask.errors import DecodeError, EncodeError, TaskFailed
from aztask.message.payload import StoredValue
from aztask.message.serializer import pack, unpack
from aztask.typed.annotations import _ARRAYS, _CONTAINERS, _MAPS
from aztask.typed.conversion import Conversion
from aztask.typed.shapes import AnyKeys

if TYPE_CHECKING:
    from elsewhere import Unknown


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Line:
    price: Decimal
    count: int = 1


@dataclass
class Invoice:
    id: int
    lines: list[Line] = field(default_factory=list)
    color: Color = Color.RED


class Model(pydantic.BaseModel):
    number: int
    color: Color = Color.RED


class Struct(msgspec.Struct):
    number: int


class Options(TypedDict):
    width: int
    folder: Path


class Point(NamedTuple):
    x: int
    y: int = 0


def conversion_of(function: Any, *, strict: bool = False, with_context: bool = False) -> Conversion:
    signature = inspect.signature(function)
    return Conversion("shop.bill", function, signature, with_context=with_context, strict=strict)


def one(annotation: Any, *, strict: bool = False) -> Conversion:
    """The converter of a task with one argument, `value`."""

    def task(value: Any) -> Any: ...

    task.__annotations__ = {"value": annotation}
    return conversion_of(task, strict=strict)


def read(annotation: Any, value: Any, *, strict: bool = False) -> Any:
    return one(annotation, strict=strict).read((value,), {})[0][0]


def written(annotation: Any, value: Any, *, strict: bool = False) -> Any:
    found = one(annotation, strict=strict).written((value,), {})
    return value if found is None else found[0][0]


# -- what strict refuses, by the name of the field -------------------------------------------

WRONG = [
    (int, "7", "value is a str, not int"),
    (str, 7, "value is an int, not str"),
    (int | None, "7", "value is a str, not int | None"),
    (list[int], [1, "2"], "value[1] is a str, not int"),
    (dict[str, int], {"a": "b"}, "value[...] is a str, not int"),
    (dict[str, int], {1: 1}, "value (a key) is an int, not str"),
    (tuple[int, str], (1,), "value is a tuple, not tuple[int, str]"),
    (Literal["a", "b"], "c", "value is a str, not one of 'a', 'b'"),
    (datetime, "2026-01-01T00:00:00", "value is a str, not datetime"),
    (Options, {"width": "1", "folder": Path("a")}, "value.width is a str, not int"),
    (Options, {"width": 1}, "value.folder is missing"),
]


@pytest.mark.parametrize(("annotation", "value", "text"), WRONG)
def test_strict_refuses_a_wrong_value_at_the_send(annotation, value, text):
    with pytest.raises(EncodeError) as refused:
        written(annotation, value, strict=True)
    assert str(refused.value) == f"task shop.bill: {text}"


@pytest.mark.parametrize(
    ("annotation", "value", "text"),
    [
        *(case for case in WRONG if case[0] is not Options and not isinstance(case[1], tuple)),
        (Line, {"price": True}, "value.price is a bool, not Decimal"),
        (list[Line], [{"price": ""}], "value[0].price is a str, not Decimal"),
        (Invoice, {"lines": []}, "value.id is missing"),
        (Invoice, [1], "value is a list, not Invoice"),
        (Color, "green", "value is a str, not Color (RED, BLUE)"),
        (Path, 3, "value is an int, not Path"),
        (set[int], [1, "2"], "value[1] is a str, not int"),
        (set[Any], [[1]], "value makes no set[Any]: TypeError was raised"),
        (Model, {"number": "x"}, "value.number: Input should be a valid integer, unable to parse"
         " string as an integer"),
        (Struct, {"number": "x"}, "value.number: Expected `int`, got `str`"),
        (Point, [], "value.x is missing"),
    ],
)  # fmt: skip
def test_strict_refuses_a_wrong_value_in_a_worker(annotation, value, text):
    with pytest.raises(DecodeError) as refused:
        read(annotation, value, strict=True)
    assert str(refused.value) == f"task shop.bill: {text}"


def test_the_text_of_an_error_holds_no_value():
    class Card(pydantic.BaseModel):
        number: int

    with pytest.raises(DecodeError) as refused:
        read(Card, {"number": "4111-secret"}, strict=True)
    assert "secret" not in str(refused.value)


def test_strict_refuses_plain_data_for_a_class_at_the_send_and_takes_it_by_name():
    conversion = one(Invoice, strict=True)
    plain = {"id": 1, "lines": [{"price": "1.5"}]}
    with pytest.raises(EncodeError, match="value is a dict, not Invoice"):
        conversion.written((plain,), {})
    assert conversion.written((plain,), {}, by_name=True) is None, "it is sent unchanged"
    with pytest.raises(EncodeError, match=r"value.id is missing"):
        conversion.written(({},), {}, by_name=True)
    assert conversion.written((Invoice(1),), {}, by_name=True) is not None


# -- without strict --------------------------------------------------------------------------


@pytest.mark.parametrize(("annotation", "value", "text"), WRONG)
def test_a_plain_value_of_another_type_is_sent_and_run_as_before(annotation, value, text, caplog):
    deep = text.startswith(("value[", "value ("))
    plain = value
    if isinstance(value, dict) and "folder" in value:
        plain = {"width": "1", "folder": "a"}
    conversion = one(annotation)
    assert conversion.written((plain,), {}) in (None, ((plain,), {}))
    conversion.written((plain,), {})
    if not deep:  # without strict the elements of a plain list are not looked at
        (said,) = caplog.messages
        assert said.startswith("task shop.bill: value")
        assert "is sent as it is" in said
    caplog.clear()
    other = one(annotation)
    arrived = other.read((list(plain) if isinstance(plain, tuple) else plain,), {})[0][0]
    assert arrived == (list(plain) if isinstance(plain, tuple) else plain) or annotation is Options
    assert len(caplog.messages) == (not deep)


def test_a_wrong_part_stays_where_it_is():
    found = read(Invoice, {"id": "one", "lines": [{"price": "1"}], "color": "green"})
    assert found == Invoice("one", [Line(Decimal(1))], "green")


def test_what_cannot_be_built_stays_plain(caplog):
    plain = {"id": 1, "lines": [{"count": 2}]}
    assert read(Invoice, plain) is plain
    assert "value.lines[0].price is missing; the task gets it as it is" in caplog.text


def test_it_is_said_once_for_each_task(caplog):
    conversion = one(int)
    for _ in range(3):
        assert conversion.written(("x",), {}) is None
        assert conversion.read(("x",), {}) == (("x",), {})
    assert len(caplog.messages) == 1


def test_a_result_of_another_type_is_recorded_as_it_is_and_said_once(caplog):
    def task() -> int: ...

    conversion = conversion_of(task, strict=True)
    assert [conversion.written_result(value) for value in ("a", "b", 3)] == ["a", "b", 3]
    assert caplog.messages == [
        "task shop.bill: the result is a str, not int; it is recorded as it is. This is said once"
    ]
    assert conversion.result("a") == "a"


# -- unknown and missing fields --------------------------------------------------------------


def test_unknown_fields_are_ignored_and_missing_ones_get_their_defaults():
    plain = {"id": 1, "added_later": True}
    assert read(Invoice, plain, strict=True) == Invoice(1)
    assert read(Model, {"number": 1, "later": 2}, strict=True) == Model(number=1)
    assert read(Struct, {"number": 1, "later": 2}, strict=True) == Struct(1)
    assert read(Point, [1, 2, 3], strict=True) == Point(1, 2)
    assert read(Point, [1], strict=True) == Point(1)


def test_a_typed_dict_keeps_unknown_keys():
    found = read(Options, {"width": 1, "folder": "a", "later": 2}, strict=True)
    assert found == {"width": 1, "folder": Path("a"), "later": 2}


class Late(TypedDict):
    """As in a module with ``from __future__ import annotations``."""

    width: "int"
    folder: "NotRequired[Path]"
    other: "Annotated[NotRequired[Path], 1]"


class Partial(TypedDict, total=False):
    width: "Required[int]"
    folder: "Path"


@pytest.mark.parametrize("annotation", [Late, Partial])
def test_keys_that_are_not_required_may_be_missing(annotation):
    assert written(annotation, {"width": 1}, strict=True) == {"width": 1}
    assert read(annotation, {"width": 1, "folder": "a"}, strict=True)["folder"] == Path("a")
    with pytest.raises(EncodeError, match=r"value\.width is missing"):
        written(annotation, {"folder": Path("a")}, strict=True)


def test_a_library_follows_its_own_settings():
    class Closed(pydantic.BaseModel, extra="forbid"):
        number: int

    class ClosedStruct(msgspec.Struct, forbid_unknown_fields=True):
        number: int

    refused = {Closed: "Extra inputs are not permitted", ClosedStruct: "does not fit ClosedStruct"}
    for annotation, text in refused.items():
        with pytest.raises(DecodeError, match=text):
            read(annotation, {"number": 1, "later": 2}, strict=True)


# -- what must not be written ----------------------------------------------------------------


@dataclass
class Circle:
    size: int


@dataclass
class Square:
    size: int


@dataclass
class Ring(Circle):
    width: int = 1


@dataclass
class Loaded:
    path: str
    loader: InitVar[object]


def test_a_member_of_a_union_that_would_arrive_as_another_one_is_refused():
    assert written(Circle | Square, Circle(1)) == {"size": 1}
    with pytest.raises(EncodeError, match="a Square, which would arrive as a Circle"):
        written(Circle | Square, Square(1))
    with pytest.raises(EncodeError, match="a set, which would arrive as a list"):
        written(list[int] | set[int], {1})
    with pytest.raises(EncodeError, match="a Color, which would arrive as a str"):
        written(str | Color, Color.RED)


def test_the_fields_tell_the_members_of_a_union_apart():
    for value in (Circle(1), Ring(1, 2)):
        assert read(Circle | Ring, written(Circle | Ring, value), strict=True) == value
    for value in (Line(Decimal(1)), Model(number=1), None, "text"):
        annotation = Line | Model | None | str
        assert read(annotation, written(annotation, value), strict=True) == value


def test_a_path_in_a_union_with_text_arrives_as_text():
    assert written(Path | str, Path("a")) == "a"
    assert read(Path | str, "a", strict=True) == "a"
    assert read(Path | None, "a", strict=True) == Path("a")


def test_an_instance_of_a_subclass_is_refused():
    with pytest.raises(EncodeError, match=r"would arrive as Circle; annotate Circle \| Ring"):
        written(Circle, Ring(1))

    class Special(Model):
        extra: int

    with pytest.raises(EncodeError, match="would arrive as Model"):
        written(Model, Special(number=1, extra=2))


def test_a_dataclass_with_an_init_var_is_refused():
    with pytest.raises(EncodeError, match="does not keep loader, an InitVar"):
        written(Loaded, Loaded("a", object()))


def test_a_hidden_secret_is_refused_and_one_that_is_written_is_not():
    class Hidden(pydantic.BaseModel):
        word: pydantic.SecretStr

    class Open(Hidden):
        @pydantic.field_serializer("word", when_used="json")
        def reveal(self, value: pydantic.SecretStr) -> str:
            return value.get_secret_value()

    with pytest.raises(EncodeError, match="SecretStr; give that field a serializer") as refused:
        written(Hidden, Hidden(word="open sesame"))
    assert "sesame" not in str(refused.value)
    assert read(Open, written(Open, Open(word="a")), strict=True) == Open(word="a")


def test_values_of_pydantic_that_are_no_plain_data_are_text():
    class Site(pydantic.BaseModel):
        address: pydantic.HttpUrl
        raw: bytes
        computed: int = 0

        @pydantic.computed_field
        def doubled(self) -> int:
            return self.computed * 2

    site = Site(address="http://localhost/", raw=b"\xff")
    assert written(Site, site) == {"address": "http://localhost/", "raw": b"\xff", "computed": 0}
    assert read(Site, written(Site, site), strict=True) == site


# -- annotations -----------------------------------------------------------------------------


def test_annotations_that_cannot_be_resolved_are_not_checked_and_others_are():
    def task(a: "Unknown", b: "Color", c: "list[Unknown]") -> "Unknown": ...

    conversion = conversion_of(task, strict=True)
    assert conversion.written((1, Color.RED, object), {}) == ((1, "red", object), {})
    with pytest.raises(EncodeError, match="b is an int, not Color"):
        conversion.written((1, 1, 1), {})


class Custom:
    pass


@pytest.mark.parametrize("annotation", [Any, object, Custom, "no such name", type, complex])
def test_what_an_annotation_does_not_say_is_left_alone(annotation):
    for value in (1, "a", [1], {"a": 1}, Custom):
        assert one(annotation, strict=True).written((value,), {}) is None
        assert read(annotation, value, strict=True) is value


def test_each_way_to_pass_an_argument():
    def task(a: Color, /, b: Path, *more: Color, c: set[int] = frozenset(), **others: Path) -> None: ...  # noqa: E501  # fmt: skip

    conversion = conversion_of(task, strict=True)
    args, kwargs = (Color.RED, Path("b"), Color.BLUE), {"c": {2, 1}, "d": Path("d")}
    plain = conversion.written(args, kwargs)
    assert plain == (("red", "b", "blue"), {"c": [1, 2], "d": "d"})
    assert conversion.read(*plain) == (args, kwargs)
    with pytest.raises(EncodeError, match=r"more\[0\] is an int"):
        conversion.written((Color.RED, Path("b"), 1), {})
    with pytest.raises(EncodeError, match="d is an int"):
        conversion.written((Color.RED, Path("b")), {"d": 1})


def test_the_context_is_no_argument_and_a_given_value_comes_first():
    def task(context: Any, first: Line, second: Color) -> None: ...

    conversion = conversion_of(task, strict=True, with_context=True)
    assert conversion.written((Color.RED,), {}, given=1) == (("red",), {})
    assert conversion.peek(("red",), {}, given=1) == ((Color.RED,), {})
    assert conversion.read(({"price": 1}, "red"), {}) == ((Line(Decimal(1)), Color.RED), {})


def test_a_decorated_function_has_the_annotations_of_the_inner_one():
    def inner(value: Color) -> Color: ...

    @wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any: ...

    assert conversion_of(outer).written((Color.RED,), {}) == (("red",), {})
    assert conversion_of(outer).result("red") is Color.RED


def test_containers_of_the_standard_library():
    assert read(Counter[str], {"a": 1}) == Counter(a=1)
    assert type(read(OrderedDict[str, int], {"a": 1})) is OrderedDict
    assert written(MappingProxyType, 1) == 1
    from collections.abc import Mapping  # noqa: PLC0415  # beside its only use

    assert written(Mapping[str, int], MappingProxyType({"a": 1})) == {"a": 1}
    assert written(Iterable[int], {3, 1}) == [1, 3]


ACCEPTED: list[Any] = [
    ([1, 2], [1, 2]),
    ((1, 2), (1, 2)),
    ({2, 1}, [1, 2]),
    (frozenset({2, 1}), [1, 2]),
    (deque([1, 2]), [1, 2]),
    ({1: 2}, {1: 2}),
    (MappingProxyType({1: 2}), {1: 2}),
    (Counter({1: 2}), {1: 2}),
    (OrderedDict({1: 2}), {1: 2}),
]
AROUND: list[tuple[Any, Any]] = [
    (lambda kind: kind, lambda value: value),
    (lambda kind: list[kind], lambda value: [value]),
    (lambda kind: dict[str, kind], lambda value: {"a": value}),
    (lambda kind: tuple[kind, int], lambda value: (value, 1)),
    (lambda kind: kind | None, lambda value: value),
    (lambda kind: TypedDict("Inner", {"a": kind}), lambda value: {"a": value}),
]


@pytest.mark.parametrize(("kind_around", "value_around"), AROUND)
@pytest.mark.parametrize("kind", sorted(_CONTAINERS, key=str))
def test_each_container_is_written_after_a_warning_too(kind, kind_around, value_around, caplog):
    """Whether a call needs a converter must not depend on what was passed before it."""
    inner = kind[int, ...] if kind is tuple else kind[int] if kind in _ARRAYS else None
    inner = inner or (kind[int] if kind is Counter else kind[int, int])
    conversion = one(kind_around(inner))
    conversion.written((object(),), {})
    assert caplog.messages
    accepts = _ARRAYS[kind][0] if kind in _ARRAYS else _MAPS[kind][0]
    for value, plain in ACCEPTED:
        if not isinstance(value, accepts):
            continue
        passed = value_around(value)
        (found,), _ = conversion.written((passed,), {}) or ((passed,), {})
        assert unpack(pack(found)) == unpack(pack(value_around(plain)))


def test_text_is_read_in_a_dataclass_alone():
    @dataclass
    class Order:
        id: UUID
        on: date
        data: bytes

    text = {"id": "0" * 32, "on": "2026-01-02", "data": "YQ=="}
    assert read(Order, text, strict=True) == Order(UUID(int=0), date(2026, 1, 2), b"a")
    assert read(date, "2026-01-02") == "2026-01-02"


def test_a_stored_value_and_an_error_of_a_member_fit_everywhere():
    stored = StoredValue("value/1/2", 3, "0" * 64)
    assert written(Invoice, stored, strict=True) is stored
    error = TaskFailed("ValueError", "no")
    assert read(list[Invoice], [{"id": 1}, error], strict=True) == [Invoice(1), error]


def test_a_set_is_written_in_one_order_in_all_processes():
    code = (
        "from tests.unit.typed.test_conversion import written;"
        "print(written(set[str], set('abcdefghij')), written(set[int | str], {1, 'a', 'b', 2}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


class Row(msgspec.Struct, array_like=True, tag="row"):
    colors: frozenset[Color]


@dataclass(slots=True)
class Box:
    colors: set[Color]


class Sets(msgspec.Struct, omit_defaults=True):
    colors: set[Color] = msgspec.field(name="Colors")
    rows: dict[str, list[Row]] = msgspec.field(default_factory=dict)
    boxes: tuple[Box, ...] = ()
    count: int = 0


def test_sets_of_enums_in_a_struct_are_written_in_one_order():
    both, plain = {Color.RED, Color.BLUE}, ["red", "blue"]
    value = Sets(both, {"a": [Row(frozenset(both))]}, (Box(both),))
    expected = {
        "Colors": plain,
        "rows": {"a": [["row", plain]]},
        "boxes": [{"colors": plain}],
    }
    assert written(Sets, value) == expected
    assert read(Sets, expected, strict=True) == value


# -- what others ask -------------------------------------------------------------------------


def test_why_a_value_does_not_fit_a_parameter():
    def task(count: int, when: datetime, invoice: Invoice, anything) -> None: ...

    conversion = conversion_of(task)
    assert conversion.why_not("count", 1) == ""
    assert conversion.why_not("count", "text") == "count is a str, not int"
    assert conversion.why_not("when", datetime(2026, 1, 1)) == ""
    assert conversion.why_not("invoice", {"id": "x"}) == "invoice.id is a str, not int"
    assert conversion.why_not("anything", object()) == conversion.why_not("no_such", 1) == ""


def test_a_sample_stands_for_all_values_of_its_type():
    @dataclass
    class Never:
        count: int
        day: date

        def __post_init__(self):
            raise AssertionError

    def task(color: Color, never: Never, pair: tuple[int, str], row: Row | None, f) -> None: ...

    conversion = conversion_of(task)
    fits = partial(conversion.why_not, by_type=True)
    assert conversion.why_not("color", "text") != fits("color", "text") == ""
    assert fits("color", 1).startswith("color is an int, not Color")
    assert fits("never", {"count": 1, "day": "text"}) == fits("never", AnyKeys({"x": 1})) == ""
    assert fits("never", {"count": 1}) == "never.day is missing"
    assert fits("never", {"count": "text", "day": "text"}) == "never.count is a str, not int"
    assert fits("pair", [1]) == "pair[1] is an int, not str"
    assert fits("row", None) == fits("f", object()) == ""
    assert conversion.annotation_of("color") == "Color"
    assert conversion.annotation_of("f") is conversion.annotation_of("no_such") is None


def test_a_call_with_plain_arguments_is_looked_at_once():
    def task(a: int, b: str | None, c: list[int], d) -> None: ...

    conversion = conversion_of(task)
    assert conversion.written((1, None, [1], object), {}) is None
    assert conversion.settled == {(int, type(None), list, type)}
    strict = conversion_of(task, strict=True)
    assert strict.written((1, None, [1], object), {}) is None
    assert strict.settled == set(), "it looks into each list"


def test_neither_library_is_imported_for_a_task_that_does_not_use_it():
    code = (
        "import sys, aztask, dataclasses\n"
        "app = aztask.App('a', broker='local://')\n"
        "@dataclasses.dataclass\n"
        "class A: b: int\n"
        "@app.task\n"
        "def f(a: A) -> A: return a\n"
        "assert f.conversion.written((A(1),), {}) == (({'b': 1},), {})\n"
        "assert not {'pydantic', 'msgspec'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
