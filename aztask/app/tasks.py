"""The tasks of an app, and those that handle the messages of other programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar, cast

from aztask.config import Settings
from aztask.context import current_context
from aztask.errors import DuplicateTask
from aztask.handler import Handler
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.foreign import foreign_message, is_foreign
from aztask.message.message import TaskMessage
from aztask.queues.delivery import Position
from aztask.retry import RetryPolicy
from aztask.support.interactive import replaces
from aztask.task import ContextTask, InvocationSender, Task
from aztask.taskoptions import TaskOptions, raise_duplicate, task_name

P = ParamSpec("P")
R = TypeVar("R")


class TaskRegistry:
    """Makes the tasks of one app, and knows them by their names.

    * `tasks`: all of them, handlers too.
    """

    def __init__(self, app_name: str, settings: Settings, retry: RetryPolicy) -> None:
        """retry: the policy of tasks that set none."""
        self._app_name = app_name
        self._settings = settings
        self._retry = retry
        self.tasks: dict[str, Task[..., Any]] = {}
        self._handlers: dict[str, Handler[..., Any]] = {}

    def add(
        self,
        sender: InvocationSender,
        function: Callable[..., Any],
        options: TaskOptions,
        *,
        with_context: bool,
    ) -> Task[..., Any]:
        """Register a task that `sender` sends. Raises DuplicateTask, ConfigurationError."""
        name = task_name(self._app_name, function, options.get("name"))
        if name in self.tasks and not replaces(self.tasks[name].function, function):
            raise_duplicate(self._app_name, name, self.tasks[name].function, function)
        kind = ContextTask if with_context else Task
        made: Task[..., Any] = kind(
            sender, function, name, self._over_defaults(options), with_context=with_context
        )
        return self._kept(made, options)

    def add_handler(
        self,
        sender: InvocationSender,
        function: Callable[..., Any],
        options: TaskOptions,
        model: Any,
        *,
        unsigned: bool,
    ) -> Handler[..., Any]:
        """Register a handler, see `App.handler`. Raises DuplicateTask, ConfigurationError."""
        queue = options.get("queue") or self._settings.default_queue
        name = task_name(self._app_name, function, options.get("name"))
        earlier = self._handlers.get(queue) or self.tasks.get(name)
        if earlier is not None and not replaces(earlier.function, function):
            taken = f"queue {queue!r}" if queue in self._handlers else f"the name {name!r}"
            raise DuplicateTask(
                f"{taken} has a handler or task already: {earlier.function.__module__}."
                f"{earlier.function.__qualname__}; one function handles a queue's messages"
            )
        placed = cast("TaskOptions", {**self._over_defaults(options), "queue": queue})
        made: Handler[..., Any] = Handler(
            sender, function, name, placed, model=model, unsigned=unsigned
        )
        self._handlers[queue] = made
        self._kept(made, options)
        return made

    def message_in(
        self,
        codec: Codec,
        envelope: Envelope,
        queue: str,
        position: Position,
        *,
        any_age: bool = False,
    ) -> TaskMessage:
        """The message in an envelope, received from `queue`; see `App.message_in`."""
        handler = self._handlers.get(queue)
        if handler is not None and is_foreign(envelope):
            return foreign_message(envelope, queue, position, handler.name, codec.limits)
        return codec.from_envelope(envelope, queue, any_age=any_age)

    def _over_defaults(self, options: TaskOptions) -> TaskOptions:
        strategy = self._settings.retry_strategy
        strict = self._settings.strict
        return {"retry": self._retry, "retry_strategy": strategy, "strict": strict, **options}

    def _kept(self, task: Task[..., Any], options: TaskOptions) -> Task[..., Any]:
        task.strategy_asked = options.get("retry_strategy")
        self.tasks[task.name] = task
        return task


def declared_step(
    function: Callable[P, R], name: str, retry: RetryPolicy | None, *, record_errors: bool
) -> Callable[P, R]:
    """The function that `App.step` returns: a step where a task calls it, else the function."""

    @wraps(function)
    def step(*args: P.args, **kwargs: P.kwargs) -> R:
        context = current_context()
        if context is None or context.steps.current is not None:
            return function(*args, **kwargs)
        called = partial(function, *args, **kwargs)
        return context.step(name, called, retry=retry, record_errors=record_errors)

    if not iscoroutinefunction(function):
        return step

    @wraps(function)
    async def coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
        made: Any = step(*args, **kwargs)
        return await made

    return cast("Callable[P, R]", coroutine)
