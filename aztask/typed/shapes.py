"""Shapes: what an annotation says about a value, how it is written, and how it is read.

Rules
1. `Shape.write` gets what a caller passes, and returns plain data. `Shape.read` gets plain data,
   and returns what the annotation names. Each leaves alone what has the other form already.
2. What does not fit is told to the `Findings`, which raise Misfit if they are strict. A caller that
   goes on keeps the value as it is. Only reading raises Misfit without being strict: if a whole
   cannot be built from its parts.
3. A place is a tuple (place around it, step) or the name of an argument: text is made of it only
   for an error, because each element of a list has one.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""A name, or (place, step): a step is an index, a key, or the name of a field with a dot."""

VALUE_CHARACTERS: Final = 60


class Misfit(Exception):  # it never leaves this package
    """A value is not what its annotation says."""


class Refused(Exception):
    """A value must not be written: a reader would make another one of it."""


class Findings:
    """What one conversion has found. strict: raise Misfit for a part that does not fit.

    * `first`: the first misfit, for the log; "" if all fits.

    Two kinds of values fit everywhere: a reference of `App.put`, which stands for a value, and an
    error in the place of a member of a group that failed (``return_errors``).
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.first = ""

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


def place_text(place: Place) -> str:
    """A place as it is written in Python: ``invoice.lines[0].price``."""
    steps = []
    while isinstance(place, tuple):
        place, step = place
        is_field = isinstance(step, str) and step.startswith(".")
        steps.append(step if is_field else f"[{one_line(repr(step), VALUE_CHARACTERS)}]")
    return f"{place}{''.join(reversed(steps))}"


def kind_text(value: Any) -> str:
    """The kind of a value with its article: "a str", "an int", "None". The value is not shown."""
    if value is None:
        return "None"
    name = type(value).__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


class Shape(ABC):
    """One annotation.

    * `name`: the annotation as errors name it.
    * `plain`: True if neither writing nor reading ever changes a value.
    * `settled`: a value of exactly one of these types fits, and is never changed.
    * `fields`: the names that a map of it may have, None if it is no map or any will do.
    """

    name: str = ""
    plain: bool = False
    settled: frozenset[type] = frozenset()
    fields: frozenset[str] | None = None

    def holds(self, value: Any) -> bool:
        """Whether `value` is of the annotated type, without a look at its parts."""
        return type(value) in self.settled

    @abstractmethod
    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """`value` as plain data. Raises Refused, and Misfit if `found` is strict."""

    @abstractmethod
    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """Plain data as a value of the annotated type. Raises Misfit."""


class AnyShape(Shape):
    """Whatever is not checked: ``Any``, unresolved names, classes of other kinds."""

    plain = True

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


_FROM_TEXT: Final[dict[type, Callable[[str], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    Decimal: Decimal,
    UUID: UUID,
    bytes: lambda text: base64.b64decode(text, validate=True),
}


class ScalarShape(Shape):
    """A type that the serializer writes itself. loose: read JSON's text for it, too."""

    plain = True

    def __init__(self, kind: type, *, loose: bool = False) -> None:
        self.name = "None" if kind is type(None) else kind.__name__
        self.kind: Any = (int, float) if kind is float else kind
        self.settled = frozenset((int, float) if kind is float else (kind,))
        self._from_text = _FROM_TEXT.get(kind) if loose else None
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
                return self._from_text(value)
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
        if isinstance(value, self.kind):
            return value
        if isinstance(value, str):
            try:
                return self.kind(value)
            except (ValueError, LookupError):
                pass
        return found.misfit(place, value, self.name)


_BY_VALUE: Final = (str, bytes, int, float, datetime, date, Decimal, UUID)
_SCALARS: Final = (*_BY_VALUE, time, timedelta)
_COULD_BE_SENT: Final = (*_SCALARS, list, tuple, dict, PurePath)
"""What was written before there were converters, and a path, which may arrive as text."""


class EnumShape(Shape):
    """An enum: its value if that is plain, else the name of the member."""

    def __init__(self, kind: type[Enum]) -> None:
        self.name, self.kind = kind.__name__, kind
        self._by_value = all(isinstance(each.value, _BY_VALUE) for each in kind)

    def holds(self, value: Any) -> bool:
        """Whether it is a member of the enum."""
        return isinstance(value, self.kind)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """Its value or its name."""
        if isinstance(value, self.kind):
            return value.value if self._by_value else value.name
        return found.misfit(place, value, self.name)

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """The member that the value or name stands for."""
        if isinstance(value, self.kind):
            return value
        try:
            return self.kind(value) if self._by_value else self.kind[value]
        except (ValueError, KeyError, TypeError):
            text = f"{self.name} ({one_line(', '.join(self.kind.__members__), VALUE_CHARACTERS)})"
            return found.misfit(place, value, text)


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
            if (type(value) is type(plain) and value == plain) or value is each:
                return each
        return found.misfit(place, value, self.name)


# -- containers ------------------------------------------------------------------------------


class ArrayShape(Shape):
    """Values of one shape, any number of them; a list on the wire.

    * `accepts`: the types that a caller may pass.
    * `make`: the type that is made of the list; None leaves the list.
    """

    def __init__(self, name: str, accepts: tuple[type, ...], make: Any, item: Shape) -> None:
        self.name, self.item = name, item
        self._accepts: Any = accepts
        self._make = make
        self._sets = tuple(each for each in accepts if issubclass(each, set | frozenset))
        self.plain = make is None and item.plain
        self.settled = frozenset(accepts) - frozenset(self._sets) if self.plain else frozenset()

    def holds(self, value: Any) -> bool:
        """Whether its type is one that callers may pass."""
        return isinstance(value, self._accepts)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A list; of a set, in an order that depends on its values alone."""
        if not isinstance(value, self._accepts):
            return found.misfit(place, value, self.name)
        if isinstance(value, self._sets):
            # A set of texts has another order in each process, and a unique key must not.
            return _sorted(self.item.write(each, (place, "?"), found) for each in value)
        write = self.item.write
        if not self.item.plain:
            return [write(each, (place, n), found) for n, each in enumerate(value)]
        for n, each in enumerate(value if found.strict else ()):
            write(each, (place, n), found)
        return value if isinstance(value, list | tuple) else list(value)

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """The container, of elements that are read."""
        if not isinstance(value, list | tuple):
            return value if self.holds(value) else found.misfit(place, value, self.name)
        items: Any = value
        if not self.item.plain or found.strict:
            read = self.item.read
            items = [read(each, (place, n), found) for n, each in enumerate(value)]
            items = value if self.item.plain else items
        if self._make is None or (type(value) is self._make and items is value):
            return items
        try:
            return self._make(items)
        except TypeError as error:  # a set of what has no hash
            raise Misfit(f"{place_text(place)} makes no {self.name}: {error}") from None


def _sorted(values: Iterable[Any]) -> list[Any]:
    found = list(values)
    try:
        return sorted(found, key=pack)
    except (TypeError, ValueError, OverflowError):
        return found  # the serializer refuses a value, and says which


class TupleShape(Shape):
    """A tuple of known length; a list on the wire."""

    def __init__(self, items: Sequence[Shape]) -> None:
        self.name = f"tuple[{', '.join(each.name for each in items) or '()'}]"
        self._items = items
        self._plain_items = all(each.plain for each in items)

    def holds(self, value: Any) -> bool:
        """Whether it is a tuple, of whatever length."""
        return isinstance(value, tuple)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A list, or the tuple itself, which the serializer writes as one."""
        if not isinstance(value, tuple) or len(value) != len(self._items):
            return found.misfit(place, value, self.name)
        if self._plain_items and not found.strict:
            return value
        parts = zip(self._items, value, strict=True)
        plain = [shape.write(each, (place, n), found) for n, (shape, each) in enumerate(parts)]
        return value if self._plain_items else plain

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """A tuple of the items, each in its shape."""
        if not isinstance(value, list | tuple) or len(value) != len(self._items):
            return found.misfit(place, value, self.name)
        parts = zip(self._items, value, strict=True)
        return tuple(shape.read(each, (place, n), found) for n, (shape, each) in enumerate(parts))


class MapShape(Shape):
    """A map of keys and values of one shape each.

    * `accepts`: the types that a caller may pass.
    * `make`: the type that is made of the dict; None leaves the dict.
    """

    def __init__(
        self, name: str, accepts: tuple[type, ...], make: Any, key: Shape, value: Shape
    ) -> None:
        self.name, self._make = name, make
        self._accepts: Any = accepts
        self._key, self._value = key, value
        self._plain_items = key.plain and value.plain
        self.plain = make is None and self._plain_items
        self.settled = frozenset((dict,)) if self.plain else frozenset()

    def holds(self, value: Any) -> bool:
        """Whether its type is one that callers may pass."""
        return isinstance(value, self._accepts)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A dict of keys and values in their shapes."""
        if not isinstance(value, self._accepts):
            return found.misfit(place, value, self.name)
        if self._plain_items and not found.strict:
            return value if isinstance(value, dict) else dict(value)
        made: dict[Any, Any] = {}
        for key, each in value.items():
            plain = self._key.write(key, (place, "key"), found)
            made[plain] = self._value.write(each, (place, key), found)
        return value if self._plain_items and isinstance(value, dict) else made

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """The map, of keys and values that are read."""
        if not isinstance(value, dict):
            return value if self.holds(value) else found.misfit(place, value, self.name)
        if self._plain_items and not found.strict:
            return value if self._make is None else self._make(value)
        made = {
            self._key.read(key, (place, "key"), found): self._value.read(each, (place, key), found)
            for key, each in value.items()
        }
        if self._make is None:
            return value if self._plain_items else made
        return self._make(made)


class UnionShape(Shape):
    """One of several shapes.

    Reading tries the plain members first, since what could be sent before must not change; then the
    others in their order: first those that have all fields of a map, then those that ignore some.
    """

    def __init__(self, members: Sequence[Shape]) -> None:
        self.name = " | ".join(each.name for each in members)
        self._plain_members = [each for each in members if each.plain]
        self._others = [each for each in members if not each.plain]
        self.plain = not self._others
        self.settled = frozenset[type]().union(*(each.settled for each in self._plain_members))

    def holds(self, value: Any) -> bool:
        """Of the type of a member."""
        return any(each.holds(value) for each in (*self._plain_members, *self._others))

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """As the first member that holds the value, and that fits, writes it."""
        held = [each for each in (*self._plain_members, *self._others) if each.holds(value)]
        held.sort(key=lambda each: getattr(each, "kind", None) is not type(value))
        if not held:
            return found.misfit(place, value, self.name)
        for member in held[:-1]:
            try:
                plain = member.write(value, place, Findings(strict=True))
            except Misfit:
                continue
            return self._checked(value, plain, place)
        return self._checked(value, held[-1].write(value, place, found), place)

    def _checked(self, value: Any, plain: Any, place: Place) -> Any:
        """Refuse a value that a reader takes for another member (rule 6 of `aztask.typed`)."""
        if plain is value or isinstance(value, _COULD_BE_SENT):
            return plain
        read = self.read(plain, place, Findings(strict=False))
        if type(read) is not type(value):
            raise Refused(
                f"{place_text(place)} is {kind_text(value)}, which would arrive as "
                f"{kind_text(read)}: the members of {self.name} look the same as plain data; give "
                "one of them a field that the others lack"
            )
        return plain

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """As the first member that fits reads it."""
        for member in self._plain_members:
            if member.holds(value):
                try:
                    return member.read(value, place, Findings(strict=True))
                except Misfit:
                    continue
        if len(self._others) == 1 and isinstance(value, dict | list):
            return self._others[0].read(value, place, found)  # it names the part that is wrong
        return self._of_several(value, place, found)

    def _of_several(self, value: Any, place: Place, found: Findings) -> Any:
        some = [each for each in self._others if _knows(each, value)]
        for member in (*some, *self._others):
            try:
                return member.read(value, place, Findings(strict=True))
            except Misfit:
                continue
        return found.misfit(place, value, self.name)


def _knows(shape: Shape, value: Any) -> bool:
    """False for a map with keys that the shape would ignore."""
    return shape.fields is None or not isinstance(value, dict) or value.keys() <= shape.fields


def plain_of(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """What a library has made of one of its objects, as plain data. Raises TypeError for the rest.

    By the values themselves: the library has checked them.

    * `other`: makes plain data of the rest.
    """
    if value is None or isinstance(value, Enum):
        return None if value is None else plain_of(value.value, other)
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, dict):
        return {plain_of(key, other): plain_of(each, other) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        made = [plain_of(each, other) for each in value]
        return _sorted(made) if isinstance(value, set | frozenset) else made
    if isinstance(value, PurePath):
        return str(value)
    if other is not None:
        return other(value)
    raise TypeError(f"{kind_text(value)} is not plain data")
