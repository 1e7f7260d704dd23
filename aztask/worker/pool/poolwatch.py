"""Notices pool processes that no longer work, and replaces them.

Rules
1. Each ready process is asked every `PING_SECONDS` whether its control thread is alive. One that
   has not answered for `SILENT_SECONDS` is shown as a failing part, and no more: a task may hold
   the interpreter, which is its right until its time limit.
2. A process that has closed its connection is ending; one that is still there `ENDING_SECONDS`
   later is killed.
3. A process that runs nothing, by its board, and has deliveries for `IDLE_SECONDS` is stuck: it is
   killed. What it has not read goes to others, and the rest has failed.
"""

from __future__ import annotations

import logging
from typing import Final

from aztask.support.parts import Part
from aztask.worker.pool.pool import Pool, PoolProcess

logger = logging.getLogger(__name__)

PING_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0
ENDING_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 30.0


class PoolWatch:
    """Only the supervisor's loop uses it. Times are on the clock of the deadlines."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._part = Part("pool processes")
        self._pinged: dict[PoolProcess, float] = {}
        self._idle: dict[PoolProcess, float] = {}
        self._asked: dict[PoolProcess, float] = {}
        self._ending: dict[PoolProcess, float] = {}

    def alive(self, process: PoolProcess) -> None:
        """The process has answered the ping."""
        self._pinged.pop(process, None)

    def tick(self, now: float) -> None:
        """Check all processes. Cheap enough for every tick."""
        living = self._pool.processes
        for known in (self._pinged, self._idle, self._asked, self._ending):
            for gone in known.keys() - set(living):
                del known[gone]
        silent: list[PoolProcess] = []
        for process in living:
            if process.ready and not process.kill_reason:
                self._ping(process, now)
                self._check_ending(process, now)
                self._check_idle(process, now)
            if now - self._pinged.get(process, now) > SILENT_SECONDS:
                silent.append(process)
        self._part.begin()
        if silent:
            names = ", ".join(str(process) for process in silent)
            self._part.trouble(
                f"{names} has not answered for more than {SILENT_SECONDS:g} s: does a task hold "
                "the interpreter?"
            )
        self._part.rest()

    def _ping(self, process: PoolProcess, now: float) -> None:
        if process not in self._pinged and now - self._asked.get(process, 0.0) >= PING_SECONDS:
            self._pinged[process] = self._asked[process] = now
            process.tell(["ping", 0])

    def _check_ending(self, process: PoolProcess, now: float) -> None:
        if process.link.hung_up and now - self._ending.setdefault(process, now) > ENDING_SECONDS:
            self._kill(process, "it closed its connection to the worker")

    def _check_idle(self, process: PoolProcess, now: float) -> None:
        if not process.items or process.link.running():
            self._idle.pop(process, None)
        elif now - self._idle.setdefault(process, now) > IDLE_SECONDS:
            self._kill(process, "it was given tasks and ran none of them")

    @staticmethod
    def _kill(process: PoolProcess, reason: str) -> None:
        logger.error("%s is replaced: %s", process, reason)
        process.kill(reason)
