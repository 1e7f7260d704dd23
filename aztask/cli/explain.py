"""``aztask explain``: what happened to one task, in order, and what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aztask.cli.failures import NotFound
from aztask.cli.options import Text, app_option, json_option
from aztask.cli.output import STATE_COLOURS, iso_time, local_time, print_json
from aztask.cli.target import open_app
from aztask.errors import ConfigurationError
from aztask.explain.entries import GAP, Entry
from aztask.explain.eventlog import events_of
from aztask.explain.timeline import History, history_of
from aztask.support.display import one_line, visible
from aztask.support.masking import mask

LONGEST = 500


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
def command(task_id: str, directory: Path | None, as_json: bool) -> None:
    """Show what happened to a task, in order, and why.

    That is its deliveries, leases, retries and settlements, with their reasons. The command merges
    the task's rows in the result store with its events in the event directory of this machine.
    Gaps are named: rows keep the last 20 starts of a run, and only events know renewals and lost
    leases.
    """
    with open_app(reads=True) as app:
        store = app.results
        place = directory or app.settings.events
        if store is None and place is None:
            raise ConfigurationError(
                "nothing to read: set AZTASK_RESULTS to the result store, or --events to a "
                "directory of events"
            )
        latest = store.get(task_id) if store is not None else None
        runs = store.history(task_id) if store is not None else []
        log = events_of(place, task_id) if place is not None else None
    state = latest.state if latest is not None else None
    history = history_of(task_id, runs, log, state=state)
    if history is None:
        raise NotFound(
            f"neither the result store nor the events know a task {task_id!r}; it may not have "
            "started yet"
        )
    if as_json:
        print_json(_described(history))
        for entry in history.entries:
            print_json(_described_entry(entry))
    else:
        _print(history)


def _print(history: History) -> None:
    state = history.state.value if history.state is not None else "not in the result store"
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


def _described(history: History) -> dict[str, Any]:
    return {
        "id": history.task_id,
        "task": history.task,
        "queue": history.queue,
        "state": None if history.state is None else history.state.value,
        "workflow_id": history.workflow or None,
        "parent_id": history.parent or None,
        "gaps": history.gaps,
    }


def _described_entry(entry: Entry) -> dict[str, Any]:
    return {
        "at": iso_time(entry.at),
        "kind": entry.kind,
        "text": mask(entry.text),
        "source": entry.source,
        "worker": entry.worker,
        "delivery_count": entry.delivery,
    }
