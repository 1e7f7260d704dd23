"""The worker's side of the fork server: it has pool processes started, and learns how they ended.

Rules
1. One thread calls, the supervisor's: the kernel's parent-death signal follows it. It waits for the
   server only when the pool is closed, and for processes only when they are killed: a lease may be
   short.
2. A server that is gone has taken its pool processes with it. The next start makes another one.
3. The first server is a copy of the worker, if that began without threads; a later one, beside
   threads and connections, is a new interpreter.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from aztask.worker.pool import forkserver
from aztask.worker.pool.childhandle import copied
from aztask.worker.pool.packets import socket_pair

ENDING_SECONDS: Final = 5.0
_ANSWER_BYTES: Final = 4096


class Forked:
    """A process that a server was asked for. status: how it ended, as `subprocess` has it; None if
    nobody knows, for its server ended with it. failed: why it could not be started.
    """

    def __init__(self, number: int, server: ForkServerHandle) -> None:
        self.number = number
        self.pid = 0
        self.ended = False
        self.status: int | None = None
        self.failed = ""
        self._server = server
        self._pidfd = -1
        self._killed = False

    def kill(self) -> None:
        """End it now, whatever it does; as soon as it is there, if it is not yet."""
        self._killed = True
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):  # it has ended, and the server has noticed
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def started(self, pid: int, pidfd: int) -> None:
        """The server has started it."""
        self.pid, self._pidfd = pid, pidfd
        if self._killed:
            self.kill()

    def wait(self) -> None:
        """Until it is dead, for `ENDING_SECONDS` at most.

        One that was killed and is not dead by then hangs in the kernel, and runs no line any more;
        one that the server has not started yet holds nothing.
        """
        if self._pidfd < 0:
            self._server.wait(self)
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(1000 * ENDING_SECONDS)

    def close(self) -> None:
        """Let go of it."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Process(Protocol):
    """What a server is, to the worker."""

    def kill(self) -> None:
        """End it now."""

    def wait(self, timeout: float | None = None) -> object:
        """Until it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""


def interpreted(ours: socket.socket, theirs: socket.socket) -> Process:
    """A new interpreter that serves at the other end of `ours`. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-m", forkserver.__name__, str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


class ForkServerHandle:
    """One fork server, until it or the worker ends. gone: whether it has ended."""

    def __init__(
        self, start: Callable[[socket.socket, socket.socket], Process] = interpreted
    ) -> None:
        """start: starts it, with our end and its own. Raises OSError."""
        self.gone = False
        self._processes: dict[int, Forked] = {}
        self._number = 0
        self._socket, theirs = socket_pair()
        self._socket.setblocking(False)
        with theirs:
            self._process = start(self._socket, theirs)

    def fileno(self) -> int:
        """Readable when `read` has something to do."""
        return self._socket.fileno()

    def fork(self, setup: Mapping[str, Any], descriptors: Sequence[int]) -> Forked:
        """Ask for a pool process. Raises OSError where the server is gone.

        setup: see `aztask.worker.pool.children`. descriptors: those of `forkserver.DESCRIPTORS`.
        """
        self._number += 1
        data = json.dumps({**setup, "number": self._number}).encode()
        socket.send_fds(self._socket, [data], descriptors)
        forked = self._processes[self._number] = Forked(self._number, self)
        return forked

    def read(self) -> list[Forked]:
        """Take what the server says; the processes that have ended.

        A dying server closes its socket before the kernel strikes its processes: they are dead when
        this returns, for what they ran may be given to another one then.
        """
        ended = []
        with suppress(BlockingIOError):
            while not self.gone:
                if (forked := self._read_one()) is not None:
                    ended.append(self._processes.pop(forked.number))
        if self.gone:
            for forked in self._processes.values():
                forked.kill()
                forked.wait()
                ended.append(forked)
            self._processes.clear()
        for forked in ended:
            forked.ended = True
        return ended

    def wait(self, forked: Forked) -> None:
        """Until that process was started, or there is none, for `ENDING_SECONDS` at most."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        give_up_at = time.monotonic() + ENDING_SECONDS
        while not (forked.pid or forked.ended or self.gone):
            if (left := give_up_at - time.monotonic()) <= 0:
                break
            if poll.poll(1000 * left):
                self.read()

    def close(self) -> None:
        """End it, and with it what it has started. A second time is nothing."""
        self._socket.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_one(self) -> Forked | None:
        """One packet; the process, if it is about its end. Raises BlockingIOError."""
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # it ended without reading what we said
            data = b""
        if not data:
            self.gone = True
            return None
        answer = json.loads(data)
        forked = self._processes[answer["number"]]
        if "pid" in answer:
            forked.started(answer["pid"], descriptors[0])
            return None
        forked.status, forked.failed = answer.get("status"), answer.get("failed", "")
        return forked


def first_server() -> ForkServerHandle | None:
    """A copy of this process, to be made before it imports the app; None where a later one has to
    do, for something has threads already.
    """
    if forkserver.has_threads():
        return None
    try:
        return ForkServerHandle(copied)
    except OSError:  # no more processes: the pool says so, and tries again
        return None
