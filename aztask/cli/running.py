"""``aztask running``: list the tasks that workers run now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from aztask.cli.options import Duration, Text, all_names, app_option, json_option, queues_option
from aztask.cli.output import iso_time, print_json, print_table, span
from aztask.cli.target import open_app, results_of
from aztask.cli.workers import readable_workers, state_of
from aztask.results.base import RunningTask, WorkerRecord


class _Row(NamedTuple):
    task: RunningTask
    worker: WorkerRecord
    state: str
    seconds: float


@click.command("running")
@app_option
@queues_option("Only tasks from these queues: a,b or -Q a -Q b.")
@click.option("--task", type=Text(), help="Only runs of this task.")
@click.option(
    "--longer",
    type=Duration(),
    default="0s",
    help="Only tasks that have run for at least this time.",
)
@json_option
def command(
    queues: tuple[tuple[str, ...], ...], task: str | None, longer: float, as_json: bool
) -> None:
    """List the tasks that workers run now, the longest-running first.

    Each worker reports its tasks every 5 seconds, at most the 100 that have run longest. For a
    silent worker, its last reported tasks are shown: they run again when their leases expire.
    """
    with open_app() as app:
        records = readable_workers(results_of(app))
    names = all_names(queues)
    rows = [
        row
        for row in _rows(records, time.time())
        if row.seconds >= longer
        and (not names or row.task.queue in names)
        and (task is None or row.task.task == task)
    ]
    rows.sort(key=lambda row: row.seconds, reverse=True)
    if as_json:
        for row in rows:
            print_json(_described(row))
        return
    print_table(
        ["id", "task", "queue", "retries", "for", "worker", "state"],
        [
            [
                row.task.task_id,
                row.task.task,
                row.task.queue,
                row.task.retries,
                span(row.seconds),
                row.worker.name,
                row.state,
            ]
            for row in rows
        ],
    )


def _rows(records: list[WorkerRecord], now: float) -> Iterator[_Row]:
    for worker in records:
        state = state_of(worker, now)
        until = now if state == "alive" else worker.seen_at
        for task in worker.tasks:
            yield _Row(task, worker, state, max(0.0, until - task.started_at))


def _described(row: _Row) -> dict[str, Any]:
    return {
        "id": row.task.task_id,
        "task": row.task.task,
        "queue": row.task.queue,
        "retries": row.task.retries,
        "started_at": iso_time(row.task.started_at),
        "running_seconds": round(row.seconds, 3),
        "worker": row.worker.name,
        "state": row.state,
        "seen_at": iso_time(row.worker.seen_at),
    }
