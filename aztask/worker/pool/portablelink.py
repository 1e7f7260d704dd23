"""Pool processes that are new interpreters, and the streams that link the worker to each.

The portable shell: it uses nothing that only Linux or only Unix has. A process starts in about
0.3 s of processor time instead of 30 ms, and shares no memory with its siblings.

Steps of a start, each with a failpoint (`aztask.support.failpoint`): the watching process, the
private folder, the ends of the link, the process, its id told to the watching process, its setup.
A worker that dies between any two of them leaves neither a process nor a folder behind
(`aztask.worker.pool.watcher`).

The process of the pool solo is in the foreground: it gets the worker's own input, and stays in its
process group, so that it may read from the terminal.

A pool process is this module as a program: ``python -m aztask.worker.pool.portablelink``. It reads
its setup from its input. Until that has arrived, the watching process knows of it, or the worker
has ended; then the input ends, and so does the process.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from aztask.support.failpoint import hit, hit_in_pool
from aztask.worker.platform import (
    HAS_GROUPS,
    given_socket,
    memory_of,
    shares_sockets,
    taken_socket,
)
from aztask.worker.pool.link import ANSWERS_A_TURN, Board, Link, PoolPlan
from aztask.worker.pool.poolprocess import ProcessEnds, serve, setup_of
from aztask.worker.pool.streams import StreamPackets, TicketInbox, TicketOutbox, stream_pair
from aztask.worker.pool.watcher import ENDING_SECONDS, GROUP, KILL, WatchingProcess, start_python

PROGRAM: Final = "aztask.worker.pool.portablelink"
"""This module, which is the program of a pool process too."""

ENDS: Final = ("data", "control", "tickets")
"""The streams of a link: deliveries and answers; control packets; tickets of deliveries."""

BOARD: Final = "board"

MOST_HELD: Final = 66
"""Deliveries that a process may hold for each slot: see `MOST_AHEAD`; and the end of the slot."""

EXIT_SECONDS: Final = 0.02
"""For a process that has closed its streams to end."""


class PortableLink:
    """The link to one new interpreter. Raises OSError if it cannot be started."""

    def __init__(self, plan: PoolPlan, folder: Path, watching: WatchingProcess) -> None:
        """folder: a new one, for this link."""
        folder.mkdir(mode=0o700)
        self._folder = folder
        self._watching = watching
        self.hung_up = False
        self._waited = False
        self.failed = ""
        self.board = Board.create_at(folder / BOARD, plan.slots)
        pairs = {name: stream_pair() for name in ENDS}
        theirs = {name: pair[1] for name, pair in pairs.items()}
        self.outbox = StreamPackets(pairs["data"][0], folder, waits=False)
        self._control = StreamPackets(pairs["control"][0], folder, waits=False)
        most = MOST_HELD * plan.slots
        self._inbox = TicketOutbox(pairs["tickets"][0], theirs["tickets"], self.outbox, most)
        hit("pool-link")
        try:
            given = _own_input() if plan.foreground else None
            try:
                self._process = _interpreter(theirs, given)
            finally:
                if given is not None:
                    os.close(given)
            hit("pool-started")
            watching.watch(self._process)
        except OSError:
            theirs["data"].close()
            theirs["control"].close()
            self._free()
            raise
        hit("pool-watched")
        self._tell_setup({**setup_of(plan), "input": given}, theirs)
        hit("pool-told")
        theirs["data"].close()
        theirs["control"].close()

    @property
    def pid(self) -> int:
        """Its process id, known from the start: it is a child of the worker."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    def send(self, packet: list[Any]) -> bool:
        """Put a packet into its inbox; False if that is full or the process has ended."""
        try:
            return self._inbox.send(packet)
        except OSError:
            return False

    def tell(self, packet: list[Any]) -> bool:
        """Send a control packet; False if it does not read them."""
        try:
            return self._control.send(packet)
        except OSError:
            return True  # it has ended: that is noticed soon

    def flush(self) -> None:
        """Pass on what had no room in a stream; cheap enough for every tick."""
        with suppress(OSError):  # it has ended
            self._inbox.flush()
            self._control.flush()

    def answers(self) -> list[list[Any]]:
        """Its answers since the last call, up to some hundreds; `hung_up` after the last."""
        packets: list[list[Any]] = []
        if self.outbox.fileno() < 0:  # it was closed earlier in the same turn
            return packets
        try:
            # What has been received is handled to its end: no selector reports it again.
            while len(packets) < ANSWERS_A_TURN or self.outbox.buffered:
                if not (packet := self.outbox.receive(wait=False)):
                    self.hung_up = True
                    break
                packets.append(packet)
        except BlockingIOError:
            pass
        except OSError:
            self.hung_up = True
        self.flush()
        return packets

    def unread(self) -> list[int]:
        """Take back what it has not read: the numbers of the deliveries."""
        return self._inbox.unread()

    def running(self) -> dict[int, float]:
        """What its slots run, by its board: {delivery number: start}."""
        return self.board.running()

    def memory(self) -> int:
        """The bytes of memory that it uses; 0 where the system does not tell."""
        return memory_of(self.pid)

    def ended(self) -> bool:
        """Whether the process has ended. One that has closed its streams gets a moment to do so."""
        if self._process.poll() is None and self.hung_up and not self._waited:
            self._waited = True
            self.wait(EXIT_SECONDS)
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it and its process group, which is what its tasks have started."""
        if self._process.poll() is None:
            if HAS_GROUPS:
                with suppress(OSError):
                    os.killpg(self.pid, KILL)
            self._process.kill()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it is dead, for `seconds` or `ENDING_SECONDS` at most."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS if seconds is None else seconds)

    def close(self) -> None:
        """Close its streams and its board, and remove its files."""
        self._watching.forget(self.pid)
        self._free()

    def _free(self) -> None:
        self.outbox.close()
        self._control.close()
        self._inbox.close()
        self.board.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tell_setup(self, setup: dict[str, Any], theirs: dict[str, socket.socket]) -> None:
        """Write the setup, which lets the process begin; one that has died misses it."""
        ends = {name: given_socket(end, self.pid) for name, end in theirs.items()}
        setup |= {"folder": str(self._folder), "ends": ends}
        if (pipe := self._process.stdin) is not None:
            with suppress(OSError):
                pipe.write(json.dumps(setup).encode() + b"\n")
            with suppress(OSError):
                pipe.close()


def _own_input() -> int | None:
    """A copy of this process's input, for a process in the foreground; None if it has none."""
    with suppress(OSError):
        return os.dup(0)
    return None


def _interpreter(theirs: dict[str, socket.socket], given: int | None) -> subprocess.Popen[bytes]:
    """Start a pool process that waits for its setup. Raises OSError.

    * `given`: the input of a process in the foreground.
    """
    inherited = [] if shares_sockets() else [end.fileno() for end in theirs.values()]
    if given is not None and not shares_sockets():
        inherited.append(given)
    return start_python(
        ["-m", PROGRAM],
        bufsize=0,
        stdin=subprocess.PIPE,
        pass_fds=inherited,
        start_new_session=given is None,
        creationflags=GROUP,
    )


class PortableStarter:
    """Starts new interpreters, and notices when they have ended."""

    def __init__(self) -> None:
        self._watching: WatchingProcess | None = None
        self._folder = Path()
        self._number = 0
        self._links: list[PortableLink] = []
        self._ended: list[Link] = []

    def start(self, plan: PoolPlan) -> PortableLink:
        """Start a process, and the watching process before the first. Raises OSError."""
        if self._watching is None:
            watching = WatchingProcess()
            hit("pool-watcher")
            self._folder = watching.make_folder()
            hit("pool-folder")
            self._watching = watching
        self._number += 1
        link = PortableLink(plan, self._folder / str(self._number), self._watching)
        self._links.append(link)
        return link

    def ended(self) -> list[Link]:
        """The processes that have ended since the last call."""
        if any(link.hung_up for link in self._links):
            self._look(hung_up=True)
        ended, self._ended = self._ended, []
        return ended

    def check(self, now: float) -> None:
        """Notice what has ended, pass on what waits for room, mend the watching process."""
        if self._watching is not None:
            self._watching.check()
        self._look(hung_up=False)
        for link in self._links:
            link.flush()

    def close(self) -> None:
        """End the watching process, and all that it watches."""
        if self._watching is not None:
            self._watching.close()

    def _look(self, *, hung_up: bool) -> None:
        """Note which processes have ended; hung_up: of those that have closed their streams."""
        ended = [link for link in self._links if (link.hung_up or not hung_up) and link.ended()]
        if ended:
            self._ended += ended
            self._links = [link for link in self._links if link not in ended]


# -- the process's side


def ends_of(setup: Mapping[str, Any]) -> ProcessEnds:
    """The ends of the link that the setup describes."""
    folder = Path(setup["folder"])
    data, control, tickets = (taken_socket(setup["ends"][name]) for name in ENDS)
    for end in (data, control, tickets):
        end.setblocking(False)
    packets = StreamPackets(data, folder, waits=True)
    return ProcessEnds(
        inbox=TicketInbox(tickets, packets),
        outbox=packets,
        control=StreamPackets(control, folder, waits=True),
        board=Board.open_at(folder / BOARD, setup["slots"]),
    )


def _take_input(given: int | None) -> None:
    """Read from the worker's input; without it tasks find none, as under the fork server."""
    if given is None:
        source = os.open(os.devnull, os.O_RDONLY)
    elif shares_sockets():
        source = _console()
    else:
        source = given
    os.dup2(source, 0)
    os.close(source)
    if given is not None:
        # The former object has read from the pipe with the setup, and is at its end.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # it stays open


def _console() -> int:
    """The console, on Windows, where no descriptor is inherited; a service has none to read."""
    with suppress(OSError):
        return os.open("CONIN$", os.O_RDWR)
    return os.open(os.devnull, os.O_RDONLY)


def main() -> None:
    """Serve with the setup that the input gives as a line of JSON."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the worker has ended
        os._exit(1)
    setup = json.loads(line)
    _take_input(setup["input"])
    hit_in_pool("pool-set-up", setup["worker"])
    serve(setup, ends_of(setup))


if __name__ == "__main__":
    main()
