"""Shapes of classes with fields: dataclasses, typed dicts and named tuples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aztask.typed.shapes import (
    ANY,
    AnyKeys,
    Findings,
    Misfit,
    Place,
    Refused,
    Shape,
    kind_text,
    place_text,
    raised,
)


@dataclass(slots=True)
class Member:
    """One field.

    * `required`: it has no default.
    * `alias`: its name in the JSON of other programs, ``field(metadata={"name": ...})``.
    """

    name: str
    required: bool
    alias: str = ""
    shape: Shape = ANY

    def key_in(self, value: dict[Any, Any]) -> str:
        """The key of the field in a map: its alias if that is there."""
        return self.alias if self.alias and self.alias in value else self.name


class RecordShape(Shape):
    """What the shapes of classes with fields have in common.

    * `record`: the class.
    * `kind`: the class of its values.
    """

    def __init__(self, kind: Any, name: str, members: Sequence[Member]) -> None:
        self.record = kind
        self.kind, self.name = kind, name
        self.members = members
        names = (name for each in members for name in (each.name, each.alias) if name)
        self.fields = frozenset(names)

    def complete(self, parts: Sequence[Shape]) -> None:
        """Set the shapes of the members."""
        for member, part in zip(self.members, parts, strict=True):
            member.shape = part

    def holds(self, value: Any) -> bool:
        """Whether it is an instance, of a subclass too."""
        return isinstance(value, self.kind)

    @property
    def _plain_members(self) -> bool:
        return all(each.shape.plain for each in self.members)


class DataclassShape(RecordShape):
    """A dataclass: a map of its fields. Fields with ``init=False`` are made anew by the reader.

    The reader calls the class, so ``__post_init__`` runs again, on what it has made before. To do
    without it would leave out the fields with ``init=False``, and what it checks.

    * `init_only`: names of its ``InitVar``, which no instance keeps.
    """

    def __init__(
        self, kind: Any, name: str, members: Sequence[Member], init_only: Sequence[str]
    ) -> None:
        super().__init__(kind, name, members)
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
            key = each.key_in(value)
            if key in value:
                given[each.name] = each.shape.read(value[key], (place, f".{key}"), found)
            elif each.required and not isinstance(value, AnyKeys):
                raise Misfit(f"{place_text(place)}.{each.alias or each.name} is missing")
        return value if found.by_type else made(self.kind, given, place)


class TypedDictShape(RecordShape):
    """A TypedDict: a dict in both forms, whose unknown keys are kept."""

    plain = True

    def __init__(self, kind: Any, name: str, members: Sequence[Member]) -> None:
        super().__init__(kind, name, members)
        self.kind = dict  # of which its values are

    def settle(self) -> bool:
        """It is plain if all its members are."""
        before = self.plain
        self.plain = self._plain_members
        self.settled = frozenset((dict,)) if self.plain else frozenset()
        return self.plain is not before

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
            elif each.required and not isinstance(value, AnyKeys):
                found.missing(inside)
        return result


class NamedTupleShape(RecordShape):
    """A named tuple: a list of its fields."""

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A list, or the tuple itself, which the serializer writes as one."""
        if not isinstance(value, self.kind):
            return found.misfit(place, value, self.name)
        if self._plain_members and not found.strict:
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
        if found.by_type:  # of any length
            return [
                each.shape.read(part, (place, f".{each.name}"), found)
                for each in self.members
                for part in value
            ]
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
        raise Misfit(raised(place, f"makes no {kind.__qualname__}", error)) from None
