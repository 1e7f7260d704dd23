"""Waits, for one thread, until it should check the database for changes.

Rules
1. A write ends the wait, `SETTLING` seconds later, because SQLite writes to its log before readers
   can see the change. While the checks find nothing, short waits follow, each twice as long as the
   one before.
2. For `rest` seconds after a write, further writes do not end a wait. After a check that found a
   change, no short waits follow. So beside a busy writer there is one check per `rest` seconds.
3. If writes are not reported (`Watch.works` is False), no wait is longer than `rest` or `blind`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from aztask.engine.watch import Watch

SETTLING: Final = 0.001
LONGEST: Final = 0.5
"""Seconds between two checks while nothing is written."""


def _never() -> bool:
    return False


class Waiter:
    """The waits of one thread. Make it before the first check; check before the first wait.

    rest, blind: seconds, see the rules.
    """

    def __init__(self, watch: Watch, *, rest: float, blind: float) -> None:
        self._watch = watch
        self._rest = rest
        self._blind = blind
        self._pause = rest
        self._ignores_writes_until = 0.0
        self._writes = watch.writes
        self._woken_by_write = True

    def wait(self, seconds: float, notified: Callable[[], bool] = _never) -> None:
        """Wait until the next check, until `notified`, or for at most `seconds`."""
        left = min(seconds, self._pause)
        if (rest := min(left, self._ignores_writes_until - time.monotonic())) > 0:
            self._watch.rest(notified, rest)
            left -= rest
        self._woken_by_write = left > 0 and not notified() and self._written(left, notified)
        if self._woken_by_write:
            if rest <= 0:  # otherwise most writes are older than this wait
                self._watch.rest(notified, SETTLING)
            self._ignores_writes_until = time.monotonic() + self._rest
            self._pause = SETTLING
            self._writes = self._watch.writes
        self._pause = min(2 * self._pause, LONGEST if self._watch.works else self._blind)

    def _written(self, seconds: float, notified: Callable[[], bool]) -> bool:
        watch, writes = self._watch, self._writes
        watch.wait(lambda: notified() or watch.writes != writes, seconds)
        return watch.writes != writes

    def found_change(self) -> None:
        """Call this if the check after a wait has found a change."""
        if not self._woken_by_write:
            self._watch.doubt()
        self._pause = max(self._pause, self._rest)
