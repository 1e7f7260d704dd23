"""The deliveries that a worker holds, and where each one waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count

from aztask.brokers.base import Receiver
from aztask.clock import Clock
from aztask.delivery import Delivery
from aztask.lease import Lease
from aztask.worker.job import Job

RETRY_PAUSE = 0.5
LONGEST_RETRY_PAUSE = 10.0
RENEWAL_PAUSE = 0.01


class Deliveries:
    """All jobs, and two queues: opened (to be claimed) and ready (to be sent to the pool).

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

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def add(self, queue: str, receiver: Receiver, delivery: Delivery) -> Job:
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
            self._clock.wall(),
            f"{self._worker}/{number}",
        )
        self._jobs[number] = job
        self._by_lease[lease] = job
        return job

    def of(self, lease: Lease) -> Job | None:
        """The job that a lease belongs to, while it is held."""
        return self._by_lease.get(lease)

    def remove(self, job: Job) -> bool:
        """Done with; False when it was already."""
        self._by_lease.pop(job.lease, None)
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
