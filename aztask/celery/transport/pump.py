"""Receives a mailbox of a remote broker on a thread of its own.

The thread that drains a connection waits at the task queue, where messages come and requests cost
money. So it cannot wait at the mailbox too: a control command would come late, or tasks would.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from aztask.errors import AztaskError
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

WAIT_SECONDS: Final = 0.25
"""How long one receive waits, and so how long stopping may take."""

PAUSE_SECONDS: Final = 2.0


class Pump:
    """Calls `fetch` again and again, from `start` until it is stopped.

    * `fetch`: receives, waiting at most the given seconds, and hands over what came.
    """

    def __init__(self, fetch: Callable[[float], object], queue: str) -> None:
        self._fetch = fetch
        self._queue = queue
        self._stop = threading.Event()
        self._part = Part(f"mailbox {queue}")
        self._thread = self._part.thread(self._run, "aztask-mailbox")

    def start(self) -> None:
        """Call it from now on, on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread: when this returns, it takes no further message."""
        self._stop.set()
        self._part.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(4 * WAIT_SECONDS + PAUSE_SECONDS)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._fetch(WAIT_SECONDS)
            except AztaskError as error:
                if not self._stop.is_set():
                    logger.info("mailbox %s: %s; trying again", self._queue, error)
                    self._stop.wait(PAUSE_SECONDS)
            except Exception:  # an SDK may raise anything; the next attempt may succeed
                if not self._stop.is_set():
                    logger.exception("mailbox %s: the receive failed; trying again", self._queue)
                    self._stop.wait(PAUSE_SECONDS)
