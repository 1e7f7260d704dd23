"""How long the writers of contended rows wait, so that few of their writes fail.

Rules
1. A writer that met another one doubles its pace, up to `LONGEST`; one that did not lowers it. With
   these factors about one write in five fails, however many writers there are.
2. Nothing waits while no writer meets another one. The pace halves every `HALF_LIFE` seconds.
3. While a worker waits, more of its tasks end: their bits go into the same write.
"""

from __future__ import annotations

from threading import Lock
from typing import Final

from aztask.support import chance
from aztask.support.clock import SYSTEM_CLOCK, Clock

FIRST: Final = 0.02
LONGEST: Final = 0.5
RISE: Final = 2.0
FALL: Final = 0.85
SLIGHT: Final = 0.01
"""Seconds below which a pace counts as none."""
HALF_LIFE: Final = 2.0


class Pace:
    """The pace of one process. Times are seconds. Any thread may call."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._monotonic = clock.monotonic
        self._pace = 0.0
        self._at = self._monotonic()
        self._lock = Lock()

    @property
    def contended(self) -> bool:
        """True if writers met lately: remembered versions of rows are probably old."""
        return self._now() > SLIGHT

    def wait(self) -> float:
        """How long to wait before a write: at random, twice the pace at most."""
        pace = self._now()
        return chance.uniform(0.0, 2 * pace) if pace > SLIGHT else 0.0

    def met(self) -> None:
        """A write failed, because another writer had changed the row before it."""
        with self._lock:
            self._set(min(LONGEST, max(FIRST, self._decayed() * RISE)))

    def meeting(self) -> None:
        """Other writers still change the rows; that costs no write, so the pace stays."""
        with self._lock:
            self._set(max(FIRST, self._decayed()))

    def passed(self) -> None:
        """A write succeeded at its first try."""
        with self._lock:
            self._set(self._decayed() * FALL)

    def _now(self) -> float:
        with self._lock:
            return self._decayed()

    def _set(self, pace: float) -> None:
        self._pace, self._at = pace, self._monotonic()

    def _decayed(self) -> float:
        passed = max(0.0, self._monotonic() - self._at)
        return float(self._pace * 0.5 ** (passed / HALF_LIFE))
