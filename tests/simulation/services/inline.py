"""A thread pool without threads: each call is made at once, by the caller.

It has the order of its items where the real one (`aztask.support.threadpool`) has none. Requests
that the real pool makes in parallel follow each other here, each with its own way to the service.
A pool whose callers look for the answers later posts its calls: their requests are on their way
while the program goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from aztask.support.parts import Part
from aztask.support.threadpool import ThreadPool

from .wire import Line

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Ended(Future[Answer]):
    """A finished future, without the locks that waiting for one needs."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        self._value: Answer
        self._error: Exception | None = None
        try:
            self._value = call()
        except Exception as error:  # noqa: BLE001  # it belongs to the reader of the future
            self._error = error

    def done(self) -> bool:
        """It is."""
        return True

    def exception(self, timeout: float | None = None) -> Exception | None:
        """The call's error."""
        return self._error

    def result(self, timeout: float | None = None) -> Answer:
        """The call's answer."""
        if self._error is not None:
            raise self._error
        return self._value


class InlinePool(ThreadPool):
    """Carries out each call before `submit` returns."""

    def __init__(self, name: str) -> None:
        self.part = Part(name, listed=False)
        self._name = name
        self._closed = False

    def submit(self, call: Callable[[], Answer]) -> Future[Answer]:
        """The call's answer, or its error."""
        if self._closed:
            raise RuntimeError(f"the pool {self._name} was closed; make another one")
        return Ended(call)

    def map(self, call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """The answers in order. All calls are made, then the first error is raised."""
        if self._closed:
            raise RuntimeError(f"the pool {self._name} was closed; make another one")
        answers: list[Answer] = []
        first: Exception | None = None
        for item in items:
            try:
                answers.append(call(item))
            except Exception as error:  # noqa: BLE001  # it is raised when all calls are made
                first = first or error
        if first is not None:
            raise first
        return answers

    def close(self) -> None:
        """Accept no more calls."""
        self._closed = True


class PostingPool(InlinePool):
    """Posts each call over a line. A call of it makes one request."""

    def __init__(self, name: str, line: Line) -> None:
        super().__init__(name)
        self._line = line

    def submit(self, call: Callable[[], Answer]) -> Future[Answer]:
        """The call's answer, once it is there."""
        if self._closed:
            raise RuntimeError(f"the pool {self._name} was closed; make another one")
        return self._line.post(call)

    def map(self, call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """As `InlinePool.map`: it waits for all, so nothing is posted."""
        return super().map(call, items)


def replaced(pool: ThreadPool) -> InlinePool:
    """An inline pool in the place of this one, which is closed."""
    pool.close()
    return InlinePool(pool.part.name)
