"""What a listing skips: queues that aztask cannot use, queues that refuse, rows that are damaged.

One line on stderr names them, so that stdout stays the same for programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import click

from aztask.app import App
from aztask.cli.failures import one_line
from aztask.errors import BrokerError, BrokerUnavailable, QueueDisabled, QueueNotFound
from aztask.support.display import plural

NAMED: Final = 3
"""Damaged rows that the line names; it counts the others."""


def all_queues(app: App) -> list[str]:
    """All queues that aztask can use. One line names the others, which other programs made."""
    found = app.broker.listing()
    if found.foreign:
        names = ", ".join(found.foreign)
        _say(f"skipped {plural(len(found.foreign), 'queue')} that aztask cannot use: {names}")
    return list(found.queues)


@contextmanager
def skipping(queue: str) -> Iterator[None]:
    """Read one queue of many: if this queue alone refuses, the command goes on without it.

    A queue that was deleted in the meantime is skipped silently, a disabled one with a line. If
    the service does not answer, BrokerUnavailable is raised as usual.
    """
    try:
        yield
    except QueueNotFound:
        return
    except BrokerError as error:
        if isinstance(error, BrokerUnavailable) and not isinstance(error, QueueDisabled):
            raise
        _say(f"skipped queue {queue}: {error}")


def warn_of_damage(what: str, damaged: Sequence[tuple[str, str]], then: str) -> None:
    """Name the damaged rows, if there are any.

    what: the noun, such as ``worker``. damaged: name and reason of each. then: what to do next.
    """
    if not damaged:
        return
    named = "; ".join(f"{name or '?'} ({reason})" for name, reason in damaged[:NAMED])
    more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
    _say(f"warning: {plural(len(damaged), f'damaged {what}')}: {named}{more}; {then}")


def _say(text: str) -> None:
    click.echo(f"aztask: {one_line(text)}", err=True)
