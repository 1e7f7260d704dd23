"""An event loop in a thread of its own, for code that is not on one."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any


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
