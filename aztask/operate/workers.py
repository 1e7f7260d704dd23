"""Workers by their heartbeats, and the tasks that they run."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from aztask.app import App
from aztask.errors import CodecError, ForeignId
from aztask.message.codec import Codec
from aztask.operate.action import results_of
from aztask.stores.records.base import ResultStore, RunningTask, RunRecord, State, WorkerRecord
from aztask.stores.records.onceruns import Noted, OnceRun, once_runs_of
from aztask.stores.records.workerrow import PROGRESS
from aztask.support.parts import PartFailure

__all__ = [
    "STATES",
    "RunningRow",
    "RunningTasks",
    "WorkerRecord",
    "Workers",
    "heartbeats",
    "lost_runs",
    "running",
    "running_rows",
    "workers",
]

STATES: Final = ("alive", "silent", "stopped")


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers, and when they were read, UTC epoch seconds. damaged: names and reasons."""

    records: Sequence[WorkerRecord]
    damaged: Mapping[str, str]
    at: float

    def state(self, worker: WorkerRecord) -> str:
        """The state of a worker then: one of `STATES`."""
        return worker.state_at(self.at)

    def failing(self, worker: WorkerRecord) -> tuple[PartFailure, ...]:
        """The parts of a worker that fail; none if it does not run."""
        return worker.failing if self.state(worker) == "alive" else ()


def heartbeats(store: ResultStore, now: float, *, everyone: bool) -> Workers:
    """The last reports of workers. everyone: of other brokers on the same result store, too."""
    found = store.workers(everyone=True) if everyone else store.workers()
    damaged = {worker.name: worker.damage for worker in found if worker.damage}
    return Workers([worker for worker in found if not worker.damage], damaged, now)


def workers(app: App) -> Workers:
    """The workers of the last day: running ones first, the newest first.

    Not by their last heartbeats: they would change places every few seconds. Raises
    BrokerUnavailable, and ConfigurationError without a result store.
    """
    store = results_of(app)
    found = heartbeats(store, time.time(), everyone=True)
    records = [
        _without_ended(store, each) if each.tasks and found.state(each) != "alive" else each
        for each in found.records
    ]
    records.sort(key=lambda each: (STATES.index(found.state(each)), -each.started_at))
    return replace(found, records=records)


def _without_ended(store: ResultStore, worker: WorkerRecord) -> WorkerRecord:
    """A silent worker without the runs that have ended, or that another worker has started.

    Its last heartbeat still lists them. It reads one record for each listed task, at most 100.
    """
    left = tuple(
        each for each in worker.tasks if not _is_over(_record(store, each.task_id), worker, each)
    )
    running = max(0, worker.running - len(worker.tasks) + len(left))
    return replace(worker, tasks=left, running=running)


def _record(store: ResultStore, task_id: str) -> RunRecord | None:
    """The record of a task; None for one of another owner, which this store does not show."""
    try:
        return store.get(task_id)
    except ForeignId:
        return None


def _is_over(record: RunRecord | None, worker: WorkerRecord, task: RunningTask) -> bool:
    """Whether the store shows that the worker no longer runs the task."""
    if record is None or record.damage:
        return False
    if record.outcome is not None and record.outcome.at >= task.started_at:
        return True
    return bool(record.worker) and record.worker != worker.name


# -- what they run ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A task that runs, on which worker, for how many seconds.

    * `state`: of the worker. For one that is silent, `seconds` ends with its last report.
    * `progress`: the last checkpoint; None without one, or if this version cannot read it.
    """

    task: RunningTask
    worker: WorkerRecord
    state: str
    seconds: float
    progress: Any = None


@dataclass(frozen=True, slots=True)
class RunningTasks:
    """The tasks that run, the longest-running first. damaged: of the workers."""

    rows: Sequence[RunningRow]
    damaged: Mapping[str, str]


def running(
    app: App, *, queues: Collection[str] = (), task: str | None = None, longer: float = 0.0
) -> RunningTasks:
    """The tasks that workers run now. Raises BrokerUnavailable.

    queues, task: only those; () and None mean all. longer: only those that have run so long.
    """
    found = workers(app)
    rows = [
        row
        for row in (*running_rows(found, app.codec), *_lost(app, found))
        if row.seconds >= longer
        and (not queues or row.task.queue in queues)
        and (task is None or row.task.task == task)
    ]
    rows.sort(key=lambda row: row.seconds, reverse=True)
    return RunningTasks(rows, found.damaged)


def running_rows(found: Workers, codec: Codec) -> Iterator[RunningRow]:
    """What each of these workers runs, in their order."""
    for worker in found.records:
        state = found.state(worker)
        until = found.at if state == "alive" else worker.seen_at
        for task in worker.tasks:
            seconds = max(0.0, until - task.started_at)
            yield RunningRow(task, worker, state, seconds, _progress(codec, task))


def _lost(app: App, found: Workers) -> Iterator[RunningRow]:
    """At-most-once runs of workers that are gone and did not report them."""
    known = {task.task_id for worker in found.records for task in worker.tasks}
    for run, worker in lost_runs(app, found):
        task_id = run.key.task_id
        if task_id not in known:
            task = RunningTask(task_id, run.task, run.queue, run.at, run.key.hop)
            seconds = max(0.0, worker.seen_at - run.at)
            yield RunningRow(task, worker, found.state(worker), seconds)


def lost_runs(app: App, found: Workers) -> Iterator[tuple[OnceRun, WorkerRecord]]:
    """At-most-once runs that have started, and whose workers are gone: they end as lost.

    A worker that the store has forgotten is shown as silent since it noted the run. Raises
    BrokerUnavailable.
    """
    store = results_of(app)
    notes = once_runs_of(store)
    workers = {each.name: each for each in found.records}
    noted = Noted() if notes is None else notes.read()
    for run in noted.runs:
        worker = workers.get(run.worker)
        if worker is None:
            worker = WorkerRecord(run.worker, run.at, run.at, (run.queue,), 1, 0)
        elif run.beats:  # the row may be that of another worker under this name
            beat = noted.beats.get(run.life)
            worker = replace(worker, seen_at=run.at if beat is None else max(run.at, beat.at))
        if found.state(worker) == "alive":
            continue
        record = _record(store, run.key.task_id)
        same = record is not None and record.key == run.key and record.worker == run.worker
        if same and record is not None and record.state is State.STARTED:
            yield run, worker


def _progress(codec: Codec, task: RunningTask) -> Any:
    if task.progress is None:
        return None
    try:
        return codec.decode_value(codec.cipher.decrypt(task.progress, PROGRESS, task.task_id))
    except CodecError:
        return None
