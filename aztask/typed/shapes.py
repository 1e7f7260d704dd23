"""Shapes: what an annotation says about a value, how it is written, and how it is read.

Rules
1. `Shape.write` gets what a caller passes, and returns plain data. `Shape.read` gets plain data,
   and returns what the annotation names. Each leaves alone what has the other form already.
2. What does not fit is told to the `Findings`, which raise Misfit if they are strict. A caller that
   goes on keeps the value as it is. Only reading raises Misfit without being strict: if a whole
   cannot be built from its parts.
3. A place is a tuple (place around it, step) or the name of an argument: text is made of it only
   for an error, because each element of a list has one.
4. No text of this package holds a value, a map's key, or what a class of the user says about one:
   texts get into logs and dead letters. They name the place, and types.
5. A shape of others is made empty and gets them afterwards (`Shape.complete`), because a type may
   name itself in them. What it derives of them is settled when all of them are known.
"""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, TypeAlias
from uuid import UUID

from aztask.errors import ResultError
from aztask.message.payload import StoredValue
from aztask.message.serializer import pack
from aztask.support.display import one_line

Place: TypeAlias = Any
"""A name, or (place, step): a step is an index, or text, such as the name of a field with a dot."""

INSIDE: Final = "[...]"
"""The step to a value of a map, or to an element of a set."""

KEY: Final = " (a key)"
NAMES_CHARACTERS: Final = 60


class Misfit(Exception):  # it never leaves this package
    """A value is not what its annotation says."""


class Refused(Exception):
    """A value must not be written: a reader would make another one of it."""


class NotPlain(TypeError):
    """A value inside an object of a library is no plain data. The text names its type."""


class Findings:
    """What one conversion has found. strict: raise Misfit for a part that does not fit.

    * `by_type`: what is read is a sample of its type, so only the type counts: any text may be the
      member of an enum of texts, and no class of the user is called.
    * `first`: the first misfit, for the log; "" if all fits.
    * `tried`: what members of unions made of values that are no scalars, see `UnionShape`.

    Two kinds of values fit everywhere: a reference of `App.put`, which stands for a value, and an
    error in the place of a member of a group that failed (``return_errors``).
    """

    def __init__(
        self,
        *,
        strict: bool,
        by_type: bool = False,
        tried: dict[tuple[Any, ...], tuple[Any, ...]] | None = None,
    ) -> None:
        self.strict = strict
        self.by_type = by_type
        self.first = ""
        self.tried = {} if tried is None else tried

    def misfit(self, place: Place, value: Any, expected: str) -> Any:
        """Note that `value` is not an `expected`; returns the value. Raises Misfit if strict."""
        if isinstance(value, StoredValue | ResultError):
            return value
        if not self.first:
            self.first = f"{place_text(place)} is {kind_text(value)}, not {expected}"
        if self.strict:
            raise Misfit(self.first)
        return value

    def missing(self, place: Place) -> None:
        """Note that a value is missing there. Raises Misfit if strict."""
        self.first = self.first or f"{place_text(place)} is missing"
        if self.strict:
            raise Misfit(self.first)


class AnyKeys(dict[Any, Any]):
    """The sample of a map whose keys are not known, see `Findings`."""


def place_text(place: Place) -> str:
    """A place as it is written in Python: ``invoice.lines[0].price``. A map's key is not shown."""
    steps = []
    while isinstance(place, tuple):
        place, step = place
        steps.append(step if isinstance(step, str) else f"[{step}]")
    return f"{place}{''.join(reversed(steps))}"


def kind_text(value: Any) -> str:
    """The kind of a value with its article: "a str", "an int", "None". The value is not shown."""
    if value is None:
        return "None"
    name = type(value).__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def raised(place: Place, does: str, error: Exception) -> str:
    """The text for an error of a user's class: its own text may hold values, so its type counts."""
    return f"{place_text(place)} {does}: {type(error).__name__} was raised"


class Shape(ABC):
    """One annotation.

    * `name`: the annotation as errors name it.
    * `plain`: True if neither writing nor reading ever changes a value, whether it fits or not.
    * `settled`: a value of exactly one of these types fits, and is never changed.
    * `fields`: the names that a map of it may have, None if it is no map or any will do.
    * `unchecked`: True if every value fits.
    """

    name: str = "..."
    plain: bool = False
    settled: frozenset[type] = frozenset()
    fields: frozenset[str] | None = None
    unchecked: bool = False

    def complete(self, parts: Sequence[Shape]) -> None:
        """Set the shapes of what it is made of, which may be incomplete themselves."""
        assert not parts  # noqa: S101  # most shapes are made of nothing else

    def settle(self) -> bool:
        """Derive `plain` and `settled` from the parts again; returns whether `plain` changed."""
        return False

    def holds(self, value: Any) -> bool:
        """Whether `value` is of the annotated type, without a look at its parts."""
        return type(value) in self.settled

    @abstractmethod
    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """`value` as plain data. Raises Refused, and Misfit if `found` is strict."""

    @abstractmethod
    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """Plain data as a value of the annotated type. Raises Misfit."""

    def parse(self, data: bytes, place: Place) -> Any:  # a library names it
        """What `read` takes, of JSON. Raises ValueError, RecursionError and Misfit."""
        return json.loads(data)


class AnyShape(Shape):
    """Whatever is not checked: ``Any``, unresolved names, classes of other kinds."""

    plain = unchecked = True

    def __init__(self, name: str = "Any") -> None:
        self.name = name

    def holds(self, value: Any) -> bool:
        """True, since nothing is known of it."""
        return True

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """Unchanged: the serializer refuses what it cannot write."""
        return value

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """The value itself, which is not looked at."""
        return value


ANY: Final = AnyShape()

_FROM_TEXT: Final[dict[type, Callable[[str], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    Decimal: Decimal,
    UUID: UUID,
    bytes: lambda text: base64.b64decode(text, validate=True),
}


class ScalarShape(Shape):
    """A type that the serializer writes itself.

    * `loose`: read JSON's text for it, too.
    * `key`: it is the key of a map, which JSON always writes as text.
    """

    plain = True

    def __init__(self, kind: type, *, loose: bool = False, key: bool = False) -> None:
        self.name = "None" if kind is type(None) else kind.__name__
        self.kind: Any = (int, float) if kind is float else kind
        self.settled = frozenset((int, float) if kind is float else (kind,))
        self._from_text = _FROM_TEXT.get(kind) if loose else None
        if loose and key and kind is int:
            self._from_text = int
        self._number = loose and kind is Decimal
        self.plain = self._from_text is None

    def holds(self, value: Any) -> bool:
        """Of the type or of a subclass, as type checkers see it; an int is a float, too."""
        return isinstance(value, self.kind)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """The value itself: the serializer has an encoding for it."""
        return value if isinstance(value, self.kind) else found.misfit(place, value, self.name)

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """Unchanged, or made of text where that is accepted."""
        if isinstance(value, self.kind):
            return value
        try:
            if self._from_text is not None and isinstance(value, str):
                return value if found.by_type else self._from_text(value)
            if self._number and isinstance(value, int | float) and not isinstance(value, bool):
                return Decimal(str(value))
        except (ValueError, ArithmeticError):
            pass
        return found.misfit(place, value, self.name)


class TextShape(Shape):
    """A type that is text on the wire, such as a path."""

    def __init__(self, kind: type) -> None:
        self.name, self.kind = kind.__name__, kind

    def holds(self, value: Any) -> bool:
        """Of the type or of a subclass."""
        return isinstance(value, self.kind)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """The text that stands for it."""
        if isinstance(value, self.kind):
            return str(value)
        return found.misfit(place, value, self.name)

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """The object that the text stands for."""
        if isinstance(value, self.kind) or (found.by_type and isinstance(value, str)):
            return value
        if isinstance(value, str):
            with suppress(Exception):  # a ZoneInfo opens a file, and a subclass raises anything
                return self.kind(value)
        return found.misfit(place, value, self.name)


_BY_VALUE: Final = (str, bytes, int, float, datetime, date, Decimal, UUID)
SCALARS: Final = (*_BY_VALUE, time, timedelta)
_WRITTEN: Final = (*SCALARS, list, tuple, dict)
"""What the serializer writes itself, of subclasses too, and always has."""

COULD_BE_SENT: Final = (*_WRITTEN, PurePath)
"""`_WRITTEN`, and a path, which may arrive as text."""


class EnumShape(Shape):
    """An enum: its value if that is plain, else the name of the member.

    Members that are themselves of a type that the serializer writes, as those of an IntEnum, are
    written as that type (rule 1 of `aztask.typed`), whatever their values and names are.
    """

    def __init__(self, kind: type[Enum]) -> None:
        self.name, self.kind = kind.__name__, kind
        self._itself = issubclass(kind, _WRITTEN)
        self._by_value = (
            all(isinstance(each.value, SCALARS) and bool(each == each.value) for each in kind)
            if self._itself
            else all(isinstance(each.value, _BY_VALUE) for each in kind)
        )

    def holds(self, value: Any) -> bool:
        """Whether it is a member of the enum."""
        return isinstance(value, self.kind)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """Its value, the member itself for the serializer, or its name."""
        if not isinstance(value, self.kind):
            return found.misfit(place, value, self.name)
        if self._by_value:
            return value.value
        return value if self._itself else value.name

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """The member that the value or name stands for."""
        if isinstance(value, self.kind) or (found.by_type and self._is_like(value)):
            return value
        with suppress(Exception):  # `_missing_` and `__eq__` may raise anything
            if self._by_value:
                return self.kind(value)
            if not self._itself:
                return self.kind[value]
            same = (
                tuple(value) if isinstance(value, list) and issubclass(self.kind, tuple) else value
            )
            return next(each for each in self.kind if each == same)
        names = one_line(", ".join(self.kind.__members__), NAMES_CHARACTERS)
        return found.misfit(place, value, f"{self.name} ({names})")

    def _is_like(self, sample: Any) -> bool:
        """Whether a value of the sample's type may stand for a member."""
        if self._by_value:  # `_missing_` of the user may know other values
            known = "_missing_" not in vars(self.kind)
            return not known or any(isinstance(each.value, type(sample)) for each in self.kind)
        if self._itself:
            return any(isinstance(each, type(sample)) for each in self.kind)
        return isinstance(sample, str)


class LiteralShape(Shape):
    """One of a few values; members of enums are written as `EnumShape` does."""

    def __init__(self, allowed: Sequence[Any], enums: Mapping[type, Shape]) -> None:
        self.name = f"one of {', '.join(map(repr, allowed))}"
        found = Findings(strict=True)
        self._allowed = [
            (each, enums[type(each)].write(each, "", found) if type(each) in enums else each)
            for each in allowed
        ]
        self.plain = not enums

    def holds(self, value: Any) -> bool:
        """Equal to one, and of its type: 1 is not True."""
        return any(type(value) is type(each) and value == each for each, _ in self._allowed)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """The plain form of the literal."""
        for each, plain in self._allowed:
            if type(value) is type(each) and value == each:
                return plain
        return found.misfit(place, value, self.name)

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """The literal that the plain value stands for."""
        for each, plain in self._allowed:
            same = type(value) is type(plain) and (found.by_type or value == plain)
            if same or value is each:
                return each
        return found.misfit(place, value, self.name)


def in_order(values: Iterable[Any]) -> list[Any]:
    """In an order that depends on the values alone: plain data of a set, whose own order varies."""
    found = list(values)
    try:
        return sorted(found, key=pack)
    except (TypeError, ValueError, OverflowError):
        return found  # the serializer refuses a value, and says which


def plain_of(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """What a library has made of one of its objects, as plain data. Raises NotPlain for the rest.

    By the values themselves: the library has checked them.

    * `other`: makes plain data of the rest.
    """
    if value is None or isinstance(value, Enum):
        return None if value is None else plain_of(value.value, other)
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, dict):
        return {plain_of(key, other): plain_of(each, other) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        made = [plain_of(each, other) for each in value]
        return in_order(made) if isinstance(value, set | frozenset) else made
    if isinstance(value, PurePath):
        return str(value)
    if other is not None:
        return other(value)
    raise NotPlain(f"{kind_text(value)}, which is not plain data")
