"""What a pool asks of the operating system: processes, and a link to each of them.

Three implementations: `aztask.worker.pool.forking`, over sockets and a fork server of Linux;
`aztask.worker.pool.portablelink`, over streams and new interpreters of any system; and the stepped
one of the tests, which is neither a process nor a thread. Of the first two, each link has a board
(`Board`) that says what runs.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from aztask.worker.mailbox import HasDescriptor

ANSWERS_A_TURN: Final = 512
"""How many answers of one process a turn of the worker handles, about."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of a pool and what it runs.

    app: ``module:app``. slots: tasks that run at the same time in each process. worker: the
    worker's name. pool: one of `aztask.worker.options.POOLS`.
    """

    app: str
    processes: int
    slots: int
    worker: str = ""
    pool: str = "processes"

    @property
    def alone(self) -> bool:
        """Whether there is one slot in all, so that a task cannot wait for another one."""
        return self.processes * self.slots == 1

    @property
    def foreground(self) -> bool:
        """Whether its process has the terminal, so that a debugger can ask there."""
        return self.pool == "solo"

    def scaled(self, concurrency: int) -> PoolPlan:
        """The same pool for another number of tasks at the same time; solo stays as it is."""
        if self.foreground:
            return self
        if self.pool == "processes":
            return replace(self, processes=concurrency)
        return replace(self, slots=concurrency)


class Link(Protocol):
    """The worker's link to one pool process. Packets are those of `aztask.worker.pool.runner`."""

    hung_up: bool
    """Whether the process has closed its side: no further answer comes."""

    @property
    def outbox(self) -> HasDescriptor:
        """What the mailbox watches for answers."""

    @property
    def pid(self) -> int:
        """Its process id; 0 as long as it has not started."""

    @property
    def status(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs, and if it is not known."""

    @property
    def failed(self) -> str:
        """Why it could not be started; else ""."""

    def send(self, packet: list[Any], /) -> bool:
        """Put a delivery into its inbox, [] to retire a slot; False if that is full, or it has
        ended."""

    def tell(self, packet: list[Any], /) -> bool:
        """Send a control packet; False if it does not read them. One that has ended misses it."""

    def answers(self) -> list[list[Any]]:
        """Its answers since the last call, up to some hundreds."""

    def unread(self) -> list[int]:
        """Take its unread deliveries back: their numbers. It will not see them."""

    def running(self) -> dict[int, float]:
        """What its slots run: {delivery number: start}, on the clock of the deadlines."""

    def memory(self) -> int:
        """The bytes of memory that it uses."""

    def kill(self) -> None:
        """Kill it, and what its tasks have started."""

    def wait(self, seconds: float | None = None, /) -> None:
        """Wait until it is dead, for `seconds` or a few at most."""

    def close(self) -> None:
        """Free what the link has open."""


class Starter(Protocol):
    """Starts pool processes. Only the supervisor's thread calls."""

    def start(self, plan: PoolPlan, /) -> Link:
        """Start a process. Raises OSError if that is impossible now."""

    def ended(self) -> list[Link]:
        """The processes that have ended since the last call."""

    def check(self, now: float, /) -> None:
        """Mend what starts processes, if it does not answer; cheap enough for every tick."""

    def close(self) -> None:
        """End what starts processes, and all that it has started."""


# -- The board -------------------------------------------------------------------------------------
#
# In shared memory; on it a pool process notes what each slot runs, and since when. The worker reads
# it to enforce time limits and to report starts. A note costs the pool process well under a
# microsecond, a packet ten. A slot holds (delivery number, start time); number 0 means idle.
#
# Nothing is locked, so the order matters. The time is written before its number and never erased,
# and the number is read first: a reader that sees a number sees the time of its start, or of a
# later one. An earlier time would look like a task that has run for hours. Both are stored through
# a view of the memory, eight bytes at once: `struct.pack_into` would set them to zero first, and
# the worker could read that zero as the time.


_SLOT_BYTES = 16
"""Eight bytes for the number and eight for the time."""


class Board:
    """A row of slots in memory that the worker and the pool process share."""

    def __init__(self, descriptor: int, slots: int) -> None:
        self.descriptor = descriptor
        self.slots = slots
        self._map = mmap.mmap(descriptor, slots * _SLOT_BYTES)
        memory = memoryview(self._map)
        # Native sizes and aligned places: slot n is number 2n and time 2n + 1.
        self._numbers = memory.cast("Q")
        self._times = memory.cast("d")
        memory.release()

    @classmethod
    def create(cls, slots: int) -> Board:
        """Make a board; the kernel frees it when no process maps it."""
        descriptor = os.memfd_create("aztask-board")
        os.ftruncate(descriptor, slots * _SLOT_BYTES)
        return cls(descriptor, slots)

    @classmethod
    def create_at(cls, path: Path, slots: int) -> Board:
        """Make a board in a new file, for systems without files in memory."""
        path.write_bytes(bytes(slots * _SLOT_BYTES))
        return cls.open_at(path, slots)

    @classmethod
    def open_at(cls, path: Path, slots: int) -> Board:
        """Open the board that is in this file."""
        return cls(os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0)), slots)

    def note(self, slot: int, number: int, at: float) -> None:
        """Note that `slot` runs delivery `number` since `at` (seconds, clock of the deadlines)."""
        self._times[2 * slot + 1] = at
        self._numbers[2 * slot] = number

    def clear(self, slot: int) -> None:
        """Note that `slot` is idle."""
        self._numbers[2 * slot] = 0

    def running(self) -> dict[int, float]:
        """The busy slots, as {delivery number: start}; seconds on the clock of the deadlines."""
        found = {}
        for slot in range(self.slots):
            number = self._numbers[2 * slot]
            if number:
                found[number] = self._times[2 * slot + 1]
        return found

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        self._numbers.release()
        self._times.release()
        self._map.close()
        os.close(self.descriptor)
