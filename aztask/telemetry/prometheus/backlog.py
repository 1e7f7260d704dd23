"""Events that wait to be counted.

Counters are seen only when they are scraped. So the events of a worker are kept as they come and
counted together: at a scrape, and every `MOST_WAITING` events. That takes less CPU time than to
count each one between two other steps of the worker.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

from aztask.events.event import Event

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 1_000


class Backlog:
    """Passes events on to listeners, many at a time. Any thread may call."""

    def __init__(self, listeners: Sequence[Callable[[Event], None]]) -> None:
        """`listeners`: each is called with each event, by one thread at a time."""
        self._listeners = listeners
        self._events: deque[Event] = deque()
        self._counting = Lock()

    def add(self, event: Event) -> None:
        """Keep one event; count all if there are `MOST_WAITING`."""
        self._events.append(event)
        if len(self._events) >= MOST_WAITING:
            self.count()

    def count(self) -> None:
        """Pass all events on. A listener's error is logged, and the other events are counted."""
        with self._counting:
            while self._events:
                event = self._events.popleft()
                for listener in self._listeners:
                    try:
                        listener(event)
                    except Exception:
                        logger.exception("an event was not counted: %s", event.event)
