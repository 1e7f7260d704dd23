"""``aztask cancel ID``: have tasks not started any more, or stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from aztask.cli.failures import CommandFailed, visible
from aztask.cli.options import app_option
from aztask.cli.target import open_app, results_of
from aztask.results.base import State

WILL: Final = {
    False: "goes on; it will not be started again (--running stops it)",
    True: "will be stopped in a few seconds",
}


@click.command("cancel")
@app_option
@click.argument("task_ids", nargs=-1, required=True, metavar="ID...")
@click.option("--running", is_flag=True, help="Stop runs that have started, too.")
def command(task_ids: Sequence[str], running: bool) -> None:
    """Cancel tasks, so that they are not started any more.

    A run that has started goes on to its end, but is not retried. With --running its worker stops
    it within about five seconds: TaskStopped is raised in the task, and a second later its process
    is killed if it has not ended.
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
        raise CommandFailed(f"ended already, so not cancelled: {', '.join(ended)}")
