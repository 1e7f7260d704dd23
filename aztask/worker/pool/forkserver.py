"""The fork server: it has imported what every pool process needs, and forks them.

It is our own: the processes of `multiprocessing`'s fork server outlive a worker that is killed.

A pool process starts in 30 ms this way instead of 300 ms, and all of them share the memory of the
imported modules [measured]. Each pool process imports the user's modules itself, because threads
and connections that a module opens do not survive a fork.

The server is a copy of the worker, made before the worker imports the app (see
`aztask.worker.pool.forking`). Where no copy can be made, it is
``python -m aztask.worker.pool.forkserver`` with a socket and the worker's process id.

Rules
1. Nothing here starts a thread: a fork would copy the locks that it holds. If something else did
   (such as a monitoring agent that the interpreter loads), each pool process is a new interpreter.
2. When the worker ends, this process ends, and every pool process with it.
3. Each request is one packet: the setup of a pool process and four descriptors. The answer is one
   packet with a descriptor of the process. Only this process, as the parent, can learn how a pool
   process ended; it reports that in a further packet.
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

from aztask.worker.pool import poolprocess
from aztask.worker.stopsignals import leave_ending_to_worker

REQUEST_BYTES: Final = 1 << 20
NAME: Final = b"aztask-fork"
TASKS: Final = Path("/proc/self/task")
DESCRIPTORS: Final = ("inbox", "outbox", "control", "board")


class ForkServer:
    """Forks pool processes and reports their ends, in a process of its own."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._children: dict[int, tuple[int, int]] = {}  # its descriptor -> (its number, its pid)

    def run(self) -> None:
        """Serve until the worker ends, which ends this process too."""
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
        except ConnectionResetError:  # the worker ended without reading our answers
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
            os._exit(0)  # the worker has ended

    def _fork(self, setup: dict[str, Any]) -> int:
        """Fork a pool process; returns its process id."""
        if pid := os.fork():
            return pid
        try:
            self._socket.close()
            for descriptor in self._children:
                os.close(descriptor)
            os.setsid()
            poolprocess.serve_forked(setup)
        except BaseException:  # noqa: BLE001  # it must not continue as a second server
            traceback.print_exc()
        os._exit(1)


def has_threads() -> bool:
    """Whether this process has more than one thread; a fork would copy the others' locks."""
    return len(list(TASKS.iterdir())) > 1


def spawn(setup: dict[str, Any]) -> int:
    """Start a new interpreter as a pool process; returns its process id."""
    for name in DESCRIPTORS:
        os.set_inheritable(setup[name], True)
    command = [sys.executable, "-m", poolprocess.__name__, json.dumps(setup)]
    return os.posix_spawn(sys.executable, command, os.environ, setsid=True)


def serve(end: socket.socket, parent: int) -> None:
    """Be the fork server until the worker ends. parent: the worker's process id."""
    poolprocess.name_thread(NAME)
    end.set_inheritable(False)
    poolprocess.die_with_parent(parent)
    leave_ending_to_worker()
    gc.freeze()  # a collection would write to the shared pages, and so copy them
    ForkServer(end).run()


def main() -> None:
    """Serve at the socket and for the worker that the command line names."""
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    main()
