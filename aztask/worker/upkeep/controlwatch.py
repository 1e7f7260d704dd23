"""What is paused, as a worker knows it: read from the result store every two seconds.

Rules
1. A worker receives nothing before it has read the state once: a pause holds for new workers too.
2. If the store is unreachable, or the document damaged, the last known state stands.
3. Reading takes place on a thread of its own, because other chores may take long.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from aztask.errors import AztaskError
from aztask.limits.control import Controls, ControlState
from aztask.stores.records.controls import controls_of
from aztask.worker.lane import Lane, Work
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Stages

logger = logging.getLogger(__name__)

READ_SECONDS: Final = 2.0
REPEATED_SECONDS: Final = 60.0
"""Seconds between two log lines about a state that cannot be read."""


class ControlWatch(Work[None]):
    """Keeps the last known state; only the supervisor's loop calls it."""

    def __init__(self, runtime: WorkerRuntime, core: Stages) -> None:
        """core: is told when the state has changed."""
        store = controls_of(runtime.app.results)
        self._controls = None if store is None else Controls(store, runtime.clock)
        self._core = core
        self._clock = runtime.clock
        self._read_at = 0.0
        self._warned_at: float | None = None
        self.state = ControlState()
        self.known = store is None
        self._found: ControlState | None = None
        self._lane: Lane[None] | None = None
        if store is not None:
            self._lane = runtime.lane("control", self, threads=1)

    @property
    def active(self) -> bool:
        """Whether a queue or a task is paused now."""
        return bool(self.state.pauses)

    def tick(self, now: float) -> None:
        """Start to read the state if that is due. now: on the clock of the deadlines."""
        if self._lane is not None and now >= self._read_at and not len(self._lane):
            self._read_at = now + READ_SECONDS
            self._lane.submit([None])

    def stop(self) -> None:
        """End the thread that reads the state."""
        if self._lane is not None:
            self._lane.stop()

    def work(self, reads: Sequence[None]) -> None:
        """Read the state; on the lane's thread."""
        assert self._controls is not None  # noqa: S101  # there is no lane without it
        self._found = None
        try:
            self._found = self._controls.read()
        except AztaskError as error:
            if self._lane is not None:
                self._lane.part.trouble(error)
            self._warn(error)
        else:
            self._warned_at = None

    def _warn(self, error: AztaskError) -> None:
        now = self._clock.monotonic()
        if self._warned_at is None or now - self._warned_at >= REPEATED_SECONDS:
            self._warned_at = now
            then = "the last known pauses stand" if self.known else "nothing is received until then"
            logger.warning("cannot read what is paused, retry follows, %s: %s", then, error)

    def done(self, reads: Sequence[None]) -> None:
        """Go on with what was read, if it could be."""
        found = self._found
        if found is None:
            return
        former, self.state, first = self.state, found, not self.known
        self.known = True
        if first or former != found:
            self._core.control_changed(former, found)
