"""Lifespans: functions that open something before the work of a process and close it afterwards.

Rules
1. They open in the order of their registration and close in the reverse order.
2. An asynchronous one runs in one asyncio task from beginning to end, because task groups and
   cancel scopes must be left in the task that entered them.
3. If one fails to open, those before it are closed and the error reaches the caller. An error of
   closing is logged.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import Any, TypeVar

from aztask.errors import ConfigurationError

logger = logging.getLogger(__name__)

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

    def enter(self, manager: Manager) -> None:
        """Open one; raises what it raises."""
        if isinstance(manager, AbstractAsyncContextManager):
            task, closing = self._run(_open(manager))
            self._close.append(lambda: self._run(_shut(task, closing)))
        elif isinstance(manager, AbstractContextManager):
            manager.__enter__()
            self._close.append(lambda: manager.__exit__(None, None, None))
        else:
            raise ConfigurationError(
                f"a lifespan returned {manager!r}, which is no context manager"
            )

    def close(self) -> None:
        """Close them; an error is logged, and the others are closed."""
        while self._close:
            try:
                self._close.pop()()
            except BaseException:
                logger.exception("a lifespan failed while it closed; the others are closed")


async def _open(
    manager: AbstractAsyncContextManager[Any],
) -> tuple[asyncio.Task[None], asyncio.Event]:
    """Start the task that keeps it open; returns once it is open."""
    opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    closing = asyncio.Event()
    task = asyncio.create_task(_keep(manager, opened, closing), name="aztask-lifespan")
    await opened
    return task, closing


async def _keep(
    manager: AbstractAsyncContextManager[Any], opened: asyncio.Future[None], closing: asyncio.Event
) -> None:
    try:
        async with manager:
            opened.set_result(None)
            await closing.wait()
    except BaseException as error:
        if opened.done():
            raise
        opened.set_exception(error)


async def _shut(task: asyncio.Task[None], closing: asyncio.Event) -> None:
    closing.set()
    await task
