"""Events that wait to be counted.

Counters are seen only when they are scraped. So the events of a worker are kept as they come and
counted together: at a scrape, and when there are many. That takes much less CPU time than to count
each one between two other steps of the worker.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, TypeAlias

from aztask.events.event import Event

logger = logging.getLogger(__name__)

MANY: Final = 200
"""So few that they are still in the processor's cache when they are counted."""

Counting: TypeAlias = Callable[[Sequence[Event]], None]


class Backlog:
    """Passes events on, many at a time. Any thread may call.

    `add` keeps one event. It is the method of a queue, without a Python function around it: a
    worker calls it several times for each task.
    """

    def __init__(self, listeners: Sequence[Counting]) -> None:
        """`listeners`: each is called with all events, by one thread at a time."""
        self._listeners = listeners
        self._events: deque[Event] = deque()
        self._counting = Lock()
        self.add: Callable[[Event], None] = self._events.append

    def tidy(self) -> None:
        """Count the events if there are `MANY`; to be called at least once a second."""
        if len(self._events) >= MANY:
            self.count()

    def count(self) -> None:
        """Pass all events on. A listener's error is logged, and the others are still called."""
        with self._counting:
            take = self._events.popleft
            events = [take() for _ in range(len(self._events))]
            for listener in self._listeners:
                try:
                    listener(events)
                except Exception:
                    logger.exception("%s events were not counted", len(events))
