"""Hooks: code that runs around something, and listeners: code that is notified of something.

Rules
1. Hooks run in the order of their `order`, then of their registration. The first is the outermost.
2. An error that a hook raises before the work begins stops the work and reaches the caller, so a
   hook can refuse it. An error that it raises afterwards is logged: the work is done. In a
   harmless hook, an error before the work is logged too, and the work goes on.
3. A hook sees the error that the work raises and cannot swallow it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

Around: TypeAlias = Callable[[T], Generator[None, Any, Any]]
"""A generator function with one ``yield``: the code before it runs before the work."""

Listener: TypeAlias = Callable[[T], None]


class Hook(Generic[T]):
    """A place where you can run code around something. Use the hook itself as a decorator."""

    def __init__(self, name: str, *, harmless: bool = False) -> None:
        """`name`: the hook's name in the log. `harmless`: no error of a hook stops the work."""
        self._name = name
        self._harmless = harmless
        self._hooks: list[tuple[float, Callable[[T], AbstractContextManager[None]]]] = []

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def __call__(self, function: Around[T]) -> Around[T]:
        """Register `function`, a generator function with one ``yield``; as a decorator, mostly."""
        return self.add(function)

    def add(self, function: Around[T], *, order: float = 0.0) -> Around[T]:
        """Register `function`; a hook with a smaller `order` (default 0) is further out."""
        self._hooks.append((order, contextmanager(function)))
        self._hooks.sort(key=lambda pair: pair[0])
        return function

    def around(self, value: T) -> AbstractContextManager[None]:
        """Run the hooks around a ``with`` block. Raises what a hook raises before the block."""
        hooks = [hook for _, hook in self._hooks]
        return _Entered(self._name, hooks, value, harmless=self._harmless)


class _Entered(AbstractContextManager[None], Generic[T]):
    """The context manager that runs the hooks around one block."""

    def __init__(
        self,
        name: str,
        hooks: list[Callable[[T], AbstractContextManager[None]]],
        value: T,
        *,
        harmless: bool,
    ) -> None:
        self._name = name
        self._harmless = harmless
        self._hooks = hooks
        self._value = value
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        try:
            for hook in self._hooks:
                self._enter(hook)
        except BaseException as error:
            self._leave(error)
            raise

    def _enter(self, hook: Callable[[T], AbstractContextManager[None]]) -> None:
        manager = hook(self._value)
        try:
            manager.__enter__()
        except Exception:
            if not self._harmless:
                raise
            logger.exception("a hook of %s failed; the work goes on", self._name)
        else:
            self._open.append(manager)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        kind, trace = (type(error), error.__traceback__) if error is not None else (None, None)
        for manager in reversed(self._open):
            try:
                manager.__exit__(kind, error, trace)
            except BaseException as problem:
                if problem is not error:
                    logger.exception("a hook of %s failed after the work was done", self._name)
        self._open.clear()


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
