"""``aztask cancel``: cancel tasks before they start, or stop running ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from aztask.app import App
from aztask.errors import NotFound
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.options import (
    NameList,
    Text,
    all_names,
    app_option,
    confirm,
    dry_run_option,
    yes_option,
)
from aztask.operate.cli.output import say_left_out
from aztask.operate.cli.target import open_app
from aztask.operate.tasks import CancelTasks, Chosen, cancel, cancel_chosen
from aztask.support.display import plural, visible

WILL: Final = {
    False: "continues to its end; it will not be retried (--running stops it)",
    True: "will be stopped in a few seconds",
}


@click.command("cancel")
@app_option
@click.argument("task_ids", nargs=-1, type=Text(), metavar="[ID]...")
@click.option("--task", type=Text(), help="Cancel the waiting invocations of this task.")
@click.option(
    *("-Q", "--queue", "queues"),
    type=NameList(),
    multiple=True,
    help="Cancel the tasks that wait in these queues: a,b or -Q a -Q b.",
)
@click.option("--running", is_flag=True, help="Also stop runs that have started.")
@dry_run_option
@yes_option
def command(
    task_ids: Sequence[str],
    task: str | None,
    queues: tuple[tuple[str, ...], ...],
    running: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Cancel tasks before they start.

    Select them by ID, or by --task, --queue or both. A selection is counted first, and you are
    asked before anything is cancelled.

    A task that has started runs to its end, but is not retried. With --running, its worker stops it
    within about five seconds: TaskStopped is raised in the task, and if the task has not ended a
    second later, its process is killed.

    An id that neither the result store nor a queue knows is an error, exit code 5. Of a Storage
    queue, only the first 32 messages can be searched.
    """
    chosen = Chosen(task, all_names(queues), running)
    if bool(task_ids) == bool(chosen.task or chosen.queues):
        raise click.UsageError(
            "select tasks by ID, or by --task and --queue"
            if not task_ids
            else "an ID and --task or --queue exclude each other; remove one of them",
            click.get_current_context(),
        )
    with open_app() as app:
        if not task_ids:
            _cancel_chosen(app, chosen, dry_run=dry_run, yes=yes)
        elif dry_run:
            click.echo(f"would cancel {', '.join(map(visible, task_ids))}")
        else:
            _cancel(app, task_ids, running=running)


def _cancel(app: App, task_ids: Sequence[str], *, running: bool) -> None:
    """Cancel tasks by id. Raises NotFound, CommandFailed for those that have ended."""
    action = cancel(app, task_ids, running=running)
    say_left_out(action.left_out)
    try:
        action.act()
    finally:
        _print_marked(action)
    if action.unknown:
        raise NotFound(
            f"no task has the id {', '.join(sorted(action.unknown))}; if a message with it "
            "arrives, it will not run"
        )
    if action.ended:
        raise CommandFailed(f"not cancelled, since already ended: {', '.join(action.ended)}")


def _print_marked(action: CancelTasks) -> None:
    for task_id in action.marked:
        if action.runs(task_id):
            click.echo(f"{visible(task_id)} runs now and {WILL[action.running]}")
        elif task_id not in action.unknown:
            click.echo(f"{visible(task_id)} is cancelled")


def _cancel_chosen(app: App, chosen: Chosen, *, dry_run: bool, yes: bool) -> None:
    """Count the chosen tasks, ask, cancel them, and report how many were cancelled."""
    action = cancel_chosen(app, chosen)
    say_left_out(action.left_out)
    if action.hidden:
        click.echo(f"aztask: {action.hidden}; aztask queues purge empties a queue", err=True)
    if not action.count:
        click.echo("there is nothing to cancel")
        return
    if not confirm(str(action), dry_run=dry_run, yes=yes):
        return
    try:
        action.act()
    finally:
        click.echo(f"cancelled {plural(action.done, 'task')}")
    if ended := action.count - action.done:
        click.echo(f"aztask: {plural(ended, 'task')} had ended already", err=True)
