"""Makes the occurrences of schedules, on a thread of its own, beside a worker or alone.

It is a part (`aztask.support.parts`): whatever fails, it is tried again. One bad schedule is put
aside while the others run; `aztask workers` and `aztask schedule list` show the reason.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError
from aztask.schedules.runner import Runner
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0
UNUSABLE_SECONDS: Final = 15.0
STOP_SECONDS: Final = 10.0
LONGEST_TURN: Final = 120.0
PART: Final = "schedules"


class Scheduling:
    """The thread. It does not exist until there is a schedule.

    name: the worker's.
    """

    def __init__(self, app: App, name: str) -> None:
        self._app = app
        self._name = name
        self._stopping = threading.Event()
        self.part = Part(PART, longest=LONGEST_TURN)
        self._runner: Runner | None = None
        self._complaint = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = self.part.thread(self._serve, "aztask-schedules")
            self._thread.start()

    def start_if_wanted(self) -> None:
        """Start the thread if a schedule exists; asks the store, so call it once a minute."""
        if self._thread is None and self._app.schedules.wanted:
            self.start()

    def request_stop(self) -> None:
        """Let `run` end soon. A signal handler may call it."""
        self._stopping.set()
        self.part.stop()

    def stop(self) -> None:
        """End the thread. What it leaves open, another worker completes."""
        self.request_stop()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def run(self) -> None:
        """Make occurrences on the calling thread, until `request_stop` is called."""
        self.part.run(self._serve)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(self.step())

    def step(self) -> float:
        """Do what is due now; returns the seconds until the next step."""
        self.part.begin()
        try:
            pause = self._turn()
        except ConfigurationError as error:
            pause = self._failed("schedules are not run by this worker", UNUSABLE_SECONDS, error)
        except AztaskError as error:
            pause = self._failed("schedules cannot be read", RETRY_SECONDS, error)
        else:
            self._complaint = ""
            self.part.rest()
        self.part.idle()
        return pause

    def _turn(self) -> float:
        if self._runner is None:
            self._runner = self._app.schedules.runner(self._name, self.part)
        return self._runner.turn()

    def _failed(self, what: str, pause: float, error: AztaskError) -> float:
        """Log an error, once until it changes; returns the pause."""
        self.part.trouble(error)
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.warning("%s, retry every %g s: %s", what, pause, error)
        return pause
