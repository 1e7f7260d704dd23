"""The deliveries that a worker holds, where each one waits, and whose turn it is."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count
from typing import TypeAlias

from aztask.queues.base import Receiver
from aztask.queues.delivery import Delivery
from aztask.queues.lease.state import Lease
from aztask.support.clock import Clock
from aztask.worker.pipeline.work import HeldSession, WorkItem

# -- Taking turns by weight ------------------------------------------------------------------------
#
# The smooth weighted round robin of nginx. With the weights 4 and 1 the turns are A A B A A, again
# and again: no queue starves, and the turns of one queue are spread evenly. A queue that has
# nothing to give takes no turn and saves none up.


class Rotation:
    """Whose turn it is, among queues with weights; a queue without one has weight 1."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self._current: dict[str, int] = {}

    def next(self, ready: Collection[str]) -> str:
        """The queue whose turn it is among those that are ready, at least one."""
        for name in [each for each in self._current if each not in ready]:
            del self._current[name]
        total = 0
        best = ""
        for name in ready:
            weight = self._weights.get(name, 1)
            total += weight
            self._current[name] = self._current.get(name, 0) + weight
            if not best or self._current[name] > self._current[best]:
                best = name
        self._current[best] -= total
        return best


class WeightedItems:
    """Deliveries that wait, by queue, taken out in turns by weight; in a queue, in their order.

    It has the methods of a deque that a worker needs.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._rotation = Rotation(weights)
        self._queues: dict[str, deque[WorkItem]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[WorkItem]:
        for waiting in self._queues.values():
            yield from waiting

    def append(self, item: WorkItem) -> None:
        """Add one at the end of its queue."""
        self._queues.setdefault(item.queue, deque()).append(item)
        self._count += 1

    def extend(self, items: Iterable[WorkItem]) -> None:
        """Add these, each at the end of its queue."""
        for item in items:
            self.append(item)

    def popleft(self) -> WorkItem:
        """Take out the first of the queue whose turn it is. Raises IndexError if none waits."""
        if not self._queues:
            raise IndexError("no delivery waits")
        name = self._rotation.next(self._queues)
        waiting = self._queues[name]
        item = waiting.popleft()
        self._count -= 1
        if not waiting:
            del self._queues[name]
        return item

    def clear(self) -> None:
        """Take out all of them."""
        self._queues.clear()
        self._count = 0


# -- What a worker holds ---------------------------------------------------------------------------

Opened: TypeAlias = deque[WorkItem] | WeightedItems
"""Deliveries that wait for their claim: in their order, or by the weights of their queues."""

FIRST_BYTES = 4 << 20
"""What a message is taken for before the first one has come."""

RETRY_PAUSE = 0.5
LONGEST_RETRY_PAUSE = 10.0
RENEWAL_PAUSE = 0.01


class Deliveries:
    """All items of a worker; only the supervisor's loop uses it.

    opened: items to be claimed. ready: items to be sent to the pool. bytes: of all held messages;
    usual_bytes: of a message, lately. finished: how many tasks have ended since the worker started.
    Beside these queues, items are held until their retry is due, or wait until their stage is tried
    again.
    """

    def __init__(self, worker: str, clock: Clock, weights: Mapping[str, int] | None = None) -> None:
        """weights: those of the queues, if deliveries are claimed by weight; None: in order."""
        self.weights = weights or {}
        self.opened: Opened = WeightedItems(weights) if weights else deque()
        self.ready: deque[WorkItem] = deque()
        self._worker = worker
        self._clock = clock
        self.bytes = self.finished = 0
        self.usual_bytes: float = FIRST_BYTES
        self._numbers = count(1)
        self._jobs: dict[int, WorkItem] = {}
        self._by_lease: dict[Lease, WorkItem] = {}
        self._later: list[tuple[float, WorkItem]] = []
        self._held: dict[int, WorkItem] = {}
        self._held_until: list[tuple[float, int]] = []

    @property
    def held(self) -> int:
        """How many items are held until their retry is due; they take no slot and no room."""
        return len(self._held)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[WorkItem]:
        return iter(list(self._jobs.values()))

    def add(
        self,
        queue: str,
        receiver: Receiver,
        delivery: Delivery,
        session: HeldSession | None = None,
    ) -> WorkItem:
        """Make an item of a new delivery."""
        number = next(self._numbers)
        lease = Lease.of(delivery)
        item = WorkItem(
            number,
            delivery,
            receiver,
            lease,
            queue,
            self._clock.monotonic(),
            f"{self._worker}/{number}",
            session=session,
        )
        self._jobs[number] = item
        size = len(delivery.envelope.body)
        self.bytes += size
        # It rises at once and falls slowly: the first large message bounds the next receive.
        usual = self.usual_bytes
        if size > usual or number == 1:
            self.usual_bytes = size
        else:
            self.usual_bytes = usual + 0.01 * (size - usual)
        self._by_lease[lease] = item
        return item

    def of(self, lease: Lease) -> WorkItem | None:
        """The item that a lease belongs to, while it is held."""
        return self._by_lease.get(lease)

    def numbered(self, number: object) -> WorkItem | None:
        """The item with this number, while it is held."""
        return self._jobs.get(number) if isinstance(number, int) else None

    def swapped(self, item: WorkItem) -> None:
        """Note that the item has the lease of the deferred message, no longer its pointer's."""
        if item.pointer is not None and self._by_lease.pop(item.pointer.lease, None) is not None:
            self._by_lease[item.lease] = item

    def remove(self, item: WorkItem) -> bool:
        """Forget an item that has ended; False if it was forgotten before."""
        self._by_lease.pop(item.lease, None)
        if item.pointer is not None:
            self._by_lease.pop(item.pointer.lease, None)
        self._held.pop(item.number, None)
        if self._jobs.pop(item.number, None) is None:
            return False
        self.bytes -= len(item.delivery.envelope.body)
        return True

    def back(self, items: Iterable[WorkItem]) -> None:
        """Put items that were taken out of `ready` too early back in front, in order."""
        self.ready.extendleft(reversed(list(items)))

    def try_later(self, item: WorkItem) -> float:
        """Note that a stage failed; returns when to retry it (clock of the deadlines).

        Almost at once if only a renewal was in the way, with growing pauses during an outage.
        """
        pause = RENEWAL_PAUSE
        if item.tries:
            pause = min(RETRY_PAUSE * 2 ** min(item.tries - 1, 6), LONGEST_RETRY_PAUSE)
        at = self._clock.monotonic() + pause
        self._later.append((at, item))
        return at

    def due(self, now: float) -> list[WorkItem]:
        """Take out the items whose stage is to be tried again now."""
        due = [item for at, item in self._later if at <= now]
        if due:
            self._later = [entry for entry in self._later if entry[0] > now]
        return due

    def hold(self, item: WorkItem) -> float:
        """Hold an item until `WorkItem.held_until`; returns that."""
        until = item.held_until
        self._held[item.number] = item
        heapq.heappush(self._held_until, (until, item.number))
        return until

    def hurry(self, now: float) -> None:
        """Let the put-off items among the held ones go now: the reason may no longer hold."""
        for number, item in self._held.items():
            if item.waits_in_queue:
                heapq.heappush(self._held_until, (now, number))

    def let_go(self, now: float) -> list[WorkItem]:
        """Take out the held items whose time has come."""
        items = []
        while self._held_until and self._held_until[0][0] <= now:
            item = self._held.pop(heapq.heappop(self._held_until)[1], None)
            if item is not None:
                items.append(item)
        return items

    def waiting(self) -> list[WorkItem]:
        """Take out the items that were not sent to the pool and have no outcome."""
        waiting = [
            *self.opened,
            *self.ready,
            *(item for _, item in self._later if item.decided is None),
        ]
        self.opened.clear()
        self.ready.clear()
        self._later = [entry for entry in self._later if entry[1].decided is not None]
        return waiting
