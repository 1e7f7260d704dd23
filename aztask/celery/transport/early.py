"""Messages that arrived shortly before their time, held by their channel until then.

Rules
1. A message is handed out at its eta or up to 0.1 s later, never before. Celery's own timer would
   start it up to a second late, because that timer's thread sleeps for a second at a time.
2. Until then its lease is renewed, as that of any message that was not acknowledged. It does not
   count for the prefetch count, so it delays no other message.
3. At most `MOST` are held; a message that is earlier or more than that is hidden again.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Final

from aztask.celery.transport.unacked import UnackedDelivery

MOST: Final = 256


class EarlyMessages:
    """The early messages of one channel, by the time when they are due (UTC epoch seconds)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, UnackedDelivery]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def hold(self, holding: UnackedDelivery, due: float) -> bool:
        """Hold a message until `due`; returns False if there are too many."""
        if len(self._heap) >= MOST:
            return False
        heapq.heappush(self._heap, (due, next(self._numbers), holding))
        return True

    def due(self, now: float) -> list[UnackedDelivery]:
        """Take out the messages whose time has come, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[2])
        return found

    def seconds(self, now: float) -> float | None:
        """Seconds until the next message is due; None if none is held."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def take(self, consumer_tag: str) -> list[UnackedDelivery]:
        """Take out the messages of one consumer."""
        mine = [each for _, _, each in self._heap if each.consumer_tag == consumer_tag]
        self._heap = [each for each in self._heap if each[2].consumer_tag != consumer_tag]
        heapq.heapify(self._heap)
        return mine

    def clear(self) -> None:
        """Forget the messages, in a child that did not receive them."""
        self._heap.clear()
