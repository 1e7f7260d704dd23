"""Being told when any process writes to a file, by the kernel (inotify(7)), instead of looking.

Rules
1. Of the threads that wait, one waits for the kernel and the others for that one; when it leaves,
   another one takes its place. No thread is made for it.
2. What is told is that something was written, not that it can be seen: SQLite writes to its log
   before it tells its readers. So whoever was told looks again a little later
   (`aztask.engine.waiter`).
3. Where the kernel does not tell (another system, no more watches, a file system that hides
   writes), `works` is false, and whoever waits has to look.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_IN_MODIFY: Final = 0x2  # sys/inotify.h
_READ_BYTES: Final = 65536
TRUST_SECONDS: Final = 5.0
"""A change that nobody told of for so long was missed: a writer may pause between telling and
committing, but not for longer than other writers wait for it."""


class Watch:
    """Tells the threads of this process. writes: a number that is another one after each write.

    path: the file; None where nobody else can write. It is watched from the first wait on, by two
    descriptors. In a forked child they stay open, and nothing reads them.
    """

    def __init__(self, path: str | None) -> None:
        self.writes = 0
        self.works = path is not None
        self._path = path or ""
        self._lock = threading.Lock()
        self._resting = threading.Condition(self._lock)
        self._waiting = threading.Condition(self._lock)
        self._looking = False
        self._closed = False
        self._told_at = 0.0
        self._poll = select.poll()
        self._inotify = self._wakened = -1

    def rest(self, done: Callable[[], bool], seconds: float) -> None:
        """Until `done`, for `seconds` at most. It is asked again after each `wake`."""
        with self._lock:
            self._resting.wait_for(lambda: self._closed or done(), seconds)

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Until `done`, for `seconds` at most. It is asked again after each write and `wake`."""
        until = time.monotonic() + seconds
        with self._lock:
            while not (self._closed or done()):
                left = until - time.monotonic()
                if left <= 0:
                    break
                if self._looking or not self.works:
                    self._waiting.wait(left)
                elif self._inotify < 0:
                    self._open()
                else:
                    self._wait_for_kernel(left)

    def wake(self) -> None:
        """Have all that rest or wait ask again."""
        with self._lock:
            if self._looking:
                os.eventfd_write(self._wakened, 1)
            self._resting.notify_all()
            self._waiting.notify_all()

    def doubt(self) -> None:
        """Somebody has seen a change of which nothing was told."""
        with self._lock:
            if self._inotify >= 0:
                self._read()
                if self._looking:  # whoever looks would wait for what was read here
                    os.eventfd_write(self._wakened, 1)
                self.works = time.monotonic() - self._told_at <= TRUST_SECONDS

    def close(self) -> None:
        """Let go of the file and end all waiting, now and later. A second time is nothing."""
        with self._lock:
            self._closed = True
            if self._looking:
                os.eventfd_write(self._wakened, 1)  # whoever looks lets go of it
            else:
                self._let_go()
            self._resting.notify_all()
            self._waiting.notify_all()

    def _open(self) -> None:
        """Nobody has told of earlier writes: this counts as one."""
        try:
            self._inotify = _watching(self._path)
            self._wakened = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except (OSError, AttributeError):  # there is no such thing here: rule 3
            self._let_go()
        else:
            self._poll.register(self._inotify, select.POLLIN)
            self._poll.register(self._wakened, select.POLLIN)
        self._told_at = time.monotonic()
        self.writes += 1

    def _wait_for_kernel(self, seconds: float) -> None:
        """The lock is free meanwhile. A time limit or Ctrl-C may raise in any line of the try."""
        self._looking = True
        try:
            self._lock.release()
            self._poll.poll(1000 * seconds)
        finally:
            self._lock.acquire()
            self._looking = False
            with suppress(BlockingIOError):
                os.eventfd_read(self._wakened)
            self._read()
            if self._closed:
                self._let_go()
            self._waiting.notify_all()  # one of the others waits for the kernel from now on

    def _read(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._inotify, _READ_BYTES)  # equal events are one: there are never many
            self._told_at = time.monotonic()
            self.writes += 1

    def _let_go(self) -> None:
        self.works = False
        for descriptor in (self._inotify, self._wakened):
            if descriptor >= 0:
                os.close(descriptor)
        self._inotify = self._wakened = -1

    def __del__(self) -> None:
        self._let_go()


def _watching(path: str) -> int:
    """A descriptor that is readable after a write. Raises OSError, AttributeError."""
    if sys.platform != "linux":
        raise OSError("inotify is Linux's")
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = int(library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    if library.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(descriptor)
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    return descriptor
