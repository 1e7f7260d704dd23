"""Hooks: code that runs around something, and listeners: code that is notified of something.

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

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Generic, TypeAlias, TypeVar

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
