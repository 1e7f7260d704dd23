"""The mailbox: everything that wakes the supervisor's loop from its wait.

Other threads post calls to it, it watches the sockets of the pool, and a signal handler wakes it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections import deque
from collections.abc import Callable
from typing import Protocol


class HasDescriptor(Protocol):
    """A socket, or anything else that a selector can wait for."""

    def fileno(self) -> int:
        """The descriptor to wait for."""
        ...


class Mailbox:
    """The supervisor's loop alone watches, waits and runs; any thread may post or wake."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ, self._quiet)

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run in the supervisor's next turn."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """End the current wait, or the next one at once. Signal handlers may call this."""
        if self._bell >= 0:  # else the worker has ended
            os.eventfd_write(self._bell, 1)

    def watch(self, end: HasDescriptor, readable: Callable[[], None]) -> None:
        """From now on, each wait calls `readable` when `end` has something to read."""
        self._selector.register(end, selectors.EVENT_READ, readable)

    def unwatch(self, end: HasDescriptor) -> None:
        """Stop watching `end`; call this before it is closed."""
        self._selector.unregister(end)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for something to happen, then handle all that has."""
        for key, _ in self._selector.select(seconds):
            key.data()
        self.run()

    def run(self) -> None:
        """Run the posted calls, those that they post included."""
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        """Close the descriptors. A thread that still posts does no harm."""
        bell, self._bell = self._bell, -1
        self._selector.close()
        if bell >= 0:
            os.close(bell)

    def _quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
