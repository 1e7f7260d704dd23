"""A board in shared memory on which a pool process notes what each slot runs, and since when.

The worker reads it to enforce time limits and to report starts: a note costs the pool process well
under a microsecond, a packet ten. A slot holds (delivery number, start time); number 0 is idle.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

_SLOT = struct.Struct("=Qd")


class Board:
    """A row of slots in a file that both processes map."""

    def __init__(self, descriptor: int, slots: int) -> None:
        self.descriptor = descriptor
        self.slots = slots
        self._map = mmap.mmap(descriptor, slots * _SLOT.size)

    @classmethod
    def create(cls, slots: int, folder: str) -> Board:
        """A board whose file is unlinked already: it lives as long as somebody maps it."""
        descriptor, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)  # noqa: PTH108  # the descriptor stays; the name is not needed any more
        os.ftruncate(descriptor, slots * _SLOT.size)
        return cls(descriptor, slots)

    def note(self, slot: int, number: int, at: float) -> None:
        """`slot` runs delivery `number` since `at` (seconds, clock of the deadlines)."""
        _SLOT.pack_into(self._map, slot * _SLOT.size, number, at)

    def running(self) -> dict[int, float]:
        """{delivery number: start} of all slots that run something."""
        return {number: at for number, at in _SLOT.iter_unpack(self._map) if number}

    def close(self) -> None:
        """Unmap it."""
        self._map.close()
        os.close(self.descriptor)
