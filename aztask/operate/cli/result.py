"""``aztask result``, ``aztask explain`` and ``aztask tasks``: what is known of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from aztask.errors import TaskCancelled, TaskExpired, TaskFailed
from aztask.operate.celeryapp import CeleryApp, celery_recent, celery_result
from aztask.operate.cli.options import Text, app_option, json_option
from aztask.operate.cli.output import (
    STATE_COLOURS,
    iso_time,
    local_time,
    print_fields,
    print_json,
    print_table,
    to_json,
    warn_of_damage,
)
from aztask.operate.cli.target import open_app
from aztask.operate.eventlog import GAP, LogEntry
from aztask.operate.explain import History
from aztask.operate.explain import explain as explained
from aztask.operate.tasks import (
    STATES,
    ParkedRun,
    Registered,
    RunRecord,
    StreamPart,
    TaskResult,
    recent,
    registered,
    result,
    settlement_of,
    stream,
)
from aztask.support.display import mask, one_line, visible

NOT_VERIFIED = "no: the result is signed, and AZTASK_SIGNING_KEYS is not set here"
UNVERIFIED = "not verified"
LONGEST = 500
"""Characters of an entry of a task's history that are shown."""


@click.command("result")
@app_option
@click.argument("task_id", type=Text(), required=False, metavar="[ID]")
@click.option(
    "--state",
    type=click.Choice(STATES),
    help="List only runs in this state.",
)
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=20, help="List at most this many runs."
)
@click.option("--follow", is_flag=True, help="Print what the task emits, until it has ended.")
@json_option
def command(
    task_id: str | None, state: str | None, limit: int, follow: bool, as_json: bool
) -> None:
    """Show how a task ended, or list the newest runs.

    With ID, it shows the task, its value or error, its last checkpoint while it runs, and all its
    runs. Without, it lists the newest runs of all tasks. Each retry is a run of its own; starts
    counts how often one run was started, which is more than once if its worker died. Damaged runs
    are skipped and named on stderr; --state unreadable lists those that workers have found. If
    several apps with brokers of their own share the result store, the list has the runs of all, and
    the column owner says whose each one is.

    With --follow, it prints the parts that the task emits as they come, one on each line; with
    --json as objects. A line on stderr says that the task was retried and began anew.

    Of a Celery app it shows what the app's own result backend knows, of whatever kind that is; the
    list needs one of aztask's.
    """
    if follow and task_id is None:
        raise click.UsageError("--follow belongs to a task: aztask result ID --follow")
    with open_app(reads=True, celery=True) as app:
        if task_id is not None and follow:
            if isinstance(app, CeleryApp):
                raise click.UsageError(
                    "--follow is for aztask's tasks: those of Celery emit nothing"
                )
            _follow(stream(app, task_id), as_json=as_json)
            return
        if task_id is None:
            found = (
                celery_recent(app, state, limit)
                if isinstance(app, CeleryApp)
                else recent(app, state, limit)
            )
        else:
            one = (
                celery_result(app, task_id) if isinstance(app, CeleryApp) else result(app, task_id)
            )
            _print_one(task_id, one, as_json=as_json)
            return
    warn_of_damage("run", found.damaged, "see: aztask result ID, or --state unreadable")
    _print_recent(found.runs, as_json=as_json)


def _follow(parts: Iterator[StreamPart], *, as_json: bool) -> None:
    try:
        for part in parts:
            if as_json:
                record = {"number": part.number, "id": part.id, "value": part.value}
                print_json({**record, "reset": part.reset})
            elif part.reset:
                click.echo("aztask: the task was retried; its stream begins anew", err=True)
            else:
                value = part.value
                click.echo(visible(value if isinstance(value, str) else to_json(value)))
    except (TaskFailed, TaskCancelled, TaskExpired) as error:
        raise click.ClickException(visible(mask(str(error)))) from None


def _print_recent(runs: Sequence[RunRecord], *, as_json: bool) -> None:
    if as_json:
        for run in runs:
            print_json(_summary(run))
        return
    unverified = any(run.unverified for run in runs)
    several = unverified or len({run.broker for run in runs if run.broker}) > 1
    print_table(
        [
            *("id", "task", "state", "queue", "starts", "started", "seconds", "error"),
            *(["owner"] if several else []),
            *(["verified"] if unverified else []),
        ],
        [
            [
                run.key.task_id,
                run.task,
                run.shown_state,
                run.queue,
                run.starts,
                local_time(run.started_at),
                run.outcome.duration if run.outcome else None,
                _error_line(run),
                *([run.broker] if several else []),
                *([UNVERIFIED if run.unverified else ""] if unverified else []),
            ]
            for run in runs
        ],
    )


def _print_one(task_id: str, found: TaskResult, *, as_json: bool) -> None:
    latest, runs = found.latest, found.runs
    if as_json:
        print_json(
            {
                **_summary(latest),
                "value": found.value,
                "progress": found.progress,
                "waits": _described_waits(found.waits),
                "signals": list(found.signals),
                "traceback": latest.outcome.traceback if latest.outcome else "",
                "runs": [_summary(run) for run in runs],
            }
        )
        return
    outcome = latest.outcome
    succeeded = latest.state.value == "succeeded" and not latest.damage
    progress = found.progress
    print_fields(
        [
            ("id", task_id),
            ("task", latest.task or None),
            ("state", latest.shown_state),
            ("queue", latest.queue or None),
            ("starts", str(latest.starts) if latest.starts > 1 else None),
            ("worker", latest.worker or None),
            ("started", local_time(latest.started_at)),
            ("waits for", _waits(found.waits)),
            ("since", local_time(found.waits.since) if found.waits else None),
            ("signals", ", ".join(found.signals) or None),
            ("ended", local_time(outcome.at) if outcome and not found.waits else None),
            ("seconds", f"{outcome.duration:.3f}" if outcome else None),
            ("progress", to_json(progress) if progress is not None else None),
            ("value", to_json(found.value) if succeeded else None),
            ("damaged", latest.damage or None),
            ("verified", NOT_VERIFIED if latest.unverified else None),
            ("error", None if latest.damage or found.waits else _error_line(latest)),
        ]
    )
    if len(runs) > 1:
        click.echo()
        _print_runs(runs)
    if outcome is not None and outcome.traceback:
        click.echo()
        for line in outcome.traceback.splitlines():
            click.echo(visible(mask(line)))


def _waits(run: ParkedRun | None) -> str | None:
    if run is None:
        return None
    return "; ".join(f"{wait}, until {local_time(wait.until)}" for wait in run.waits)


def _described_waits(run: ParkedRun | None) -> dict[str, Any] | None:
    if run is None:
        return None
    waits = [
        {"kind": wait.kind, "names": list(wait.names), "until": iso_time(wait.until)}
        for wait in run.waits
    ]
    return {"since": iso_time(run.since), "for": waits}


def _print_runs(runs: Sequence[RunRecord]) -> None:
    print_table(
        ["generation", "hop", "state", "starts", "started", "seconds", "then", "error"],
        [
            [
                run.key.generation,
                run.key.hop,
                run.shown_state,
                run.starts,
                local_time(run.started_at),
                run.outcome.duration if run.outcome else None,
                settlement_of(run),
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
        "state": run.shown_state,
        "worker": run.worker,
        "starts": run.starts,
        "started_at": iso_time(run.started_at),
        "ended_at": iso_time(outcome.at) if outcome else None,
        "duration_seconds": outcome.duration if outcome else None,
        "settlement": settlement_of(run),
        "error_type": outcome.error_type if outcome else "",
        "error": outcome.error if outcome else "",
        "damage": run.damage,
        "owner": run.broker or None,
        **({"unverified": True} if run.unverified else {}),
    }


def _error_line(run: RunRecord) -> str | None:
    if run.damage:
        return run.damage
    if run.outcome is None or not run.outcome.error_type:
        return None
    lines = run.outcome.error.splitlines()
    if run.outcome.parked:
        return lines[0] if lines else None
    return f"{run.outcome.error_type}: {lines[0]}" if lines else run.outcome.error_type


# -- what happened to a task -----------------------------------------------------------------


@click.command("explain")
@app_option
@click.argument("task_id", type=Text(), metavar="ID")
@click.option(
    "--events",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Read the event files in this directory. [default: the app's own, or AZTASK_EVENTS]",
)
@json_option
def explain(task_id: str, directory: Path | None, as_json: bool) -> None:
    """Show what happened to a task, in order, and why; or to the tasks of a workflow.

    That is its deliveries, leases, retries and settlements, with their reasons. The command merges
    the task's rows in the result store with its events in the event directory of this machine.
    Gaps are named: rows keep the last 20 starts of a run, and only events know renewals and lost
    leases.
    """
    with open_app(reads=True) as app:
        history = explained(app, task_id, directory)
    if as_json:
        print_json(_described_history(history))
        for entry in history.entries:
            print_json(_described_entry(entry))
    else:
        _print_history(history)


def _print_history(history: History) -> None:
    state = history.shown or "not in the result store"
    shown = click.style(state, fg=STATE_COLOURS.get(state))
    click.echo(f"{visible(history.task) or 'task'}  {visible(history.task_id)}  {shown}")
    for name, value in (("workflow", history.workflow), ("parent", history.parent)):
        if value:
            click.echo(f"{name}: {visible(value)}")
    width = max((len(visible(entry.worker)) for entry in history.entries), default=0)
    for entry in history.entries:
        text = one_line(mask(visible(entry.text)), LONGEST)
        if entry.kind == GAP:
            click.echo(click.style(f"{'':19}      {'':{width}}  gap: {text}", dim=True))
        else:
            click.echo(f"{_time(entry.at)}  {visible(entry.worker):{width}}  {text}")


def _time(at: float | None) -> str:
    """An entry's time as the reader's clock shows it, to the millisecond."""
    text = local_time(at) or ""
    return f"{text}.{int((at or 0.0) % 1 * 1000):03d}"


def _described_history(history: History) -> dict[str, Any]:
    return {
        "id": history.task_id,
        "task": history.task,
        "queue": history.queue,
        "state": history.shown or None,
        "workflow_id": history.workflow or None,
        "parent_id": history.parent or None,
        "gaps": history.gaps,
    }


def _described_entry(entry: LogEntry) -> dict[str, Any]:
    return {
        "at": iso_time(entry.at),
        "kind": entry.kind,
        "text": mask(entry.text),
        "source": entry.source,
        "worker": entry.worker,
        "delivery_count": entry.delivery,
    }


# -- the tasks of an app ---------------------------------------------------------------------


@click.command("tasks")
@app_option
@json_option
def tasks(as_json: bool) -> None:
    """List the tasks that the app registers."""
    with open_app(required="aztask tasks") as app:
        found = registered(app)
    if as_json:
        for each in found:
            print_json(_described_task(each))
        return
    print_table(
        ["task", "queue", "retries", "time limit", "about"],
        [
            [
                f"{each.task.name}{each.signature}",
                each.queue,
                each.task.retry.max_retries,
                f"{each.task.time_limit:g} s" if each.task.time_limit else None,
                each.about,
            ]
            for each in found
        ],
    )


def _described_task(found: Registered) -> dict[str, Any]:
    task = found.task
    return {
        "task": task.name,
        "signature": found.signature,
        "queue": found.queue,
        "max_retries": task.retry.max_retries,
        "retry_strategy": task.retry_strategy,
        "time_limit_seconds": task.time_limit,
        "soft_time_limit_seconds": task.soft_time_limit,
        "lease_seconds": task.lease,
        "max_lease_seconds": task.max_lease,
        "expires_seconds": task.expires,
        "delivery": task.delivery,
        "about": found.about,
    }
