"""A clock that several processes read from a file, and that a test moves.

The file holds a time, the moment at which it was right, and the speed; all processes of a machine
share the monotonic clock. The delays of the broker are not simulated: a message that is sent is
available at once.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

FORMAT = "<ddd"


def inject(path: str, *stores: Any) -> None:
    """Have the schedules of these stores take their time from the file."""

    def now(self: Any) -> float:
        return read(path)

    for each in stores:
        each.now = now


def read(path: str | Path) -> float:
    """The time in the file."""
    then, mark, speed = struct.unpack(FORMAT, Path(path).read_bytes())
    found: float = then + speed * (time.monotonic() - mark)
    return found


class ClockFile:
    """The clock. It begins at `now`, and at first its seconds are real ones."""

    def __init__(self, path: Path, now: float) -> None:
        self.path = path
        self._speed = 1.0
        self.set(now)

    @property
    def now(self) -> float:
        return read(self.path)

    def set(self, now: float) -> None:
        """Move the clock; a reader sees the old time or the new one."""
        new = self.path.with_suffix(".new")
        new.write_bytes(struct.pack(FORMAT, now, time.monotonic(), self._speed))
        new.replace(self.path)

    def go(self, speed: float) -> None:
        """From now on, let so many of its seconds pass in one real second."""
        now, self._speed = self.now, speed
        self.set(now)
