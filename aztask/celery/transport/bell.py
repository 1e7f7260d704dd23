"""A descriptor by which other threads wake an event loop."""

from __future__ import annotations

import os
import select
import socket
import threading


class Bell:
    """Becomes readable when any thread rings, and stays so until the loop's thread silences it.

    A forked child has a copy of the descriptor, through which it would wake its parent: there,
    ringing does nothing.
    """

    def __init__(self) -> None:
        # Sockets, not an eventfd: macOS has none, and the event loop may use `select`.
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = self._closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Make the descriptor readable. Ringing again before it was silenced costs no system call.

        Hand over what the loop shall find before you ring: `silence` comes before it looks.
        """
        # Without the lock in a child: another thread of the parent may have held it at the fork.
        if self._rung or self._pid != os.getpid():
            return
        with self._lock:
            if not self._rung and not self._closed:
                self._rung = True
                self._writer.send(b"\0")

    def silence(self) -> None:
        """Make it unreadable. Look for work after this, not only before: someone may have rung."""
        with self._lock:
            if self._rung:
                self._reader.recv(1)
                self._rung = False

    def wait(self, seconds: float) -> bool:
        """Wait until it rings, at most `seconds`; True if it did."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        return bool(poller.poll(max(0.0, seconds) * 1000))

    def close(self) -> None:
        """Close the descriptor; a thread that rings later rings nothing."""
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()
