"""A thread pool: threads that carry out requests in parallel, each waiting for its own answer.

A thread starts when one is needed and none is idle, up to a limit. All are daemons: a request that
hangs does not keep the process alive. An error of a request belongs to its caller; a request that
never ends is a part that stands still.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from aztask.support.parts import LONGEST_STEP, Part

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ThreadPool:
    """A pool of at most `size` threads. Any thread may use it."""

    def __init__(self, name: str, size: int, *, longest: float = LONGEST_STEP) -> None:
        """longest: seconds that one call may take."""
        self._name = name
        self.part = Part(name, longest=longest)
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
                raise RuntimeError(f"the app that asks ({self._name}) was closed; make another one")
            if self._idle <= len(self._work) and self._threads < self._size:
                self._start_thread()
            self._work.append((future, call))
            self._condition.notify()
        return future

    def _start_thread(self) -> None:
        """Raises RuntimeError if there is no thread and none can be started."""
        name = f"aztask-{self._name}-{self._threads + 1}"
        try:
            self.part.thread(self._serve, name).start()
        except RuntimeError:
            if not self._threads:
                raise  # the call would wait without end
        else:
            self._threads += 1

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
        self.part.stop()

    def _serve(self) -> None:
        self.part.rest()  # it waits for work again, after whatever failed
        while (work := self._next()) is not None:
            future, call = work
            try:
                self._carry_out(future, call)
            except BaseException as error:
                if not future.done():  # its caller must not wait without end
                    future.set_exception(error)
                raise
            del work, future, call

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._condition:
            self._idle += 1
            try:
                while not self._work and not self._closed:
                    self._condition.wait()
            finally:
                self._idle -= 1
            return self._work.popleft() if self._work else None

    def _carry_out(self, future: Future[Any], call: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return  # the caller no longer waits for it
        self.part.begin()
        try:
            answer = call()
        except BaseException as error:  # noqa: BLE001  # the caller gets it
            future.set_exception(error)
        else:
            future.set_result(answer)
        self.part.rest()


# -- an event loop in a thread of its own, for code that is not on one ---------------------


class LoopThread:
    """Starts when it is first used. Any thread but its own may call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Run the awaitable in a copy of the caller's context variables; returns its value.

        Raises what it raises. An interrupt of the caller cancels it.
        """
        loop, variables = self._started(), contextvars.copy_context()
        done: Future[Any] = Future()
        tasks: list[asyncio.Task[None]] = []

        def start() -> None:
            tasks.append(loop.create_task(_settle(awaitable, done), context=variables))

        loop.call_soon_threadsafe(start)
        try:
            return done.result()
        except BaseException:
            if not done.done():
                loop.call_soon_threadsafe(lambda: tasks and tasks[0].cancel())
            raise

    def close(self) -> None:
        """Stop the loop; what still runs on it is cancelled."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop


async def _settle(awaitable: Awaitable[Any], done: Future[Any]) -> None:
    try:
        done.set_result(await awaitable)
    except BaseException as error:  # noqa: BLE001  # it belongs to the caller
        done.set_exception(error)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
