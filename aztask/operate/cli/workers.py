"""``aztask workers`` and ``aztask running``: workers with a recent heartbeat, and their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from aztask.operate import workers as operate
from aztask.operate.cli.options import (
    Duration,
    Text,
    all_names,
    app_option,
    json_option,
    queues_option,
)
from aztask.operate.cli.output import (
    ago,
    iso_time,
    print_json,
    print_table,
    to_json,
    warn_of_damage,
)
from aztask.operate.cli.target import open_app
from aztask.operate.workers import RunningRow, WorkerRecord, Workers
from aztask.support.display import visible
from aztask.support.durations import span
from aztask.version import shown_release


@click.command("workers")
@app_option
@json_option
def command(as_json: bool) -> None:
    """List the workers of the last day: running ones first, the newest first.

    alive: its last heartbeat is at most 15 seconds old. silent: it was killed, is frozen, or cannot
    reach the result store. stopped: it ended normally. leased: the messages that it holds. version:
    the app's version, from its setting `version`, and aztask's. failing: its parts that do not
    work, with the reason below the table; the others go on.
    """
    with open_app(reads=True) as app:
        found = operate.workers(app)
    warn_of_workers(found.damaged)
    records = found.records
    if as_json:
        for worker in records:
            print_json(_described(found, worker))
        return
    failing = any(found.failing(worker) for worker in records)
    several = len({worker.broker for worker in records if worker.broker}) > 1
    print_table(
        [
            *("worker", "state", "queues", "running", "leased", "finished", "started", "seen"),
            "version",
            *(["failing"] if failing else []),
            *(["owner"] if several else []),
        ],
        [
            [
                worker.name,
                found.state(worker),
                ",".join(worker.queues),
                worker.running,
                worker.leased,
                worker.finished,
                ago(worker.started_at, found.at),
                ago(worker.seen_at, found.at),
                shown_release(worker.release) or "-",
                *([_parts_of(found, worker)] if failing else []),
                *([worker.broker] if several else []),
            ]
            for worker in records
        ],
    )
    for worker in records:
        for each in found.failing(worker):
            line = f"{worker.name}: {each.part} fails since {iso_time(each.since)}: {each.reason}"
            click.echo(visible(line))


def _described(found: Workers, worker: WorkerRecord) -> dict[str, object]:
    return {
        "worker": worker.name,
        "state": found.state(worker),
        "queues": list(worker.queues),
        "running": worker.running,
        "leased": worker.leased,
        "finished": worker.finished,
        "started_at": iso_time(worker.started_at),
        "seen_at": iso_time(worker.seen_at),
        "owner": worker.broker or None,
        "version": shown_release(worker.release) or None,
        "failing": [
            {"part": each.part, "since": iso_time(each.since), "reason": each.reason}
            for each in found.failing(worker)
        ],
    }


def _parts_of(found: Workers, worker: WorkerRecord) -> str:
    return ", ".join(each.part for each in found.failing(worker)) or "-"


def warn_of_workers(damaged: Mapping[str, str]) -> None:
    """Name the workers whose heartbeats cannot be read, if there are any."""
    then = "a running worker repairs its row with its next heartbeat"
    warn_of_damage("worker", list(damaged.items()), then)


# -- what they run ---------------------------------------------------------------------------


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
def running(
    queues: tuple[tuple[str, ...], ...], task: str | None, longer: float, as_json: bool
) -> None:
    """List the tasks that workers run now, the longest-running first.

    Each worker reports its tasks every 5 seconds, at most the 100 that have run longest. For a
    silent worker, its last reported tasks are shown: they run again when their leases expire. The
    column progress shows a task's last checkpoint, if that has at most 500 bytes.
    """
    with open_app(reads=True) as app:
        found = operate.running(app, queues=all_names(queues), task=task, longer=longer)
    warn_of_workers(found.damaged)
    rows = found.rows
    if as_json:
        for row in rows:
            print_json(_described_row(row))
        return
    several = len({row.worker.broker for row in rows if row.worker.broker}) > 1
    print_table(
        [
            *("id", "task", "queue", "retries", "for", "worker", "state", "progress"),
            *(["owner"] if several else []),
        ],
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
                *([row.worker.broker] if several else []),
            ]
            for row in rows
        ],
    )


def _described_row(row: RunningRow) -> dict[str, Any]:
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
        "owner": row.worker.broker or None,
    }
