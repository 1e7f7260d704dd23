"""Deliveries that wait in hand for a permit: by entry, the oldest ticket first."""

from __future__ import annotations

from typing import Final

from aztask.worker.pipeline.work import Stage, WorkItem

MOST_PARKED: Final = 8
"""Deliveries of one entry that wait in hand, each under its lease."""

LONGEST_PARKED: Final = 15.0
"""Seconds after which a delivery that waits in hand is put off."""


class Parking:
    """Only the supervisor's loop uses it."""

    def __init__(self) -> None:
        self._parked: dict[str, list[tuple[float, int, float, WorkItem]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parked.values()))

    def add(self, item: WorkItem, now: float) -> WorkItem | None:
        """Park an item; returns the youngest one, no longer parked, if there are too many."""
        if item.parked is None:
            return None
        group = self._parked.setdefault(item.parked.entry, [])
        if item.parked_at is None:
            item.parked_at = now
        group.append((item.parked.ticket, item.number, item.parked_at, item))
        group.sort(key=lambda entry: entry[:2])
        group[:] = [entry for entry in group if _waits(entry[3])]
        return group.pop()[3] if len(group) > MOST_PARKED else None

    def next(self, entry: str) -> WorkItem | None:
        """Take out the item with the oldest ticket."""
        group = self._parked.get(entry, [])
        while group:
            item = group.pop(0)[3]
            if _waits(item):
                return item
        self._parked.pop(entry, None)
        return None

    def count(self, entry: str) -> int:
        """How many deliveries wait for a permit of this entry; any thread may call."""
        return len(self._parked.get(entry, ()))

    def ticket(self, entry: str) -> float | None:
        """The oldest ticket of an entry; None if nothing waits."""
        group = self._parked.get(entry)
        return group[0][0] if group else None

    def oldest(self) -> list[WorkItem]:
        """Take out the item with the oldest ticket of each entry."""
        found = [self.next(entry) for entry in list(self._parked)]
        return [item for item in found if item is not None]

    def too_long(self, now: float) -> list[WorkItem]:
        """Take out the items that have waited for `LONGEST_PARKED`, except in sessions."""
        found = []
        for entry, group in list(self._parked.items()):
            late = [
                each for each in group if now - each[2] >= LONGEST_PARKED and not each[3].in_order
            ]
            found += [each[3] for each in late if _waits(each[3])]
            self._parked[entry] = [each for each in group if each not in late]
            if not self._parked[entry]:
                del self._parked[entry]
        return found

    def clear(self) -> list[WorkItem]:
        """Take out whatever still waits."""
        found = [each[3] for group in self._parked.values() for each in group]
        self._parked.clear()
        return [item for item in found if _waits(item)]


def _waits(item: WorkItem) -> bool:
    """Whether it still waits: its lease may have been lost in between."""
    return item.stage in (Stage.RECEIVED, Stage.READY) and item.decided is None
