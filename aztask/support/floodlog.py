"""Warnings that a stranger can cause without end: the first lines, then a summary each minute.

Rules
1. Warnings are counted for each reason, a word of ours: never a text from a message, of which there
   are endlessly many.
2. The first `FIRST_LINES` of a reason are logged as they come. The others are counted, and one line
   says how many there were in `SUMMARY_SECONDS`. A reason that was silent for so long begins anew.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.forks import fork_safe_lock

FIRST_LINES: Final = 5
SUMMARY_SECONDS: Final = 60.0


@dataclass(slots=True)
class Flood:
    """The warnings of one reason since `began`. `quota`: how many more are logged one by one."""

    logger: logging.Logger
    began: float
    quota: int = FIRST_LINES
    counted: int = 0


class FloodLog:
    """Logs warnings within these limits. Any thread may call."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._floods: dict[str, Flood] = {}
        self._lock = fork_safe_lock()

    def warning(
        self,
        logger: logging.Logger,
        reason: str,
        text: str,
        *values: object,
        error: BaseException | None = None,
    ) -> None:
        """Log a warning, or count it. error: an unexpected one, logged with its traceback."""
        now = self._clock.monotonic()
        with self._lock:
            flood = self._floods.get(reason)
            if flood is None:
                flood = self._floods[reason] = Flood(logger, now)
            shown = flood.quota > 0
            if shown:
                flood.quota -= 1
            else:
                flood.counted += 1
        if shown and error is not None:
            logger.error(text, *values, exc_info=error)
        elif shown:
            logger.warning(text, *values)

    def tick(self, now: float) -> None:
        """Write the summaries that are due. now: on the clock of the deadlines."""
        if self._floods:
            self._write(now, SUMMARY_SECONDS)

    def close(self) -> None:
        """Write what the last summaries did not cover."""
        self._write(self._clock.monotonic(), 0.0)
        self._floods.clear()

    def _write(self, now: float, after: float) -> None:
        with self._lock:
            due = [(name, each) for name, each in self._floods.items() if now - each.began >= after]
            lines = []
            for reason, flood in due:
                lines.append((flood.logger, reason, flood.counted, now - flood.began))
                if flood.counted:  # it goes on: from now on, only summaries
                    self._floods[reason] = Flood(flood.logger, now, quota=0)
                else:
                    del self._floods[reason]
        for logger, reason, count, seconds in lines:
            if count:
                logger.warning(
                    "%s: %d more in the last %.0f s, not logged one by one (aztask dlq groups "
                    "shows what was dead-lettered)",
                    reason,
                    count,
                    seconds,
                )
