"""A thread pool: threads that carry out requests in parallel, each waiting for its own answer.

A thread starts when one is needed and none is idle, up to a limit. All are daemons: a request that
hangs does not keep the process alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ThreadPool:
    """A pool of at most `size` threads. Any thread may use it."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._condition = threading.Condition(threading.Lock())
        self._threads = 0
        self._idle = 0
        self._closed = False

    def submit(self, call: Callable[[], Answer]) -> Future[Answer]:
        """Run `call` on the next free thread."""
        future: Future[Answer] = Future()
        with self._condition:
            if self._closed:
                raise RuntimeError("the broker was closed; make another one")
            self._work.append((future, call))
            if self._idle >= len(self._work):
                self._condition.notify()
            elif self._threads < self._size:
                self._threads += 1
                threading.Thread(
                    target=self._serve, name=f"aztask-{self._name}-{self._threads}", daemon=True
                ).start()
        return future

    def map(self, call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """The answers of `call` for the items, in order; raises what a call raises.

        A single item is handled on the caller's thread.
        """
        if len(items) == 1:
            return [call(items[0])]
        futures = [self.submit(lambda item=item: call(item)) for item in items]  # type: ignore[misc]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Accept no more calls; queued ones are still carried out."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                while not self._work and not self._closed:
                    self._condition.wait()
                self._idle -= 1
                if not self._work:
                    return
                future, call = self._work.popleft()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                future.set_exception(error)
            del future, call
