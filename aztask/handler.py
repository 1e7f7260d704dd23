"""A handler: a task that runs for the messages that other programs put into a queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aztask.message.bounds import MessageLimits
from aztask.message.codec import Codec
from aztask.message.foreign import RAW
from aztask.message.message import TaskMessage
from aztask.models import read_body, reader_of
from aztask.task import InvocationSender, P, R_co, Task
from aztask.taskoptions import TaskOptions


class Handler(Task[P, R_co]):
    """The task of ``@app.handler(queue=..., model=...)``; its function takes one argument.

    `model`: what the function's argument is, see `aztask.app.App.handler`.
    """

    def __init__(
        self,
        sender: InvocationSender,
        function: Callable[..., Any],
        name: str,
        options: TaskOptions,
        *,
        model: Any,
    ) -> None:
        """Called by `App.handler`. Raises ConfigurationError if the model is of no known kind."""
        super().__init__(sender, function, name, options)
        self.model = model
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
            args = (read_body(self._read, json.dumps(args[0]).encode(), self.model),)
        return args, kwargs
