"""The deliveries that a worker holds, and where each one waits."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count

from aztask.brokers.base import Receiver
from aztask.brokers.delivery import Delivery
from aztask.lease.state import Lease
from aztask.support.clock import Clock
from aztask.worker.pipeline.work import Job, SessionSlot

RETRY_PAUSE = 0.5
LONGEST_RETRY_PAUSE = 10.0
RENEWAL_PAUSE = 0.01


class Deliveries:
    """All jobs, two queues: opened (to be claimed) and ready (to be sent to the pool), and those
    that are held aside until their retry is due.

    Only the supervisor's loop uses it.
    """

    def __init__(self, worker: str, clock: Clock) -> None:
        self.opened: deque[Job] = deque()
        self.ready: deque[Job] = deque()
        self._worker = worker
        self._clock = clock
        self._numbers = count(1)
        self._jobs: dict[int, Job] = {}
        self._by_lease: dict[Lease, Job] = {}
        self._later: list[tuple[float, Job]] = []
        self._held: dict[int, Job] = {}
        self._held_until: list[tuple[float, int]] = []

    @property
    def held(self) -> int:
        """How many are held until their retry is due; they occupy no slot and no room."""
        return len(self._held)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def add(
        self,
        queue: str,
        receiver: Receiver,
        delivery: Delivery,
        session: SessionSlot | None = None,
    ) -> Job:
        """A new delivery becomes a job."""
        number = next(self._numbers)
        lease = Lease(
            delivery,
            seconds=delivery.lease_seconds,
            granted_at=delivery.deadline - delivery.lease_seconds,
        )
        job = Job(
            number,
            delivery,
            receiver,
            lease,
            queue,
            self._clock.monotonic(),
            f"{self._worker}/{number}",
            session=session,
        )
        self._jobs[number] = job
        self._by_lease[lease] = job
        return job

    def of(self, lease: Lease) -> Job | None:
        """The job that a lease belongs to, while it is held."""
        return self._by_lease.get(lease)

    def swapped(self, job: Job) -> None:
        """It is held under another lease now: that of the message its pointer points to."""
        if job.pointer is not None and self._by_lease.pop(job.pointer.lease, None) is not None:
            self._by_lease[job.lease] = job

    def remove(self, job: Job) -> bool:
        """Done with; False when it was already."""
        self._by_lease.pop(job.lease, None)
        if job.pointer is not None:
            self._by_lease.pop(job.pointer.lease, None)
        self._held.pop(job.number, None)
        return self._jobs.pop(job.number, None) is not None

    def back(self, jobs: Iterable[Job]) -> None:
        """These were taken out of `ready` too early: put them in front, in order."""
        self.ready.extendleft(reversed(list(jobs)))

    def try_later(self, job: Job) -> float:
        """A stage could not be done: when to try again (clock of the deadlines).

        At once when only a renewal was in the way, slower and slower when something is down.
        """
        pause = RENEWAL_PAUSE
        if job.failures:
            pause = min(RETRY_PAUSE * 2 ** min(job.failures - 1, 6), LONGEST_RETRY_PAUSE)
        at = self._clock.monotonic() + pause
        self._later.append((at, job))
        return at

    def due(self, now: float) -> list[Job]:
        """The jobs whose stage is to be tried again now."""
        due = [job for at, job in self._later if at <= now]
        if due:
            self._later = [entry for entry in self._later if entry[0] > now]
        return due

    def hold(self, job: Job) -> float:
        """Keep it aside until `Job.held_until`; returns that."""
        until = job.held_until or 0.0
        self._held[job.number] = job
        heapq.heappush(self._held_until, (until, job.number))
        return until

    def let_go(self, now: float) -> list[Job]:
        """Take out those that are held no longer."""
        jobs = []
        while self._held_until and self._held_until[0][0] <= now:
            job = self._held.pop(heapq.heappop(self._held_until)[1], None)
            if job is not None:
                jobs.append(job)
        return jobs

    def waiting(self) -> list[Job]:
        """Take out everything that has not been sent to the pool and has no outcome."""
        waiting = [
            *self.opened,
            *self.ready,
            *(job for _, job in self._later if job.settlement is None),
        ]
        self.opened.clear()
        self.ready.clear()
        self._later = [entry for entry in self._later if entry[1].settlement is not None]
        return waiting
