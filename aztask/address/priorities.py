"""Priorities: each one of a queue is a queue of its own, because no service has priorities.

Rules
1. The queue of a priority is named after its queue: ``orders-high`` for the priority ``high`` of
   ``orders``. All services allow such names. The queue itself has the priority ``normal``.
2. A queue's priorities are declared with weights: how many tasks a worker takes from each queue
   while several of them have messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.checks import shown

NORMAL: Final = "normal"
"""The priority of the queue itself."""

MOST_WEIGHT: Final = 100
MOST_PRIORITIES: Final = 8

_NAME: Final = re.compile(r"[a-z][a-z0-9]{0,15}")
_TAKEN: Final = "poison"
"""The ending of the queues with the dead letters of Storage queues."""


def priority_queue(queue: str, priority: str) -> str:
    """The name of the queue for this priority of `queue`."""
    return queue if priority == NORMAL else f"{queue}-{priority}"


def check_priorities(name: str, value: Any) -> dict[str, int]:
    """Check ``{"high": 4, "low": 1}``: priorities and their weights, a check of a setting.

    `NORMAL` is added with weight 1 if it is missing.
    """
    if not isinstance(value, Mapping) or not value:
        raise ConfigurationError(
            f'{name} takes priorities with their weights, such as {{"high": 4, "low": 1}}, not '
            f"{shown(value)}"
        )
    if len(value) > MOST_PRIORITIES:
        raise ConfigurationError(f"{name} has {len(value)} entries; give at most {MOST_PRIORITIES}")
    for priority, weight in value.items():
        if not isinstance(priority, str) or not _NAME.fullmatch(priority) or priority == _TAKEN:
            raise ConfigurationError(
                f"{name}: {shown(priority)} cannot name a priority: use 1 to 16 lower-case letters "
                "and digits, a letter first; it becomes the end of a queue's name"
            )
        check_weight(f"{name}: the weight of {priority}", weight)
    return {NORMAL: 1, **value}


def check_weight(what: str, value: Any) -> int:
    """Return a weight, 1 to `MOST_WEIGHT`. Raises ConfigurationError, which names `what`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WEIGHT:
        raise ConfigurationError(
            f"{what} is a whole number from 1 to {MOST_WEIGHT}, not {shown(value)}"
        )
    return value


def queue_of_priority(queue: str, priority: str, known: Mapping[str, int] | None) -> str:
    """The queue to send to. Raises ConfigurationError for an unknown priority.

    * `known`: the declared priorities of `queue`; None if it has none.
    """
    if priority == NORMAL or (known is not None and priority in known):
        return priority_queue(queue, priority)
    if known is None:
        raise ConfigurationError(
            f"queue {queue!r} has no priorities, so priority={shown(priority)} means nothing; "
            f'declare them with app.queue({queue!r}, priorities={{"high": 4, "low": 1}})'
        )
    hint = did_you_mean(str(priority), tuple(known))
    raise ConfigurationError(
        f"queue {queue!r} has no priority {shown(priority)}.{hint} It has: {', '.join(known)}."
    )
