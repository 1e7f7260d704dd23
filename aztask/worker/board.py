"""A board in shared memory on which a pool process notes what each slot runs, and since when.

The worker reads it to enforce time limits and to report starts: a note costs the pool process well
under a microsecond, a packet ten. A slot holds (delivery number, start time); number 0 is idle.

Nothing is locked, so the order counts: the time is written before its number and never taken back,
and the number is read first. Whoever sees a number sees the time of its start, or of a later one;
an earlier one would look like a task that has run for hours.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

_SLOT = struct.Struct("Qd")  # native: eight aligned bytes are read and written at once
_NUMBER = struct.Struct("Q")
_TIME = struct.Struct("d")


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
        place = slot * _SLOT.size
        _TIME.pack_into(self._map, place + _NUMBER.size, at)
        _NUMBER.pack_into(self._map, place, number)

    def clear(self, slot: int) -> None:
        """`slot` is idle."""
        _NUMBER.pack_into(self._map, slot * _SLOT.size, 0)

    def running(self) -> dict[int, float]:
        """{delivery number: start} of all slots that run something."""
        return {number: at for number, at in _SLOT.iter_unpack(self._map) if number}

    def close(self) -> None:
        """Unmap it."""
        self._map.close()
        os.close(self.descriptor)
