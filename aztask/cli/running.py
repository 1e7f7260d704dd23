"""``aztask running``: list the tasks that workers run now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from aztask.cli.options import Duration, Text, all_names, app_option, json_option, queues_option
from aztask.cli.output import iso_time, print_json, print_table, span, to_json
from aztask.cli.target import open_app, results_of
from aztask.cli.workers import readable_workers, state_of
from aztask.errors import CodecError
from aztask.message.codec import Codec
from aztask.results.base import RunningTask, WorkerRecord


class _Row(NamedTuple):
    task: RunningTask
    worker: WorkerRecord
    state: str
    seconds: float
    progress: Any


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
    silent worker, its last reported tasks are shown: they run again when their leases expire. The
    column progress shows a task's last checkpoint, if that has at most 500 bytes.
    """
    with open_app(reads=True) as app:
        records = readable_workers(results_of(app))
        found = list(_rows(records, time.time(), app.codec))
    names = all_names(queues)
    rows = [
        row
        for row in found
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
        ["id", "task", "queue", "retries", "for", "worker", "state", "progress"],
        [
            [
                row.task.task_id,
                row.task.task,
                row.task.queue,
                row.task.retries,
                span(row.seconds),
                row.worker.name,
                row.state,
                None if row.progress is None else to_json(row.progress),
            ]
            for row in rows
        ],
    )


def _rows(records: list[WorkerRecord], now: float, codec: Codec) -> Iterator[_Row]:
    for worker in records:
        state = state_of(worker, now)
        until = now if state == "alive" else worker.seen_at
        for task in worker.tasks:
            seconds = max(0.0, until - task.started_at)
            yield _Row(task, worker, state, seconds, _progress(codec, task))


def _progress(codec: Codec, task: RunningTask) -> Any:
    """The last checkpoint; None without one, or if this version cannot read it."""
    if task.progress is None:
        return None
    try:
        return codec.decode_value(task.progress)
    except CodecError:
        return None


def _described(row: _Row) -> dict[str, Any]:
    return {
        "id": row.task.task_id,
        "task": row.task.task,
        "queue": row.task.queue,
        "retries": row.task.retries,
        "started_at": iso_time(row.task.started_at),
        "running_seconds": round(row.seconds, 3),
        "progress": row.progress,
        "worker": row.worker.name,
        "state": row.state,
        "seen_at": iso_time(row.worker.seen_at),
    }
