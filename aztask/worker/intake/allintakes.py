"""All intakes of a worker: one per queue, with sessions or without, and how much they may hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from aztask.errors import CapabilityError
from aztask.queues.delivery import Delivery
from aztask.worker.options import SOLO, WorkerOptions
from aztask.worker.pipeline.deliveries import Rotation
from aztask.worker.pipeline.work import WorkItem
from aztask.worker.pool.pool import Pool
from aztask.worker.ports import PlainIntake, QueueSource, SessionsIntake
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.stages import Source, Stages
from aztask.worker.upkeep.leasewatch import LeaseWatch

# -- How the queues of a worker share its room by weight, so that none starves.
#
# Rules
# 1. Each free place is granted to one queue, in turns by weight, among the queues that have
#    messages. So with the weights 4 and 1, four of five tasks come from the first queue while both
#    have some.
# 2. A queue is *live* while its receives find messages. It keeps no place that it cannot fill: when
#    a receive finds nothing, what was granted goes to the others.
# 3. A queue that is not live costs the others nothing. It may bring a share of the window at once,
#    so that its next message is noticed; if the worker holds all that it wants, one message. That
#    is how a message of a high priority passes those that a worker has prefetched.
# 4. In queues with sessions a place belongs to a session until that is given up, so the shares
#    bound how many sessions are served.
#
# Only the supervisor's loop uses this.

GIVE_UP: Final = -1
"""The room of a queue with sessions that serves too many: a session is given up."""


class Shares:
    """Grants the places of a worker to its queues."""

    def __init__(
        self,
        weights: Mapping[str, int],
        plain: Sequence[PlainIntake],
        sessions: Sequence[SessionsIntake],
    ) -> None:
        """weights: by queue name; a queue without one has weight 1."""
        self._weights = weights
        self._plain = plain
        self._sessions = sessions
        self._rotation = Rotation(weights)
        self._every = sum(self._weight(each.queue) for each in (*plain, *sessions))
        self._granted: defaultdict[str, int] = defaultdict(int)

    def received(self, queue: str, count: int) -> None:
        """Note that deliveries of a queue have arrived."""
        self._granted[queue] -= count

    def allow(
        self, room: int, window: int, *, ahead: bool, wait: bool, paused: frozenset[str]
    ) -> None:
        """Grant the room to the queues.

        room: how many more deliveries the worker wants. window: how many it wants in all.
        ahead: whether it prefetches. wait: grant nothing new now, see `Intakes.allow`.
        """
        open_plain = [each for each in self._plain if each.queue not in paused]
        live = {each.queue: each for each in open_plain if each.live}
        busy = {each.queue for each in self._sessions if not each.idle and each.queue not in paused}
        total = sum(self._weight(name) for name in {*live, *busy})
        for queue in self._sessions:
            self._allow_sessions(queue, room, window, total, paused, busy)
        for plain in self._plain:
            if plain.queue not in live:
                target = 0
                if plain.queue not in paused:
                    target = self._of_quiet(plain.queue, room, window, ahead=ahead)
                self._grant(plain, target - self._granted[plain.queue])
        if not live or wait:
            return
        turns: defaultdict[str, int] = defaultdict(int)
        for _ in range(room - sum(self._granted[name] for name in live)):
            turns[self._rotation.next(live)] += 1
        for name, count in turns.items():
            self._grant(live[name], count)

    def _grant(self, queue: PlainIntake, change: int) -> None:
        self._granted[queue.queue] += change
        queue.grant(change)

    def _of_quiet(self, queue: str, room: int, window: int, *, ahead: bool) -> int:
        """What a queue may bring in which no message was found (rule 3)."""
        if room <= 0:
            return int(ahead)
        return min(room, max(1, window * self._weight(queue) // self._every))

    def _allow_sessions(
        self,
        queue: SessionsIntake,
        room: int,
        window: int,
        total: int,
        paused: frozenset[str],
        busy: set[str],
    ) -> None:
        """Set how many sessions a queue may serve (rule 4)."""
        if queue.queue in paused:
            queue.allow(GIVE_UP)
            return
        weight = self._weight(queue.queue)
        total += 0 if queue.queue in busy else weight
        left = max(1, math.ceil(window * weight / total)) - queue.working
        if left > 0 and room <= 0:
            left = 0 if queue.working else 1
        queue.allow(max(GIVE_UP, left))

    def _weight(self, queue: str) -> int:
        return self._weights.get(queue, 1)


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

    def __init__(self, runtime: WorkerRuntime, leases: LeaseWatch, core: Stages) -> None:
        """leases: knows the lease to ask for. core: gets the deliveries.

        Raises CapabilityError if a queue is declared with sessions and the broker has none.
        """
        self._app = app = runtime.app
        self._options = options = runtime.options
        self._shell = runtime.shell
        self._clock = runtime.clock
        self._mailbox = runtime.mailbox
        self._leases = leases
        self._core = core
        self.refusal: Exception | None = None
        weights = runtime.deliveries.weights
        self._plain: list[PlainIntake] = []
        self._sessions: list[SessionsIntake] = []
        for queue in options.queues:
            if app.has_sessions(queue):
                self._sessions.append(self._session_intake(queue))
            else:
                self._plain.append(self._plain_intake(queue, shares=bool(weights)))
        self._all: list[PlainIntake | SessionsIntake] = [*self._plain, *self._sessions]
        self._shares = Shares(weights, self._plain, self._sessions) if weights else None

    def _plain_intake(self, queue: str, *, shares: bool) -> PlainIntake:
        wait = BURST_WAIT if self._options.burst else WAIT
        source = QueueSource(queue, wait, self._options.poll_ceiling)
        return self._shell.intake(self._app.broker, source, self, shares=shares)

    def _session_intake(self, queue: str) -> SessionsIntake:
        broker, options = self._app.broker, self._options
        if not broker.capabilities.sessions:
            raise CapabilityError(
                f"queue {queue!r} is declared with sessions, but {broker.capabilities.name} has no "
                "sessions; use Service Bus or local://, or remove sessions=True"
            )
        wait = SESSION_WAIT if broker.capabilities.remote else WAIT
        source = QueueSource(queue, BURST_WAIT if options.burst else wait, options.poll_ceiling)
        most = self._most_sessions(options.concurrency)
        return self._shell.sessions(broker, source, self, most=most, share=options.session_share)

    def _most_sessions(self, concurrency: int) -> int:
        return self._options.max_sessions or min(concurrency, USUAL_SESSIONS)

    def scale(self, concurrency: int) -> None:
        """Serve as many sessions as suits another number of tasks at the same time."""
        for sessions in self._sessions:
            sessions.set_most(self._most_sessions(concurrency))

    # -- called by the intakes, on their threads ---------------------------------------------

    def lease(self, queue: str) -> float:
        """The lease to ask for now, in seconds."""
        return self._leases.seconds(queue)

    def take(self, source: Source, deliveries: Sequence[Delivery], asked_at: float) -> None:
        """Pass new deliveries to the supervisor's loop."""
        self._mailbox.post(partial(self._core.received, source, deliveries, asked_at))

    def refused(self, error: Exception) -> None:
        """Keep the first error that ends the worker, and wake the supervisor's loop."""
        self.refusal = self.refusal or error
        self._mailbox.wake()

    def fell_quiet(self) -> None:
        """Wake the supervisor's loop: other queues get the room of an empty one."""
        self._mailbox.wake()

    # -- called by the supervisor's loop -----------------------------------------------------

    def raise_refusal(self) -> None:
        """Raise the error that ended the worker at its start, if one did (see `is_refused`)."""
        if self.refusal is not None:
            raise self.refusal

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
        until = self._clock.monotonic() + timeout
        for intake in self._all:
            intake.join(max(0.0, until - self._clock.monotonic()))

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
    if options.pool == SOLO:
        return 0  # at a breakpoint, other messages need not wait for this worker
    mean = pool.mean_seconds
    if mean is None:
        return FIRST_PREFETCH
    return min(MOST_PREFETCH, int(pool.capacity * PREFETCH_SECONDS / max(mean, 1e-5)))


def tell_ended(items: Iterable[WorkItem]) -> None:
    """Tell the sessions of these items that they have ended."""
    for item in items:
        if item.session is not None:
            item.session.ended(item)
