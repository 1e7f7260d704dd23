"""Ends at-most-once runs whose workers are gone: no delivery comes that would run them again.

Rules
1. A worker is gone once its heartbeat has not changed for as long as the lease of the run's
   delivery, and at least for `SILENT_SECONDS`. That time is measured here, so that a wrong clock of
   another machine ends no run.
2. Such a run fails with `LOST`, by compare-and-set on its start row: a frozen worker that goes on
   later records nothing. Of several workers that look, one records and reports it.
3. What waits for the run finds its end: `.get()`, the unique key, the schedule. Housekeeping of
   workflows sets its bit.
"""

from __future__ import annotations

import logging
from functools import partial

from aztask.errors import ForeignId
from aztask.settlement import DeadLetter
from aztask.stores.records.base import (
    LOST,
    SILENT_SECONDS,
    Outcome,
    ResultStore,
    RunRecord,
    State,
    WorkerRecord,
)
from aztask.stores.records.onceruns import OnceRun, once_runs_of
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


class LostRuns:
    """Looks at the notes of at-most-once runs. One thread calls it."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        # By note: the heartbeat of its worker, and since when that one is the last, on the clock of
        # the deadlines.
        self._watched: dict[OnceRun, tuple[float | None, float]] = {}

    @property
    def usual(self) -> bool:
        """Whether the app has at-most-once tasks, so that runs are lost."""
        return any(task.delivery == "at-most-once" for task in self._runtime.app.tasks.values())

    def look(self, results: ResultStore) -> None:
        """Read the notes, and end the runs of workers that are gone. Raises BrokerUnavailable."""
        notes = once_runs_of(results)
        if notes is None:
            return
        found = list(notes.all())
        workers = {each.name: each for each in results.workers()} if found else {}
        now, before = self._runtime.clock.monotonic(), self._watched
        self._watched = {}
        for run in found:
            beat = self._heartbeat(run, workers)
            last, since = before.get(run, (beat, now))
            if last != beat:
                since = now
            if now - since >= max(SILENT_SECONDS, run.lease):
                self._end(results, run)
                notes.drop([run])
            else:
                self._watched[run] = (beat, since)

    def _heartbeat(self, run: OnceRun, workers: dict[str, WorkerRecord]) -> float | None:
        """The run's worker's last heartbeat; None if it has no row, or is a former one of ours."""
        mine = self._runtime
        if run.worker == mine.name and run.incarnation != mine.incarnation:
            return None
        worker = workers.get(run.worker)
        return None if worker is None else worker.seen_at

    def _end(self, results: ResultStore, run: OnceRun) -> None:
        """Record the end of a run, unless it has one or another worker has started it.

        Crash window: if the process dies behind the record, the event and the log line are missing,
        and the next look deletes the note.
        """
        try:
            records = results.history(run.key.task_id)
        except ForeignId:
            return
        started = [each for each in records if each.key == run.key]
        if not started or started[0].state is not State.STARTED or started[0].worker != run.worker:
            return
        text = (
            f"worker {run.worker} ended while it ran the task, whose message was removed before "
            "(at-most-once)"
        )
        outcome = Outcome(
            State.FAILED, DeadLetter(LOST, text), None, LOST, text, at=self._runtime.clock.wall()
        )
        record = RunRecord(run.key, run.task, run.queue, State.FAILED, outcome=outcome)
        if results.bury([record])[0]:
            logger.warning("task %s %s is lost: %s", run.task, run.key.task_id, text)
            journal = self._runtime.journal
            self._runtime.mailbox.post(partial(journal.lost, run, LOST, text))
