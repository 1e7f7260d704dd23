"""A task: a function that you can call here, or send to run on a worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, Unpack

from aztask.errors import ConfigurationError, did_you_mean
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.result import AsyncResult
from aztask.retry import RetryPolicy, RetryStrategy, check_strategy

P = ParamSpec("P")
R = TypeVar("R")

_NO_KEYWORDS: dict[str, Any] = {}  # one for all: `map` makes millions of calls

DELIVERIES = ("at-least-once", "at-most-once")


class TaskOptions(TypedDict, total=False):
    """The options of ``@app.task(...)`` and ``@app.task_with_context(...)``. All are optional.

    * `name`: the registered name; "APP.FUNCTION" by default.
    * `queue`: the queue that invocations are sent to; the app's ``default_queue`` by default.
    * `retry`: a `RetryPolicy`; the app's by default.
    * `time_limit`: seconds after which the process that runs the task is killed; no limit by
      default.
    * `soft_time_limit`: seconds after which `TimeLimitExceeded` is raised in the task; no limit by
      default.
    * `lease`: seconds, or a callable that takes the task's arguments and returns seconds; the
      queue's lease by default.
    * `max_lease`: seconds that one run may hold its message, renewals included; the queue's limit
      by default.
    * `retry_strategy`: how the message waits for its retry: "resubmit", "abandon", "lease-timeout",
      "hold" or "defer"; the app's by default, see docs/discussions/strategies.
    * `expires`: seconds from the send after which the task no longer starts; never by default.
    * `delivery`: "at-least-once" (default), or "at-most-once", which removes the message before the
      task runs.
    * `ordered`: True (default): in a session, a message that is retried runs before the session's
      next message.
    """

    name: str
    queue: str
    retry: RetryPolicy
    time_limit: float
    soft_time_limit: float
    lease: float | Callable[..., float]
    max_lease: float
    retry_strategy: RetryStrategy
    expires: float
    delivery: str
    ordered: bool


class SendOptions(TypedDict, total=False):
    """The options of ``task.with_options(...)`` and `App.send`. All are optional.

    * `delay`: seconds until the task may start; 0 by default.
    * `queue`: the queue to send to; the task's by default.
    * `task_id`: an id of your own, 1 to 1,024 printable characters; a new UUID by default. If the
      result store already knows the id, the task does not run again and you get the existing
      result.
    * `expires`: seconds from now after which the task no longer starts; the task's by default.
    * `force`: True runs a known task id again, as a new generation; False by default.
    * `session`: the name of a session. Tasks of one session run one at a time, in the order in
      which they were sent, across all workers. The queue must have sessions.
    * `ordered`: as in `TaskOptions`, for this invocation.
    """

    delay: float
    queue: str
    task_id: str
    expires: float
    force: bool
    session: str
    ordered: bool


class InvocationSender(Protocol):
    """The part of an `App` that a task needs: sending."""

    def send_call(
        self, task: Task[..., Any], calls: Sequence[Invocation], options: SendOptions
    ) -> list[AsyncResult[Any]]:
        """Send all calls as one batch; the results are in the same order."""
        ...

    async def asend_call(
        self, task: Task[..., Any], calls: Sequence[Invocation], options: SendOptions
    ) -> list[AsyncResult[Any]]:
        """`send_call` for coroutines: it never blocks the event loop."""
        ...


class Invocation(NamedTuple):
    """The arguments of one invocation. A tuple, because `map` makes very many."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def check_options(given: Iterable[str], known: type[Any], where: str) -> None:
    """Raise ConfigurationError for an option that is not in `known`, a TypedDict."""
    names = list(known.__annotations__)
    for name in given:
        if name not in names:
            raise ConfigurationError(
                f"{where} has no option {name!r}.{did_you_mean(name, names)} "
                f"It has: {', '.join(names)}."
            )


def positive(value: object, what: str) -> float:
    """Return `value` as seconds above 0. Raises ConfigurationError, which names `what`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e10:
        raise ConfigurationError(f"{what} takes seconds above 0, not {value!r}")
    return float(value)


class Task(Generic[P, R]):
    """A registered function, made by ``@app.task``.

    Calling it runs the function here and now; `delay` sends an invocation to a worker::

        resize("a.png", 200)                                  # runs here
        resize.delay("a.png", 200)                            # runs on a worker
        resize.with_options(delay=60).delay("a.png", 200)     # runs in a minute

    `name` is the registered name, `queue` the queue (None: the app's default), `function` the
    function itself.
    """

    def __init__(
        self,
        sender: InvocationSender,
        function: Callable[..., Any],
        name: str,
        options: TaskOptions,
        *,
        with_context: bool = False,
    ) -> None:
        """Called by `App.task`. `options` must contain `retry` and `retry_strategy`."""
        check_options(options, TaskOptions, f"task {name!r}")
        self._sender = sender
        self.function = function
        self.name = name
        self.queue = options.get("queue")
        self.retry = options["retry"]
        self.with_context = with_context
        self.delivery = _choice(options.get("delivery", DELIVERIES[0]), DELIVERIES, "delivery")
        self.retry_strategy = check_strategy(
            options["retry_strategy"], f"task {name!r}: retry_strategy"
        )
        self.strategy_asked: str | None = None  # that of the task itself, not the app's
        self.ordered = _flag(options.get("ordered", True), f"task {name!r}: ordered")
        self.time_limit = self._seconds(options, "time_limit")
        self.soft_time_limit = self._seconds(options, "soft_time_limit")
        self.max_lease = self._seconds(options, "max_lease")
        self.expires = self._seconds(options, "expires")
        lease = options.get("lease")
        self.lease_of = lease if callable(lease) else None
        self.lease = None if callable(lease) else self._seconds(options, "lease")
        if self.lease is not None and self.max_lease is not None and self.max_lease <= self.lease:
            raise ConfigurationError(
                f"task {name!r}: max_lease ({self.max_lease:g} s) must be longer than "
                f"lease ({self.lease:g} s)"
            )
        self.signature = inspect.signature(function)
        self._fewest, self._most = _positional_counts(self.signature, with_context=with_context)
        self.__name__ = getattr(function, "__name__", name)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    @property
    def is_coroutine(self) -> bool:
        """True if the function is an ``async def``."""
        function = self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # an object with async __call__
        )

    @property
    def sender(self) -> InvocationSender:
        """The app, which sends the invocations."""
        return self._sender

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now, in this process."""
        result: R = self.function(*args, **kwargs)
        return result

    def arguments(
        self, codec: Codec, message: TaskMessage
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in a message of this task. Raises CodecError."""
        return codec.decode_arguments(message)

    def call(self, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as a worker does: with the context if it takes one."""
        if self.with_context:
            return self.function(context, *args, **kwargs)
        return self.function(*args, **kwargs)

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send an invocation with these arguments; when this returns, the broker has accepted it.

        Raises

        * TypeError if the arguments do not match the function's signature,
        * EncodeError if a value cannot be written, MessageTooLarge if they are too many bytes,
        * BrokerUnavailable if nothing was sent,
        * SendUnconfirmed if it may or may not have been sent: send again with the same task id.
        """
        return self._send({}, args, kwargs)

    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """`delay` for coroutines: it never blocks the event loop.

        Calls under way at the same time are sent together, on a thread that all of them share.
        Raises what `delay` raises. If the coroutine is cancelled, the message may be sent or not.
        """
        return await self._asend({}, args, kwargs)

    def map(self, calls: Iterable[Sequence[Any]]) -> list[AsyncResult[R]]:
        """Send one invocation for each tuple of arguments, in batches; the results are in order.

        ::

            resize.map([("a.png", 200), ("b.png", 100)])
        """
        return self._send_many({}, calls)

    async def amap(self, calls: Iterable[Sequence[Any]]) -> list[AsyncResult[R]]:
        """`map` for coroutines: it never blocks the event loop."""
        return await self._sender.asend_call(self, self._invocations(calls), {})

    def with_options(self, **options: Unpack[SendOptions]) -> BoundTask[P, R]:
        """The same task with options for its sends, see `SendOptions`.

        ::

            resize.with_options(delay=60, queue="bulk").delay("a.png", 200)
        """
        return BoundTask(self, _checked_send_options(options))

    def _send(
        self, options: SendOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncResult[R]:
        self.check_arguments(args, kwargs)
        return self._sender.send_call(self, (Invocation(args, kwargs),), options)[0]

    async def _asend(
        self, options: SendOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncResult[R]:
        self.check_arguments(args, kwargs)
        return (await self._sender.asend_call(self, (Invocation(args, kwargs),), options))[0]

    def _send_many(
        self, options: SendOptions, calls: Iterable[Sequence[Any]]
    ) -> list[AsyncResult[R]]:
        return self._sender.send_call(self, self._invocations(calls), options)

    def _invocations(self, calls: Iterable[Sequence[Any]]) -> list[Invocation]:
        batch = []
        for args in calls:
            if not isinstance(args, tuple | list):
                raise TypeError(f"map takes tuples of arguments, not {args!r}; write ({args!r},)")
            arguments = tuple(args)
            self.check_arguments(arguments, _NO_KEYWORDS)
            batch.append(Invocation(arguments, _NO_KEYWORDS))
        return batch

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError, as the call would, if the arguments do not match the signature."""
        if not kwargs and self._fewest <= len(args) <= self._most:
            return  # the usual case, without building a binding
        try:
            if self.with_context:
                self.signature.bind(None, *args, **kwargs)
            else:
                self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None

    def _seconds(self, options: TaskOptions, name: str) -> float | None:
        value = options.get(name)
        return None if value is None else positive(value, f"task {self.name!r}: {name}")


class BoundTask(Generic[P, R]):
    """A task together with options for its sends, made by `Task.with_options`."""

    def __init__(self, task: Task[P, R], options: SendOptions) -> None:
        self._task = task
        self._options = options

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send an invocation with these options, like `Task.delay`."""
        return self._task._send(self._options, args, kwargs)  # one class in two

    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send with these options from a coroutine, like `Task.adelay`."""
        return await self._task._asend(self._options, args, kwargs)

    def map(self, calls: Iterable[Sequence[Any]]) -> list[AsyncResult[R]]:
        """Send many invocations with these options, like `Task.map`.

        Raises ConfigurationError if the options contain a task id, which names one invocation only.
        """
        if "task_id" in self._options:
            raise ConfigurationError("task_id names one invocation; map sends many")
        return self._task._send_many(self._options, calls)

    async def amap(self, calls: Iterable[Sequence[Any]]) -> list[AsyncResult[R]]:
        """Send many invocations from a coroutine, like `Task.amap`; errors as `map`."""
        if "task_id" in self._options:
            raise ConfigurationError("task_id names one invocation; amap sends many")
        task = self._task
        return await task.sender.asend_call(task, task._invocations(calls), self._options)


def _positional_counts(signature: inspect.Signature, *, with_context: bool) -> tuple[int, int]:
    """(fewest, most) positional arguments that fit without keywords; (1, 0) if no number does."""
    kinds = inspect.Parameter
    positional = [
        each
        for each in signature.parameters.values()
        if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ][int(with_context) :]
    if any(
        each.kind is kinds.KEYWORD_ONLY and each.default is kinds.empty
        for each in signature.parameters.values()
    ):
        return 1, 0
    return sum(each.default is kinds.empty for each in positional), len(positional)


def _choice(value: object, known: Sequence[str], what: str) -> str:
    if value not in known:
        raise ConfigurationError(
            f"{what} takes {' or '.join(map(repr, known))}, not {value!r}."
            f"{did_you_mean(str(value), known)}"
        )
    return str(value)


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} is True or False, not {value!r}")
    return value


def _checked_send_options(options: SendOptions) -> SendOptions:
    check_options(options, SendOptions, "with_options")
    delay = options.get("delay", 0.0)
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < 1e10:
        raise ConfigurationError(f"delay takes seconds of 0 or more, not {delay!r}")
    if "expires" in options:
        positive(options["expires"], "expires")
    task_id = options.get("task_id")
    if task_id is not None and (not isinstance(task_id, str) or not task_id):
        raise ConfigurationError(f"task_id takes a text, not {task_id!r}")
    session = options.get("session")
    if session is not None and (not isinstance(session, str) or not session):
        raise ConfigurationError(f"session takes a text, not {session!r}")
    if "ordered" in options:
        _flag(options["ordered"], "ordered")
    return options
