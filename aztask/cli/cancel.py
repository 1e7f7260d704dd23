"""``aztask cancel ID``: cancel tasks before they start, or stop running ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import click

from aztask.app import App
from aztask.brokers.base import Peeked
from aztask.cli.failures import CommandFailed, NotFound
from aztask.cli.listing import all_queues, skipping
from aztask.cli.options import Text, app_option
from aztask.cli.target import open_app, results_of
from aztask.results.base import State
from aztask.support.display import visible

WILL: Final = {
    False: "continues to its end; it will not be retried (--running stops it)",
    True: "will be stopped in a few seconds",
}
PAGE: Final = 500
MOST_PEEKED: Final = 100_000
"""Messages of one queue that are searched for an unknown id: some seconds of reading."""


@click.command("cancel")
@app_option
@click.argument("task_ids", nargs=-1, required=True, type=Text(), metavar="ID...")
@click.option("--running", is_flag=True, help="Also stop runs that have started.")
def command(task_ids: Sequence[str], running: bool) -> None:
    """Cancel tasks before they start.

    A task that has started runs to its end, but is not retried. With --running, its worker stops it
    within about five seconds: TaskStopped is raised in the task, and if the task has not ended a
    second later, its process is killed.

    An id that neither the result store nor a queue knows is an error, exit code 5. Of a Storage
    queue, only the first 32 messages can be searched.
    """
    ended, unknown = [], set()
    with open_app() as app:
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
            for message in _messages(app, queue):
                found |= missing & {str(message.envelope.headers.get("id"))}
                if found == missing:
                    return found
    return found


def _messages(app: App, queue: str) -> Iterator[Peeked]:
    page = app.broker.peek(queue, limit=PAGE)
    seen = 0
    while page:
        yield from page
        seen += len(page)
        if not app.broker.capabilities.paged_peek or seen >= MOST_PEEKED:
            return
        page = app.broker.peek(queue, after=page[-1].position, limit=PAGE)
