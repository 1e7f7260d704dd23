"""Workers by their heartbeats, and the tasks that they run."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from aztask.app import App
from aztask.errors import CodecError
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
MOST_CHECKED: Final = 1_000
"""Tasks of silent workers that are looked up, in bulk: after an outage all of them are silent."""


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

    Not by their last heartbeats: they would change places every few seconds. Tasks of workers that
    are gone are hidden if they have ended, as far as `MOST_CHECKED` tasks tell. Raises
    BrokerUnavailable, and ConfigurationError without a result store.
    """
    store = results_of(app)
    found = heartbeats(store, time.time(), everyone=True)
    gone = [each for each in found.records if found.state(each) != "alive"]
    listed = (task.task_id for worker in gone for task in worker.tasks)
    runs = _records(store, islice(listed, MOST_CHECKED))
    records = [
        each if found.state(each) == "alive" else _without_ended(runs, each)
        for each in found.records
    ]
    records.sort(key=lambda each: (STATES.index(found.state(each)), -each.started_at))
    return replace(found, records=records)


def _without_ended(runs: Mapping[str, RunRecord], worker: WorkerRecord) -> WorkerRecord:
    """A silent worker without the runs that have ended, or that another worker has started.

    Its last heartbeat still lists them.
    """
    left = tuple(each for each in worker.tasks if not _is_over(runs, worker, each))
    running = max(0, worker.running - len(worker.tasks) + len(left))
    return replace(worker, tasks=left, running=running)


def _records(store: ResultStore, task_ids: Iterable[str]) -> dict[str, RunRecord]:
    """The records of tasks, in bulk; without those of other owners, which this store hides."""
    todo = sorted(set(task_ids))
    found = zip(todo, store.get_many(todo), strict=True)
    return {task_id: run for task_id, run in found if isinstance(run, RunRecord)}


def _is_over(runs: Mapping[str, RunRecord], worker: WorkerRecord, task: RunningTask) -> bool:
    """Whether the store shows that the worker no longer runs the task."""
    record = runs.get(task.task_id)
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

    A worker that the store has forgotten is shown as silent since it noted the run. Of more than
    `MOST_CHECKED`, the newest are looked at. Raises BrokerUnavailable.
    """
    store = results_of(app)
    notes = once_runs_of(store)
    workers = {each.name: each for each in found.records}
    noted = Noted() if notes is None else notes.read()
    gone: list[tuple[OnceRun, WorkerRecord]] = []
    for run in noted.runs:
        worker = workers.get(run.worker)
        if worker is None:
            worker = WorkerRecord(run.worker, run.at, run.at, (run.queue,), 1, 0)
        elif run.beats:  # the row may be that of another worker under this name
            beat = noted.beats.get(run.life)
            worker = replace(worker, seen_at=run.at if beat is None else max(run.at, beat.at))
        if found.state(worker) != "alive":
            gone.append((run, worker))
    gone.sort(key=lambda pair: pair[0].at, reverse=True)
    records = _records(store, (run.key.task_id for run, _ in gone[:MOST_CHECKED]))
    for run, worker in gone:
        record = records.get(run.key.task_id)
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
