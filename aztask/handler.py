"""A handler: a task that runs for the messages that other programs put into a queue."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Callable
from typing import Any, Final

from aztask.errors import ConfigurationError, DecodeError
from aztask.message.bounds import MessageLimits, check_json
from aztask.message.codec import Codec
from aztask.message.foreign import RAW
from aztask.message.message import TaskMessage
from aztask.support.display import one_line
from aztask.task import InvocationSender, P, R_co, Task
from aztask.taskoptions import TaskOptions
from aztask.typed.conversion import Conversion

# Models of foreign messages: a body of JSON becomes a dataclass, a Struct or a pydantic model.
#
# Rules
# 1. Whatever bytes come in, the only error is a CodecError of one line that says what is wrong, and
#    where.
# 2. The model is read as the annotation of a strict task (`aztask.typed`). So the handler reads
#    alike what other programs write as JSON and what `delay` sends.


BOM: Final = b"\xef\xbb\xbf"
ERROR_CHARACTERS: Final = 500


def check_model(model: Any) -> None:
    """Raise ConfigurationError for a model of an unknown kind.

    * `model`: a dataclass, a msgspec Struct, a pydantic model, ``dict``, ``list``, ``str``,
      ``bytes``, or None for any JSON.
    """
    is_class = isinstance(model, type) and (
        dataclasses.is_dataclass(model)
        or hasattr(model, "model_validate_json")  # pydantic
        or hasattr(model, "__struct_fields__")  # msgspec
    )
    if not is_class and model not in (None, dict, list, str, bytes):
        raise ConfigurationError(
            f"a handler's model is a dataclass, a msgspec Struct, a pydantic model, dict, list, "
            f"str, bytes or None, not {model!r}"
        )


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
        check_model(model)

    @property
    def conversion(self) -> Conversion:
        """Reads the model, strictly; without one, what the function's annotation says."""
        if self._conversion is None:
            self._conversion = Conversion(
                self.name,
                self.function,
                self.signature,
                with_context=False,
                strict=self.strict,
                model=self.model,
            )
        return self._conversion

    def arguments(
        self, codec: Codec, message: TaskMessage
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The only argument, which is the model if another program has sent it. Raises CodecError.

        So the unique key of a foreign body is that of the call with its model.
        """
        if message.content_type == RAW:
            return self.conversion.read((self.body(message.body),), {})
        return codec.decode_arguments(message)

    def body(self, data: bytes) -> Any:
        """What another program has written, as `conversion` reads it. Raises CodecError."""
        try:
            if self.model is bytes:
                return data
            if self.model is str:
                return data.removeprefix(BOM).decode("utf-8")
            return self.conversion.parsed(json_of(data, MessageLimits()))
        except (ValueError, RecursionError) as error:
            text = one_line(str(error), ERROR_CHARACTERS)
            name = "text" if self.model is str else "JSON"
            raise DecodeError(f"the body cannot be read as {name}: {text}") from None
