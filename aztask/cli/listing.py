"""The queues of a command that names none: all that aztask can use, and word of the others.

What is skipped is named on stderr, so that the output stays the same for programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from aztask.app import App
from aztask.cli.failures import one_line
from aztask.cli.output import plural
from aztask.errors import BrokerError, BrokerUnavailable, QueueDisabled, QueueNotFound


def all_queues(app: App) -> list[str]:
    """All queues that aztask can use. One line names those that belong to other programs."""
    found = app.broker.listing()
    if found.foreign:
        names = ", ".join(found.foreign)
        _say(f"skipped {plural(len(found.foreign), 'queue')} that aztask cannot use: {names}")
    return list(found.queues)


@contextmanager
def skipping(queue: str) -> Iterator[None]:
    """Look at one queue of many: what only this queue refuses does not end the command.

    A queue that was deleted meanwhile is skipped silently, one that is disabled with a line. A
    service that does not answer still raises BrokerUnavailable.
    """
    try:
        yield
    except QueueNotFound:
        return
    except BrokerError as error:
        if isinstance(error, BrokerUnavailable) and not isinstance(error, QueueDisabled):
            raise
        _say(f"skipped queue {queue}: {error}")


def _say(text: str) -> None:
    click.echo(f"aztask: {one_line(text)}", err=True)
