"""Obeys ``aztask control scale``: changes how many tasks this worker runs at the same time."""

from __future__ import annotations

import logging

from aztask.limits.control import ControlState
from aztask.limits.scale import scale_of
from aztask.worker.intake.allintakes import Intakes
from aztask.worker.pool.pool import Pool
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


class Scaling:
    """Only the supervisor's loop calls it."""

    def __init__(self, runtime: WorkerRuntime, pool: Pool, intakes: Intakes) -> None:
        self._name = runtime.name
        self._options = runtime.options
        self._journal = runtime.journal
        self._pool = pool
        self._intakes = intakes
        self.claims_ahead = 0
        self._ahead = bool(runtime.lane_threads)
        self._note()

    def obey(self, state: ControlState) -> None:
        """Run as many tasks as the state says, else as many as the command line says."""
        found = scale_of(state.scales.values(), self._name, self._options.queues)
        size = self._options.concurrency if found is None else found.size
        if size == self._pool.capacity:
            return
        what = f"concurrency is {size} now, and was {self._pool.capacity}"
        if found is not None and found.by:
            what = f"{what}, by {found.by}"
        logger.info("%s", what)
        self._journal.scaled(what)
        self._pool.scale(size)
        self._intakes.scale(size)
        self._note()

    def _note(self) -> None:
        """A claim across a network takes time: the next ones are sent while the pool is busy."""
        self.claims_ahead = self._pool.capacity if self._ahead else 0
