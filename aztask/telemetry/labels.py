"""Label values of metrics: bounded in number, whatever messages say.

Anyone who can send a message chooses its task name, and a task chooses the names of its errors.
Each new value would be a new time series, and the memory of every monitoring system is finite.

Rules
1. A task that the app has not registered has the label `UNKNOWN`.
2. The first `MOST_ERRORS` error types of a process have labels of their own, the later ones share
   `OTHER`. So do reasons of dead letters.
3. A value is at most `LONGEST` characters, and printable.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from aztask.stores.events.event import Event

UNKNOWN: Final = "(unknown)"
OTHER: Final = "(other)"
MOST_ERRORS: Final = 50
LONGEST: Final = 100


class TaskLabels:
    """Turns names into label values. Any thread may call."""

    def __init__(self, tasks: Container[str]) -> None:
        """tasks: the names of the registered tasks; may grow later."""
        self._tasks = tasks
        self._errors: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    def task(self, name: str) -> str:
        """The label of a task (rule 1)."""
        return cleaned(name) if name in self._tasks else UNKNOWN

    def error(self, name: str | None) -> str:
        """The label of an error's type; `UNKNOWN` without one (rule 2)."""
        return _bounded(self._errors, name)

    def reason(self, name: str | None) -> str:
        """The label of a dead letter's reason (rule 2)."""
        return _bounded(self._reasons, name)


def cleaned(text: str) -> str:
    """The text cut to `LONGEST` characters, with ``?`` for unprintable ones."""
    text = text[:LONGEST]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _bounded(known: dict[str, str], name: str | None) -> str:
    if not name:
        return UNKNOWN
    label = known.get(name)
    if label is None:
        if len(known) >= MOST_ERRORS:
            return OTHER
        label = known[name] = cleaned(name)
    return label


# -- how much of a lease was left, as the metrics of both formats count it -----------------


SHORT: Final = 0.9
"""A task that ends with more than this share of its lease left says nothing about the lease."""


def share_left(event: Event) -> float | None:
    """The share of the lease that was left at a renewal or at the end of a task.

    None if the event has no margin, and for tasks that ended within the first tenth of their lease:
    they would hide the long ones, and each value costs time.
    """
    if event.margin_seconds is None or not event.lease_seconds:
        return None
    share = event.margin_seconds / event.lease_seconds
    return None if share > SHORT else share
