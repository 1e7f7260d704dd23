"""A bell: any thread, or a signal handler, rings it, and one thread that waits in a selector hears.

On Linux it is an event descriptor. Elsewhere, and under ``AZTASK_PORTABLE=1``, it is a pair of
connected sockets, which every system can wait for.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Protocol

from aztask.worker.platform import connected_pair, is_portable


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
