"""``aztask workers``: list the workers with a recent heartbeat."""

from __future__ import annotations

import time
from dataclasses import replace

import click

from aztask.cli.listing import warn_of_damage
from aztask.cli.options import app_option, json_option
from aztask.cli.output import ago, iso_time, print_json, print_table
from aztask.cli.target import open_app, results_of
from aztask.results.base import ResultStore, RunningTask, RunRecord, WorkerRecord

STATES = ("alive", "silent", "stopped")


@click.command("workers")
@app_option
@json_option
def command(as_json: bool) -> None:
    """List the workers of the last day: running ones first, the newest first.

    alive: its last heartbeat is at most 15 seconds old. silent: it was killed, is frozen, or cannot
    reach the result store. stopped: it ended normally. leased: the messages that it holds.
    """
    with open_app(reads=True) as app:
        records = readable_workers(results_of(app))
    now = time.time()
    # Not by their last heartbeats: the lines would change places every few seconds.
    records.sort(key=lambda each: (STATES.index(state_of(each, now)), -each.started_at))
    if as_json:
        for worker in records:
            print_json(
                {
                    "worker": worker.name,
                    "state": state_of(worker, now),
                    "queues": list(worker.queues),
                    "running": worker.running,
                    "leased": worker.leased,
                    "finished": worker.finished,
                    "started_at": iso_time(worker.started_at),
                    "seen_at": iso_time(worker.seen_at),
                }
            )
        return
    print_table(
        ["worker", "state", "queues", "running", "leased", "finished", "started", "seen"],
        [
            [
                worker.name,
                state_of(worker, now),
                ",".join(worker.queues),
                worker.running,
                worker.leased,
                worker.finished,
                ago(worker.started_at, now),
                ago(worker.seen_at, now),
            ]
            for worker in records
        ],
    )


def readable_workers(store: ResultStore) -> list[WorkerRecord]:
    """The workers whose heartbeats can be read; the others are named on stderr."""
    found = store.workers()
    damaged = [(worker.name, worker.damage) for worker in found if worker.damage]
    warn_of_damage("worker", damaged, "a running worker repairs its row with its next heartbeat")
    now = time.time()
    return [
        _without_ended(store, worker)
        if worker.tasks and state_of(worker, now) != "alive"
        else worker
        for worker in found
        if not worker.damage
    ]


def _without_ended(store: ResultStore, worker: WorkerRecord) -> WorkerRecord:
    """A silent worker without the runs that have ended, or that another worker has started.

    Its last heartbeat still lists them. It reads one record for each listed task, at most 100.
    """
    left = tuple(
        each for each in worker.tasks if not _is_over(store.get(each.task_id), worker, each)
    )
    running = max(0, worker.running - len(worker.tasks) + len(left))
    return replace(worker, tasks=left, running=running)


def _is_over(record: RunRecord | None, worker: WorkerRecord, task: RunningTask) -> bool:
    """Whether the store shows that the worker no longer runs the task."""
    if record is None or record.damage:
        return False
    if record.outcome is not None and record.outcome.at >= task.started_at:
        return True
    return bool(record.worker) and record.worker != worker.name


def state_of(worker: WorkerRecord, now: float) -> str:
    """The state of a worker: alive, silent or stopped."""
    return worker.state_at(now)
