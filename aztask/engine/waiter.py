"""One thread's waiting for a change of the database: when to look, and when to be told.

Rules
1. A write ends the wait, `SETTLING` later: SQLite writes to its log before its readers can see it.
   While nothing is seen, short waits follow, each twice as long as the one before.
2. For `rest` seconds after that, further writes end no wait, and once a change was seen, no short
   wait follows: beside a busy writer it is looked once in that time.
3. Where nobody tells of writes, no wait is longer than `rest` or `blind`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from aztask.engine.watch import Watch

SETTLING: Final = 0.001
LONGEST: Final = 0.5
"""Seconds between two looks where nothing is written."""


def _never() -> bool:
    return False


class Waiter:
    """The waits of one thread. Made before the first look, which comes before the first wait.

    rest, blind: seconds, see the rules.
    """

    def __init__(self, watch: Watch, *, rest: float, blind: float) -> None:
        self._watch = watch
        self._rest = rest
        self._blind = blind
        self._pause = rest
        self._heeds_from = 0.0
        self._writes = watch.writes
        self._told = True

    def wait(self, seconds: float, rung: Callable[[], bool] = _never) -> None:
        """Until it is time to look, for `seconds` at most, or until `rung`."""
        left = min(seconds, self._pause)
        if (deaf := min(left, self._heeds_from - time.monotonic())) > 0:
            self._watch.rest(rung, deaf)
            left -= deaf
        self._told = left > 0 and not rung() and self._written(left, rung)
        if self._told:
            if deaf <= 0:  # else most of what was written is older
                self._watch.rest(rung, SETTLING)
            self._heeds_from = time.monotonic() + self._rest
            self._pause = SETTLING
            self._writes = self._watch.writes
        self._pause = min(2 * self._pause, LONGEST if self._watch.works else self._blind)

    def _written(self, seconds: float, rung: Callable[[], bool]) -> bool:
        watch, writes = self._watch, self._writes
        watch.wait(lambda: rung() or watch.writes != writes, seconds)
        return watch.writes != writes

    def seen(self) -> None:
        """The look after a wait has shown a change."""
        if not self._told:
            self._watch.doubt()
        self._pause = max(self._pause, self._rest)
