"""Makes the occurrences of schedules, on a thread of its own, beside a worker or alone."""

from __future__ import annotations

import logging
import threading
from typing import Final

from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0
STOP_SECONDS: Final = 10.0


class Scheduling:
    """The thread. It does not exist until there is a schedule.

    name: the worker's.
    """

    def __init__(self, app: App, name: str) -> None:
        self._app = app
        self._name = name
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.run, name="aztask-schedules", daemon=True)
            self._thread.start()

    def start_if_wanted(self) -> None:
        """Start the thread if a schedule exists; asks the store, so call it once a minute."""
        if self._thread is None and self._app.schedules.wanted:
            self.start()

    def request_stop(self) -> None:
        """Let `run` end soon. A signal handler may call it."""
        self._stopping.set()

    def stop(self) -> None:
        """End the thread. What it leaves open, another worker completes."""
        self.request_stop()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def run(self) -> None:
        """Make occurrences until `request_stop` is called."""
        try:
            runner = self._app.schedules.runner(self._name)
        except (AztaskError, TypeError) as error:
            logger.error("schedules are not run by this worker: %s", error)
            return
        while not self._stopping.is_set():
            try:
                pause = runner.turn()
            except ConfigurationError as error:
                logger.error("schedules are not run by this worker: %s", error)
                return
            except (AztaskError, LookupError) as error:
                logger.warning("schedules cannot be read, retry in %g s: %s", RETRY_SECONDS, error)
                pause = RETRY_SECONDS
            self._stopping.wait(pause)
