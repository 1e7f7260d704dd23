"""Raising an error in a running task from another thread.

A pool process that runs one task at a time runs it in the main thread, where a signal interrupts
even a blocking system call. Slots on threads get an asynchronous exception, which CPython raises at
the next bytecode (`PyThreadState_SetAsyncExc`, C API), so a blocking call has to return first. C
code that holds the GIL cannot be interrupted in either way: the worker kills its process after a
grace period.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from types import FrameType

from aztask.errors import AztaskError

SIGNAL = getattr(signal, "SIGUSR1", signal.SIGTERM)  # no worker runs where it is missing


class InterruptSlot:
    """Knows which delivery a slot runs, so that an interrupt never hits another one."""

    def __init__(self, index: int, *, main_thread: bool) -> None:
        self.index = index
        self._main_thread = main_thread
        self._lock = threading.Lock()
        self._number = 0
        self._thread = 0
        self._error: type[AztaskError] | None = None
        if main_thread:
            signal.signal(SIGNAL, self._on_signal)

    def begin(self, number: int) -> None:
        """The calling thread runs delivery `number` from now on."""
        with self._lock:
            self._number = number
            self._thread = threading.get_ident()
            self._error = None

    def end(self) -> None:
        """The delivery has ended: later interrupts for it do nothing."""
        with self._lock:
            self._number = 0
            self._error = None
            if not self._main_thread:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)

    def interrupt(self, number: int, error: type[AztaskError]) -> None:
        """Raise `error` in the task, if the slot still runs delivery `number`."""
        with self._lock:
            if self._number != number:
                return
            if self._main_thread:
                self._error = error
                signal.pthread_kill(self._thread, SIGNAL)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(error)
                )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        error, self._error = self._error, None
        if error is not None and self._number:
            raise error
