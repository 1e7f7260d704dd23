"""Annotations become shapes.

Rules
1. Whatever an annotation is, a shape comes back: one that this module does not know is not checked.
2. Each annotation is resolved alone if not all of them can be, so that one name which exists for
   type checkers only does not switch off the others.
3. One `Shapes` makes one shape for an annotation, so that a class may contain itself.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal, NewType, TypeVar, Union, get_args, get_origin
from uuid import UUID
from zoneinfo import ZoneInfo

from aztask.typed.libraries import library_shape
from aztask.typed.records import (
    DataclassShape,
    Member,
    NamedTupleShape,
    RecordShape,
    TypedDictShape,
)
from aztask.typed.shapes import (
    AnyShape,
    ArrayShape,
    EnumShape,
    LiteralShape,
    MapShape,
    ScalarShape,
    Shape,
    TextShape,
    TupleShape,
    UnionShape,
)

ANY: Final = AnyShape()

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


def hints_of(thing: Any) -> dict[str, Any]:
    """The resolved annotations of a function or a class; those that cannot be resolved are missing.

    * `thing`: also a `functools.partial`, or an object that can be called.
    """
    while isinstance(thing, functools.partial):
        thing = thing.func
    if not isinstance(thing, type):
        thing = inspect.unwrap(thing)
        if not hasattr(thing, "__annotations__"):
            thing = type(thing).__call__
    with suppress(Exception):  # a text in an annotation may be any Python
        return typing.get_type_hints(thing, include_extras=True)
    found: dict[str, Any] = {}
    for each in reversed(thing.__mro__) if isinstance(thing, type) else (thing,):
        module = sys.modules.get(getattr(each, "__module__", ""), None)
        names = getattr(each, "__globals__", None) or vars(module or types)
        for name, annotation in _annotations(each).items():
            found.update(_resolved(name, annotation, names))
    return found


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

    def of(self, annotation: Any, *, loose: bool = False) -> Shape:
        """The shape of an annotation. loose: within a dataclass, see rule 8 of `aztask.typed`."""
        key = (annotation, loose)
        try:
            known = self._made.get(key)
        except TypeError:  # Annotated with a list, for example
            return self._safely(annotation, loose)
        if known is None:
            self._made[key] = ANY  # an alias that contains itself
            known = self._made[key] = self._safely(annotation, loose)
        return known

    def _safely(self, annotation: Any, loose: bool) -> Shape:
        try:
            return self._build(annotation, loose)
        except Exception:  # noqa: BLE001  # dict[str], or a class with hooks of its own
            return ANY

    def _build(self, annotation: Any, loose: bool) -> Shape:
        annotation = _unwrapped(annotation)
        if annotation in _SCALARS:
            return ScalarShape(annotation, loose=loose)
        origin, inner = get_origin(annotation), get_args(annotation)
        if origin in (Union, types.UnionType):
            return self._union(inner, loose)
        if origin is Literal:
            enums = {type(each): EnumShape(type(each)) for each in inner if isinstance(each, Enum)}
            return LiteralShape(inner, enums)
        kind = origin or annotation
        if kind in _CONTAINERS:
            return self._container(annotation, kind, inner, loose)
        return self._class(annotation, kind, loose) if isinstance(kind, type) else ANY

    def _union(self, inner: Sequence[Any], loose: bool) -> Shape:
        members = [self.of(each, loose=loose) for each in inner]
        return ANY if any(isinstance(each, AnyShape) for each in members) else UnionShape(members)

    def _container(self, annotation: Any, kind: Any, inner: Sequence[Any], loose: bool) -> Shape:
        if kind is tuple and inner[-1:] != (Ellipsis,) and (inner or annotation == tuple[()]):
            return TupleShape([self.of(each, loose=loose) for each in inner])
        if kind in _ARRAYS:
            item = self.of(inner[0], loose=loose) if inner else ANY
            accepts, make = _ARRAYS[kind]
            return ArrayShape(_name(kind, item), accepts, make, item)
        if kind is collections.Counter:
            inner = (*(inner or (Any,)), int)
        key, value = (self.of(each, loose=loose) for each in inner or (Any, Any))
        accepts, make = _MAPS[kind]
        return MapShape(_name(kind, key, value), accepts, make, key, value)

    def _class(self, annotation: Any, kind: Any, loose: bool) -> Shape:
        found: Shape | None = None
        if issubclass(kind, Enum):
            found = EnumShape(kind)
        elif issubclass(kind, PurePath | ZoneInfo):
            found = TextShape(kind)
        else:
            found = library_shape(annotation)
        if found is not None:
            return found
        name: str = kind.__name__
        record: RecordShape | None = None
        if typing.is_typeddict(kind):
            record = TypedDictShape(kind, name)
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            record = NamedTupleShape(kind, name)
        elif "__dataclass_fields__" in vars(kind):  # a plain subclass adds what no field holds
            record, loose = DataclassShape(kind, name, _init_only(kind)), True
        return AnyShape(name) if record is None else self._record(record, annotation, kind, loose)

    def _record(self, shape: RecordShape, annotation: Any, kind: Any, loose: bool) -> Shape:
        self._made[annotation, loose] = shape  # the class may name itself
        hints = hints_of(kind)
        variables = dict(
            zip(getattr(kind, "__parameters__", ()), get_args(annotation), strict=False)
        )
        shape.complete(
            [
                Member(
                    name,
                    self.of(_substituted(hints.get(name, Any), variables), loose=loose),
                    needed,
                )
                for name, needed in _members(kind)
            ]
        )
        return shape


def _unwrapped(annotation: Any) -> Any:
    """The annotation below aliases, new types, type variables, and what only type checkers read."""
    while True:
        if annotation is None:
            return type(None)
        if isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, TypeVar):
            annotation = annotation.__bound__ or Any
        elif type(annotation).__name__ == "TypeAliasType":  # from Python 3.12 on
            annotation = annotation.__value__
        elif get_origin(annotation) is Annotated or get_origin(annotation) in _WRAPPERS:
            annotation = get_args(annotation)[0]
        else:
            return annotation


def _init_only(kind: Any) -> list[str]:
    """The names of the ``InitVar`` of a dataclass."""
    hidden = dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]
    fields = kind.__dataclass_fields__.values()
    return [each.name for each in fields if each._field_type is hidden]


def _members(kind: Any) -> list[tuple[str, bool]]:
    """(name, whether it is required) of the fields of a class."""
    if typing.is_typeddict(kind):
        return [(name, name in kind.__required_keys__) for name in sorted(_keys(kind))]
    if issubclass(kind, tuple):
        return [(name, name not in kind._field_defaults) for name in kind._fields]
    missing = dataclasses.MISSING
    return [
        (each.name, each.default is missing and each.default_factory is missing)
        for each in dataclasses.fields(kind)
        if each.init
    ]


def _keys(kind: Any) -> frozenset[str]:
    keys: frozenset[str] = kind.__required_keys__ | kind.__optional_keys__
    return keys


def _substituted(hint: Any, variables: Mapping[Any, Any]) -> Any:
    """The annotation of a field of a generic class, with what its variables stand for."""
    if hint in variables:
        return variables[hint]
    inner = getattr(hint, "__parameters__", ())
    if not variables or not inner or isinstance(hint, type):
        return hint
    return hint[tuple(variables.get(each, Any) for each in inner)]


def _name(kind: Any, *inner: Shape) -> str:
    return f"{kind.__name__}[{', '.join(each.name for each in inner)}]"
