"""Raising an error in a running task from another thread.

* A plain function in the main thread: a signal interrupts even a blocking system call.
  Windows has no such signals: there the error is raised at the next bytecode.
* A plain function in another thread: an asynchronous exception, which CPython raises at the next
  bytecode (`PyThreadState_SetAsyncExc`, C API), so a blocking call has to return first.
* A coroutine on the process's event loop, which always runs in the main thread: while it awaits, it
  is cancelled as asyncio defines it. While it blocks the loop, a signal interrupts it like a plain
  function.

C code that holds the GIL cannot be interrupted in any of these ways: the worker kills its process
after a grace period.
"""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from aztask.errors import AztaskError
from aztask.worker.platform import CAN_SIGNAL_THREADS

SIGNAL = getattr(signal, "SIGUSR1", signal.SIGTERM)  # on Windows nothing else sends SIGTERM


class MainThread:
    """Makes calls in the main thread, in the middle of whatever it does. A call may raise there."""

    def __init__(self) -> None:
        """Install the signal handler; only the main thread may do so."""
        self._ident = threading.get_ident()
        self._calls: deque[Callable[[], None]] = deque()
        signal.signal(SIGNAL, self._on_signal)

    def call(self, function: Callable[[], None]) -> None:
        """Have the main thread call `function` as soon as it runs Python code; any thread may."""
        self._calls.append(function)
        self._ring()

    def _ring(self) -> None:
        if CAN_SIGNAL_THREADS:
            signal.pthread_kill(self._ident, SIGNAL)
        else:
            _thread.interrupt_main(SIGNAL)  # as if a signal had come, without ending a wait

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        while self._calls:
            function = self._calls.popleft()
            try:
                function()
            except BaseException:
                if self._calls:  # this one ends the handler; the signal brings the others
                    self._ring()
                raise


class CoroutineRun:
    """A task's coroutine on the event loop.

    `task`: the asyncio task that runs it; None until it starts. `error`: the interrupt that reached
    it, if any.
    """

    def __init__(
        self,
        main: MainThread,
        loop: asyncio.AbstractEventLoop,
        task: asyncio.Task[Any] | None = None,
    ) -> None:
        self._main = main
        self._loop = loop
        self._ended = False
        self.task = task
        self.error: type[AztaskError] | None = None

    def interrupt(self, error: type[AztaskError]) -> None:
        """Raise `error` in the coroutine if it blocks the loop, else cancel it; any thread may."""
        self._main.call(lambda: self.interrupt_now(error))
        if not CAN_SIGNAL_THREADS:  # the loop may wait, and the main thread with it
            self._loop.call_soon_threadsafe(lambda: None)

    def interrupt_now(self, error: type[AztaskError]) -> None:
        """As `interrupt`, in the main thread, in a signal handler. May raise `error`."""
        if self._ended or (self.task is not None and self.task.done()):
            return
        self.error = error
        if self.task is None:
            return  # it ends when it should start
        if asyncio.current_task(self._loop) is self.task:
            raise error
        self._loop.call_soon_threadsafe(self.task.cancel, error.__name__)

    def end(self) -> None:
        """Note that the task's own code has ended: later interrupts do nothing."""
        self._ended = True

    def meaning(self, error: BaseException) -> BaseException:
        """The interrupt in place of the cancellation by which it reached the coroutine."""
        if isinstance(error, asyncio.CancelledError) and self.error is not None:
            return self.error().with_traceback(error.__traceback__)
        return error


class _Cleared(BaseException):
    """Takes the place of an interrupt that came too late, and is caught at once."""


def _clear_interrupt(thread: int) -> None:
    """Take back an interrupt of the calling thread that may not have been raised yet.

    Setting none (NULL) would do that as well, but CPython 3.11 then keeps its flag for asynchronous
    exceptions: all threads run slower, and one with a trace function never leaves its next call.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), ctypes.py_object(_Cleared)
        )
        while True:  # it is raised within a few bytecodes
            time.sleep(0)
    except _Cleared:
        pass


class InterruptSlot:
    """Knows which delivery a slot runs, so that an interrupt never hits another one."""

    def __init__(self, index: int, *, main: MainThread | None = None) -> None:
        """main: given if plain functions run in the main thread in this slot."""
        self.index = index
        self._main = main
        self._lock = threading.Lock()
        self._number = 0
        self._thread = 0
        self._coroutine: CoroutineRun | None = None
        self._interrupted = False

    def begin(self, number: int, coroutine: CoroutineRun | None = None) -> None:
        """The calling thread, or the coroutine, runs delivery `number` from now on."""
        with self._lock:
            self._number = number
            self._thread = threading.get_ident()
            self._coroutine = coroutine
            self._interrupted = False

    def end(self) -> None:
        """The delivery has ended: later interrupts for it do nothing."""
        with self._lock:
            self._number = 0
            if self._coroutine is not None:
                self._coroutine.end()
                self._coroutine = None
            elif self._main is None and self._interrupted:
                _clear_interrupt(self._thread)

    @contextmanager
    def awaiting(self, coroutine: CoroutineRun) -> Iterator[None]:
        """In the block, interrupts go to the coroutine for which the calling thread waits."""
        with self._lock:
            self._coroutine = coroutine
        try:
            yield
        finally:
            with self._lock:
                coroutine.end()
                self._coroutine = None

    def interrupt(self, number: int, error: type[AztaskError]) -> None:
        """Raise `error` in the task, if the slot still runs delivery `number`."""
        with self._lock:
            if self._number != number:
                return
            if self._coroutine is not None:
                self._coroutine.interrupt(error)
            elif self._main is not None:
                self._main.call(lambda: self._raise(number, error))
            else:
                self._interrupted = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(error)
                )

    def _raise(self, number: int, error: type[AztaskError]) -> None:
        """Raise the error, unless the delivery has ended or waits for its coroutine by now."""
        if self._number != number:
            return
        if self._coroutine is not None:
            self._coroutine.interrupt_now(error)
        else:
            raise error
