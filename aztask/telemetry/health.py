"""Whether a worker is alive, and whether it is ready: the answers to probes.

Rules
1. Live: the supervisor's loop has turned within `STUCK_SECONDS`. A worker that drains, or whose
   broker is unreachable, is live: restarting it would not help, and would interrupt its tasks.
2. Ready: the broker and the result store have answered within `SILENT_SECONDS`, their last answers
   were no errors, a pool process takes tasks, and the worker does not drain.
3. Ready, too: no essential part fails, so that messages are received, run and settled. The answer
   names other parts that fail, and stays 200: a bad schedule must not stop the rollout that repairs
   it.
4. Each service is asked every `PROBE_SECONDS` on a thread of its own, so a service that never
   answers delays neither the other one nor a probe. So a loss is noticed within 12 seconds.
5. The question is the cheapest one that a worker's permissions allow: peeking at one message,
   reading one result. On Storage queues that is a request every `PROBE_SECONDS`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from aztask.app import App
from aztask.errors import AztaskError
from aztask.hooks import WorkerStatus
from aztask.support.display import mask
from aztask.support.parts import Part, PartFailure, all_parts, failures, lacking

logger = logging.getLogger(__name__)

PROBE_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 12.0
STUCK_SECONDS: Final = 60.0
LONGEST_QUESTION: Final = 60.0
UNREADY_SECONDS: Final = 10.0
"""An essential part makes the worker unready when it has failed for so long: one that succeeds at
the next try does not."""

PROBE_ID: Final = "aztask-readiness-probe"
"""A task id that no task has."""


class Contact:
    """The last answers of one service, which is asked again and again on a thread."""

    def __init__(
        self, name: str, ask: Callable[[], object], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """name: for texts, such as "broker". ask: raises whatever the service's client raises."""
        self.name = name
        self._ask = ask
        self._now = now
        self._answered_at: float | None = None
        self._error = "it has not answered yet"
        self._stopping = threading.Event()
        self.part = Part(f"probe of the {name}", longest=LONGEST_QUESTION)
        self._thread = self.part.thread(self._run, f"aztask-probe-{name}")

    def start(self) -> None:
        """Start the thread, which asks every `PROBE_SECONDS`."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; a pending question is not waited for."""
        self._stopping.set()
        self.part.stop()

    def ask(self) -> None:
        """Ask once, and keep the answer."""
        try:
            self._ask()
        except AztaskError as error:
            self._failed(error, "does not answer")
        except Exception as error:  # noqa: BLE001  # it must not end the thread, and is no outage
            self._failed(error, "cannot be asked, because of an unexpected error", trace=True)
        else:
            self._answered_at, self._error = self._now(), ""

    def _failed(self, error: Exception, how: str, *, trace: bool = False) -> None:
        """Keep the error, and log it if the last answer was good or another error was the last."""
        text = mask(str(error)) or type(error).__name__
        if not self._error or (trace and text != self._error):
            logger.warning(
                "the %s %s, the worker is not ready: %s", self.name, how, text, exc_info=trace
            )
        self._error = text

    @property
    def problem(self) -> str:
        """Why the service counts as lost, on one line; "" if it does not."""
        if self._error:
            return f"{self.name}: {self._error}".partition("\n")[0]
        silent = self._now() - (self._answered_at or 0.0)
        if silent > SILENT_SECONDS:
            return f"{self.name}: no answer for {silent:.0f} s"
        return ""

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.part.begin()
            self.ask()
            self.part.rest()
            self._stopping.wait(PROBE_SECONDS)


class Health:
    """Answers probes from what the supervisor last reported and the services last answered."""

    def __init__(
        self, contacts: list[Contact], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.contacts = contacts
        self._now = now
        self._started_at = now()
        self._status: WorkerStatus | None = None

    @classmethod
    def of(cls, app: App, queue: str) -> Health:
        """For a worker of this app; queue: one that it receives from."""
        contacts = [Contact("broker", lambda: app.broker.peek(queue, limit=1))]
        results = app.results
        if results is not None:
            contacts.append(Contact("result store", lambda: results.get(PROBE_ID)))
        return cls(contacts)

    def start(self) -> None:
        """Ask the services from now on."""
        for contact in self.contacts:
            contact.start()

    def stop(self) -> None:
        """Stop asking; pending questions are not waited for."""
        for contact in self.contacts:
            contact.stop()

    def status(self, status: WorkerStatus) -> None:
        """Take over what the supervisor reports."""
        self._status = status

    def not_live(self) -> str:
        """Why the worker should be restarted; "" if it is live."""
        at = self._status.at if self._status is not None else self._started_at
        silent = self._now() - at
        return f"the worker has been stuck for {silent:.0f} s" if silent > STUCK_SECONDS else ""

    def failing(self) -> str:
        """The parts that fail, and why, one for each line; "" if all work."""
        return "\n".join(line_of(failure) for failure in failures())

    def not_ready(self) -> str:
        """Why the worker cannot run tasks now, one reason for each line; "" if it is ready."""
        status = self._status
        reasons = [self.not_live()]
        if status is None or not status.ready:
            reasons.append("no pool process is ready")
        elif status.draining:
            reasons.append("the worker is stopping")
        reasons += [contact.problem for contact in self.contacts]
        reasons += [line_of(failure) for failure in lacking(all_parts(), UNREADY_SECONDS)]
        return "\n".join(reason for reason in reasons if reason)


def line_of(failure: PartFailure) -> str:
    """A failing part in one line: its name, since when, and why."""
    since = datetime.fromtimestamp(failure.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"part {failure.part} fails since {since}: {failure.reason}"
