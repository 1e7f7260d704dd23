"""What may allow a connection's next receive: a settlement, a consumer, another prefetch count."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Changes:
    """Counts the changes of one connection, and wakes the thread that waits for one."""

    def __init__(self) -> None:
        self.count = 0
        self._condition = threading.Condition()
        self._wanted: Callable[[], bool] | None = None
        self._ended = False

    def note(self) -> None:
        """Something changed: end the waits that wait for it."""
        with self._condition:
            self.count += 1
            # Asked here, not by the waiting thread: to wake it costs more than to look.
            if self._wanted is None or self._ended or self._wanted():
                self._condition.notify_all()

    def wait(self, seen: int, seconds: float) -> None:
        """Wait until the count is no longer `seen`, at most `seconds`.

        Read `count` before you look at what may have changed: a change in between ends the wait.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.count != seen, seconds)

    def wait_until(self, wanted: Callable[[], bool], seconds: float) -> None:
        """Wait until a change makes `wanted` true, at most `seconds`; one thread at a time.

        * `wanted`: called with every change, by the thread that notes it. It must not wait.
        """
        with self._condition:
            self._wanted = wanted
            try:
                self._condition.wait_for(lambda: self._ended or wanted(), seconds)
            finally:
                self._wanted = None

    def end(self) -> None:
        """End the waits of `wait_until`, now and in the future."""
        self._ended = True
        self.note()
