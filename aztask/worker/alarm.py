"""What wakes the supervisor's loop from its wait: any thread rings, and a signal handler may."""

from __future__ import annotations

import contextlib
import socket


class Alarm:
    """Readable since it was rung, until it is quiet again."""

    def __init__(self) -> None:
        self._listening, self._ringing = socket.socketpair()
        for end in (self._listening, self._ringing):
            end.setblocking(False)

    def fileno(self) -> int:
        """What a selector waits for."""
        return self._listening.fileno()

    def ring(self) -> None:
        """Wake the loop, or have its next wait end at once."""
        with contextlib.suppress(OSError):  # it rings already (full), or is gone
            self._ringing.send(b"\0")

    def quiet(self) -> None:
        """Take every ring so far as heard."""
        try:
            while len(self._listening.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Let go of both ends."""
        self._listening.close()
        self._ringing.close()
