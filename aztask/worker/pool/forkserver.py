"""The fork server: it has imported what every pool process needs, and forks them.

A pool process starts in 30 ms instead of 300 that way, and the memory of those modules is there
once for all [measured]. The user's modules are not among them: each pool process imports these for
itself, for the threads and connections that a module may make do not survive a fork.

The server is a copy of the worker, made before the worker imported the app (see
`aztask.worker.pool.childhandle`). Where none can be made, it is
``python -m aztask.worker.pool.forkserver`` with a socket and the worker's process id.

Rules
1. Nothing here starts a thread: a fork would copy the locks that it holds. Where something else
   has (an agent that the interpreter itself loads), pool processes start with a new interpreter.
2. When the worker is gone, so is this process, and with it every pool process.
3. Each request is one packet, a pool process's setup with four descriptors; the answer to it is
   one, with a descriptor of the process. It alone can learn how a pool process ended, and says so.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from aztask.worker.pool import child

REQUEST_BYTES: Final = 1 << 20
NAME: Final = b"aztask-fork"
TASKS: Final = Path("/proc/self/task")
DESCRIPTORS: Final = ("inbox", "outbox", "control", "board")


class ForkServer:
    """The server, in its own process."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._children: dict[int, tuple[int, int]] = {}  # its descriptor -> (its number, its pid)

    def run(self) -> None:
        """Serve until the worker is gone."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._reap(descriptor)
                else:
                    self._serve()

    def _serve(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, REQUEST_BYTES, len(DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # it went without reading what we said
            os._exit(0)
        if not data:
            os._exit(0)
        setup = json.loads(data) | dict(zip(DESCRIPTORS, descriptors, strict=True))
        setup["parent"] = os.getpid()
        try:
            pid = spawn(setup) if has_threads() else self._fork(setup)
        except OSError as error:
            self._say({"number": setup["number"], "failed": str(error)})
        else:
            self._started(setup["number"], pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def _started(self, number: int, pid: int) -> None:
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = (number, pid)
        self._poll.register(descriptor, select.POLLIN)
        self._say({"number": number, "pid": pid}, descriptor)

    def _reap(self, descriptor: int) -> None:
        number, pid = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._say({"number": number, "status": status})

    def _say(self, answer: dict[str, Any], *descriptors: int) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(answer).encode()], descriptors)
        except OSError:
            os._exit(0)  # the worker is gone

    def _fork(self, setup: dict[str, Any]) -> int:
        """The process id of a copy of this process, which goes on as a pool process."""
        if pid := os.fork():
            return pid
        try:
            self._socket.close()
            for descriptor in self._children:
                os.close(descriptor)
            os.setsid()
            child.serve(setup)
        except BaseException:  # noqa: BLE001  # it must not go on as the server
            traceback.print_exc()
        os._exit(1)


def has_threads() -> bool:
    """Whether this process has more than one thread: a fork would copy locks of the others."""
    return len(list(TASKS.iterdir())) > 1


def spawn(setup: dict[str, Any]) -> int:
    """The process id of a new interpreter, which becomes a pool process."""
    for name in DESCRIPTORS:
        os.set_inheritable(setup[name], True)
    command = [sys.executable, "-m", child.__name__, json.dumps(setup)]
    return os.posix_spawn(sys.executable, command, os.environ, setsid=True)


def serve(end: socket.socket, parent: int) -> None:
    """Be the fork server until the worker, of that process id, is gone."""
    child.name_thread(NAME)
    end.set_inheritable(False)
    child.die_with_parent(parent)
    child.leave_ending_to_worker()
    gc.freeze()  # a collection would write to, and so copy, the pages that are shared
    ForkServer(end).run()


def main() -> None:
    """Start from the command line."""
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    main()
