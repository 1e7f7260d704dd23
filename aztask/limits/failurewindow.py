"""How many of a task's last runs failed, in one worker. Nothing here does I/O.

Memory stays the same however many runs there are: the window is divided into `PARTS`, each with two
counts. So a run leaves the count up to a tenth of the window late.
"""

from __future__ import annotations

from collections import deque
from typing import Final

PARTS: Final = 10


class FailureWindow:
    """The runs of the last `seconds`. Times are on the clock of the deadlines."""

    def __init__(self, seconds: float) -> None:
        self._part = seconds / PARTS
        self._parts: deque[tuple[int, int, int]] = deque()  # number of the part, runs, failures

    def add(self, now: float, *, failed: bool) -> None:
        """Count a run that ended now."""
        number = int(now // self._part)
        runs = failures = 0
        if self._parts and self._parts[-1][0] == number:
            _, runs, failures = self._parts.pop()
        self._parts.append((number, runs + 1, failures + failed))
        while self._parts[0][0] < number - PARTS:
            self._parts.popleft()

    def counts(self, now: float) -> tuple[int, int]:
        """How many runs the window has, and how many of them failed."""
        oldest = int(now // self._part) - PARTS
        parts = [part for part in self._parts if part[0] >= oldest]
        return sum(part[1] for part in parts), sum(part[2] for part in parts)
