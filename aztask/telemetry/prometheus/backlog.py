"""Events that wait to be counted.

Counters are seen only when they are scraped. So the events of a worker are kept as they come and
counted together: at a scrape, and when there are many. Those of one kind, queue and task are one
group, and one sum. That takes much less CPU time than to count each event between two other steps
of the worker.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from threading import Lock
from typing import Final, Protocol

from aztask.events.event import Event

logger = logging.getLogger(__name__)

MANY: Final = 200
"""So few that they are still in the processor's cache when they are counted."""

KIND_QUEUE_TASK: Final[Callable[[Event], tuple[str, str, str]]] = itemgetter(
    *map(Event._fields.index, ("event", "queue", "task"))
)
"""What events are grouped by. Reading the three by name takes twice as long."""


class Counting(Protocol):
    """Counts the events of one group, of which there is at least one."""

    def __call__(self, kind: str, queue: str, task: str, group: Sequence[Event], /) -> None:
        """`kind`, `queue`, `task`: of all events of the group."""


class Backlog:
    """Passes events on, many at a time. Any thread may call.

    `add` keeps one event. It is the method of a queue, without a Python function around it: a
    worker calls it several times for each task.
    """

    def __init__(self, listeners: Sequence[Counting]) -> None:
        """`listeners`: each is called with each group, by one thread at a time."""
        self._listeners = listeners
        self._events: deque[Event] = deque()
        self._counting = Lock()
        self.add: Callable[[Event], None] = self._events.append

    def tidy(self) -> None:
        """Count the events if there are `MANY`; to be called at least once a second."""
        if len(self._events) >= MANY:
            self.count()

    def count(self) -> None:
        """Pass all events on. A listener's error is logged, and all other groups are counted."""
        with self._counting:
            groups: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
            for _ in range(len(self._events)):
                event = self._events.popleft()
                groups[KIND_QUEUE_TASK(event)].append(event)
            for (kind, queue, task), group in groups.items():
                for listener in self._listeners:
                    try:
                        listener(kind, queue, task, group)
                    except Exception:
                        logger.exception("events were not counted: %s of %s", len(group), kind)
