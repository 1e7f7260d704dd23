"""A task: a function that you can call here, or send to run on a worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

from aztask.breaker import breaker_of
from aztask.context import Context, current_context, unsent_context
from aztask.errors import ConfigurationError, EncodeError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.result import AsyncResult
from aztask.retry import check_policy, check_strategy
from aztask.support.checks import shown
from aztask.support.elsewhere import say_ours
from aztask.taskoptions import (
    DELIVERIES,
    SendOptions,
    TaskOptions,
    check_options,
    check_time_limits,
    checked_send_options,
    choice,
    flag,
    limit_names,
    name_text,
    positive,
)
from aztask.typed.conversion import Arguments, Conversion, call_types
from aztask.uniqueness.rules import unique_rules
from aztask.workflows.graphs import GraphOwner, Signature

__all__ = [
    "BoundTask",
    "ContextTask",
    "Invocation",
    "InvocationSender",
    "SendOptions",
    "Task",
    "TaskOptions",
]

P = ParamSpec("P")
Q = ParamSpec(
    "Q"
)  # the parameters after the first one, which the element before it in a chain gives
R_co = TypeVar("R_co", covariant=True)
V = TypeVar("V")

_new: Final = tuple.__new__  # bound once, as it is called for each send
_NO_KEYWORDS: dict[str, Any] = {}  # one for all: `map` makes millions of calls


class InvocationSender(GraphOwner, Protocol):
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
    """The arguments of one invocation. A tuple, because `map` makes very many.

    * `written`: as plain data, see `aztask.typed`; None if `args` and `kwargs` are plain.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: Arguments | None = None

    @property
    def plain(self) -> Arguments:
        """The arguments as a message holds them."""
        return (self.args, self.kwargs) if self.written is None else self.written

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Invocation:
        """The invocation with these arguments. Raises EncodeError for a wrong kind of `args`."""
        if not isinstance(args, list | tuple):
            raise EncodeError(f"args must be a list or a tuple, not {type(args).__name__}")
        return cls(tuple(args), kwargs if kwargs is not None else {})


class Task(Generic[P, R_co]):
    """A registered function, made by ``@app.task``.

    Calling it runs the function here and now; `delay` sends an invocation to a worker::

        resize("a.png", 200)                                  # runs here
        resize.delay("a.png", 200)                            # runs on a worker
        resize.with_options(delay=60).delay("a.png", 200)     # runs in a minute

    `name` is the registered name, `queue` the queue (None: the app's default), `function` the
    function itself. Calling an ``async def`` task gives a coroutine; its results have the awaited
    type.
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
        self.queue, self.priority = self._name(options, "queue"), self._name(options, "priority")
        sender.check_queue_name(self.queue, f"task {name!r}: queue")
        self.retry = check_policy(options["retry"], f"task {name!r}: retry")
        self.with_context = with_context
        self.delivery = choice(options.get("delivery", DELIVERIES[0]), DELIVERIES, "delivery")
        self.retry_strategy = check_strategy(
            options["retry_strategy"], f"task {name!r}: retry_strategy"
        )
        self.strategy_asked: str | None = None  # that of the task itself, not the app's
        self.strict = flag(options.get("strict", False), f"task {name!r}: strict")
        self._conversion: Conversion | None = None
        self._plain_calls: set[tuple[Any, ...]] = set()
        self._usual_call: list[type] | None = None  # of `_plain_calls`, one without keywords
        self.ordered = flag(options.get("ordered", True), f"task {name!r}: ordered")
        self.limits = limit_names(options.get("limits", ()), f"task {name!r}: limits")
        self.breaker = breaker_of(options.get("breaker"), f"task {name!r}: breaker")
        self.time_limit = self._seconds(options, "time_limit")
        self.soft_time_limit = self._seconds(options, "soft_time_limit")
        self.stop_grace = self._seconds(options, "stop_grace")
        self.max_lease = self._seconds(options, "max_lease")
        self.expires = self._seconds(options, "expires")
        self.unique = unique_rules(options, f"task {name!r}")
        lease = options.get("lease")
        self.lease_of = lease if callable(lease) else None
        self.lease = None if callable(lease) else self._seconds(options, "lease")
        if self.lease is not None and self.max_lease is not None and self.max_lease <= self.lease:
            raise ConfigurationError(
                f"task {name!r}: max_lease ({self.max_lease:g} s) must be longer than "
                f"lease ({self.lease:g} s)"
            )
        check_time_limits(self.soft_time_limit, self.time_limit, f"task {name!r}")
        self.signature = _signature(function, name)
        _check_function(function, name, self.signature, with_context=with_context)
        self._fewest, self._most = _positional_counts(self.signature, with_context=with_context)
        self.__name__ = getattr(function, "__name__", name)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    @property
    def is_coroutine(self) -> bool:
        """True if the function is an ``async def``, a generator of that kind too."""
        function = self.function
        called = getattr(function, "__call__", None)  # noqa: B004  # an object with async __call__
        kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        return any(is_kind(each) for is_kind in kinds for each in (function, called))

    @property
    def conversion(self) -> Conversion:
        """Converts arguments and results as the annotations say, see `aztask.typed`.

        Made when it is first needed: an annotation may name what its module defines later.
        """
        if self._conversion is None:
            self._conversion = Conversion(
                self.name,
                self.function,
                self.signature,
                with_context=self.with_context,
                strict=self.strict,
            )
        return self._conversion

    @property
    def sender(self) -> InvocationSender:
        """The app, which sends the invocations."""
        return self._sender

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function here and now, in this process."""
        result: R_co = self.function(*args, **kwargs)
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

    @overload
    def delay(
        self: Task[P, Coroutine[Any, Any, V]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncResult[V]: ...

    @overload
    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]: ...

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """Send an invocation with these arguments; when this returns, the broker has accepted it.

        Raises

        * TypeError if the arguments do not match the function's signature,
        * EncodeError if a value cannot be written, or is not of its annotated type and the task is
          strict; MessageTooLarge if they are too many bytes,
        * BrokerUnavailable if nothing was sent,
        * SendUnconfirmed if it may or may not have been sent: send again with the same task id.
        """
        return self._send({}, args, kwargs)

    @overload
    async def adelay(
        self: Task[P, Coroutine[Any, Any, V]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncResult[V]: ...

    @overload
    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]: ...

    async def adelay(self, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """`delay` for coroutines: it never blocks the event loop.

        Calls under way at the same time are sent together, on a thread that all of them share.
        Raises what `delay` raises. If the coroutine is cancelled, the message may be sent or not.
        """
        return await self._asend(SendOptions(), args, kwargs)

    @overload
    def map(
        self: Task[P, Coroutine[Any, Any, V]], calls: Iterable[Sequence[Any]]
    ) -> list[AsyncResult[V]]: ...

    @overload
    def map(self, calls: Iterable[Sequence[Any]]) -> list[AsyncResult[R_co]]: ...

    def map(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """Send one invocation for each tuple of arguments, in batches; the results are in order.

        ::

            resize.map([("a.png", 200), ("b.png", 100)])
        """
        return self._send_many({}, calls)

    @overload
    async def amap(
        self: Task[P, Coroutine[Any, Any, V]], calls: Iterable[Sequence[Any]]
    ) -> list[AsyncResult[V]]: ...

    @overload
    async def amap(self, calls: Iterable[Sequence[Any]]) -> list[AsyncResult[R_co]]: ...

    async def amap(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """`map` for coroutines: it never blocks the event loop."""
        return await self._sender.asend_call(self, self._invocations(calls), {})

    @overload
    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature: ...

    @overload
    def s(self: Task[Concatenate[Any, Q], Any], *args: Q.args, **kwargs: Q.kwargs) -> Signature: ...

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """A call of this task as a part of a workflow, see `aztask.chain`.

        In a chain, the value of the element before it is its first argument, before `args`. The
        arguments are checked when the workflow is started.
        """
        return Signature(self, args, kwargs)

    def si(self, *args: P.args, **kwargs: P.kwargs) -> Signature:
        """`s` for a call that takes only its own arguments, not the value before it."""
        return Signature(self, args, kwargs, immutable=True)

    def with_options(self, **options: Unpack[SendOptions]) -> BoundTask[P, R_co]:
        """The same task with options for its sends, see `SendOptions`.

        ::

            resize.with_options(delay=60, queue="bulk").delay("a.png", 200)
        """
        checked = checked_send_options(options, "with_options")
        self._sender.check_queue_name(checked.get("queue"), "with_options: queue")
        return BoundTask(self, checked)

    def _send(
        self, options: SendOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncResult[Any]:
        return self._sender.send_call(self, (self._invocation(args, kwargs),), options)[0]

    async def _asend(
        self, options: SendOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncResult[Any]:
        return (await self._sender.asend_call(self, (self._invocation(args, kwargs),), options))[0]

    def _send_many(
        self, options: SendOptions, calls: Iterable[Sequence[Any]]
    ) -> list[AsyncResult[Any]]:
        return self._sender.send_call(self, self._invocations(calls), options)

    def _invocations(self, calls: Iterable[Sequence[Any]]) -> list[Invocation]:
        batch = []
        for args in calls:
            if not isinstance(args, tuple | list):
                raise TypeError(
                    f"map takes tuples of arguments, not {shown(args)}; write (x,) for one x"
                )
            batch.append(self._invocation(tuple(args), _NO_KEYWORDS))
        return batch

    def _invocation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
        """The checked invocation, with its arguments as plain data.

        Usually a call with arguments of these types was made before, and needed no converter. Then
        it fits the signature as well, so that a send of plain arguments costs no more than without
        converters, and one with keywords less.
        """
        # Nearly always it is of the types of the first call. A list of them compares faster than a
        # tuple is hashed, and `_new` makes an Invocation in half the time that its class takes.
        if not kwargs and [*map(type, args)] == self._usual_call:
            return _new(Invocation, (args, kwargs, None))
        types = call_types(args, kwargs)
        if types in self._plain_calls:
            return _new(Invocation, (args, kwargs, None))
        self.check_arguments(args, kwargs)
        written = self.conversion.written(args, kwargs)
        if written is None and types in self.conversion.settled:
            self._plain_calls.add(types)
            if self._usual_call is None and not kwargs:
                self._usual_call = [*types]
        return Invocation(args, kwargs, written)

    def named_invocation(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Invocation:
        """The invocation of a call by the task's name: plain data of the annotated types fits, too.

        Raises EncodeError for a wrong kind of `args`, and what `delay` raises it for.
        """
        call = Invocation.of(args, kwargs)
        written = self.conversion.written(call.args, call.kwargs, by_name=True)
        return call._replace(written=written)

    def plain_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: int = 0
    ) -> Arguments:
        """These arguments as a message holds them. Raises EncodeError.

        * `given`: how many positional arguments come before them, from another task.
        """
        return self.conversion.written(args, kwargs, given=given) or (args, kwargs)

    def shown_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call as they may be shown: those that are secret are masked."""
        return self.conversion.masked(args, kwargs, given=(0, 1)) or (args, kwargs)

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
            names = [name for name in kwargs if name in SendOptions.__annotations__]
            names = [name for name in names if name not in self.signature.parameters]
            hint = (
                f"; for the option of a send, write with_options({names[0]}=...)" if names else ""
            )
            raise TypeError(f"{self.name}(): {error}{hint}") from None

    def named_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by the names of the parameters, defaults included, without the context.

        Those that ``**kwargs`` collects have their own names. Raises TypeError.
        """
        given = (None, *args) if self.with_context else args
        bound = self.signature.bind(*given, **kwargs)
        bound.apply_defaults()
        first = next(iter(self.signature.parameters)) if self.with_context else ""
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            elif name != first:
                named[name] = value
        return named

    def _name(self, options: TaskOptions, name: str) -> str | None:
        value = options.get(name)
        return None if value is None else name_text(value, f"task {self.name!r}: {name}")

    def _seconds(self, options: TaskOptions, name: str) -> float | None:
        value = options.get(name)
        return None if value is None else positive(value, f"task {self.name!r}: {name}")


class ContextTask(Task[P, R_co]):
    """A registered function whose first argument is a `Context`.

    Made by ``@app.task_with_context``. You send it without the context, and you can call it without
    or with one::

        crawl.delay("https://example.com")              # the worker makes the context
        crawl("https://example.com")                    # runs here
        crawl(context, "https://example.com")           # runs here with this context

    Called without a context, the function gets that of the task that runs this code, so that
    ``context.lease`` is the lease under which it really runs. Outside of tasks it gets a new one,
    whose lease never ends and whose checkpoints stay in memory. `aztask.testing.task_context`
    prepares a context for a test.
    """

    @overload
    def __call__(self, context: Context, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]  # it takes both
        """Call the function here and now, in this process, with a context."""
        if args and isinstance(args[0], Context):
            return self.function(*args, **kwargs)
        context = current_context()
        if context is None:
            context = unsent_context(task=self.name, queue=self.queue)
        return self.function(context, *args, **kwargs)


class BoundTask(Generic[P, R_co]):
    """A task together with options for its sends, made by `Task.with_options`."""

    def __init__(self, task: Task[P, R_co], options: SendOptions) -> None:
        self._task = task
        self._options = options

    @property
    def name(self) -> str:
        """The registered name of the task."""
        return self._task.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function here and now, as `Task` does; the options are for sends."""
        return self._task(*args, **kwargs)

    @overload
    def delay(
        self: BoundTask[P, Coroutine[Any, Any, V]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncResult[V]: ...

    @overload
    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]: ...

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """Send an invocation with these options, like `Task.delay`."""
        return self._task._send(self._options, args, kwargs)  # one class in two

    @overload
    async def adelay(
        self: BoundTask[P, Coroutine[Any, Any, V]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncResult[V]: ...

    @overload
    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]: ...

    async def adelay(self, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """Send with these options from a coroutine, like `Task.adelay`."""
        return await self._task._asend(self._options, args, kwargs)

    @overload
    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature: ...

    @overload
    def s(
        self: BoundTask[Concatenate[Any, Q], Any], *args: Q.args, **kwargs: Q.kwargs
    ) -> Signature: ...

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """A call with these options as a part of a workflow, like `Task.s`."""
        return Signature(self._task, args, kwargs, self._options)

    def si(self, *args: P.args, **kwargs: P.kwargs) -> Signature:
        """A call with these options as a part of a workflow, like `Task.si`."""
        return Signature(self._task, args, kwargs, self._options, immutable=True)

    @overload
    def map(
        self: BoundTask[P, Coroutine[Any, Any, V]], calls: Iterable[Sequence[Any]]
    ) -> list[AsyncResult[V]]: ...

    @overload
    def map(self, calls: Iterable[Sequence[Any]]) -> list[AsyncResult[R_co]]: ...

    def map(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """Send many invocations with these options, like `Task.map`.

        Raises ConfigurationError if the options contain a task id, which names one invocation only.
        """
        if "task_id" in self._options:
            raise ConfigurationError("task_id names one invocation; map sends many")
        return self._task._send_many(self._options, calls)

    @overload
    async def amap(
        self: BoundTask[P, Coroutine[Any, Any, V]], calls: Iterable[Sequence[Any]]
    ) -> list[AsyncResult[V]]: ...

    @overload
    async def amap(self, calls: Iterable[Sequence[Any]]) -> list[AsyncResult[R_co]]: ...

    async def amap(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """Send many invocations from a coroutine, like `Task.amap`; errors as `map`."""
        if "task_id" in self._options:
            raise ConfigurationError("task_id names one invocation; amap sends many")
        task = self._task
        return await task.sender.asend_call(task, task._invocations(calls), self._options)


_SEND = ".delay(...), and .with_options(...).delay(...) for a send with options"
_SENDS = dict.fromkeys(
    ("apply_async", "kiq", "send", "send_with_options", "enqueue"), _SEND
)  # of Celery, taskiq, dramatiq, and RQ or Django
say_ours(Task, {**_SENDS, "schedule": "app.schedule(name, task.s(...), cron=... or every=...)"})
say_ours(BoundTask, _SENDS)


def _signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    """The function's signature. Raises ConfigurationError for one whose parameters nothing says."""
    try:
        return inspect.signature(function)
    except ValueError:  # builtins such as print; classes such as int
        raise ConfigurationError(
            f"task {name!r}: Python does not know the parameters of {shown(function)}; write a "
            "function of a module, with def"
        ) from None


def _check_function(
    function: Callable[..., Any], name: str, signature: inspect.Signature, *, with_context: bool
) -> None:
    """Raise ConfigurationError for a function that would fail in each run."""
    first = next(iter(signature.parameters.values()), None)
    # With `from __future__ import annotations` it is a text.
    kinds = {
        "a class": inspect.isclass(function),
        "a bound method": inspect.ismethod(function) or _is_bound_builtin(function),
        "a lambda": name.endswith(".<lambda>"),
    }
    for what in (each for each, found in kinds.items() if found):
        raise ConfigurationError(
            f"task {name!r} is {what}, which a worker cannot find by its name; write a function of "
            "a module, with def"
        )
    is_context = first is not None and first.annotation in (Context, "Context", "aztask.Context")
    if is_context and not with_context:
        raise ConfigurationError(
            f"task {name!r} takes a Context, which @app.task does not pass; write "
            "@app.task_with_context"
        )


def _is_bound_builtin(function: Callable[..., Any]) -> bool:
    """True for ``[].append``; the ``__self__`` of a builtin function is its module."""
    return inspect.isbuiltin(function) and not inspect.ismodule(function.__self__)


def _positional_counts(signature: inspect.Signature, *, with_context: bool) -> tuple[int, int]:
    """(fewest, most) positional arguments that fit without keywords; (1, 0) if no number does."""
    kinds = inspect.Parameter
    all_of_them = signature.parameters.values()
    if any(each.kind is kinds.KEYWORD_ONLY and each.default is kinds.empty for each in all_of_them):
        return 1, 0
    by_place = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    positional = [each for each in all_of_them if each.kind in by_place][int(with_context) :]
    return sum(each.default is kinds.empty for each in positional), len(positional)
