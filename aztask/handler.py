"""A handler: a task that runs for the messages that other programs put into a queue."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

from aztask.errors import CodecError, ConfigurationError, DecodeError
from aztask.message.bounds import MessageLimits, check_json
from aztask.message.codec import Codec
from aztask.message.foreign import RAW
from aztask.message.message import TaskMessage
from aztask.support.display import one_line
from aztask.task import InvocationSender, P, R_co, Task
from aztask.taskoptions import TaskOptions

# Models of foreign messages: a body of JSON becomes a dataclass, a Struct or a pydantic model.
#
# Rules
# 1. Whatever bytes come in, the only error is a CodecError of one line that says what is wrong, and
#    where.
# 2. msgspec and pydantic are used if your model is one of theirs. aztask does not require them.


BOM: Final = b"\xef\xbb\xbf"
ERROR_CHARACTERS: Final = 500

Read = Callable[[bytes], Any]

_FROM_TEXT: Final[dict[type, Callable[[str], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    Decimal: Decimal,
    UUID: UUID,
    bytes: lambda text: base64.b64decode(text, validate=True),
}


def reader_of(model: Any, limits: MessageLimits) -> Read:
    """The function that reads a body as `model`. Raises ConfigurationError for an unknown model.

    * `model`: a dataclass, a msgspec Struct, a pydantic model, ``dict``, ``list``, ``str``,
      ``bytes``, or None for any JSON.
    """
    if model is bytes:
        return bytes
    if model is str:
        return lambda body: body.removeprefix(BOM).decode("utf-8")
    if model is None or model in (dict, list):
        return lambda body: _checked(json.loads(json_of(body, limits)), model)
    if dataclasses.is_dataclass(model) and isinstance(model, type):
        return lambda body: _converted(json.loads(json_of(body, limits)), model, "")
    if hasattr(model, "model_validate_json"):  # pydantic
        return lambda body: model.model_validate_json(json_of(body, limits))
    if hasattr(model, "__struct_fields__"):  # msgspec, which made the class
        decode = sys.modules["msgspec"].json.decode
        return lambda body: decode(json_of(body, limits), type=model)
    raise ConfigurationError(
        f"a handler's model is a dataclass, a msgspec Struct, a pydantic model, dict, list, str, "
        f"bytes or None, not {model!r}"
    )


def read_body(read: Read, body: bytes, model: Any) -> Any:
    """Read a body as `reader_of` says. Raises DecodeError."""
    try:
        return read(body)
    except CodecError:
        raise
    except Exception as error:  # noqa: BLE001  # a model may check whatever it wants
        name = getattr(model, "__name__", "JSON") if model is not None else "JSON"
        text = one_line(str(error), ERROR_CHARACTERS) or type(error).__name__
        raise DecodeError(f"the body cannot be read as {name}: {text}") from None


def json_of(body: bytes, limits: MessageLimits) -> bytes:
    """The JSON in a body: without a byte order mark, and without base64 around it.

    Azure Functions and the older clients of Storage queues write base64.
    """
    plain = body.removeprefix(BOM).strip()
    if plain[:1] not in (b"{", b"[", b'"'):
        try:
            inner = base64.b64decode(plain, validate=True).removeprefix(BOM).strip()
        except binascii.Error:
            inner = b""
        if inner[:1] in (b"{", b"[", b'"'):
            plain = inner
    check_json(plain, limits)
    return plain


def _checked(value: Any, model: type | None) -> Any:
    if model is not None and not isinstance(value, model):
        raise DecodeError(f"the body is a {_kind(value)}, not a {_kind(model())}")
    return value


def _converted(value: Any, model: Any, where: str) -> Any:
    """The value as the annotation `model` says. Raises ValueError, which names the place."""
    origin, inner = typing.get_origin(model), typing.get_args(model)
    if model is Any or model is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _of_union(value, inner, where)
    if origin is typing.Literal:
        return _literal(value, inner, where)
    if dataclasses.is_dataclass(model) and isinstance(model, type):
        return _dataclass_of(value, model, where)
    return _container(value, origin or model, inner, where)


def _literal(value: Any, allowed: tuple[Any, ...], where: str) -> Any:
    if value in allowed:
        return value
    raise ValueError(f"{where or 'the body'} is {value!r}, not one of {list(allowed)}")


def _container(value: Any, kind: Any, inner: tuple[Any, ...], where: str) -> Any:
    if kind in (list, tuple, set, frozenset) and isinstance(value, list):
        item = inner[0] if inner else Any
        return kind(_converted(each, item, f"{where}[{n}]") for n, each in enumerate(value))
    if kind in (dict, Mapping) and isinstance(value, dict):
        item = inner[1] if inner else Any
        return {name: _converted(each, item, _at(where, name)) for name, each in value.items()}
    return _simple(value, kind, where)


def _simple(value: Any, kind: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    fits = isinstance(kind, type) and isinstance(value, kind)
    if fits and not (isinstance(value, bool) and kind is not bool):
        return value
    try:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind(value)
        if kind in _FROM_TEXT and isinstance(value, str):
            return _FROM_TEXT[kind](value)
        if kind is Decimal and isinstance(value, int | float) and not isinstance(value, bool):
            return Decimal(str(value))
    except (ValueError, ArithmeticError):
        raise ValueError(f"{where or 'the body'} is {value!r}, no {kind.__name__}") from None
    name = getattr(kind, "__name__", str(kind))
    raise ValueError(f"{where or 'the body'} is a {_kind(value)}, not {name}")


def _dataclass_of(value: Any, model: Any, where: str) -> Any:
    """Fields that the model does not have are ignored, as JSON APIs grow."""
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the body'} is a {_kind(value)}, not an object")
    hints = typing.get_type_hints(model)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(model):
        name = field.metadata.get("name", field.name)
        if not field.init:
            continue
        if name in value:
            given[field.name] = _converted(value[name], hints[field.name], _at(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{_at(where, name)} is missing")
    return model(**given)


def _of_union(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    problems = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return _converted(value, kind, where)
            except ValueError as error:
                problems.append(str(error))
    raise ValueError(" or ".join(problems))


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _kind(value: Any) -> str:
    """What JSON calls the kind of a value."""
    names = {dict: "object", list: "list", str: "text", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _json_text(value: Any) -> Any:
    """The text of a value that JSON lacks, as other programs write it. Raises TypeError."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__qualname__} is not in JSON")


class Handler(Task[P, R_co]):
    """The task of ``@app.handler(queue=..., model=...)``; its function takes one argument.

    * `model`: what the function's argument is, see `aztask.app.App.handler`.
    * `unsigned`: the code says that its messages need no signature although the app has keys.
    """

    def __init__(
        self,
        sender: InvocationSender,
        function: Callable[..., Any],
        name: str,
        options: TaskOptions,
        *,
        model: Any,
        unsigned: bool = False,
    ) -> None:
        """Called by `App.handler`. Raises ConfigurationError if the model is of no known kind."""
        super().__init__(sender, function, name, options)
        self.model = model
        self.unsigned = unsigned
        self._read = reader_of(model, MessageLimits())

    def arguments(
        self, codec: Codec, message: TaskMessage
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model as the only argument. Raises CodecError.

        What aztask itself sent to the handler, with `delay`, is read in the same way.
        """
        if message.content_type == RAW:
            return (read_body(self._read, message.body, self.model),), {}
        args, kwargs = codec.decode_arguments(message)
        if len(args) == 1 and not kwargs and not isinstance(args[0], str | bytes):
            try:
                text = json.dumps(args[0], default=_json_text)
            except (TypeError, ValueError) as error:  # a key that is no text, for example
                raise DecodeError(f"the argument is not in JSON: {error}") from None
            args = (read_body(self._read, text.encode(), self.model),)
        return args, kwargs
