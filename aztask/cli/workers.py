"""``aztask workers``: list the workers with a recent heartbeat."""

from __future__ import annotations

import time

import click

from aztask.cli.listing import warn_of_damage
from aztask.cli.options import app_option, json_option
from aztask.cli.output import ago, iso_time, print_json, print_table
from aztask.cli.target import open_app, results_of
from aztask.results.base import ResultStore, WorkerRecord

STATES = ("alive", "silent", "stopped")


@click.command("workers")
@app_option
@json_option
def command(as_json: bool) -> None:
    """List the workers of the last day: running ones first, the newest first.

    alive: its last heartbeat is at most 15 seconds old. silent: it was killed, is frozen, or cannot
    reach the result store. stopped: it ended normally. leased: the messages that it holds.
    """
    with open_app() as app:
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
    return [worker for worker in found if not worker.damage]


def state_of(worker: WorkerRecord, now: float) -> str:
    """The state of a worker: alive, silent or stopped."""
    return worker.state_at(now)
