"""Waits for writes of any process to a file. The kernel reports them (inotify(7)), without polling.

Rules
1. One of the waiting threads waits for the kernel, and the others wait for that thread. When it
   leaves, another one takes its place. No extra thread is started.
2. A reported write may not be visible yet: SQLite writes to its log before its readers can see the
   change. So a woken thread checks a little later (rule 4).
3. If the kernel does not report writes (another system, no more watches, a file system that hides
   writes), `works` is False, and the waiting threads have to poll.

The waits of one thread
4. A write ends the wait, `SETTLING` seconds later, because SQLite writes to its log before readers
   can see the change. While the checks find nothing, short waits follow, each twice as long as the
   one before.
5. For `rest` seconds after a write, further writes do not end a wait. After a check that found a
   change, no short waits follow. So beside a busy writer there is one check per `rest` seconds.
6. If writes are not reported (`Watch.works` is False), no wait is longer than `rest` or `blind`.
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
"""If a change was not reported for this long, reports are missing: a writer may pause between its
write and its commit, but not for longer than other writers wait for it."""

SETTLING: Final = 0.001
LONGEST: Final = 0.5
"""Seconds between two checks while nothing is written."""


class Watch:
    """Reports writes to the threads of this process. Any thread may call.

    path: the file; None if no other process can write to it. It is watched from the first wait on,
    with two descriptors. In a forked child they stay open, but nothing reads them.

    ``writes`` changes with each report. ``works`` is False if writes are not reported.
    """

    def __init__(self, path: str | None) -> None:
        self.writes = 0
        self.works = path is not None
        self._path = path or ""
        self._lock = threading.Lock()
        self._resting = threading.Condition(self._lock)
        self._waiting = threading.Condition(self._lock)
        self._present = 0
        self._looking = False
        self._closed = False
        self._reported_at = 0.0
        self._poll: select.poll | None = None
        self._inotify = self._wakened = -1

    def rest(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait until `done`, for at most `seconds`. `done` is called again after each `wake`."""
        with self._lock:
            self._present += 1
            try:
                self._resting.wait_for(lambda: self._closed or done(), seconds)
            finally:
                self._present -= 1

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait until `done`, for at most `seconds`; it is called after each write and `wake`."""
        with self._lock:
            self._present += 1
            try:
                self._wait(done, time.monotonic() + seconds)
            finally:
                self._present -= 1

    def _wait(self, done: Callable[[], bool], until: float) -> None:
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
        """Make all resting and waiting threads call their `done` again."""
        with self._lock:
            if not self._present:
                return  # as in a program that only sends: this saves 2 % of its time
            if self._looking:
                os.eventfd_write(self._wakened, 1)
            self._resting.notify_all()
            self._waiting.notify_all()

    def doubt(self) -> None:
        """A thread has found a change that was not reported: check whether reports still come."""
        with self._lock:
            if self._inotify >= 0:
                self._read()
                if self._looking:  # the looking thread would wait for the event that was read here
                    os.eventfd_write(self._wakened, 1)
                self.works = time.monotonic() - self._reported_at <= TRUST_SECONDS

    def close(self) -> None:
        """Close the descriptors and end all waits, now and in the future. May be called twice."""
        with self._lock:
            self._closed = True
            if self._looking:
                os.eventfd_write(self._wakened, 1)  # the looking thread closes the descriptors
            else:
                self._let_go()
            self._resting.notify_all()
            self._waiting.notify_all()

    def _open(self) -> None:
        """Start watching. Earlier writes were not reported, so this counts as a write."""
        try:
            self._poll = select.poll()
            self._inotify = _watching(self._path)
            self._wakened = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except (OSError, AttributeError):  # not available here: rule 3
            self._let_go()
        else:
            self._poll.register(self._inotify, select.POLLIN)
            self._poll.register(self._wakened, select.POLLIN)
        self._reported_at = time.monotonic()
        self.writes += 1

    def _wait_for_kernel(self, seconds: float) -> None:
        """Wait for the kernel without the lock. A signal may raise in any line of the try."""
        self._looking = True
        try:
            self._lock.release()
            if self._poll is not None:  # as it is while `works`
                self._poll.poll(1000 * seconds)
        finally:
            self._lock.acquire()
            self._looking = False
            with suppress(BlockingIOError):
                os.eventfd_read(self._wakened)
            self._read()
            if self._closed:
                self._let_go()
            self._waiting.notify_all()  # another thread takes over waiting for the kernel

    def _read(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._inotify, _READ_BYTES)  # the kernel merges equal events, so there are few
            self._reported_at = time.monotonic()
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
    """A descriptor that becomes readable after a write. Raises OSError, AttributeError."""
    if sys.platform != "linux":
        raise OSError("inotify exists only on Linux")
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = int(library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    if library.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(descriptor)
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    return descriptor


def _never() -> bool:
    return False


class Waiter:
    """The waits of one thread. Make it before the first check; check before the first wait.

    rest, blind: seconds, see the rules.
    """

    def __init__(self, watch: Watch, *, rest: float, blind: float) -> None:
        self._watch = watch
        self._rest = rest
        self._blind = blind
        self._pause = rest
        self._ignores_writes_until = 0.0
        self._writes = watch.writes
        self._woken_by_write = True

    def wait(self, seconds: float, notified: Callable[[], bool] = _never) -> None:
        """Wait until the next check, until `notified`, or for at most `seconds`."""
        left = min(seconds, self._pause)
        if (rest := min(left, self._ignores_writes_until - time.monotonic())) > 0:
            self._watch.rest(notified, rest)
            left -= rest
        self._woken_by_write = left > 0 and not notified() and self._written(left, notified)
        if self._woken_by_write:
            if rest <= 0:  # otherwise most writes are older than this wait
                self._watch.rest(notified, SETTLING)
            self._ignores_writes_until = time.monotonic() + self._rest
            self._pause = SETTLING
            self._writes = self._watch.writes
        self._pause = min(2 * self._pause, LONGEST if self._watch.works else self._blind)

    def _written(self, seconds: float, notified: Callable[[], bool]) -> bool:
        watch, writes = self._watch, self._writes
        watch.wait(lambda: notified() or watch.writes != writes, seconds)
        return watch.writes != writes

    def found_change(self) -> None:
        """Call this if the check after a wait has found a change."""
        if not self._woken_by_write:
            self._watch.doubt()
        self._pause = max(self._pause, self._rest)


class WakeUp:
    """Wakes the threads that wait for a queue's messages. watch: the watch they wait on."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.count = 0
        self.closed = False

    def notify(self, committed: bool = True) -> None:
        """Wake the waiting threads, unless the transaction was rolled back."""
        if committed:
            self.count += 1  # two calls at once may count as one: both have committed by then
            self.watch.wake()

    def close(self) -> None:
        """End all waits, now and in the future."""
        self.closed = True
        self.notify()
