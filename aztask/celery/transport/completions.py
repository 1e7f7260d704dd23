"""Settles messages of a remote broker on a thread of its own, many in one request.

Rules
1. Acknowledging does not wait for the service's answer. Otherwise a consumer would stand still, and
   with Celery's prefork pool one thread acknowledges for all processes.
2. Messages gather for `GATHER` before a request, and while another one is under way: a consumer of
   quick tasks acknowledges one message at a time, and one request for each would cost more than
   the task. No caller waits for the request; its message may be delivered again for so much longer
   if the process dies. If `MOST` or more wait, the connection receives nothing further until there
   is room. An acknowledgement never waits: an event loop would stand still with it.
3. If the process dies before the answer, the message is delivered again, as after any late
   acknowledgement.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Final, Generic, TypeVar

from aztask.support.parts import Part

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST: Final = 64

GATHER: Final = 0.003
"""Seconds; well below the time that a lock leaves when it is renewed."""


class Completions(Generic[T]):
    """The messages of one channel that are to be settled.

    * `complete`: settles these messages, at most `MOST`; called on the thread.
    """

    def __init__(self, complete: Callable[[Sequence[T]], None]) -> None:
        self._complete = complete
        self._waiting: list[T] = []
        self._busy = self._idle = self._closed = False
        self._changed = threading.Condition()
        self._part = Part("completions")
        self._thread: threading.Thread | None = None

    def add(self, message: T) -> None:
        """Settle the message with the next request; never waits."""
        with self._changed:
            self._waiting.append(message)
            if self._thread is None:
                self._thread = self._part.thread(self._run, "aztask-completions")
                self._thread.start()
            if self._idle:
                self._changed.notify_all()

    @property
    def crowded(self) -> bool:
        """True if so many wait that nothing further should be received (rule 2)."""
        return len(self._waiting) >= MOST

    def close(self, seconds: float) -> bool:
        """Wait until all are settled, at most `seconds`; then end the thread. True if all are."""
        ends_at = monotonic() + seconds
        with self._changed:
            while (self._waiting or self._busy) and (left := ends_at - monotonic()) > 0:
                self._changed.wait(left)
            self._closed = True
            self._changed.notify_all()
            return not self._waiting and not self._busy

    def _run(self) -> None:
        while batch := self._take():
            try:
                self._complete(batch)
            except Exception:  # their leases end by themselves; the next batch may succeed
                logger.exception(
                    "could not settle %d messages; they are delivered again", len(batch)
                )

    def _take(self) -> list[T]:
        """The next batch; [] when it was closed and none is left."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._idle = True
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle = False
            gathering = not (self._closed or self.crowded)
        if gathering:
            sleep(GATHER)
        with self._changed:
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            self._busy = bool(batch)
            return batch
