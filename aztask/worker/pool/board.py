"""A board in shared memory on which a pool process notes what each slot runs, and since when.

The worker reads it to enforce time limits and to report starts. A note costs the pool process well
under a microsecond, a packet ten. A slot holds (delivery number, start time); number 0 means idle.

Nothing is locked, so the order matters. The time is written before its number and never erased, and
the number is read first: a reader that sees a number sees the time of its start, or of a later one.
An earlier time would look like a task that has run for hours. Both are stored through a view of the
memory, eight bytes at once: `struct.pack_into` would set them to zero first, and the worker could
read that zero as the time.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

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
