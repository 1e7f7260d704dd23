"""``aztask cancel``: cancel tasks before they start, or stop running ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from aztask.app import App
from aztask.cli.cancel_many import Chosen, cancel_chosen
from aztask.cli.confirm import dry_run_option, yes_option
from aztask.cli.failures import CommandFailed, NotFound
from aztask.cli.listing import all_queues, skipping
from aztask.cli.options import NameList, Text, all_names, app_option
from aztask.cli.target import open_app, results_of
from aztask.cli.waiting import waiting
from aztask.results.base import State
from aztask.support.display import visible

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
            cancel_chosen(app, chosen, dry_run=dry_run, yes=yes)
        elif dry_run:
            click.echo(f"would cancel {', '.join(map(visible, task_ids))}")
        else:
            _cancel(app, task_ids, running=running)


def _cancel(app: App, task_ids: Sequence[str], *, running: bool) -> None:
    """Cancel tasks by id. Raises NotFound, CommandFailed for those that have ended."""
    ended, unknown = [], set()
    store = results_of(app)
    before = {task_id: store.get(task_id) for task_id in task_ids}
    missing = {task_id for task_id, record in before.items() if record is None}
    unknown = missing - _waiting(app, missing) if missing else set()
    for task_id, record in before.items():
        # An unknown id is marked too: its message may be where it cannot be searched.
        if not app.result(task_id).cancel(running=running):
            ended.append(task_id)
        elif record is not None and record.state is State.STARTED:
            click.echo(f"{visible(task_id)} runs now and {WILL[running]}")
        elif task_id not in unknown:
            click.echo(f"{visible(task_id)} is cancelled")
    if unknown:
        raise NotFound(
            f"no task has the id {', '.join(sorted(unknown))}; if a message with it arrives, it "
            "will not run"
        )
    if ended:
        raise CommandFailed(f"not cancelled, since already ended: {', '.join(ended)}")


def _waiting(app: App, missing: set[str]) -> set[str]:
    """Those of these ids whose messages are in a queue."""
    found: set[str] = set()
    for queue in all_queues(app):
        with skipping(queue):
            for each in waiting(app, queue):
                found |= missing & {str(each.peeked.envelope.headers.get("id"))}
                if found == missing:
                    return found
    return found
