"""Shapes of classes with fields: dataclasses, typed dicts and named tuples.

A shape is made empty and gets its members afterwards, because a class may name itself in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aztask.support.display import one_line
from aztask.typed.shapes import (
    Findings,
    Misfit,
    Place,
    Refused,
    Shape,
    kind_text,
    place_text,
)

ERROR_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class Member:
    """One field. required: it has no default."""

    name: str
    shape: Shape
    required: bool


class RecordShape(Shape):
    """What the shapes of classes with fields have in common."""

    def __init__(self, kind: Any, name: str) -> None:
        self.kind, self.name = kind, name
        self.members: Sequence[Member] = ()

    def complete(self, members: Sequence[Member]) -> None:
        """Set the members, when their shapes are known."""
        self.members = members
        self.fields = frozenset(each.name for each in members)

    def holds(self, value: Any) -> bool:
        """Whether it is an instance, of a subclass too."""
        return isinstance(value, self.kind)


class DataclassShape(RecordShape):
    """A dataclass: a map of its fields. Fields with ``init=False`` are made anew by the reader.

    * `init_only`: names of its ``InitVar``, which no instance keeps.
    """

    def __init__(self, kind: Any, name: str, init_only: Sequence[str]) -> None:
        super().__init__(kind, name)
        self._init_only = init_only

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A dict of all fields."""
        if not isinstance(value, self.kind):
            return found.misfit(place, value, self.name)
        refuse_subclass(value, self.kind, place)
        if self._init_only:
            raise Refused(
                f"{place_text(place)} is {kind_text(value)}, which does not keep "
                f"{self._init_only[0]}, an InitVar, so a reader could not make it again"
            )
        return {
            each.name: each.shape.write(getattr(value, each.name), (place, f".{each.name}"), found)
            for each in self.members
        }

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """An instance; keys that it does not know are ignored."""
        if isinstance(value, self.kind):
            return value
        if not isinstance(value, dict):
            return found.misfit(place, value, self.name)
        given = {}
        for each in self.members:
            if each.name in value:
                inside = (place, f".{each.name}")
                given[each.name] = each.shape.read(value[each.name], inside, found)
            elif each.required:
                raise Misfit(f"{place_text(place)}.{each.name} is missing")
        return made(self.kind, given, place)


class TypedDictShape(RecordShape):
    """A TypedDict: a dict in both forms, whose unknown keys are kept."""

    def __init__(self, kind: Any, name: str) -> None:
        super().__init__(dict, name)
        self.kind = dict

    def complete(self, members: Sequence[Member]) -> None:
        """Set the members; it is plain if all of them are."""
        super().complete(members)
        self.plain = all(each.shape.plain for each in members)
        self.settled = frozenset((dict,)) if self.plain else frozenset()

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A dict with the same keys."""
        return self._converted(value, place, found, writing=True)

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """A dict with the same keys."""
        return self._converted(value, place, found, writing=False)

    def _converted(self, value: Any, place: Place, found: Findings, *, writing: bool) -> Any:
        if not isinstance(value, dict):
            return found.misfit(place, value, self.name)
        if self.plain and not found.strict:
            return value
        result = dict(value)
        for each in self.members:
            inside = (place, f".{each.name}")
            if each.name in value:
                change = each.shape.write if writing else each.shape.read
                result[each.name] = change(value[each.name], inside, found)
            elif each.required:
                found.missing(inside)
        return result


class NamedTupleShape(RecordShape):
    """A named tuple: a list of its fields."""

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A list, or the tuple itself, which the serializer writes as one."""
        if not isinstance(value, self.kind):
            return found.misfit(place, value, self.name)
        if all(each.shape.plain for each in self.members) and not found.strict:
            return value
        return [
            each.shape.write(part, (place, f".{each.name}"), found)
            for each, part in zip(self.members, value, strict=True)
        ]

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """The named tuple; values behind its last field are ignored."""
        if isinstance(value, self.kind):
            return value
        if not isinstance(value, list | tuple):
            return found.misfit(place, value, self.name)
        if len(value) < len(self.members) and self.members[len(value)].required:
            raise Misfit(f"{place_text(place)}.{self.members[len(value)].name} is missing")
        parts = {
            each.name: each.shape.read(part, (place, f".{each.name}"), found)
            for each, part in zip(self.members, value, strict=False)
        }
        return made(self.kind, parts, place)


def refuse_subclass(value: Any, kind: type, place: Place) -> None:
    """Raise Refused for an instance of a subclass: it would arrive without what that adds."""
    if type(value) is not kind:
        raise Refused(
            f"{place_text(place)} is {kind_text(value)}, which would arrive as "
            f"{kind.__qualname__}; annotate {kind.__qualname__} | {type(value).__qualname__}"
        )


def made(kind: Any, given: dict[str, Any], place: Place) -> Any:
    """An instance with these fields. Raises Misfit if the class refuses them."""
    try:
        return kind(**given)
    except Exception as error:  # noqa: BLE001  # a class may check whatever it wants
        text = one_line(str(error), ERROR_CHARACTERS) or type(error).__name__
        raise Misfit(f"{place_text(place)} makes no {kind.__qualname__}: {text}") from None
