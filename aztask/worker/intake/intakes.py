"""All intakes of a worker: one for each queue, of the kind that the queue needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from aztask.app import App
from aztask.brokers.delivery import Delivery
from aztask.errors import CapabilityError
from aztask.worker.intake.intake import Intake
from aztask.worker.intake.sessions import SessionIntake, SessionSlot
from aztask.worker.options import WorkerOptions
from aztask.worker.pipeline.work import WorkItem

Source: TypeAlias = Intake | SessionSlot
"""Where deliveries come from: it has a `queue` and a `receiver`."""

WAIT: Final = 1.0
BURST_WAIT: Final = 0.05
SESSION_WAIT: Final = 20.0
"""Seconds to look for a session where each look costs a new connection."""

USUAL_SESSIONS: Final = 32


class Intakes:
    """Begins, bounds and ends receiving."""

    def __init__(
        self,
        app: App,
        options: WorkerOptions,
        lease: Callable[[str], float],
        take: Callable[[Source, list[Delivery]], None],
    ) -> None:
        """lease: seconds to ask for now, of a queue. take: gets deliveries, on an intake's thread.

        Raises CapabilityError where a queue is to have sessions and the broker has none.
        """
        self._app = app
        self._options = options
        self._lease = lease
        self._take = take
        self._plain: list[Intake] = []
        self._sessions: list[SessionIntake] = []
        for queue in options.queues:
            if app.has_sessions(queue):
                self._sessions.append(self._of_sessions(queue))
            else:
                self._plain.append(self._of(queue))
        self._all: list[Intake | SessionIntake] = [*self._plain, *self._sessions]

    def _of(self, queue: str) -> Intake:
        return Intake(
            self._app.broker,
            queue,
            lease=lambda: self._lease(queue),
            wait=BURST_WAIT if self._options.burst else WAIT,
            poll_ceiling=self._options.poll_ceiling,
            take=self._take,
        )

    def _of_sessions(self, queue: str) -> SessionIntake:
        broker, options = self._app.broker, self._options
        if not broker.capabilities.sessions:
            raise CapabilityError(
                f"queue {queue!r} is to have sessions, which {broker.capabilities.name} does not "
                "have; use Service Bus or local://, or leave sessions=True out"
            )
        wait = SESSION_WAIT if broker.capabilities.remote else WAIT
        return SessionIntake(
            broker,
            queue,
            lease=lambda: self._lease(queue),
            wait=BURST_WAIT if options.burst else wait,
            most=options.max_sessions or min(options.concurrency, USUAL_SESSIONS),
            share=options.session_share,
            poll_ceiling=options.poll_ceiling,
            take=self._take,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing was found, anywhere."""
        return all(intake.idle for intake in self._all)

    def start(self) -> None:
        """Begin to receive, once there is room."""
        for intake in self._all:
            intake.start()

    def allow(self, room: int, *, wait: bool) -> None:
        """There is room for that many deliveries. wait: better for a fuller batch soon."""
        if not wait:
            for plain in self._plain:
                plain.allow(max(0, room))
        for sessions in self._sessions:
            sessions.allow(room)

    def stop(self) -> None:
        """Receive nothing more."""
        for intake in self._all:
            intake.stop()

    def join(self, timeout: float) -> None:
        """Wait for the ends of their threads, up to `timeout` seconds in all."""
        until = time.monotonic() + timeout
        for intake in self._all:
            intake.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Close the receivers."""
        for intake in self._all:
            intake.close()


def tell_over(items: Iterable[WorkItem]) -> None:
    """Tell the sessions of these that they are done with."""
    for item in items:
        if item.session is not None:
            item.session.over(item)
