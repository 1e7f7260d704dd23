"""The event loop of a pool process, on which its `async def` tasks run.

Rules
1. There is one loop for each process. It lives as long as the process, so clients that belong to a
   loop can be shared by all tasks. It is made when a coroutine or a lifespan first needs it.
2. It always runs in the main thread, so that a signal can interrupt code that blocks it
   (`aztask.worker.pool.interrupt`). Where plain functions run in the main thread too, the loop
   stands still in the meantime.
3. Whatever a coroutine raises, `SystemExit` included, never ends the loop.
4. A loop that can no longer wait, because a task closed its descriptors, ends the process. The
   worker replaces it, and the task has failed.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import selectors
import threading
import time
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from aztask.context import Context, context_in, current_context
from aztask.worker.pool.interrupt import CoroutineRun, InterruptSlot, MainThread
from aztask.worker.pool.packets import PacketsIn

logger = logging.getLogger(__name__)


class LoopDied(BaseException):
    """The loop can no longer wait (rule 4)."""


class TimedSelector(selectors.DefaultSelector):
    """Notes since when the loop has been busy, for `LoopWatch`; it costs under a microsecond.

    turns: how often the loop has finished a wait. busy_since: when the current turn began (seconds
    of `time.monotonic`); None while the loop waits. last_turn: the seconds of the turn before.
    """

    turns = 0
    busy_since: float | None = None
    last_turn = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events, as every selector does."""
        if self.busy_since is not None:
            self.last_turn = time.monotonic() - self.busy_since
        self.busy_since = None
        try:
            return super().select(timeout)
        except (OSError, ValueError) as error:
            raise LoopDied from error
        finally:
            self.turns += 1
            self.busy_since = time.monotonic()


class LazyLoop:
    """The event loop of a pool process, which makes it when it is first needed.

    * `made`: the loop, if it was needed already.
    """

    def __init__(self, main: MainThread) -> None:
        self._main = main
        self.made: EventLoop | None = None

    def get(self) -> EventLoop:
        """The loop. The first call comes from the main thread."""
        if self.made is None:
            self.made = EventLoop(self._main)
        return self.made


class EventLoop:
    """Runs coroutines for the slots of a pool process. Made in the main thread.

    `owners` maps each asyncio task to the context of the aztask task that created it.
    """

    def __init__(self, main: MainThread) -> None:
        self.main = main
        self.ident = threading.get_ident()
        self.selector = TimedSelector()
        self.loop = asyncio.SelectorEventLoop(self.selector)
        self.owners: WeakKeyDictionary[asyncio.Task[Any], Context] = WeakKeyDictionary()
        self.loop.set_task_factory(self._new_task)  # type: ignore[arg-type]  # **options: any
        asyncio.set_event_loop(self.loop)

    def call(self, awaitable: Awaitable[Any], slot: InterruptSlot) -> Any:
        """Run the awaitable for the slot and return its value; raises what it raises.

        In the main thread this runs the loop; in any other thread the loop must be running. It runs
        in a copy of the caller's context: hooks and tasks may have set variables in that.
        """
        run = CoroutineRun(self.main, self.loop)
        with slot.awaiting(run):
            if threading.get_ident() == self.ident:
                task = self._start(run, awaitable, contextvars.copy_context())
                self.drive(task)
                value, error = _outcome_of(run, task)
            else:
                value, error = self._call_from_thread(run, awaitable)
        if error is not None:
            raise error
        return value

    def own(self, context: Context) -> None:
        """Note that the running asyncio task runs the aztask task of this context."""
        if (task := asyncio.current_task(self.loop)) is not None:
            self.owners[task] = context

    def complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of aztask's own and return its value. The caller is the main thread."""
        task = self.loop.create_task(coroutine)
        self.drive(task)
        return task.result()

    def drive(self, future: asyncio.Future[Any]) -> None:
        """Run the loop until the future is done. The caller is the main thread."""
        while not future.done():
            try:
                self.loop.run_until_complete(future)
            except LoopDied as error:
                end_process("the event loop has died: did a task close its descriptors?", error)
            except BaseException as error:  # noqa: BLE001  # of a coroutine that a task left behind
                if not future.done():
                    _report(error)

    def receive(self, inbox: PacketsIn) -> Any:
        """Receive a packet, and run the loop while there is none. The caller is the main thread."""
        while True:
            try:
                return inbox.receive(wait=False)
            except BlockingIOError:
                self.loop.add_reader(inbox.fileno(), self.loop.stop)
            try:
                self.loop.run_forever()
            except LoopDied as error:
                end_process("the event loop has died: did a task close its descriptors?", error)
            except BaseException as error:  # noqa: BLE001  # of a coroutine that a task left behind
                _report(error)
            finally:
                self.loop.remove_reader(inbox.fileno())

    def _call_from_thread(
        self, run: CoroutineRun, awaitable: Awaitable[Any]
    ) -> tuple[Any, BaseException | None]:
        done: Future[tuple[Any, BaseException | None]] = Future()
        context = contextvars.copy_context()

        def start() -> None:
            task = self._start(run, awaitable, context)
            task.add_done_callback(lambda _: done.set_result(_outcome_of(run, task)))

        self.loop.call_soon_threadsafe(start)
        try:
            return done.result()
        except BaseException:  # an interrupt of this thread: no thread waits for the coroutine
            self.loop.call_soon_threadsafe(lambda: run.task and run.task.cancel())
            raise

    def _start(
        self, run: CoroutineRun, awaitable: Awaitable[Any], context: contextvars.Context
    ) -> asyncio.Task[Any]:
        run.task = self.loop.create_task(_outcome(run, awaitable), context=context)
        return run.task

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        context = options.get("context")
        owner = current_context() if context is None else context_in(context)
        if owner is not None:
            self.owners[task] = owner
        return task


def end_process(why: str, error: BaseException) -> NoReturn:
    """End this process, which cannot go on; the worker replaces it, and what it ran has failed."""
    logger.critical("this pool process ends: %s", why, exc_info=error)
    os._exit(1)


async def _outcome(
    run: CoroutineRun, awaitable: Awaitable[Any]
) -> tuple[Any, BaseException | None]:
    """(the value, None) or (None, the error): asyncio ends its loop at some errors."""
    if run.error is not None:  # it was interrupted before it could start
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        return None, run.error()
    try:
        return await awaitable, None
    except BaseException as error:  # noqa: BLE001  # task code may raise anything at all
        return None, run.meaning(error)


def _outcome_of(run: CoroutineRun, task: asyncio.Task[Any]) -> tuple[Any, BaseException | None]:
    """The task's outcome, also if an interrupt hit it before or after the awaitable itself."""
    try:
        outcome: tuple[Any, BaseException | None] = task.result()
    except BaseException as error:  # noqa: BLE001
        return None, run.meaning(error)
    return outcome


def _report(error: BaseException) -> None:
    logger.error(
        "a coroutine that a task left behind ended with an error; the event loop continues",
        exc_info=error,
    )
