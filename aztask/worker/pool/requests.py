"""What a running task asks the worker for: a longer lease, a stored checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from aztask.app import App
from aztask.delivery import Renewed
from aztask.errors import AztaskError
from aztask.leasekeeper import LeaseKeeper
from aztask.worker.job import Job
from aztask.worker.lane import Lane, Mailbox
from aztask.worker.limits import Limits
from aztask.worker.pool.children import PoolProcess

logger = logging.getLogger(__name__)

Save = tuple[PoolProcess, Job, bytes, list[str]]


class Requests:
    """Answers them: extensions through the keeper, checkpoints through a lane of their own."""

    def __init__(
        self, app: App, keeper: LeaseKeeper, limits: Limits, mailbox: Mailbox, *, threads: int
    ) -> None:
        self._app = app
        self._keeper = keeper
        self._limits = limits
        self._saves: Lane[Save] = Lane(
            "save", self._save_all, self._saved_all, mailbox, threads=threads
        )

    def answer(self, process: PoolProcess, kind: str, number: int, *details: Any) -> None:
        """Begin to do what the task that delivery `number` runs asked for."""
        job = process.jobs.get(number)
        if job is None:
            return
        if kind == "extend":
            if job.settled:  # at most once: there is no lease to lose
                process.tell(["renewed", number, job.delivery.deadline])
                return
            seconds = max(details[0], job.lease.seconds)
            self._keeper.extend(job.lease, seconds, self._limits.limit_at(job))
        elif kind == "save":
            self._saves.submit([(process, job, details[0], [])])
            self._saves.turn()

    def stop(self) -> None:
        """Finish what is under way."""
        self._saves.stop()

    def _save_all(self, saves: Any) -> None:
        for _, job, state, errors in saves:
            errors.append(self._save(job, state))

    def _saved_all(self, saves: Any) -> None:
        for process, job, state, errors in saves:
            if not errors[0]:
                job.saved = state
            process.tell(["saved", job.number, errors[0]])

    def _save(self, job: Job, state: bytes) -> str:
        """Why it could not be stored, "lost" when the lease is; "" when it is stored.

        One request replaces the content and renews the lease: either both happen or neither.
        """
        if job.message is None or job.settled:
            return "a message that is gone already (at-most-once) cannot hold a checkpoint"
        if not self._app.broker.capabilities.update:
            return self._keep(job, state)
        envelope = self._app.codec.to_envelope(replace(job.message, saved=state))
        try:
            answer = self._keeper.update(job.lease, job.receiver, envelope)
        except AztaskError as error:
            logger.warning("could not store the checkpoint of %s: %s", job.message.id, error)
            return str(error)
        return "" if isinstance(answer, Renewed) else "lost"

    def _keep(self, job: Job, state: bytes) -> str:
        """As `_save`, where the service cannot change a message: in the run's row of the result
        store. A redelivery finds it there; a clone carries it in its headers as usual.
        """
        results = self._app.results
        if results is None:
            return "checkpoints need a result store here: this service cannot change a message"
        try:
            kept = results.save(job.key, job.owner, state)
        except AztaskError as error:
            logger.warning("could not store the checkpoint of %s: %s", job.key.task_id, error)
            return str(error)
        return "" if kept else "lost"
