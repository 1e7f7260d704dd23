"""Hooks of an app: your code around sends, runs, workers and pool processes.

Telemetry, error reporters and web frameworks register here; aztask calls none of them by name. See
docs/how-to/advanced/hooks.md.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from contextvars import ContextVar, Token, copy_context
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Generic, TypeAlias, TypeVar

from aztask.config import Settings
from aztask.context import Context
from aztask.errors import ConfigurationError
from aztask.message.message import TaskMessage
from aztask.queues.delivery import Delivery, Lost, Settled, Unknown
from aztask.settlement import Decision
from aztask.stores.events.event import Event
from aztask.stores.events.sink import EventSink, FileEventSink, NullEventSink


@dataclass(slots=True)
class Sending:
    """One send, the argument of an ``app.around_send`` hook.

    * `task`: the task's name.
    * `queue`: the queue that it is sent to.
    * `ids`: the task ids, in order: one for `.delay`, up to 500 for each batch of `.map`.
    * `headers`: what you put here travels with every message of the send: text, numbers, bytes, or
      lists and maps of those. The task reads them in ``context.message.extra``.
    * `each`: None, or a map for each id, in their order: further headers of that message alone.
    * `workflow`: the workflow's id if a graph is started. Then `ids` are those of all its tasks, of
      those that follow later too, and `task` and `queue` are those of the first.
    * `note`: None, or up to 60 KiB that the result store keeps until it purges the task. Only for a
      `task_id` of your own. Read it in ``app.results.history(task_id)[0].note``.
    """

    task: str
    queue: str
    ids: Sequence[str]
    headers: dict[str, Any] = field(default_factory=dict)
    each: Sequence[dict[str, Any]] | None = None
    workflow: str | None = None
    note: bytes | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker or one of its pool processes, the argument of worker and process hooks.

    * `name`: the worker's name, the same in its pool processes.
    * `queues`: the queues that it serves.
    """

    name: str
    queues: tuple[str, ...] = ()


@dataclass(slots=True)
class Receiving:
    """Messages that a worker received in one batch, the argument of ``app.hooks.receive``.

    * `queue`: the queue that they came from.
    * `messages`, `deliveries`: those that could be read, in the same order.
    * `received`: how many messages came, damaged ones included.
    * `asked_at`, `received_at`: when the request began and ended, UTC epoch seconds.
    * `traceparents`: empty; the trace contexts that you put here, by index, become those of
      messages, and their retries carry them on.
    """

    queue: str
    messages: Sequence[TaskMessage]
    deliveries: Sequence[Delivery]
    received: int
    asked_at: float
    received_at: float
    traceparents: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Settling:
    """Settlements that a worker carries out in one batch, the argument of ``app.hooks.settle``.

    * `queue`: the queue that the messages came from.
    * `messages`: None for one that could not be read.
    * `deliveries`, `settlements`: in the same order as the messages.
    * `answers`: the broker's answers, in that order; empty before the ``yield``.
    """

    queue: str
    messages: Sequence[TaskMessage | None]
    deliveries: Sequence[Delivery]
    settlements: Sequence[Decision]
    answers: Sequence[Settled | Lost | Unknown] = ()


@dataclass(frozen=True, slots=True)
class KilledRun:
    """A run that its pool process could not report, the argument of ``app.hooks.killed``.

    * `message`, `delivery`: the message of the run, and its delivery.
    * `started_at`, `ended_at`: UTC epoch seconds.
    * `error_type`, `error`: why the process ended.
    """

    message: TaskMessage
    delivery: Delivery
    started_at: float
    ended_at: float
    error_type: str
    error: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's state at one moment, the argument of ``app.hooks.status``.

    * `at`: seconds of `time.monotonic`.
    * `capacity`: how many tasks can run at the same time; `ready`: pool processes that take tasks.
    * `running`: how long each running task has run, in seconds.
    * `held`: deliveries under a lease, waiting ones included.
    * `draining`: the worker no longer receives, and ends when its tasks have ended.
    """

    at: float
    capacity: int
    ready: int
    running: tuple[float, ...]
    held: int
    draining: bool


class Hooks:
    """All hooks of one app. You register with the attributes of the `App`, as decorators::

    @app.around_run
    def timed(context: Context) -> Iterator[None]:
        started = time.monotonic()
        yield
        print(context.task, time.monotonic() - started)

    Further hooks are for telemetry and have no attribute of the app: `receive`, `settle`, `killed`
    and `status`, which is called at least once a second. They run in the worker, not in its pool
    processes. An error in them is logged, and the worker goes on.
    """

    def __init__(self) -> None:
        self.send: Hook[Sending] = Hook("around_send")
        self.run: Hook[Context] = Hook("around_run")
        self.worker: Hook[WorkerInfo] = Hook("around_worker")
        self.process: Hook[WorkerInfo] = Hook("around_process")
        self.event: Listeners[Event] = Listeners("on_event")
        self.receive: Listeners[Receiving] = Listeners("receive")
        self.settle: Hook[Settling] = Hook("settle", harmless=True)
        self.killed: Listeners[KilledRun] = Listeners("killed")
        self.status: Listeners[WorkerStatus] = Listeners("status")
        self.lifespan = Lifespans()


class HookedSink:
    """An event sink that also passes every event to the app's ``on_event`` listeners."""

    def __init__(self, inner: EventSink, listeners: Listeners[Event]) -> None:
        self._inner = inner
        self._listeners = listeners

    @property
    def idle(self) -> bool:
        """True if no file and no listener takes the events."""
        return self._inner.idle and not self._listeners

    def emit(self, event: Event) -> None:
        """Pass one event to the sink and to the listeners."""
        self._inner.emit(event)
        self._listeners.notify(event)

    def flush(self) -> None:
        """Have the sink write its buffered events."""
        self._inner.flush()

    def close(self) -> None:
        """Close the sink; the listeners stay registered."""
        self._inner.close()


class PrivateSink(HookedSink):
    """An event sink that leaves out the texts of errors, which may quote arguments.

    Their types stay. The texts are in the result store, encrypted.
    """

    def emit(self, event: Event) -> None:
        """Pass one event on, without the text of its error."""
        super().emit(event if event.error is None else event._replace(error=None))


def event_sink(settings: Settings, writer: str, hooks: Hooks) -> EventSink:
    """The sink for events of `writer`: the app's directory, if it has one, and its listeners.

    Files that are uploaded are not deleted by age here: the workers that upload them do that.
    """
    inner: EventSink = NullEventSink()
    if settings.events is not None:
        kept = settings.events_container is not None
        retention = None if kept else settings.events_retention_seconds
        inner = FileEventSink(settings.events, writer, retention=retention)
    made = PrivateSink if settings.encrypt else HookedSink
    return made(inner, hooks.event)


# ------------------------------------------------------------------------------------------------
# Hooks run around something, listeners are notified of it, lifespans enclose a process's work.
#
# Rules
# 1. Hooks run in the order of their `order`, then of their registration. The first is the
#    outermost.
# 2. An error that a hook raises before the work begins stops the work and reaches the caller, so a
#    hook can refuse it. An error that it raises afterwards is logged: the work is done. In a
#    harmless hook, an error before the work is logged too, and the work goes on.
# 3. A hook sees the error that the work raises and cannot swallow it.
# 4. A hook is a function that returns a generator with one ``yield``, or None if it has nothing
#    more to do for this work. A generator function always returns the former.

logger = logging.getLogger(__name__)

T = TypeVar("T")

Around: TypeAlias = Callable[[T], Generator[None, Any, Any] | None]
"""Mostly a generator function with one ``yield``: the code before it runs before the work."""

Listener: TypeAlias = Callable[[T], None]

_ENDED: Final = object()


class Hook(Generic[T]):
    """A place where you can run code around something. Use the hook itself as a decorator."""

    def __init__(self, name: str, *, harmless: bool = False) -> None:
        """`name`: the hook's name in the log. `harmless`: no error of a hook stops the work."""
        self._name = name
        self._harmless = harmless
        self._hooks: tuple[tuple[float, Around[T]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def __call__(self, function: Around[T]) -> Around[T]:
        """Register `function`; as a decorator, mostly.

        It is a generator function with one ``yield``, or a function that returns None: then nothing
        runs after the work.
        """
        return self.add(function)

    def add(self, function: Around[T], *, order: float = 0.0) -> Around[T]:
        """Register `function`; a hook with a smaller `order` (default 0) is further out."""
        hooks = [*self._hooks, (order, function)]
        self._hooks = tuple(sorted(hooks, key=lambda pair: pair[0]))
        return function

    def around(self, value: T) -> AbstractContextManager[None]:
        """Run the hooks around a ``with`` block. Raises what a hook raises before the block."""
        return _Entered(self._name, self._hooks, value, self._harmless)


class _Entered(AbstractContextManager[None], Generic[T]):
    """The context manager that runs the hooks around one block.

    It drives their generators itself. With `contextlib.contextmanager` around each hook, a send
    with one hook took several microseconds longer.
    """

    __slots__ = ("_harmless", "_hooks", "_name", "_open", "_value")

    def __init__(
        self, name: str, hooks: Sequence[tuple[float, Around[T]]], value: T, harmless: bool
    ) -> None:
        self._name = name
        self._harmless = harmless
        self._hooks = hooks
        self._value = value
        self._open: list[Generator[None, Any, Any]] = []

    def __enter__(self) -> None:
        for _, hook in self._hooks:
            try:
                generator = hook(self._value)
                if generator is None:
                    continue
                if next(generator, _ENDED) is _ENDED:
                    raise RuntimeError(f"a hook of {self._name} ended without a yield")
            except BaseException as error:
                if not self._harmless or not isinstance(error, Exception):
                    self._leave(error)
                    raise
                logger.exception("a hook of %s failed; the work goes on", self._name)
            else:
                self._open.append(generator)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        trace = error.__traceback__ if error is not None else None
        while self._open:
            generator = self._open.pop()
            try:
                if error is not None:
                    generator.throw(error)
                elif next(generator, _ENDED) is _ENDED:
                    continue
            except StopIteration:
                continue
            except BaseException as problem:
                if problem is not error and not _stands_for(problem, error):
                    logger.exception("a hook of %s failed after the work was done", self._name)
            else:
                logger.error("a hook of %s has more than one yield", self._name)
                generator.close()
        if error is not None:
            error.__traceback__ = trace  # without the frames of the hooks


def _stands_for(problem: BaseException, error: BaseException | None) -> bool:
    """True if Python raised `problem` for a StopIteration that left a generator (PEP 479)."""
    return isinstance(error, StopIteration) and problem.__cause__ is error


class Listeners(Generic[T]):
    """Functions that are called with each value. Use the object itself as a decorator."""

    def __init__(self, name: str) -> None:
        """`name`: the listeners' name in the log."""
        self._name = name
        self._listeners: list[Listener[T]] = []

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def __call__(self, function: Listener[T]) -> Listener[T]:
        """Register `function`; as a decorator, mostly."""
        self._listeners.append(function)
        return function

    def notify(self, value: T) -> None:
        """Call each listener. If one raises, that is logged and the others are still called."""
        for listener in self._listeners:
            try:
                listener(value)
            except Exception:
                logger.exception("a listener of %s failed; the others are called", self._name)


# -- lifespans -------------------------------------------------------------------------------
#
# Lifespans: functions that open something before the work of a process and close it afterwards.
#
# Rules
# 1. They open in the order of their registration and close in the reverse order.
# 2. An asynchronous one runs in one asyncio task from beginning to end, because task groups and
#    cancel scopes must be left in the task that entered them.
# 3. A context variable that one sets is seen by those after it and by the tasks, as if it were set
#    where the lifespans are opened. Each task runs in a copy of that context.
# 4. If one fails to open, those before it are closed and the error reaches the caller. An error of
#    closing is logged.


F = TypeVar("F", bound=Callable[[], Any])

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the process's event loop and returns its value."""

Manager = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]


class Lifespans:
    """The lifespans of an app. Use the object itself as a decorator."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], Manager]] = []

    def __bool__(self) -> bool:
        return bool(self._functions)

    def __call__(self, function: F) -> F:
        """Register a function without arguments: a generator function (``async def`` or ``def``)
        with one ``yield``, or a function that returns a context manager.

        Raises ConfigurationError for anything else.
        """
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                "a lifespan is a function with one yield, async def or def, or one that returns a "
                f"context manager, not {function!r}"
            )
        make: Callable[[], Manager] = function
        if inspect.isasyncgenfunction(function):
            make = asynccontextmanager(function)
        elif inspect.isgeneratorfunction(function):
            make = contextmanager(function)
        self._functions.append(make)
        return function

    def open(self, run: Run) -> OpenLifespans:
        """Open all of them. run: on the loop on which the tasks will run."""
        opened = OpenLifespans(run)
        try:
            for make in self._functions:
                opened.enter(make())
        except BaseException:
            opened.close()
            raise
        return opened


class OpenLifespans:
    """The lifespans that are open in this process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._close: list[Callable[[], object]] = []
        self._given: list[tuple[ContextVar[Any], Token[Any]]] = []

    def enter(self, manager: Manager) -> None:
        """Open one; raises what it raises."""
        if isinstance(manager, AbstractAsyncContextManager):
            task, closing, variables = self._run(_open(manager))
            self._close.append(lambda: self._run(_shut(task, closing)))
            self._take(variables)
        elif isinstance(manager, AbstractContextManager):
            manager.__enter__()
            self._close.append(lambda: manager.__exit__(None, None, None))
        else:
            raise ConfigurationError(
                f"a lifespan returned {manager!r}, which is no context manager"
            )

    def _take(self, variables: contextvars.Context) -> None:
        """Set here what an asynchronous lifespan has set in the context of its own task."""
        here = copy_context()
        for variable, value in variables.items():
            if variable not in here or here[variable] is not value:
                self._given.append((variable, variable.set(value)))

    def close(self) -> None:
        """Close them; an error is logged, and the others are closed."""
        while self._given:
            variable, token = self._given.pop()
            with suppress(ValueError):  # another context than the one that opened them
                variable.reset(token)
        while self._close:
            try:
                self._close.pop()()
            except BaseException:
                logger.exception("a lifespan failed while it closed; the others are closed")


async def _open(
    manager: AbstractAsyncContextManager[Any],
) -> tuple[asyncio.Task[None], asyncio.Event, contextvars.Context]:
    """Start the task that keeps it open; returns once it is open, with its context variables."""
    opened: asyncio.Future[contextvars.Context] = asyncio.get_running_loop().create_future()
    closing = asyncio.Event()
    task = asyncio.create_task(_keep(manager, opened, closing), name="aztask-lifespan")
    return task, closing, await opened


async def _keep(
    manager: AbstractAsyncContextManager[Any],
    opened: asyncio.Future[contextvars.Context],
    closing: asyncio.Event,
) -> None:
    try:
        async with manager:
            opened.set_result(copy_context())
            await closing.wait()
    except BaseException as error:
        if opened.done():
            raise
        opened.set_exception(error)


async def _shut(task: asyncio.Task[None], closing: asyncio.Event) -> None:
    closing.set()
    await task
