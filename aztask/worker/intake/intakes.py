"""All intakes of a worker: one per queue, with sessions or without, and how much they may hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from aztask.app import App
from aztask.brokers.delivery import Delivery
from aztask.errors import CapabilityError
from aztask.worker.intake.intake import Intake, QueueSource
from aztask.worker.intake.sessions import SessionIntake, SessionSlot
from aztask.worker.intake.shares import Shares
from aztask.worker.options import WorkerOptions
from aztask.worker.pipeline.work import WorkItem
from aztask.worker.pool.children import Pool

Source: TypeAlias = Intake | SessionSlot
"""The part of an intake that received a delivery; it has a `queue` and a `receiver`."""

WAIT: Final = 1.0
BURST_WAIT: Final = 0.05
SESSION_WAIT: Final = 20.0
"""Seconds to wait for a session if each try costs a new connection."""

USUAL_SESSIONS: Final = 32
FIRST_PREFETCH: Final = 4
"""Deliveries to hold before the first task has ended: its duration is not known yet."""

PREFETCH_SECONDS: Final = 0.25
MOST_PREFETCH: Final = 1000
NO_ROOM: Final = -1
"""So little room that sessions are given up, too."""


class Intakes:
    """Starts, bounds and stops the intakes of all queues."""

    def __init__(
        self,
        app: App,
        options: WorkerOptions,
        lease: Callable[[str], float],
        take: Callable[[Source, list[Delivery], float], None],
        *,
        weights: Mapping[str, int] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """lease: the lease to ask for now, in seconds, by queue name. take: gets the deliveries, on
        an intake's thread, and when the receive began (UTC epoch seconds).

        weights: those of the queues, if they share the room by weight (`Shares`); then wake ends
        the wait of the supervisor's loop, on an intake's thread.

        Raises CapabilityError if a queue is declared with sessions and the broker has none.
        """
        self._app = app
        self._options = options
        self._lease = lease
        self._take = take
        self._on_quiet = wake if weights else None
        self._plain: list[Intake] = []
        self._sessions: list[SessionIntake] = []
        for queue in options.queues:
            if app.has_sessions(queue):
                self._sessions.append(self._session_intake(queue))
            else:
                self._plain.append(self._plain_intake(queue))
        self._all: list[Intake | SessionIntake] = [*self._plain, *self._sessions]
        self._shares = Shares(weights, self._plain, self._sessions) if weights else None

    def _plain_intake(self, queue: str) -> Intake:
        source = self._source(queue, BURST_WAIT if self._options.burst else WAIT)
        return Intake(self._app.broker, source, self._take, on_quiet=self._on_quiet)

    def _session_intake(self, queue: str) -> SessionIntake:
        broker, options = self._app.broker, self._options
        if not broker.capabilities.sessions:
            raise CapabilityError(
                f"queue {queue!r} is declared with sessions, but {broker.capabilities.name} has no "
                "sessions; use Service Bus or local://, or remove sessions=True"
            )
        wait = SESSION_WAIT if broker.capabilities.remote else WAIT
        return SessionIntake(
            broker,
            self._source(queue, BURST_WAIT if options.burst else wait),
            self._take,
            max_sessions=self._most_sessions(options.concurrency),
            share=options.session_share,
        )

    def _most_sessions(self, concurrency: int) -> int:
        return self._options.max_sessions or min(concurrency, USUAL_SESSIONS)

    def scale(self, concurrency: int) -> None:
        """Serve as many sessions as suits another number of tasks at the same time."""
        for sessions in self._sessions:
            sessions.set_most(self._most_sessions(concurrency))

    def _source(self, queue: str, wait: float) -> QueueSource:
        return QueueSource(queue, lambda: self._lease(queue), wait, self._options.poll_ceiling)

    @property
    def idle(self) -> bool:
        """Whether no intake found anything."""
        return all(intake.idle for intake in self._all)

    def start(self) -> None:
        """Start to receive as soon as there is room."""
        for intake in self._all:
            intake.start()

    def received(self, queue: str, count: int) -> None:
        """Note that the supervisor's loop has got deliveries of a queue."""
        if self._shares is not None:
            self._shares.received(queue, count)

    def allow(
        self,
        room: int,
        *,
        wait: bool,
        paused: frozenset[str] = frozenset(),
        window: int = 0,
        ahead: bool = False,
    ) -> None:
        """Set how many more deliveries there is room for.

        wait: plain queues wait for more room, because a fuller batch costs less. paused: queues
        from which nothing may be received. window: how many deliveries the worker wants in all.
        ahead: whether some of these only wait for a slot.
        """
        if self._shares is not None:
            self._shares.allow(room, window, ahead=ahead, wait=wait, paused=paused)
            return
        for plain in self._plain:
            if plain.queue in paused:
                plain.allow(0)
            elif not wait:
                plain.allow(max(0, room))
        for sessions in self._sessions:
            sessions.allow(NO_ROOM if sessions.queue in paused else room)

    def stop(self) -> None:
        """Stop all intakes; returns at once."""
        for intake in self._all:
            intake.stop()

    def join(self, timeout: float) -> None:
        """Wait until their threads have ended, for `timeout` seconds in all."""
        until = time.monotonic() + timeout
        for intake in self._all:
            intake.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Close the receivers, once `join` has returned."""
        for intake in self._all:
            intake.close()


def prefetch(options: WorkerOptions, pool: Pool) -> int:
    """How many deliveries to hold beyond those that run: ``--prefetch``, or without it about a
    quarter of a second's work at the measured speed.
    """
    if options.prefetch is not None:
        return options.prefetch
    mean = pool.mean_seconds
    if mean is None:
        return FIRST_PREFETCH
    return min(MOST_PREFETCH, int(pool.capacity * PREFETCH_SECONDS / max(mean, 1e-5)))


def tell_over(items: Iterable[WorkItem]) -> None:
    """Tell the sessions of these items that they have ended."""
    for item in items:
        if item.session is not None:
            item.session.over(item)
