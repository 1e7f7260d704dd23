"""Pool processes of a fork server, and the sockets and the board that link the worker to each.

Rules
1. A server is started when the first process is needed, and again after it has ended.
2. The mailbox tells when a server reports; what has ended is kept until the pool asks for it.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

from aztask.support.failpoint import hit
from aztask.worker.mailbox import Mailbox
from aztask.worker.pool.board import Board
from aztask.worker.pool.forking import ENDING_SECONDS, ForkServerHandle, next_server
from aztask.worker.pool.link import ANSWERS_A_TURN, Link, PoolPlan
from aztask.worker.pool.packets import Packets, socket_pair
from aztask.worker.pool.poolprocess import setup_of


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
