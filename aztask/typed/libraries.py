"""Shapes of the classes of msgspec and pydantic, which convert them themselves.

Neither library is imported here: an annotation that is one of their classes proves that the user
has imported it, so it is among the loaded modules.

What a library says about a value may hold it, or the text of a validator of the user. Of its errors
only the texts that are the same for all values are shown, and places without the keys of maps.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Final, get_origin
from uuid import UUID

from aztask.typed.records import refuse_subclass
from aztask.typed.shapes import (
    INSIDE,
    Findings,
    Misfit,
    NotPlain,
    Place,
    Refused,
    Shape,
    in_order,
    kind_text,
    place_text,
    plain_of,
    raised,
)

_WRITTEN: Final = (bytes, bytearray, datetime, date, time, timedelta, UUID, Decimal)
"""What msgspec leaves as it is, because the serializer has an encoding for it."""

_TYPES_ONLY: Final = ("Expected `", "Object missing required field `")
"""How msgspec begins the texts that name types and fields; others show the value."""


def library_shape(annotation: Any) -> Shape | None:
    """The shape of a class of msgspec or pydantic; None if it is neither.

    Raises what the libraries raise for a class that they cannot convert.
    """
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return None
    if hasattr(kind, "__struct_fields__") and "msgspec" in sys.modules:
        return StructShape(annotation, kind)
    if "pydantic" not in sys.modules:
        return None
    is_dataclass = dataclasses.is_dataclass(kind) and hasattr(kind, "__pydantic_validator__")
    if is_dataclass or issubclass(kind, sys.modules["pydantic"].BaseModel):
        return ModelShape(annotation, kind)
    return None


class StructShape(Shape):
    """A ``msgspec.Struct``, which msgspec itself writes and reads."""

    def __init__(self, annotation: Any, kind: Any) -> None:
        self.name, self.kind = kind.__name__, kind
        self._annotation = annotation
        self._msgspec: Any = sys.modules["msgspec"]
        config = kind.__struct_config__
        tag = (config.tag_field,) if config.tag_field else ()
        self.fields = (
            None if config.array_like else frozenset((*kind.__struct_encode_fields__, *tag))
        )

    def holds(self, value: Any) -> bool:
        """Whether it is an instance, of a subclass too."""
        return isinstance(value, self.kind)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """What ``msgspec.to_builtins`` makes of it."""
        if not isinstance(value, self.kind):
            return found.misfit(place, value, self.name)
        refuse_subclass(value, self.kind, place)
        options = {"builtin_types": _WRITTEN, "enc_hook": plain_of}
        try:
            with suppress(TypeError):  # it cannot sort a set of members of an enum
                return self._msgspec.to_builtins(value, order="deterministic", **options)
            return _ordered(value, self._msgspec.to_builtins(value, **options))
        except NotPlain as error:
            raise Refused(f"{place_text(place)} holds {error}") from None
        except Exception as error:  # noqa: BLE001  # a property may raise anything
            raise Refused(raised(place, "cannot be written by msgspec", error)) from None

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """What ``msgspec.convert`` makes of it."""
        if isinstance(value, self.kind):
            return value
        if not isinstance(value, dict | list):
            return found.misfit(place, value, self.name)
        if found.by_type:  # msgspec would look at the values
            return value
        return self._made(
            place,
            self._msgspec.convert,
            value,
            self._annotation,
            builtin_types=_WRITTEN,
            dec_hook=_from_plain,
        )

    def parse(self, data: bytes, place: Place) -> Any:
        """An instance, as ``msgspec.json.decode`` makes it."""
        decode = self._msgspec.json.decode
        return self._made(place, decode, data, type=self._annotation, dec_hook=_from_plain)

    def _made(self, place: Place, make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return make(*args, **options)
        except self._msgspec.ValidationError as error:
            text, _, path = str(error).rpartition(" - at `")
            text, path = (text, path.rstrip("`")) if text else (str(error), "")
            where = f"{place_text(place)}{path[1:] if path.startswith('$') else ''}"
            if error.__cause__ is not None or not text.startswith(_TYPES_ONLY):
                raise Misfit(f"{where} does not fit {self.name}") from None
            raise Misfit(f"{where}: {text}") from None
        except self._msgspec.DecodeError as error:  # it is no JSON
            raise ValueError(str(error)) from None
        except Exception as error:  # noqa: BLE001  # __post_init__ may raise anything
            raise Misfit(raised(place, f"makes no {self.name}", error)) from None


def _ordered(value: Any, plain: Any) -> Any:
    """What msgspec has made of a value, with each set in an order that depends on its values."""
    if isinstance(value, set | frozenset):
        return in_order(map(_ordered, value, plain))
    if isinstance(value, list | tuple):
        return list(map(_ordered, value, plain))
    if isinstance(value, dict):
        return dict(zip(plain, map(_ordered, value.values(), plain.values()), strict=True))
    names = getattr(value, "__struct_fields__", None)
    if names is not None:
        parts = [getattr(value, name) for name in names]
        if isinstance(plain, list):  # behind its tag, if it has one
            tags = len(plain) - len(parts)
            return [*plain[:tags], *map(_ordered, parts, plain[tags:])]
        fields = dict(zip(value.__struct_encode_fields__, parts, strict=True))
    elif dataclasses.is_dataclass(value):
        fields = {name: getattr(value, name) for name in plain}
    else:
        return plain
    return {name: _ordered(fields.get(name), each) for name, each in plain.items()}


def _from_plain(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    raise NotImplementedError(f"{kind} cannot be read")


class ModelShape(Shape):
    """A pydantic model, or a dataclass of pydantic.

    Written by the names of the fields, without computed ones; read by names and aliases. Values
    that have an encoding (datetime, Decimal, bytes) keep it, so that nothing is lost; a model with
    other values is written as its own JSON, if that reads as an equal model.
    """

    def __init__(self, annotation: Any, kind: Any) -> None:
        pydantic = sys.modules["pydantic"]
        self.name, self.kind = kind.__name__, kind
        self._adapter: Any = pydantic.TypeAdapter(annotation)
        self._error: Any = pydantic.ValidationError
        self._core: Any = sys.modules["pydantic_core"]
        names = getattr(kind, "__pydantic_fields__", None) or {}
        root = getattr(kind, "__pydantic_root_model__", False)
        known = (*names, *(str(each.alias) for each in names.values() if each.alias))
        self.fields = None if root else frozenset(known)
        version = tuple(map(int, pydantic.VERSION.split(".")[:2]))
        # Before 2.11 a field with an alias was read by that alone, so the alias is written.
        self._dump = {"by_alias": version < (2, 11), "round_trip": True, "warnings": False}
        self._load = {"by_alias": True, "by_name": True} if version >= (2, 11) else {}

    def holds(self, value: Any) -> bool:
        """Whether it is an instance, of a subclass too."""
        return isinstance(value, self.kind)

    def write(self, value: Any, place: Place, found: Findings) -> Any:
        """A map of its fields."""
        if not isinstance(value, self.kind):
            return found.misfit(place, value, self.name)
        refuse_subclass(value, self.kind, place)
        try:
            dumped = self._adapter.dump_python(value, **self._dump)
        except Exception as error:  # noqa: BLE001  # a serializer may raise anything
            raise Refused(raised(place, "cannot be written by pydantic", error)) from None
        with suppress(TypeError):
            return plain_of(dumped)
        return self._verified(value, dumped, place)

    def _verified(self, value: Any, dumped: Any, place: Place) -> Any:
        """With text in the place of an address and the like, or as the JSON of the model.

        Both may hide a part, such as a secret: the one that reads as an equal model counts.
        """
        with suppress(Exception):  # a type of its own, or a validator that refuses the text
            plain = plain_of(dumped, self._core.to_jsonable_python)
            if self._validated(plain) == value:
                return plain
        with suppress(Exception):  # bytes that are no text
            plain = self._adapter.dump_python(value, mode="json", **self._dump)
            if self._validated(plain) == value:
                return plain
        raise Refused(
            f"{place_text(place)} is {kind_text(value)}, which holds what a reader would not get as"
            " it is, such as a SecretStr; give that field a serializer"
        )

    def read(self, value: Any, place: Place, found: Findings) -> Any:
        """An instance that pydantic has validated."""
        if isinstance(value, self.kind):
            return value
        if self.fields is not None and not isinstance(value, dict):
            return found.misfit(place, value, self.name)
        if found.by_type:  # pydantic would look at the values
            return value
        return self._made(value, place, self._validated, value)

    def parse(self, data: bytes, place: Place) -> Any:
        """An instance, validated as JSON."""
        return self._made(data, place, self._adapter.validate_json, data, **self._load)

    def _made(
        self, value: Any, place: Place, make: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """value: what is read, in which the place of an error is looked up."""
        try:
            return make(*args, **options)
        except self._error as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            plain = json.loads(value) if isinstance(value, bytes) else value
            where = place_text(self._place(place, plain, first["loc"]))
            raise Misfit(f"{where}: {self._text(first['type'])}") from None
        except Exception as error:  # noqa: BLE001  # a validator may raise anything
            raise Misfit(raised(place, f"makes no {self.name}", error)) from None

    def _place(self, place: Place, value: Any, steps: Sequence[Any]) -> Place:
        """The place of an error, whose steps are names of fields, keys, and members of unions."""
        names = _names_in(self._adapter.core_schema)
        for step in steps:
            if isinstance(value, list) and isinstance(step, int):
                place = (place, step)
                value = value[step] if step < len(value) else None
            elif isinstance(value, dict) and step in names:
                place, value = (place, f".{step}"), value.get(step)
            elif isinstance(value, dict) and step in value:
                place, value = (place, INSIDE), value[step]
        return place

    def _text(self, kind: str) -> str:
        """pydantic's text for an error; only its type if the text has a part that varies."""
        try:
            text: str = self._core.PydanticKnownError(kind).message()
        except TypeError:  # the text needs a part
            return f"it does not fit ({kind})"
        except KeyError:  # of a validator of the user, which names it as it likes
            return "a validator refuses it"
        return text

    def _validated(self, value: Any) -> Any:
        try:
            return self._adapter.validate_python(value, **self._load)
        except self._error:
            # A strict model takes a list for a set, or text for an enum, from JSON alone.
            try:
                text = self._core.to_json(value)
                return self._adapter.validate_json(text, **self._load)
            except (ValueError, TypeError):  # ValidationError is a ValueError
                pass
            raise


def _names_in(schema: Any) -> set[str]:
    """The names and the aliases of all fields in a core schema of pydantic."""
    found: set[str] = set()
    rest = [schema]
    while rest:
        each = rest.pop()
        if isinstance(each, list | tuple):
            rest.extend(each)
        elif isinstance(each, dict):
            rest.extend(each.values())
            fields = each.get("fields")
            if isinstance(fields, dict):
                found.update(fields)
            elif isinstance(fields, list):
                found.update(field["name"] for field in fields)
            found.update(_texts_in(each.get("validation_alias")))
    return found


def _texts_in(alias: Any) -> set[str]:
    """The names in an alias: a text, a path, or a choice of paths."""
    if isinstance(alias, list):
        return {name for each in alias for name in _texts_in(each)}
    return {alias} if isinstance(alias, str) else set()
