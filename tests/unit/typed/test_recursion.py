"""Types that contain themselves, in every way that Python can write them, and what they cost."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import pytest
from typing_extensions import TypeAliasType

from aztask.errors import DecodeError
from aztask.typed.conversion import Conversion

T = TypeVar("T")
TRIES: list[object] = []


class Color(Enum):
    RED = "red"
    BLUE = "blue"

    @classmethod
    def _missing_(cls, value: object) -> None:
        TRIES.append(value)


@dataclass
class InList:
    color: Color
    inner: "list[InList]" = field(default_factory=list)


@dataclass
class InUnion:
    color: Color
    inner: "InUnion | None" = None


@dataclass
class InMap:
    color: Color
    inner: "dict[str, InMap]" = field(default_factory=dict)


class InTuple(NamedTuple):
    color: Color
    inner: "tuple[InTuple, ...]" = ()


class InTypedDict(TypedDict):
    color: Color
    inner: "list[InTypedDict]"


@dataclass
class First:
    color: Color
    inner: "Sequence[Second | None]" = ()


@dataclass
class Second:
    color: Color
    inner: "list[First]"


Colors = list["Colors"] | Color
Named = dict[str, "Named"] | list[Color]
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
Rows = list["Rows | int"]

Alias = TypeAliasType("Alias", list["Alias"] | Color)
Twin = TypeAliasType("Twin", tuple[T, T], type_params=(T,))
Endless = TypeAliasType("Endless", "Endless")  # type: ignore[misc]

RED = Color.RED
VALUES: list[tuple[Any, Any]] = [
    (InList, InList(RED, [InList(RED, [InList(RED, [InList(RED)])])])),
    (InUnion, InUnion(RED, InUnion(RED, InUnion(RED)))),
    (InMap, InMap(RED, {"a": InMap(RED, {"b": InMap(RED, {"c": InMap(RED)})})})),
    (InTuple, InTuple(RED, (InTuple(RED, (InTuple(RED, (InTuple(RED),)),)),))),
    (
        InTypedDict,
        {"color": RED, "inner": [{"color": RED, "inner": [{"color": RED, "inner": []}]}]},
    ),
    (First, First(RED, [Second(RED, [First(RED, [Second(RED, []), None])])])),
    (Second, Second(RED, [First(RED, [Second(RED, [First(RED, [])])])])),
    (Colors, [RED, [RED, [RED, [RED, [RED]]]]]),
    (Named, {"a": {"b": {"c": {"d": [RED]}}}}),
    (Alias, [RED, [RED, [RED, [RED]]]]),
    (Twin[Color], (RED, RED)),
]


def of(annotation: Any, *, strict: bool = True) -> Conversion:
    """The converter of a task with one argument, `value`."""

    def task(value: Any) -> Any: ...

    task.__annotations__ = {"value": annotation, "return": annotation}
    return Conversion("t", task, inspect.signature(task), with_context=False, strict=strict)


def colors_in(plain: Any) -> bool:
    """Whether a member of the enum is left somewhere."""
    if isinstance(plain, dict):
        plain = list(plain.values())
    if isinstance(plain, list | tuple):
        return any(map(colors_in, plain))
    return isinstance(plain, Color) or hasattr(plain, "inner")


@pytest.mark.parametrize("wrap", ["it", "list", "dict", "union", "tuple", "union of lists"])
@pytest.mark.parametrize(("annotation", "value"), VALUES)
def test_every_level_is_converted(annotation, value, wrap):
    around = {
        "it": (annotation, value),
        "list": (list[annotation], [value]),
        "dict": (dict[str, annotation], {"a": value}),
        "union": (annotation | None, value),
        "tuple": (tuple[int, annotation], (1, value)),
        "union of lists": (list[annotation] | int, [value]),
    }
    kind, passed = around[wrap]
    for strict in (True, False):
        conversion = of(kind, strict=strict)
        plain = conversion.written((passed,), {})
        assert plain is not None
        assert not colors_in(plain[0][0])
        assert conversion.read(*plain) == ((passed,), {})


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Json, {"a": [1, {"b": None}]}),
        (Json, [1.5, [True]]),
        (Rows, [1, [2, [3]]]),
        (list[Json], ["a", ["b"]]),
    ],
)
def test_a_plain_type_that_contains_itself_needs_no_converter(annotation, value):
    conversion = of(annotation, strict=False)
    assert conversion.written((value,), {}) is None
    assert conversion.settled == {(type(value),)}
    assert conversion.read((value,), {})[0][0] is value


def test_a_wrong_part_deep_inside_is_named():
    plain = {"color": "red", "inner": [{"color": "red", "inner": [{"color": "green"}]}]}
    with pytest.raises(DecodeError, match=r"value.inner\[0\].inner\[0\].color is a str, not Color"):
        of(InList).read((plain,), {})
    with pytest.raises(DecodeError, match=r"value\[...\]\[0\]\[...\] is a bytes, not dict"):
        of(Json).read(({"a": [{"b": b""}]},), {})


# -- unions ----------------------------------------------------------------------------------

BUILT: list[str] = []


@dataclass
class Sum:
    left: "Term"
    right: "Term"
    sign: Literal["+"] = "+"

    def __post_init__(self) -> None:
        BUILT.append("+")


@dataclass
class Product:
    left: "Term"
    right: "Term"
    sign: Literal["*"]

    def __post_init__(self) -> None:
        BUILT.append("*")


Term = Sum | Product | Color
Lists = list["Lists"] | list[Color] | tuple["Lists", ...]


def chain_of(depth: int, leaf: object) -> Any:
    value: Any = leaf
    for _ in range(depth):
        value = {"left": value, "right": "blue", "sign": "*"}
    return value


DEPTH = 8


@pytest.mark.parametrize("strict", [True, False])
def test_a_wrong_leaf_under_unions_takes_time_in_proportion(strict):
    conversion = of(Term, strict=strict)
    TRIES.clear()
    plain = chain_of(DEPTH, "green")
    if strict:
        with pytest.raises(DecodeError):
            conversion.read((plain,), {})
    else:
        assert conversion.read((plain,), {}) == ((plain,), {})
    assert len(TRIES) <= 4 * DEPTH


def test_a_right_value_under_unions_takes_time_in_proportion():
    conversion = of(Term)
    BUILT.clear()
    ((term,), _) = conversion.read((chain_of(DEPTH, "red"),), {})
    assert BUILT == ["*"] * DEPTH
    BUILT.clear()
    assert conversion.written((term,), {}) == ((chain_of(DEPTH, "red"),), {})
    assert len(BUILT) <= 2 * DEPTH, "the sender reads what it has written, at each union once"


def test_lists_under_unions_take_time_in_proportion():
    conversion = of(Lists)
    value: Any = [object()]
    TRIES.clear()
    plain: Any = ["green"]
    for _ in range(DEPTH):
        value, plain = [value], [plain]
    with pytest.raises(DecodeError):
        conversion.read((plain,), {})
    assert len(TRIES) <= 8 * DEPTH
    of(Lists, strict=False).written((value,), {})  # it ends


def test_equal_values_at_two_places_stay_two_values():
    first, second = of(list[InUnion | InList]).read(([{"color": "red"}, {"color": "red"}],), {})[0][
        0
    ]
    assert first == second
    assert first is not second


# -- what stands for itself ------------------------------------------------------------------


@pytest.mark.parametrize(
    "annotation",
    [Iterable["Missing"], "Missing", list["Missing"] | int, Endless],  # noqa: F821
)
def test_a_name_that_does_not_exist_is_not_checked(annotation):
    assert of(annotation).written(([1, "a"],), {}) is None
