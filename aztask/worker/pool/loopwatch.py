"""Names the task that blocks the event loop: all other coroutines of the process wait for it.

Rules
1. A turn of the loop is watched from another thread, so the loop pays nothing for it. A thread that
   does not get the GIL cannot look; then the block is reported when it has ended, without a line.
2. Many short steps in one turn are not a block: the same asyncio task must run throughout.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from aztask.support.parts import Part
from aztask.worker.pool.eventloop import EventLoop

logger = logging.getLogger(__name__)

LONGEST_STEP: Final = 1.0
"""Seconds for which a coroutine may run without an ``await`` before it is named in the log."""

LOOK_SECONDS: Final = 0.2
LIBRARIES: Final = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),  # aztask itself
)
ADVICE: Final = (
    "no other coroutine of this process runs; await something, or move the call into "
    "asyncio.to_thread or a task that is a plain def"
)


@dataclass(slots=True)
class LoopStep:
    """What the loop did at the last look. since: seconds of `time.monotonic`."""

    turn: int
    task: asyncio.Task[Any]
    since: float
    reported: bool = False


class LoopWatch:
    """Looks at the loop a few times a second, as long as the process lives."""

    def __init__(self, loop: EventLoop) -> None:
        self._part = Part("loop watch")
        self._loop = loop
        self._step: LoopStep | None = None
        self._looked_at = time.monotonic()

    def start(self) -> None:
        """Start the thread, which watches until the process ends."""
        self._part.thread(self._run, "aztask-loop-watch").start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self._part.begin()
            self.look(time.monotonic())
            self._part.rest()

    def look(self, now: float) -> None:
        """Compare what the loop does now with the last look. now: of `time.monotonic`."""
        before, self._looked_at = self._looked_at, now
        turn, busy_since = self._loop.selector.turns, self._loop.selector.busy_since
        task = asyncio.current_task(self._loop.loop)
        step = self._step
        if step is not None and (step.turn, step.task) == (turn, task) and busy_since is not None:
            if now - step.since >= LONGEST_STEP and not step.reported:
                step.reported = True
                self._report(step, now)
            return
        if step is not None and step.reported:
            logger.warning(
                "%s let the event loop continue after %.1f s", self._name_of(step.task),
                now - step.since,
            )  # fmt: skip
        elif now - before >= LONGEST_STEP + LOOK_SECONDS:
            self._report_starved(now - before)
        self._step = None
        if task is not None and busy_since is not None:
            self._step = LoopStep(turn, task, max(busy_since, before))

    def _report(self, step: LoopStep, now: float) -> None:
        frame = sys._current_frames().get(self._loop.ident)
        logger.warning(
            "%s blocks the event loop, for %.1f s so far, at %s; %s",
            self._name_of(step.task),
            now - step.since,
            line_of(frame),
            ADVICE,
        )

    def _report_starved(self, seconds: float) -> None:
        if self._loop.selector.last_turn >= LONGEST_STEP:
            logger.warning(
                "the event loop stood still for about %.1f s: a task called something that let no "
                "other thread run, so its line is unknown, or this process was stopped; %s",
                seconds,
                ADVICE,
            )

    def _name_of(self, task: asyncio.Task[Any]) -> str:
        owner = self._loop.owners.get(task)
        return f"task {owner.task} {owner.task_id}" if owner else f"coroutine {task.get_name()}"


def line_of(frame: FrameType | None) -> str:
    """The innermost line outside libraries, as "FILE:LINE in FUNCTION", and what it calls."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    own = frame or innermost
    if own is None:
        return "an unknown line"
    text = _shown(own)
    return text if own is innermost or innermost is None else f"{text} (in {_shown(innermost)})"


def _shown(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
