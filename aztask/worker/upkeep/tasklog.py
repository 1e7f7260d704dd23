"""The log lines of tasks that end, and one summary a minute when there are too many of them.

Rules
1. Failed runs have their own line, written where they are decided; here they are only counted.
2. Up to `LINES_A_SECOND` tasks are logged one by one. When a second has more, a summary replaces
   the lines for at least `SUMMARY_SECONDS`, and until the rate has fallen below the limit.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Final

from aztask.stores.records.base import Outcome, State
from aztask.support.clock import Clock
from aztask.worker.logs import LOG_TASKS, brief_seconds
from aztask.worker.pipeline.redelivery import UNKNOWN_TASK
from aztask.worker.pipeline.work import WorkItem

logger = logging.getLogger("aztask.worker")

LINES_A_SECOND: Final = 50
SUMMARY_SECONDS: Final = 60.0


class TaskLog:
    """Logs tasks as they end; only the supervisor's loop calls it.

    mode: "auto" (rule 2), "all" (a line for every task) or "off" (failures only).
    """

    def __init__(self, clock: Clock, mode: str = LOG_TASKS[0]) -> None:
        self._clock = clock
        self._mode = mode
        self._second = -math.inf
        self._in_second = 0
        self._summary_began: float | None = None
        self._counts: Counter[str] = Counter()

    def ended(self, item: WorkItem, outcome: Outcome) -> None:
        """Log how a task ended, or count it for the summary."""
        if self._mode == "off" or not logger.isEnabledFor(logging.INFO):
            return
        if self._mode == "auto" and self._summarises(self._clock.monotonic()):
            self._counts[outcome.state.value] += 1
        elif line := _line(item, outcome):
            logger.info("%s %s", item.label, line)

    def tick(self, now: float) -> None:
        """Write the summary if it is due. now: on the clock of the deadlines."""
        began = self._summary_began
        if began is None or now - began < SUMMARY_SECONDS:
            return
        busy = self._counts.total() > LINES_A_SECOND * (now - began)
        self._write(now - began)
        self._summary_began = now if busy else None

    def close(self) -> None:
        """Write what the last summary did not cover."""
        if self._summary_began is not None and self._counts:
            self._write(self._clock.monotonic() - self._summary_began)
        self._summary_began = None

    def _summarises(self, now: float) -> bool:
        """Whether this task is only counted."""
        if self._summary_began is not None:
            return True
        if now - self._second >= 1.0:
            self._second, self._in_second = now, 0
        self._in_second += 1
        if self._in_second <= LINES_A_SECOND:
            return False
        logger.info(
            "more than %d tasks a second: one summary each %g s replaces their lines "
            "(--log-tasks all keeps them)",
            LINES_A_SECOND,
            SUMMARY_SECONDS,
        )
        self._summary_began = now
        return True

    def _write(self, seconds: float) -> None:
        parts = ", ".join(f"{count} {state}" for state, count in self._counts.most_common())
        logger.info(
            "%d %s ended in the last %.0f s%s",
            self._counts.total(),
            "task" if self._counts.total() == 1 else "tasks",
            seconds,
            f": {parts}" if parts else "",
        )
        self._counts.clear()


def _line(item: WorkItem, outcome: Outcome) -> str:
    """What to say about the end of a task; "" if another line has said it."""
    if outcome.state is State.SUCCEEDED:
        return f"succeeded in {brief_seconds(item.duration)}"
    if outcome.parked:
        return f"waits: {outcome.error}"
    if outcome.state is State.SNOOZED and outcome.error_type != UNKNOWN_TASK:
        delay = getattr(outcome.settlement, "delay", 0.0)
        return f"snoozed, it runs again in {brief_seconds(delay)}"
    if outcome.state is State.CANCELLED:
        return "was cancelled"
    if outcome.state is State.EXPIRED:
        return "did not run: it expired before it could start"
    return ""
