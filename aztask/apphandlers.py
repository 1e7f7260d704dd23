"""The handlers of an app: tasks for the messages that other programs send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, Unpack, cast

from aztask.brokers.delivery import Position
from aztask.config import Settings
from aztask.errors import DuplicateTask
from aztask.handler import Handler
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.foreign import foreign_message, is_foreign
from aztask.message.message import TaskMessage
from aztask.retry import RetryPolicy
from aztask.task import Task
from aztask.taskoptions import TaskOptions, check_options

M = TypeVar("M")
R = TypeVar("R")


class AppHandlers:
    """The part of `aztask.app.App` that knows its handlers."""

    name: str
    settings: Settings
    retry: RetryPolicy
    codec: Codec
    tasks: dict[str, Task[..., Any]]
    _handlers: dict[str, Handler[..., Any]]

    def handler(
        self, *, model: type[M] | None = None, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[[M], R]], Handler[[M], R]]:
        """Register a function for the messages of a queue that neither aztask nor Celery wrote.

        ::

            @app.handler(queue="orders", model=Order)
            def on_order(order: Order) -> None:
                ...

        They run under the same leases, retries and dead letters as tasks. A body that does not fit
        the model becomes a dead letter with the reason, and the original bytes.

        * `model`: the type of the argument: a dataclass, a msgspec Struct, a pydantic model,
          ``dict``, ``list``, ``str`` or ``bytes``. None, the default, passes any JSON value.
        * `options`: those of tasks, see `TaskOptions`. ``queue`` is the queue; it may also hold
          tasks, which run as usual. By default it is the app's ``default_queue``.

        Raises DuplicateTask if the queue has a handler already, and what `task` raises.
        """
        check_options(options, TaskOptions, "handler")
        queue = options.get("queue") or self.settings.default_queue

        def register(function: Callable[[M], R]) -> Handler[[M], R]:
            name = options.get("name") or f"{self.name}.{function.__name__}"
            if queue in self._handlers or name in self.tasks:
                taken = f"queue {queue!r}" if queue in self._handlers else f"the name {name!r}"
                earlier = self._handlers.get(queue) or self.tasks[name]
                raise DuplicateTask(
                    f"{taken} has a handler or task already: {earlier.function.__module__}."
                    f"{earlier.function.__qualname__}; one function handles a queue's messages"
                )
            strategy = {"retry": self.retry, "retry_strategy": self.settings.retry_strategy}
            all_options = cast("TaskOptions", {**strategy, **options, "queue": queue})
            sender = cast("Any", self)  # the App
            made: Handler[[M], R] = Handler(sender, function, name, all_options, model=model)
            made.strategy_asked = options.get("retry_strategy")
            self._handlers[queue] = self.tasks[name] = made
            return made

        return register

    def message_in(
        self, envelope: Envelope, queue: str, position: Position, *, any_age: bool = False
    ) -> TaskMessage:
        """The message in an envelope, received from `queue`. Workers and dead letters use it.

        A foreign message is one for the queue's handler. Raises CodecError, and what
        `Codec.from_envelope` raises.
        """
        handler = self._handlers.get(queue)
        if handler is not None and is_foreign(envelope):
            return foreign_message(envelope, queue, position, handler.name, self.codec.limits)
        return self.codec.from_envelope(envelope, queue, any_age=any_age)
