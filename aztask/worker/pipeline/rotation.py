"""Taking turns by weight: the smooth weighted round robin of nginx.

With the weights 4 and 1 the turns are A A B A A, again and again: no queue starves, and the turns
of one queue are spread evenly. A queue that has nothing to give takes no turn and saves none up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

from aztask.worker.pipeline.work import WorkItem


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
