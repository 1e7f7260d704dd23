"""``aztask cancel ID``: cancel tasks before they start, or stop running ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from aztask.cli.failures import CommandFailed, visible
from aztask.cli.options import app_option
from aztask.cli.target import open_app, results_of
from aztask.results.base import State

WILL: Final = {
    False: "continues to its end; it will not be retried (--running stops it)",
    True: "will be stopped in a few seconds",
}


@click.command("cancel")
@app_option
@click.argument("task_ids", nargs=-1, required=True, metavar="ID...")
@click.option("--running", is_flag=True, help="Also stop runs that have started.")
def command(task_ids: Sequence[str], running: bool) -> None:
    """Cancel tasks before they start.

    A task that has started runs to its end, but is not retried. With --running, its worker stops it
    within about five seconds: TaskStopped is raised in the task, and if the task has not ended a
    second later, its process is killed.
    """
    ended = []
    with open_app() as app:
        store = results_of(app)
        for task_id in task_ids:
            before = store.get(task_id)
            if not app.result(task_id).cancel(running=running):
                ended.append(task_id)
            elif before is not None and before.state is State.STARTED:
                click.echo(f"{visible(task_id)} runs now and {WILL[running]}")
            else:
                click.echo(f"{visible(task_id)} is cancelled")
    if ended:
        raise CommandFailed(f"not cancelled, since already ended: {', '.join(ended)}")
