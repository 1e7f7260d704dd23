"""``aztask cancel ID``: have tasks not started any more."""

from __future__ import annotations

from collections.abc import Sequence

import click

from aztask.cli.failures import Failed, visible
from aztask.cli.options import app_option
from aztask.cli.target import open_app, results_of
from aztask.results.base import State


@click.command("cancel")
@app_option
@click.argument("task_ids", nargs=-1, required=True, metavar="ID...")
def command(task_ids: Sequence[str]) -> None:
    """Cancel tasks, so that they are not started any more.

    A run that has started goes on to its end, but is not retried.
    """
    ended = []
    with open_app() as app:
        store = results_of(app)
        for task_id in task_ids:
            before = store.get(task_id)
            if not app.result(task_id).cancel():
                ended.append(task_id)
            elif before is not None and before.state is State.STARTED:
                click.echo(f"{visible(task_id)} runs now and goes on; it will not be started again")
            else:
                click.echo(f"{visible(task_id)} is cancelled")
    if ended:
        raise Failed(f"ended already, so not cancelled: {', '.join(ended)}")
