"""``aztask result``: show how a task ended, or list the newest runs."""

from __future__ import annotations

from typing import Any

import click

from aztask.app import App
from aztask.cli.failures import NotFound
from aztask.cli.listing import warn_of_damage
from aztask.cli.options import Text, app_option, json_option
from aztask.cli.output import (
    iso_time,
    local_time,
    print_fields,
    print_json,
    print_table,
    to_json,
)
from aztask.cli.target import open_app, results_of
from aztask.errors import AztaskError, CodecError
from aztask.results.base import ResultStore, RunRecord, State
from aztask.settlement import name_of
from aztask.support.display import visible
from aztask.support.masking import mask


@click.command("result")
@app_option
@click.argument("task_id", type=Text(), required=False, metavar="[ID]")
@click.option(
    "--state",
    type=click.Choice([each.value for each in State]),
    help="List only runs in this state.",
)
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=20, help="List at most this many runs."
)
@json_option
def command(task_id: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """Show how a task ended, or list the newest runs.

    With ID, it shows the task, its value or error, its last checkpoint while it runs, and all its
    runs. Without, it lists the newest runs of all tasks. Each retry is a run of its own; starts
    counts how often one run was started, which is more than once if its worker died. Damaged runs
    are skipped and named on stderr; --state unreadable lists those that workers have found.
    """
    with open_app(reads=True) as app:
        store = results_of(app)
        if task_id is None:
            _print_recent(store, State(state) if state else None, limit, as_json=as_json)
        else:
            _print_one(app, store, task_id, as_json=as_json)


def _print_recent(store: ResultStore, state: State | None, limit: int, *, as_json: bool) -> None:
    runs = store.recent(state=state, limit=limit)
    if state is not State.UNREADABLE:
        runs = _readable(store, state, limit, runs)
    if as_json:
        for run in runs:
            print_json(_summary(run))
        return
    print_table(
        ["id", "task", "state", "queue", "starts", "started", "seconds", "error"],
        [
            [
                run.key.task_id,
                run.task,
                run.state.value,
                run.queue,
                run.starts,
                local_time(run.started_at),
                run.outcome.duration if run.outcome else None,
                _error_line(run),
            ]
            for run in runs
        ],
    )


def _readable(
    store: ResultStore, state: State | None, limit: int, found: list[RunRecord]
) -> list[RunRecord]:
    """Up to `limit` runs whose rows can be read; damaged ones are named on stderr.

    A damaged row does not take the place of another run: if there are some, more runs are read.
    """
    asked = limit
    while True:
        runs = [run for run in found if run.state is not State.UNREADABLE]
        if len(runs) >= limit or len(found) < asked:
            break
        asked *= 2
        found = store.recent(state=state, limit=asked)
    damaged = [(run.key.task_id, run.damage) for run in found if run.damage]
    warn_of_damage("run", damaged, "see: aztask result ID, or --state unreadable")
    return runs[:limit]


def _print_one(app: App, store: ResultStore, task_id: str, *, as_json: bool) -> None:
    latest = store.get(task_id)
    if latest is None:
        if _is_workflow(app, task_id):
            raise NotFound(f"{task_id!r} is a workflow; see aztask workflow show {task_id}")
        raise NotFound(f"the result store has no task {task_id!r}; it may not have started yet")
    runs = store.history(task_id)
    if as_json:
        print_json(
            {
                **_summary(latest),
                "value": _value(app, latest),
                "progress": app.result(task_id).progress,
                "traceback": latest.outcome.traceback if latest.outcome else "",
                "runs": [_summary(run) for run in runs],
            }
        )
        return
    outcome = latest.outcome
    succeeded = latest.state is State.SUCCEEDED and not latest.damage
    progress = app.result(task_id).progress
    print_fields(
        [
            ("id", task_id),
            ("task", latest.task or None),
            ("state", latest.state.value),
            ("queue", latest.queue or None),
            ("starts", str(latest.starts) if latest.starts > 1 else None),
            ("worker", latest.worker or None),
            ("started", local_time(latest.started_at)),
            ("ended", local_time(outcome.at) if outcome else None),
            ("seconds", f"{outcome.duration:.3f}" if outcome else None),
            ("progress", to_json(progress) if progress is not None else None),
            ("value", to_json(_value(app, latest)) if succeeded else None),
            ("damaged", latest.damage or None),
            ("error", None if latest.damage else _error_line(latest)),
        ]
    )
    if len(runs) > 1:
        click.echo()
        _print_runs(runs)
    if outcome is not None and outcome.traceback:
        click.echo()
        for line in outcome.traceback.splitlines():
            click.echo(visible(mask(line)))


def _is_workflow(app: App, task_id: str) -> bool:
    """Whether the id names a workflow; False if the store keeps none, or its row is damaged."""
    try:
        return app.workflows.result(task_id).state != State.PENDING.value
    except AztaskError:
        return False


def _print_runs(runs: list[RunRecord]) -> None:
    print_table(
        ["generation", "hop", "state", "starts", "started", "seconds", "then", "error"],
        [
            [
                run.key.generation,
                run.key.hop,
                run.state.value,
                run.starts,
                local_time(run.started_at),
                run.outcome.duration if run.outcome else None,
                name_of(run.outcome.settlement) if run.outcome else None,
                _error_line(run),
            ]
            for run in runs
        ],
    )


def _summary(run: RunRecord) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "id": run.key.task_id,
        "generation": run.key.generation,
        "hop": run.key.hop,
        "task": run.task,
        "queue": run.queue,
        "state": run.state.value,
        "worker": run.worker,
        "starts": run.starts,
        "started_at": iso_time(run.started_at),
        "ended_at": iso_time(outcome.at) if outcome else None,
        "duration_seconds": outcome.duration if outcome else None,
        "settlement": name_of(outcome.settlement) if outcome else None,
        "error_type": outcome.error_type if outcome else "",
        "error": outcome.error if outcome else "",
        "damage": run.damage,
    }


def _error_line(run: RunRecord) -> str | None:
    if run.damage:
        return run.damage
    if run.outcome is None or not run.outcome.error_type:
        return None
    lines = run.outcome.error.splitlines()
    return f"{run.outcome.error_type}: {lines[0]}" if lines else run.outcome.error_type


def _value(app: App, run: RunRecord) -> Any:
    """The task's value; if this version cannot read it, a text that says why."""
    if run.outcome is None or run.outcome.value is None:
        return None
    try:
        return app.codec.decode_value(run.outcome.value)
    except CodecError as error:
        return f"(cannot be read: {error})"
