"""Shapes that are made of others: lists, sets, tuples, maps and unions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aztask.typed.shapes import (
    ANY,
    COULD_BE_SENT,
    INSIDE,
    KEY,
    SCALARS,
    Findings,
    Misfit,
    Place,
    Refused,
    Shape,
    in_order,
    kind_text,
    place_text,
    raised,
)


class ArrayShape(Shape):
    """Values of one shape, any number of them; a list on the wire.

    * `accepts`: the types that a caller may pass.
    * `make`: the type that is made of the list; None leaves the list.
    """

    def __init__(self, title: str, accepts: tuple[type, ...], make: Any) -> None:
        self._title, self._make = title, make
        self._accepts: Any = accepts
        self._sets = tuple(each for each in accepts if issubclass(each, set | frozenset))
        self._lists = frozenset(accepts) & {list, tuple} if make is None else frozenset()
        self.item: Shape = ANY
        self.plain = len(self._lists) == len(accepts)

    def complete(self, parts: Sequence[Shape]) -> None:
        """Set the shape of the elements."""
        (self.item,) = parts
        self.name = f"{self._title}[{self.item.name}]"

    def settle(self) -> bool:
        """It is plain if its elements are, and all that it accepts is written as it is."""
        before = self.plain
        self.plain = self.item.plain and len(self._lists) == len(self._accepts)
        self.settled = self._lists if self.item.plain else frozenset()
        return self.plain is not before

    def holds(self, value: Any) -> bool:
        """Whether its type is one that callers may pass."""
        return isinstance(value, self._accepts)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A list; of a set, in an order that depends on its values alone."""
        if not isinstance(value, self._accepts):
            return found.misfit(place, value, self.name)
        if isinstance(value, self._sets):
            # A set of texts has another order in each process, and a unique key must not.
            return in_order(self.item.write(each, (place, INSIDE), found) for each in value)
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
        if self._make is None or found.by_type or (type(value) is self._make and items is value):
            return items
        try:
            return self._make(items)
        except Exception as error:  # noqa: BLE001  # a set of what has no hash
            raise Misfit(raised(place, f"makes no {self.name}", error)) from None


class TupleShape(Shape):
    """A tuple of known length; a list on the wire."""

    name = "tuple[()]"

    def __init__(self) -> None:
        self._items: Sequence[Shape] = ()

    def complete(self, parts: Sequence[Shape]) -> None:
        """Set the shapes of its items."""
        self._items = parts
        self.name = f"tuple[{', '.join(each.name for each in parts)}]"

    def holds(self, value: Any) -> bool:
        """Whether it is a tuple, of whatever length."""
        return isinstance(value, tuple)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A list, or the tuple itself, which the serializer writes as one."""
        if not isinstance(value, tuple) or len(value) != len(self._items):
            return found.misfit(place, value, self.name)
        is_plain = all(each.plain for each in self._items)
        if is_plain and not found.strict:
            return value
        parts = zip(self._items, value, strict=True)
        plain = [shape.write(each, (place, n), found) for n, (shape, each) in enumerate(parts)]
        return value if is_plain else plain

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """A tuple of the items, each in its shape."""
        if found.by_type and isinstance(value, list):  # of any length
            items = enumerate(self._items)
            return [shape.read(each, (place, n), found) for n, shape in items for each in value]
        if not isinstance(value, list | tuple) or len(value) != len(self._items):
            return found.misfit(place, value, self.name)
        parts = zip(self._items, value, strict=True)
        return tuple(shape.read(each, (place, n), found) for n, (shape, each) in enumerate(parts))


class MapShape(Shape):
    """A map of keys and values of one shape each.

    * `accepts`: the types that a caller may pass.
    * `make`: the type that is made of the dict; None leaves the dict.
    """

    def __init__(self, title: str, accepts: tuple[type, ...], make: Any) -> None:
        self._title, self._make = title, make
        self._accepts: Any = accepts
        self._key: Shape = ANY
        self._value: Shape = ANY
        self._dicts = make is None and accepts == (dict,)
        self.plain = self._dicts

    def complete(self, parts: Sequence[Shape]) -> None:
        """Set the shapes of the keys and of the values."""
        self._key, self._value = parts
        self.name = f"{self._title}[{self._key.name}, {self._value.name}]"

    def settle(self) -> bool:
        """It is plain if keys and values are, and only a dict is accepted."""
        before, plain = self.plain, self._plain_items
        self.plain = plain and self._dicts
        self.settled = frozenset((dict,)) if plain and self._make is None else frozenset()
        return self.plain is not before

    @property
    def _plain_items(self) -> bool:
        return self._key.plain and self._value.plain

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
            plain = self._key.write(key, (place, KEY), found)
            if isinstance(plain, list | dict):
                raise Refused(
                    f"{place_text((place, KEY))} is {kind_text(key)}, which is a"
                    f" {type(plain).__name__} as plain data; use text or numbers as keys"
                )
            made[plain] = self._value.write(each, (place, INSIDE), found)
        if len(made) != len(value):
            raise Refused(f"{place_text(place)} has keys that are equal as plain data")
        return value if self._plain_items and isinstance(value, dict) else made

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """The map, of keys and values that are read."""
        if not isinstance(value, dict):
            return value if self.holds(value) else found.misfit(place, value, self.name)
        pairs: Any = value
        if not self._plain_items or found.strict:
            key, item = self._key.read, self._value.read
            pairs = [
                (key(each, (place, KEY), found), item(inner, (place, INSIDE), found))
                for each, inner in value.items()
            ]
            pairs = value if self._plain_items else pairs
        if found.by_type or (self._make is None and pairs is value):
            return value
        try:
            made = value if pairs is value else dict(pairs)
            return made if self._make is None else self._make(made)
        except Exception as error:  # noqa: BLE001  # a key may have a hash of its own
            raise Misfit(raised(place, f"makes no {self.name}", error)) from None


class UnionShape(Shape):
    """One of several shapes.

    Reading tries the plain members first, since what could be sent before must not change; then the
    others in their order: first those that have all fields of a map, then those that ignore some.

    What a member made of a value is kept for the conversion: members that name the union again
    would otherwise try all below them anew, which takes a time that doubles with each level.
    """

    plain = True

    def __init__(self) -> None:
        self._members: Sequence[Shape] = ()
        self._plain_members: list[Shape] = []
        self._others: list[Shape] = []

    def complete(self, parts: Sequence[Shape]) -> None:
        """Set the members, in the order of the annotation."""
        self._members = parts
        self.name = " | ".join(each.name for each in parts)
        self.settle()

    def settle(self) -> bool:
        """It is plain if all members are, or if one of them is anything at all."""
        before = self.plain
        self.unchecked = any(each.unchecked for each in self._members)
        self._plain_members = [each for each in self._members if each.plain]
        self._others = [each for each in self._members if not each.plain]
        self.plain = self.unchecked or not self._others
        self.settled = frozenset[type]().union(*(each.settled for each in self._plain_members))
        return self.plain is not before

    def holds(self, value: Any) -> bool:
        """Of the type of a member."""
        return any(each.holds(value) for each in self._members)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """As the first member that holds the value, and that fits, writes it."""
        if self.unchecked:
            return value
        held = [each for each in (*self._plain_members, *self._others) if each.holds(value)]
        held.sort(key=lambda each: getattr(each, "kind", None) is not type(value))
        if not held:
            return found.misfit(place, value, self.name)
        for member in held[:-1]:
            fits, plain = self._tried(member, value, place, found, member.write)
            if fits:
                return self._checked(value, plain, place, found)
        return self._checked(value, held[-1].write(value, place, found), place, found)

    def _tried(
        self,
        member: Shape,
        value: Any,
        place: Place,
        found: Findings,
        convert: Callable[[Any, Place, Findings], Any],
    ) -> tuple[bool, Any]:
        """Whether a value fits a member in all its parts, and what `convert` makes of it then."""
        if value is None or isinstance(value, SCALARS):
            return _attempt(convert, value, place, found)
        key = (member, convert.__name__, id(value))
        if key not in found.tried:
            # The value is kept, too, so that no other one can get its id.
            found.tried[key] = (*_attempt(convert, value, place, found), value)
        fits, made, _ = found.tried[key]
        return fits, made

    def _checked(self, value: Any, plain: Any, place: Place, found: Findings) -> Any:
        """Refuse a value that a reader takes for another member (rule 6 of `aztask.typed`)."""
        if plain is value or isinstance(value, COULD_BE_SENT):
            return plain
        if len(self._others) == 1 and not any(each.holds(plain) for each in self._plain_members):
            return plain  # no other member is like it
        try:
            read = self.read(plain, place, Findings(strict=False, tried=found.tried))
        except Misfit as error:
            raise Refused(
                f"{place_text(place)} would not arrive as {kind_text(value)}: {error}"
            ) from None
        if type(read) is not type(value):
            raise Refused(
                f"{place_text(place)} is {kind_text(value)}, which would arrive as "
                f"{kind_text(read)}: the members of {self.name} look the same as plain data; give "
                "one of them a field that the others lack"
            )
        return plain

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """As the first member that fits reads it."""
        if self.unchecked:
            return value
        held = [each for each in self._plain_members if found.by_type or each.holds(value)]
        others = self._others
        if len(others) == 1 and isinstance(value, dict | list):
            others = []
        else:  # those that have all fields of a map come first
            others = sorted(others, key=lambda each: not _knows(each, value))
        for member in (*held, *others):
            fits, made = self._tried(member, value, place, found, member.read)
            if fits:
                return made
        if not others and self._others:
            return self._others[0].read(value, place, found)  # it names the part that is wrong
        if found.strict and len(held) == 1 and not self._others:
            return held[0].read(value, place, found)
        return found.misfit(place, value, self.name)


def _attempt(
    convert: Callable[[Any, Place, Findings], Any], value: Any, place: Place, found: Findings
) -> tuple[bool, Any]:
    try:
        inner = Findings(strict=True, by_type=found.by_type, tried=found.tried)
        return True, convert(value, place, inner)
    except Misfit:
        return False, None


def _knows(shape: Shape, value: Any) -> bool:
    """False for a map with keys that the shape would ignore."""
    return shape.fields is None or not isinstance(value, dict) or value.keys() <= shape.fields
