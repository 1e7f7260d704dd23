"""Hooks run around something, listeners are notified of it, lifespans enclose a process's work.

Rules
1. Hooks run in the order of their `order`, then of their registration. The first is the outermost.
2. An error that a hook raises before the work begins stops the work and reaches the caller, so a
   hook can refuse it. An error that it raises afterwards is logged: the work is done. In a
   harmless hook, an error before the work is logged too, and the work goes on.
3. A hook sees the error that the work raises and cannot swallow it.
4. A hook is a function that returns a generator with one ``yield``, or None if it has nothing more
   to do for this work. A generator function always returns the former.
"""

from __future__ import annotations

import asyncio
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
from contextvars import Context, ContextVar, Token, copy_context
from types import TracebackType
from typing import Any, Final, Generic, TypeAlias, TypeVar

from aztask.errors import ConfigurationError

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

    def _take(self, variables: Context) -> None:
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
) -> tuple[asyncio.Task[None], asyncio.Event, Context]:
    """Start the task that keeps it open; returns once it is open, with its context variables."""
    opened: asyncio.Future[Context] = asyncio.get_running_loop().create_future()
    closing = asyncio.Event()
    task = asyncio.create_task(_keep(manager, opened, closing), name="aztask-lifespan")
    return task, closing, await opened


async def _keep(
    manager: AbstractAsyncContextManager[Any],
    opened: asyncio.Future[Context],
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
