"""The worker's side of the fork server: asks for pool processes, links the worker to them, and
learns how they ended.

Rules
1. Only the supervisor's thread calls, because the kernel's parent-death signal follows it. It waits
   for the server only when the pool is closed, and for processes only when they are killed: leases
   may be short.
2. When a server ends, its pool processes end too. The next start makes another server.
3. A server that owes answers and gives none for `SILENT_SECONDS` is resumed (SIGCONT), because it
   may have been stopped. If it still gives none, it is killed, and rule 2 applies. Hundreds of
   processes that start at once may keep it busy for longer, with answers all the time.
4. The first server is a copy of the worker, if that began without threads. A later one is a new
   interpreter, because by then the worker has threads and connections.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from aztask.support.failpoint import hit
from aztask.worker.mailbox import Mailbox
from aztask.worker.platform import memory_of
from aztask.worker.pool import forkserver
from aztask.worker.pool.link import ANSWERS_A_TURN, Board, Link, PoolPlan
from aztask.worker.pool.packets import Packets, socket_pair
from aztask.worker.pool.poolprocess import setup_of

# -- A copy of this process that becomes the fork server.
#
# It is made at the start of the command ``aztask worker``: the modules of aztask have been
# imported, but there is no thread, no connection and nothing of the app yet. The copy costs some
# milliseconds; a new interpreter would have to import all modules again [measured: 0.25 s of
# processor time].

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


logger = logging.getLogger(__name__)

ENDING_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 5.0
_ANSWER_BYTES: Final = 4096


class Forked:
    """A process that a server was asked for.

    status: its exit code, negative for a signal, as in `subprocess`; None while it runs, and if its
    server ended with it. failed: why it could not be started.
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
        """Kill it and its process group now; if the server has not started it yet, as soon as it
        has.

        The group is what its tasks started, less what they made a group of its own. It is killed
        first: as long as the process has not ended, no other group can have its number.
        """
        self._killed = True
        if self._pidfd >= 0 and not _readable(self._pidfd):
            with suppress(ProcessLookupError):  # it has ended, and the server has reaped it
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def memory(self) -> int:
        """The bytes of memory that it uses; what it shares with its siblings counts, too."""
        return memory_of(self.pid)

    def unreported(self) -> bool:
        """Whether the server has not reported that it started the process, or that it ended."""
        return self._pidfd < 0 or _readable(self._pidfd)

    def started(self, pid: int, pidfd: int) -> None:
        """Note that the server has started it."""
        self.pid, self._pidfd = pid, pidfd
        if self._killed:
            self.kill()

    def wait(self, seconds: float = ENDING_SECONDS) -> None:
        """Wait until it is dead, for `seconds` at most.

        A killed process that is not dead by then hangs in the kernel and runs no further line of
        code. A process that the server has not started yet holds nothing.
        """
        if self._pidfd < 0:
            self._server.wait(self)
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(1000 * seconds)

    def close(self) -> None:
        """Close the descriptor of the process."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Process(Protocol):
    """A fork server as the worker needs it: `subprocess.Popen` or `ProcessHandle`."""

    def kill(self) -> None:
        """Kill the server, which ends its pool processes."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal to the server, unless it has ended."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait until it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""


def interpreted(theirs: socket.socket) -> Process:
    """Start a new interpreter that serves at this end of a socket. Raises OSError."""
    return subprocess.Popen(  # noqa: S603  # this interpreter, without a shell
        [sys.executable, "-m", forkserver.__name__, str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


class ForkServerHandle:
    """The worker's handle of one fork server. gone: whether that has ended."""

    def __init__(self, ours: socket.socket, process: Process) -> None:
        """ours: our end of the socket at which the process serves."""
        self.gone = False
        self._processes: dict[int, Forked] = {}
        self._number = 0
        self._silent_since: float | None = None
        self._resumed = False
        self._socket = ours
        self._process = process
        hit("pool-server")

    def fileno(self) -> int:
        """Readable when `read` has something to do."""
        return self._socket.fileno()

    def fork(self, setup: Mapping[str, Any], descriptors: Sequence[int]) -> Forked:
        """Ask for a pool process. Raises OSError if the server has ended.

        setup: see `aztask.worker.pool.pool`. descriptors: those of `forkserver.DESCRIPTORS`.
        """
        self._number += 1
        data = json.dumps({**setup, "number": self._number}).encode()
        socket.send_fds(self._socket, [data], descriptors)
        forked = self._processes[self._number] = Forked(self._number, self)
        return forked

    def read(self) -> list[Forked]:
        """Read the server's packets; returns the processes that have ended.

        A dying server closes its socket before the kernel kills its processes. They are dead when
        this returns, because the caller then gives their tasks to other processes.
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
        """Wait until that process has started or failed to, for `ENDING_SECONDS` at most."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        give_up_at = time.monotonic() + ENDING_SECONDS
        while not (forked.pid or forked.ended or self.gone):
            if (left := give_up_at - time.monotonic()) <= 0:
                break
            if poll.poll(1000 * left):
                self.read()

    def check(self, now: float) -> None:
        """Resume, then kill, a server that owes an answer (rule 3). Call it about every second.

        now: seconds of a monotonic clock.
        """
        if self.gone or _readable(self._socket.fileno()) or not self._owes():
            self._silent_since, self._resumed = None, False
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since < SILENT_SECONDS:
            pass
        elif not self._resumed:
            logger.warning("the pool's fork server does not answer, it is resumed (SIGCONT)")
            self._process.send_signal(signal.SIGCONT)
            self._silent_since, self._resumed = now, True
        else:
            logger.error("the pool's fork server does not answer, it is replaced with its pool")
            self._process.kill()

    def _owes(self) -> bool:
        return any(forked.unreported() for forked in self._processes.values())

    def close(self) -> None:
        """End the server and all that it has started. A second call does nothing."""
        self._socket.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_one(self) -> Forked | None:
        """Read one packet; returns the process if it reports an end. Raises BlockingIOError."""
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # it ended without reading our requests
            data = b""
        if not data:
            self.gone = True
            return None
        self._silent_since, self._resumed = None, False
        answer = json.loads(data)
        forked = self._processes[answer["number"]]
        if "pid" in answer:
            forked.started(answer["pid"], descriptors[0])
            return None
        forked.status, forked.failed = answer.get("status"), answer.get("failed", "")
        return forked


def _readable(descriptor: int) -> bool:
    """Whether a socket has data or has been closed, or the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _ends() -> tuple[socket.socket, socket.socket]:
    """The ends of a server's socket: ours, which does not block, and its own."""
    ours, theirs = socket_pair()
    ours.setblocking(False)
    return ours, theirs


def next_server() -> ForkServerHandle:
    """Start a server as a new interpreter. Raises OSError."""
    ours, theirs = _ends()
    try:
        with theirs:
            return ForkServerHandle(ours, interpreted(theirs))
    except OSError:
        ours.close()
        raise


def first_server() -> ForkServerHandle | None:
    """Fork a server off this process, which must not have imported the app yet.

    None if this process has threads already, or no process can be started: the pool then starts a
    server later, as a new interpreter.
    """
    if forkserver.has_threads():
        return None
    ours, theirs = _ends()
    try:
        with theirs:
            return ForkServerHandle(ours, copied(ours, theirs))
    except OSError:  # no more processes: the pool will report that and try again
        ours.close()
        return None


# -- Pool processes of a fork server ---------------------------------------------------------------
#
# And the sockets and the board that link the worker to each.
#
# Rules
# 1. A server is started when the first process is needed, and again after it has ended.
# 2. The mailbox tells when a server reports; what has ended is kept until the pool asks for it.


class ForkedLink:
    """The link to one process of a fork server."""

    def __init__(self, server: ForkServerHandle, plan: PoolPlan) -> None:
        """Ask `server` for the process. Raises OSError if the server has ended."""
        theirs: list[socket.socket] = []
        self._sockets: list[Packets] = []
        for _ in range(3):
            ours, other = socket_pair()
            ours.setblocking(False)
            self._sockets.append(Packets(ours))
            theirs.append(other)
        self._inbox, self.outbox, self._control = self._sockets
        self.board = Board.create(plan.slots)
        self.hung_up = False
        hit("pool-link")
        descriptors = [*(end.fileno() for end in theirs), self.board.descriptor]
        try:
            self.forked = server.fork(setup_of(plan), descriptors)
        except OSError:
            ends: list[Packets | socket.socket] = [*self._sockets, *theirs]
            for end in ends:
                end.close()
            self.board.close()
            raise
        hit("pool-asked")
        self._peek = Packets(theirs[0])
        theirs[1].close()
        theirs[2].close()

    @property
    def pid(self) -> int:
        """Its process id; 0 as long as it has not started."""
        return self.forked.pid

    @property
    def status(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs, or if its server ended too."""
        return self.forked.status

    @property
    def failed(self) -> str:
        """Why it could not be started; else ""."""
        return self.forked.failed

    def send(self, packet: list[Any]) -> bool:
        """Put a packet into its socket; False if that is full or the process has ended."""
        try:
            return self._inbox.send(packet)
        except OSError:
            return False

    def tell(self, packet: list[Any]) -> bool:
        """Send a control packet; False if its socket is full."""
        try:
            return self._control.send(packet)
        except OSError:
            return True  # it has ended: the fork server will report that

    def answers(self) -> list[list[Any]]:
        """Its answers since the last call, at most `ANSWERS_A_TURN`; `hung_up` after the last."""
        packets: list[list[Any]] = []
        if self.outbox.fileno() < 0:  # it was closed earlier in the same turn
            return packets
        try:
            while len(packets) < ANSWERS_A_TURN:
                if not (packet := self.outbox.receive()):
                    self.hung_up = True
                    break
                packets.append(packet)
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.hung_up = True
        return packets

    def unread(self) -> list[int]:
        """Take back what it has not read: the numbers of the deliveries."""
        numbers: list[int] = []
        with suppress(BlockingIOError):  # the socket is empty
            while packet := self._peek.receive(wait=False):
                numbers.append(packet[0])
        return numbers

    def running(self) -> dict[int, float]:
        """What its slots run, by its board: {delivery number: start}."""
        return self.board.running()

    def memory(self) -> int:
        """The bytes of memory that it uses; what it shares with its siblings counts, too."""
        return self.forked.memory()

    def kill(self) -> None:
        """Kill it and its process group."""
        self.forked.kill()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it is dead, for `seconds` or `ENDING_SECONDS` at most."""
        self.forked.wait(ENDING_SECONDS if seconds is None else seconds)

    def close(self) -> None:
        """Close its sockets, its board and its process descriptor."""
        self.forked.close()
        for end in (*self._sockets, self._peek):
            end.close()
        self.board.close()


class ForkedStarter:
    """The fork servers of a worker, one at a time."""

    def __init__(self, mailbox: Mailbox, server: ForkServerHandle | None = None) -> None:
        """server: one that runs already, for the first processes."""
        self._mailbox = mailbox
        self._first = server
        self._server: ForkServerHandle | None = None
        self._links: list[ForkedLink] = []
        self._ended: list[Link] = []

    def start(self, plan: PoolPlan) -> ForkedLink:
        """Start a process, and a server before it if none runs. Raises OSError."""
        if self._server is None:
            server, self._first = self._first or next_server(), None
            self._server = server
            self._mailbox.watch(server, lambda: self._read(server))
        link = ForkedLink(self._server, plan)
        self._links.append(link)
        return link

    def ended(self) -> list[Link]:
        """The processes that have ended since the last call."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        return ended

    def check(self, now: float) -> None:
        """Resume or replace a server that does not answer."""
        if self._server is not None:
            self._server.check(now)

    def close(self) -> None:
        """End the server and all that it has started."""
        if self._server is not None:
            self._server.close()

    def _read(self, server: ForkServerHandle) -> None:
        """Note which processes have ended, or that their server and all of them have."""
        ended = server.read()
        if server.gone:
            if self._server is server:
                self._server = None
            self._mailbox.unwatch(server)
            server.close()
        self._ended += [link for link in self._links if link.forked in ended]
        self._links = [link for link in self._links if link.forked not in ended]
