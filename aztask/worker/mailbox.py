"""The mailbox: everything that wakes the supervisor's loop from its wait.

Other threads post calls to it, it watches the sockets of the pool, and a signal handler wakes it.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable
from typing import Protocol

from aztask.support.parts import Part
from aztask.worker.bell import WakeBell, make_bell


class HasDescriptor(Protocol):
    """A socket, or anything else that a selector can wait for."""

    def fileno(self) -> int:
        """The descriptor to wait for."""
        ...


class Mailbox(Protocol):
    """The supervisor's loop alone watches, waits and runs; any thread may post or wake.

    `EventMailbox`, and the stepped one of the tests, which never waits.
    """

    def post(self, call: Callable[[], None], /) -> None:
        """Have `call` run in the supervisor's next turn."""

    def wake(self) -> None:
        """End the current wait, or the next one at once. Signal handlers may call this."""

    def watch(self, end: HasDescriptor, readable: Callable[[], None], /) -> None:
        """From now on, each wait calls `readable` when `end` has something to read."""

    def unwatch(self, end: HasDescriptor, /) -> None:
        """Stop watching `end`; call this before it is closed."""

    def wait(self, seconds: float, part: Part, /) -> None:
        """Wait up to `seconds`, then handle all that has happened, as one step of `part`."""

    def run(self) -> None:
        """Run the posted calls, those that they post included."""

    def close(self) -> None:
        """Close what it has open. A thread that still posts does no harm."""


class EventMailbox:
    """Waits for a bell and for the sockets of the pool."""

    def __init__(self, bell: WakeBell | None = None) -> None:
        """bell: by default the one of this system."""
        self._calls: deque[Callable[[], None]] = deque()
        self._bell = make_bell() if bell is None else bell
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ, self._bell.quiet)

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run in the supervisor's next turn."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """End the current wait, or the next one at once. Signal handlers may call this."""
        self._bell.ring()

    def watch(self, end: HasDescriptor, readable: Callable[[], None]) -> None:
        """From now on, each wait calls `readable` when `end` has something to read."""
        self._selector.register(end, selectors.EVENT_READ, readable)

    def unwatch(self, end: HasDescriptor) -> None:
        """Stop watching `end`; call this before it is closed."""
        self._selector.unregister(end)

    def wait(self, seconds: float, part: Part | None = None) -> None:
        """Wait up to `seconds` for something to happen, then handle all that has.

        part: what the handling is a step of.
        """
        ready = self._selector.select(seconds)
        if part is not None:
            part.begin()
        for key, _ in ready:
            key.data()
        self.run()

    def run(self) -> None:
        """Run the posted calls, those that they post included."""
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        """Close the descriptors. A thread that still posts does no harm."""
        self._selector.close()
        self._bell.close()
