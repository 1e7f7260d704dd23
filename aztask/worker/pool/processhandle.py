"""A copy of this process that becomes the fork server.

It is made at the start of the command ``aztask worker``: the modules of aztask have been imported,
but there is no thread, no connection and nothing of the app yet. The copy costs some milliseconds;
a new interpreter would have to import all modules again [measured: 0.25 s of processor time].
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final

from aztask.worker.pool import forkserver

_DESCRIPTORS: Final = Path("/proc/self/fd")
_STANDARD: Final = 3  # input, output and errors come first


class ProcessHandle:
    """The parent's handle of the process: as much of `subprocess.Popen` as is needed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._ended = False

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int, /) -> None:
        """Send the signal, unless the process has ended."""
        if not self._ended:
            signal.pidfd_send_signal(self._pidfd, sig)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self._ended:
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
        os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        self._ended = True


def copied(ours: socket.socket, theirs: socket.socket) -> ProcessHandle:
    """Fork the process, which serves at the other end of `ours`. Raises OSError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or both processes would write what is buffered
    parent = os.getpid()
    if pid := os.fork():
        return ProcessHandle(pid)
    try:
        ours.close()
        _go_alone(theirs.fileno())
        forkserver.serve(theirs, parent)
    except BaseException:  # noqa: BLE001  # it must not continue as a second worker
        traceback.print_exc()
    os._exit(1)


def _go_alone(kept: int) -> None:
    """Leave the terminal's session and close all that the parent has open, but `kept`."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for descriptor in [int(each.name) for each in _DESCRIPTORS.iterdir()]:
        if descriptor >= _STANDARD and descriptor != kept:
            with suppress(OSError):  # one of them was that of the listing itself
                os.close(descriptor)
