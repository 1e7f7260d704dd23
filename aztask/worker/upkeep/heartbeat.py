"""The heartbeat: a worker's record of itself and of the tasks that it runs.

Where the one of another worker stays out, its at-most-once runs are ended (`LostRuns`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from aztask.errors import ForeignId
from aztask.hooks import WorkerStatus
from aztask.message.codec import Codec
from aztask.message.payload import stored_in
from aztask.settlement import DeadLetter
from aztask.stores.records.base import (
    LOST,
    SILENT_SECONDS,
    Outcome,
    ResultStore,
    RunningTask,
    RunRecord,
    State,
    WorkerRecord,
)
from aztask.stores.records.onceruns import Life, Noted, OnceBeat, OnceRun, once_runs_of
from aztask.stores.records.workerrow import PROGRESS
from aztask.support.parts import failures
from aztask.version import release_of
from aztask.worker.pipeline.work import WorkItem, message_of
from aztask.worker.pool.pool import Pool
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

MOST_TASKS: Final = 100
"""Running tasks in one heartbeat, the longest first; it is written every few seconds."""


MOST_PROGRESS: Final = 500
"""Bytes of a checkpoint in a heartbeat. Longer ones are state to resume from, not progress."""


class Heartbeat:
    """Builds heartbeats; only the supervisor's loop uses it."""

    def __init__(self, runtime: WorkerRuntime, pool: Pool) -> None:
        self._name = runtime.name
        self._queues = tuple(runtime.options.queues)
        self._pool = pool
        self._deliveries = runtime.deliveries
        self._clock = runtime.clock
        self._born = runtime.clock.wall()
        self._codec = runtime.app.codec
        self._release = release_of(runtime.app.settings.version)
        self._told: dict[str, bytes] = {}

    def news(self) -> bool:
        """Whether a running task has a checkpoint that the last heartbeat did not have."""
        running = sorted(self._pool.running(), key=lambda pair: pair[1])
        found = ((item.key.task_id, _progress_of(item)) for item, _ in running[:MOST_TASKS])
        return any(saved and self._told.get(task_id) != saved for task_id, saved in found)

    def running_ids(self) -> list[str]:
        """The ids of the running tasks."""
        return [item.key.task_id for item, _ in self._pool.running()]

    def record(self, *, stopped: bool = False) -> WorkerRecord:
        """The worker's current state, as other programs read it."""
        running = sorted(self._pool.running(), key=lambda pair: pair[1])
        seen_at = self._clock.wall()
        behind = seen_at - self._clock.monotonic()
        found = ((item.key.task_id, _progress_of(item)) for item, _ in running[:MOST_TASKS])
        self._told = {task_id: saved for task_id, saved in found if saved is not None}
        return WorkerRecord(
            self._name,
            self._born,
            seen_at,
            self._queues,
            len(running),
            self._deliveries.finished,
            stopped,
            len(self._deliveries),
            tuple(_running_tasks(running[:MOST_TASKS], behind, self._codec)),
            failing=tuple(failures()),
            release=self._release,
        )

    def status(self, *, draining: bool) -> WorkerStatus:
        """The worker's state for the hook."""
        now = self._clock.monotonic()
        return WorkerStatus(
            time.monotonic(),
            self._pool.capacity,
            sum(process.ready for process in self._pool.processes),
            tuple(max(0.0, now - at) for _, at in self._pool.running()),
            len(self._deliveries),
            draining,
        )


def _running_tasks(
    running: Sequence[tuple[WorkItem, float]], behind: float, codec: Codec
) -> Iterator[RunningTask]:
    """The tasks of a heartbeat. behind: what wall time is ahead of the clock of the deadlines."""
    for item, at in running:
        try:
            yield _running_task(item, at + behind, codec)
        except Exception:  # one delivery must not keep the heartbeat from being written
            logger.exception("%s is missing in the heartbeat", item.label)


def _running_task(item: WorkItem, started_at: float, codec: Codec) -> RunningTask:
    message, progress = message_of(item), _progress_of(item)
    if progress is not None and codec.encrypts:
        progress = codec.cipher.encrypt(progress, PROGRESS, message.id)
    return RunningTask(
        message.id,
        message.task,
        item.queue,
        started_at,
        message.resubmit_count,
        progress,
    )


def _progress_of(item: WorkItem) -> bytes | None:
    """The last checkpoint of a running task, encoded; None without one, or for a long one."""
    saved = item.opened.message.saved if item.opened is not None else None
    return saved if saved and len(saved) <= MOST_PROGRESS and not stored_in(saved) else None


# -- At-most-once runs whose workers are gone ------------------------------------------------------
#
# They are ended here, since no delivery comes that would run them again.
#
# Rules
# 1. A worker is gone once its heartbeat has not changed for as long as the lease of the run's
#    delivery, and at least for `SILENT_SECONDS`. That time is measured here, so that a wrong clock
#    of another machine ends no run.
# 2. Only time in which a heartbeat could be written counts: that in which our own ones were
#    written, one after the other. After an outage of the store, the time begins again.
# 3. The heartbeats of `aztask.stores.records.onceruns` count, one of each incarnation: of two
#    workers under one name, none stands in for the other, whether both live or one. For notes of a
#    release that wrote none, the worker's own row counts; a former worker under our own name is
#    gone then.
# 4. A run of a worker that is gone fails with `LOST`, by compare-and-set on the start that was
#    noted: a frozen worker that goes on later records nothing, and a later start goes on. Of
#    several workers that look, one records and reports it.
# 5. What waits for the run finds its end: `.get()`, the unique key, the schedule. Housekeeping of
#    workflows sets its bit.


CLOCK_STEP_SECONDS: Final = 1.0
"""How far a clock may be set back between the start of a run and its note."""

Watched: TypeAlias = OnceRun | Life
"""What is watched: a run, or an incarnation that has a heartbeat and no runs."""


class BeatsWritten(NamedTuple):
    """From when until when each of our heartbeats was written, on the clock of the deadlines."""

    since: float
    until: float


class LostRuns:
    """Looks at the notes of at-most-once runs. One thread calls `look`, and one `beat`."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._life: Life = (runtime.name, runtime.incarnation)
        self._reach = BeatsWritten(math.inf, -math.inf)
        # The last heartbeat of each worker, and since when it is the last, on the clock of the
        # deadlines.
        self._watched: dict[Watched, tuple[float | None, float]] = {}

    @property
    def usual(self) -> bool:
        """Whether the app has at-most-once tasks, so that runs are lost."""
        return any(task.delivery == "at-most-once" for task in self._runtime.app.tasks.values())

    def beat(self, results: ResultStore, every: float, *, stopped: bool = False) -> None:
        """Write our heartbeat for the runs that we note, and remember that we could.

        every: seconds until the next one. An app without at-most-once tasks writes none; call it
        behind another write then. Raises BrokerUnavailable.
        """
        notes = once_runs_of(results)
        if notes is not None and self.usual:
            if stopped:
                notes.remove_beat(self._life)
            else:
                notes.beat(OnceBeat(self._life, self._runtime.clock.wall()))
        now, last = self._runtime.clock.monotonic(), self._reach
        close = now - last.until <= 1.5 * every
        self._reach = BeatsWritten(last.since if close else now, now)

    def look(self, results: ResultStore) -> None:
        """Read the notes, and end the runs of workers that are gone. Raises BrokerUnavailable."""
        notes = once_runs_of(results)
        if notes is None:
            return
        reach = self._reach  # what was written until then is among the notes
        noted = notes.read()
        runs = [run for run in noted.runs if run.life != self._life]
        old = any(not run.beats for run in runs)
        workers = {each.name: each for each in results.workers()} if old else {}
        now, before = self._runtime.clock.monotonic(), self._watched
        self._watched = {}
        for run in runs:
            beat = self._beat_of(run, noted, workers)
            if self._silent(run, beat, before, now, reach) >= max(SILENT_SECONDS, run.lease):
                self._end(results, run)
                notes.drop_unchanged(run)
                del self._watched[run]
        # What dead workers have left. A living one writes it again, before it is missed.
        for life in noted.beats.keys() - {run.life for run in noted.runs} - {self._life}:
            left = noted.beats[life]
            if self._silent(life, left.at, before, now, reach) >= SILENT_SECONDS:
                notes.drop_beat(left)

    def _silent(
        self,
        watched: Watched,
        beat: float | None,
        before: dict[Watched, tuple[float | None, float]],
        now: float,
        reach: BeatsWritten,
    ) -> float:
        """For how long a worker has been silent although it could write (rules 1 and 2)."""
        last, since = before.get(watched, (beat, now))
        since = since if last == beat else now
        self._watched[watched] = (beat, since)
        return reach.until - max(since, reach.since)

    def _beat_of(
        self, run: OnceRun, noted: Noted, workers: dict[str, WorkerRecord]
    ) -> float | None:
        """The last heartbeat of the run's worker; None if it has none."""
        if run.beats:
            beat = noted.beats.get(run.life)
            return None if beat is None else beat.at
        worker = workers.get(run.worker)
        return None if worker is None or run.worker == self._runtime.name else worker.seen_at

    def _end(self, results: ResultStore, run: OnceRun) -> None:
        """Record the end of a run, unless it has one or it was started again.

        Crash window: if the process dies behind the record, the event and the log line are missing,
        and the next look deletes the note.
        """
        try:
            records = results.history(run.key.task_id)
        except ForeignId:
            return
        started = next((each for each in records if each.key == run.key), None)
        if started is None or started.state is not State.STARTED or started.worker != run.worker:
            return
        if started.started_at is None or started.started_at > run.at + CLOCK_STEP_SECONDS:
            return  # another worker under that name has started it, and notes it next
        text = (
            f"worker {run.worker} ended while it ran the task, whose message was removed before "
            "(at-most-once)"
        )
        outcome = Outcome(
            State.FAILED, DeadLetter(LOST, text), None, LOST, text, at=self._runtime.clock.wall()
        )
        record = RunRecord(run.key, run.task, run.queue, State.FAILED, outcome=outcome)
        if results.bury([record], [started])[0]:
            logger.warning("task %s %s is lost: %s", run.task, run.key.task_id, text)
            journal = self._runtime.journal
            self._runtime.mailbox.post(partial(journal.lost, run, LOST, text))
