"""The mailbox: everything that wakes the supervisor's loop from its wait.

Other threads post calls to it, it watches the sockets of the pool, and a signal handler wakes it.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from aztask.support.parts import Part
from aztask.worker.platform import connected_pair, is_portable

# -- The bell --------------------------------------------------------------------------------------
#
# Any thread, or a signal handler, rings it, and one thread that waits in a selector hears. On Linux
# it is an event descriptor. Elsewhere, and under ``AZTASK_PORTABLE=1``, it is a pair of connected
# sockets, which every system can wait for.


class WakeBell(Protocol):
    """What rings, and what hears it: `EventBell` on Linux, `SocketBell` elsewhere."""

    def fileno(self) -> int:
        """Readable from a ring until `quiet`."""

    def ring(self) -> None:
        """Make it readable. Signal handlers may call this; rings before `quiet` count once."""

    def quiet(self) -> None:
        """Make it unreadable until the next ring."""

    def close(self) -> None:
        """Close its descriptors. A ring afterwards does no harm."""


class EventBell:
    """An event descriptor, see eventfd(2)."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable from a ring until `quiet`."""
        return self._descriptor

    def ring(self) -> None:
        """End the wait of the hearer, or its next one at once."""
        if self._descriptor >= 0:  # else it is closed
            os.eventfd_write(self._descriptor, 1)

    def quiet(self) -> None:
        """Make it unreadable until the next ring."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; rings after that are lost."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class SocketBell:
    """A pair of connected sockets: a byte in it is a ring."""

    def __init__(self) -> None:
        self._heard, self._rung = connected_pair()
        for end in (self._heard, self._rung):
            end.setblocking(False)

    def fileno(self) -> int:
        """Readable from a ring until `quiet`."""
        return self._heard.fileno()

    def hear_signals(self) -> None:
        """Have every signal of this process ring it; the calling thread is the main thread.

        On Windows a signal does not end the wait of a selector, so its handler would run late.
        """
        signal.set_wakeup_fd(self._rung.fileno(), warn_on_full_buffer=False)

    def ring(self) -> None:
        """End the wait of the hearer, or its next one at once."""
        # Full of rings that nothing has heard yet, or closed: either way there is nothing to do.
        with suppress(OSError):
            self._rung.send(b"\0")

    def quiet(self) -> None:
        """Make it unreadable until the next ring."""
        with suppress(BlockingIOError):
            while self._heard.recv(4096):
                pass

    def close(self) -> None:
        """Close both sockets; rings after that are lost."""
        self._heard.close()
        self._rung.close()


def make_bell() -> WakeBell:
    """The bell of this system."""
    return SocketBell() if is_portable() else EventBell()


# -- The mailbox -----------------------------------------------------------------------------------


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
