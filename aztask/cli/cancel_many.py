"""Cancelling tasks by name and queue: find them, count them, ask, and cancel them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import click

from aztask.app import App
from aztask.cli.confirm import confirm
from aztask.cli.failures import NotFound
from aztask.cli.listing import all_queues, skipping
from aztask.cli.target import results_of
from aztask.cli.waiting import hidden, waiting
from aztask.errors import did_you_mean
from aztask.support.display import plural, visible


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tasks to cancel: those of this name, in these queues; None and () mean all.

    running: those that have started too.
    """

    task: str | None
    queues: tuple[str, ...]
    running: bool

    def matches(self, task: str, queue: str) -> bool:
        """True for a task of that name in that queue."""
        return self.task in (None, task) and (not self.queues or queue in self.queues)


def cancel_chosen(app: App, chosen: Chosen, *, dry_run: bool, yes: bool) -> None:
    """Count the chosen tasks, ask, cancel them, and report how many were cancelled.

    A task that is sent after the count is not cancelled. Raises NotFound for an unknown task.
    """
    results_of(app)  # the cancellations are kept there: without one, fail before reading queues
    found = dict(_found(app, chosen))
    note = hidden(app.broker.capabilities)
    if note and not app.broker.capabilities.paged_peek:
        click.echo(f"aztask: {note}; aztask queues purge empties a queue", err=True)
    if not found:
        _explain_nothing(app, chosen)
        return
    counts = ", ".join(
        f"{count:,} {visible(task)} in {visible(queue)}"
        for (task, queue), count in Counter(found.values()).most_common()
    )
    if not confirm(f"cancel {plural(len(found), 'task')} ({counts})", dry_run=dry_run, yes=yes):
        return
    done = 0
    try:
        for task_id in found:
            done += app.result(task_id).cancel(running=chosen.running)
    finally:
        click.echo(f"cancelled {plural(done, 'task')}")
    if ended := len(found) - done:
        click.echo(f"aztask: {plural(ended, 'task')} had ended already", err=True)


def _found(app: App, chosen: Chosen) -> Iterator[tuple[str, tuple[str, str]]]:
    """The id of each chosen task, with its name and queue."""
    for queue in chosen.queues or all_queues(app):
        if chosen.queues:
            app.broker.stats(queue)  # a missing queue that you name is an error
        with skipping(queue):
            for each in waiting(app, queue):
                message = each.message
                if message is not None and chosen.matches(message.task, queue):
                    yield message.id, (message.task, queue)
    if chosen.running:
        for worker in results_of(app).workers():
            for task in () if worker.stopped else worker.tasks:
                if chosen.matches(task.task, task.queue):
                    yield task.task_id, (task.task, task.queue)


def _explain_nothing(app: App, chosen: Chosen) -> None:
    """Say that nothing waits. Raises NotFound if the app has tasks, but none of that name."""
    if chosen.task and app.tasks and chosen.task not in app.tasks:
        hint = did_you_mean(chosen.task, list(app.tasks))
        raise NotFound(f"the app has no task {chosen.task!r}.{hint} See: aztask tasks")
    click.echo("there is nothing to cancel")
