"""Annotations become shapes.

Rules
1. Whatever an annotation is, a shape comes back: one that this module does not know is not checked.
2. Each annotation is resolved alone if not all of them can be, so that one name which exists for
   type checkers only does not switch off the others.
3. One `Shapes` makes one shape for an annotation, before it makes those inside, so that a type may
   contain itself: a class, an alias, or either of them inside a list or a union.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import (
    Annotated,
    Any,
    Final,
    ForwardRef,
    Literal,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
)
from uuid import UUID
from zoneinfo import ZoneInfo

from aztask.support.display import Secret
from aztask.typed.containers import ArrayShape, MapShape, TupleShape, UnionShape
from aztask.typed.libraries import library_shape
from aztask.typed.records import (
    DataclassShape,
    Member,
    NamedTupleShape,
    RecordShape,
    TypedDictShape,
)
from aztask.typed.shapes import (
    ANY,
    AnyShape,
    EnumShape,
    LiteralShape,
    ScalarShape,
    Shape,
    TextShape,
)

_SCALARS: Final = frozenset(
    (type(None), bool, int, float, str, bytes, datetime, date, time, timedelta, UUID, Decimal)
)
_WRAPPERS: Final = tuple(
    getattr(typing, name)
    for name in ("Required", "NotRequired", "ReadOnly", "Final", "ClassVar")
    if hasattr(typing, name)
)
_FORWARDREF: Final = 3
"""``annotationlib.Format.FORWARDREF``."""

_SETS: Final = (set, frozenset)
_LISTS: Final = (list, tuple)
_ARRAYS: Final[dict[Any, tuple[tuple[type, ...], Any]]] = {
    list: ((list,), None),
    set: ((set,), set),
    frozenset: ((frozenset,), frozenset),
    tuple: ((tuple,), tuple),
    collections.deque: ((collections.deque,), collections.deque),
    abc.Sequence: (_LISTS, None),
    abc.MutableSequence: ((list,), None),
    abc.Collection: ((*_LISTS, *_SETS), None),
    abc.Iterable: ((*_LISTS, *_SETS), None),
    abc.Set: (_SETS, set),
    abc.MutableSet: ((set,), set),
}
"""What a caller may pass, and what is made of the list for the function."""

_MAPS: Final[dict[Any, tuple[tuple[type, ...], Any]]] = {
    dict: ((dict,), None),
    collections.defaultdict: ((dict,), None),
    collections.Counter: ((collections.Counter,), collections.Counter),
    collections.OrderedDict: ((collections.OrderedDict,), collections.OrderedDict),
    abc.Mapping: ((abc.Mapping,), None),
    abc.MutableMapping: ((abc.MutableMapping,), None),
}
_CONTAINERS: Final = frozenset((*_ARRAYS, *_MAPS))
_ALIASES: Final = 100
"""How many aliases may stand for each other. ``type A = A`` has no end."""


def hints_of(thing: Any) -> dict[str, Any]:
    """The resolved annotations of a function or a class; those that cannot be resolved are missing.

    * `thing`: also a `functools.partial`, or an object that can be called.
    """
    thing = _annotated(thing)
    with suppress(Exception):  # a text in an annotation may be any Python
        return typing.get_type_hints(thing, include_extras=True)
    found: dict[str, Any] = {}
    for each in reversed(thing.__mro__) if isinstance(thing, type) else (thing,):
        names = names_of(each)
        for name, annotation in _annotations(each).items():
            found.update(_resolved(name, annotation, names))
    return found


def names_of(thing: Any) -> Mapping[str, Any]:
    """The names of the module of a function or a class, for what its annotations leave as text."""
    thing = _annotated(thing)
    module = sys.modules.get(getattr(thing, "__module__", ""), None)
    return getattr(thing, "__globals__", None) or vars(module or types)


def _annotated(thing: Any) -> Any:
    """The function or class that has the annotations."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, type):
        return thing
    thing = inspect.unwrap(thing)
    return thing if hasattr(thing, "__annotations__") else type(thing).__call__


def _annotations(thing: Any) -> Mapping[str, Any]:
    # From Python 3.14 on annotations are evaluated here: FORWARDREF keeps names that are unknown.
    late = {"format": _FORWARDREF} if sys.version_info >= (3, 14) else {}
    return inspect.get_annotations(thing, **late)  # type: ignore[arg-type]


def _resolved(name: str, annotation: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    def holder() -> None: ...

    holder.__annotations__ = {name: annotation}
    try:
        return typing.get_type_hints(holder, dict(names), include_extras=True)
    except Exception:  # noqa: BLE001  # this one is not checked
        return {}


class Shapes:
    """Makes the shapes of one task, or of any other set of annotations."""

    def __init__(self) -> None:
        self._made: dict[Any, Shape] = {}
        self._kept: list[Any] = []  # of annotations that have no hash the ids are keys

    def of(self, annotation: Any, names: Mapping[str, Any]) -> Shape:
        """The shape of an annotation.

        * `names`: those of the module where it stands, see `names_of`.
        """
        found = self._shape(annotation, names, loose=False)
        while any(each.settle() for each in self._made.values()):
            pass  # a type that contains itself is plain if all other parts of it are
        return found

    def _shape(
        self, annotation: Any, names: Mapping[str, Any], *, loose: bool, key: bool = False
    ) -> Shape:
        """loose: within a dataclass, see rule 8 of `aztask.typed`. key: it is that of a map."""
        place: Any = None
        try:
            annotation = _unwrapped(annotation, names)
            place = self._place(annotation, names, loose=loose, key=key)
            if place not in self._made:
                self._fill(place, annotation, names, loose=loose, key=key)
        except Exception:  # noqa: BLE001  # dict[str], or a class with hooks of its own
            return self._made.setdefault(place, ANY)
        return self._made[place]

    def _place(
        self, annotation: Any, names: Mapping[str, Any], *, loose: bool, key: bool
    ) -> tuple[Any, ...]:
        where = 0 if isinstance(annotation, type) else id(names)
        try:
            hash(annotation)
        except TypeError:  # Annotated with a list, for example
            self._kept.append(annotation)
            return (id(annotation), where, loose, key)
        return (annotation, where, loose, key)

    def _fill(
        self, place: Any, annotation: Any, names: Mapping[str, Any], *, loose: bool, key: bool
    ) -> None:
        """Put the shape of an annotation at its place, and then those that it is made of."""
        shape, inner = _outline(annotation, loose=loose, key=key)
        self._made[place] = shape
        if isinstance(shape, RecordShape):
            names = names_of(shape.record)
            loose = loose or isinstance(shape, DataclassShape)
        is_map = isinstance(shape, MapShape)
        parts = [
            self._shape(each, names, loose=loose, key=is_map and number == 0)
            for number, each in enumerate(inner)
        ]
        if inner:
            shape.complete(parts)


def _outline(annotation: Any, *, loose: bool, key: bool) -> tuple[Shape, Sequence[Any]]:
    """The shape of an annotation without those it is made of, and the annotations of these."""
    if isinstance(annotation, type) and annotation in _SCALARS:
        return ScalarShape(annotation, loose=loose, key=key), ()
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return UnionShape(), inner
    if origin is Literal:
        enums = {type(each): EnumShape(type(each)) for each in inner if isinstance(each, Enum)}
        return LiteralShape(inner, enums), ()
    kind = origin or annotation
    if kind in _CONTAINERS:
        return _container(annotation, kind, inner)
    return _class(annotation, kind) if isinstance(kind, type) else (ANY, ())


def _container(annotation: Any, kind: Any, inner: Sequence[Any]) -> tuple[Shape, Sequence[Any]]:
    name = kind.__name__
    if kind is tuple and inner[-1:] != (Ellipsis,) and (inner or annotation == tuple[()]):
        return TupleShape(), inner
    if kind in _ARRAYS:
        return ArrayShape(name, *_ARRAYS[kind]), (inner or (Any,))[:1]
    if kind is collections.Counter:
        inner = (*(inner or (Any,)), int)
    key, value = inner or (Any, Any)
    return MapShape(name, *_MAPS[kind]), (key, value)


def _class(annotation: Any, kind: Any) -> tuple[Shape, Sequence[Any]]:
    if issubclass(kind, Enum):
        return EnumShape(kind), ()
    if issubclass(kind, PurePath | ZoneInfo):
        return TextShape(kind), ()
    found = library_shape(annotation)
    if found is not None:
        return found, ()
    name: str = kind.__name__
    record: RecordShape
    if typing.is_typeddict(kind):
        record = TypedDictShape(kind, name, _keys(kind, hints_of(kind)))
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        record = NamedTupleShape(kind, name, _members(kind))
    elif "__dataclass_fields__" in vars(kind):  # a plain subclass adds what no field holds
        record = DataclassShape(kind, name, _members(kind), _init_only(kind))
    else:
        return AnyShape(name), ()
    hints = hints_of(kind)
    variables = dict(zip(getattr(kind, "__parameters__", ()), get_args(annotation), strict=False))
    return record, [_substituted(hints.get(each.name, Any), variables) for each in record.members]


def _unwrapped(annotation: Any, names: Mapping[str, Any]) -> Any:
    """The annotation below aliases, new types, type variables, and what only type checkers read."""
    for _ in range(_ALIASES):
        origin = get_origin(annotation)
        if annotation is None:
            return type(None)
        if isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, TypeVar):
            annotation = annotation.__bound__ or Any
        elif isinstance(annotation, str | ForwardRef):  # of an alias that contains itself
            annotation = _resolved("it", annotation, names).get("it", Any)
        elif type(annotation).__name__ == "TypeAliasType":  # from Python 3.12 on
            annotation = annotation.__value__
        elif type(origin).__name__ == "TypeAliasType":
            variables = zip(origin.__type_params__, get_args(annotation), strict=False)
            annotation = _substituted(origin.__value__, dict(variables))
        elif origin is Annotated or origin in _WRAPPERS:
            annotation = get_args(annotation)[0]
        else:
            return annotation
    return Any


def _init_only(kind: Any) -> list[str]:
    """The names of the ``InitVar`` of a dataclass."""
    hidden = dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]
    fields = kind.__dataclass_fields__.values()
    return [each.name for each in fields if each._field_type is hidden]


def _members(kind: Any) -> list[Member]:
    """The fields of a dataclass or a named tuple."""
    if issubclass(kind, tuple):
        return [Member(name, name not in kind._field_defaults) for name in kind._fields]
    missing, fields = dataclasses.MISSING, dataclasses.fields(kind)
    names = {each.name for each in fields}
    found = []
    for each in fields:
        alias = each.metadata.get("name")
        alias = alias if isinstance(alias, str) and alias not in names else ""
        required = each.default is missing and each.default_factory is missing
        if each.init:
            found.append(Member(each.name, required, alias))
    return found


def _keys(kind: Any, hints: Mapping[str, Any]) -> list[Member]:
    """The keys of a typed dict."""
    required: frozenset[str] = kind.__required_keys__
    return [
        Member(name, _is_required(hints.get(name), otherwise=name in required))
        for name in sorted(required | kind.__optional_keys__)
    ]


def _is_required(hint: Any, *, otherwise: bool) -> bool:
    """Of a key. A class does not see the ``NotRequired`` in an annotation that is text."""
    while (origin := get_origin(hint)) is Annotated or origin in _WRAPPERS:
        if origin in (typing.Required, typing.NotRequired):
            return origin is typing.Required
        hint = get_args(hint)[0]
    return otherwise


def _substituted(hint: Any, variables: Mapping[Any, Any]) -> Any:
    """The annotation of a field of a generic class, with what its variables stand for."""
    if isinstance(hint, TypeVar):
        return variables.get(hint, hint)
    inner = getattr(hint, "__parameters__", ())
    if not variables or not inner or isinstance(hint, type):
        return hint
    return hint[tuple(variables.get(each, Any) for each in inner)]


# -- secrets ---------------------------------------------------------------------------------
#
# What ``Annotated[str, Secret]`` marks is masked wherever aztask shows values.


_FIELDS: Final = (
    "__dataclass_fields__",
    "__attrs_attrs__",
    "__struct_fields__",
    "__pydantic_fields__",
    "_fields",
)


def is_secret(annotation: Any, seen: frozenset[int] = frozenset()) -> bool:
    """True if `Secret` is in an annotation, or in that of a field of a class in it.

    seen: the annotations around it, by their identity: a class may contain itself.
    """
    if id(annotation) in seen:
        return False
    seen |= {id(annotation)}
    origin = get_origin(annotation)
    if origin is Annotated:
        marks = annotation.__metadata__
        if any(each is Secret or isinstance(each, Secret) for each in marks):
            return True
    return any(is_secret(each, seen) for each in _within(annotation, origin))


def _within(annotation: Any, origin: Any) -> Iterator[Any]:
    """The annotations that one consists of."""
    yield from get_args(annotation)
    if isinstance(annotation, NewType):
        yield annotation.__supertype__
    elif isinstance(annotation, TypeVar):
        yield annotation.__bound__
    elif type(annotation).__name__ == "TypeAliasType":  # from Python 3.12 on
        yield annotation.__value__
    kind = origin or annotation
    if isinstance(kind, type) and (typing.is_typeddict(kind) or _has_fields(kind)):
        yield from hints_of(kind).values()


def _has_fields(kind: type) -> bool:
    return any(hasattr(kind, name) for name in _FIELDS)
