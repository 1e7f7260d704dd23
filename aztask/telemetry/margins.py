"""How much of a lease was left, as the metrics of both formats count it."""

from __future__ import annotations

from typing import Final

from aztask.events.event import Event

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
