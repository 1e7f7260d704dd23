"""A lane: does a stage's work in batches, inline or on threads of its own.

A stage that only touches a local file runs inline, in the supervisor's turn, because passing it to
a thread would cost more than the work. A stage that waits for a network runs on threads: all that
arrived during one batch becomes the next batch. One thread does this as long as it keeps up, since
a small batch costs as much as a large one. A second thread takes over items that have waited for
`PATIENCE` seconds, so that a stuck batch does not block the items behind it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from aztask.worker.mailbox import Mailbox

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

BATCH = 256
PATIENCE = 0.02
"""Seconds that an item waits for a busy thread before another thread takes it."""


class Lane(Generic[Item]):
    """Gives batches to `work`, then to `done`, which always runs in the supervisor's turn."""

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Item]], None],
        done: Callable[[Sequence[Item]], None],
        mailbox: Mailbox,
        *,
        threads: int = 0,
    ) -> None:
        """threads: how many the lane starts; with 0 it works inline, in `turn`."""
        self._name = name
        self._work = work
        self._done = done
        self._mailbox = mailbox
        self._items: deque[Item] = deque()
        self._condition = threading.Condition()
        self._busy = 0
        self._working = 0
        self._watched = False
        self._waiting_since = 0.0
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"aztask-{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._items) + self._busy

    @property
    def waiting(self) -> bool:
        """Whether an inline lane has something left for the next turn."""
        return not self._threads and bool(self._items)

    def submit(self, items: Iterable[Item]) -> None:
        """Queue these items; an inline lane works on them in its next `turn`."""
        if not self._threads:
            self._items.extend(items)
            return
        with self._condition:
            if not self._items:
                self._waiting_since = time.monotonic()
            self._items.extend(items)
            if not self._working or not self._watched:
                self._condition.notify()

    def turn(self) -> None:
        """Work on everything that is queued, if this lane is inline."""
        if self._threads:
            return
        for _ in range(len(self._items) // BATCH + 1):
            if batch := self._take():
                self._work(batch)
                self._done(batch)

    def stop(self) -> None:
        """Finish what is queued and end the threads."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _take(self) -> list[Item]:
        return [self._items.popleft() for _ in range(min(BATCH, len(self._items)))]

    def _serve(self) -> None:
        while True:
            with self._condition:
                if not self._await_work():
                    return
                batch = self._take()
                self._waiting_since = time.monotonic()
                self._busy += len(batch)
                self._working += 1
            try:
                self._work(batch)
            except Exception:  # the items return as they were, and their stage is tried again
                logger.exception(
                    "stage %s failed for %d deliveries, it will be tried again",
                    self._name,
                    len(batch),
                )
            with self._condition:
                self._working -= 1
            self._mailbox.post(lambda batch=batch: self._returned(batch))  # type: ignore[misc]

    def _await_work(self) -> bool:
        """Wait until this thread should take a batch; False at the end. The caller has the lock."""
        while True:
            left = self._waiting_since + PATIENCE - time.monotonic()
            if self._items and (not self._working or self._stopping or left <= 0):
                return True
            if self._stopping:
                return False
            if not self._items or self._watched:
                self._condition.wait()
            else:
                self._watched = True
                self._condition.wait(left)
                self._watched = False

    def _returned(self, batch: Sequence[Item]) -> None:
        with self._condition:
            self._busy -= len(batch)
        self._done(batch)
