"""How many tasks workers run at the same time, if an operator changed that while they run.

Rules
1. What is said of a worker comes before what is said of one of its queues, and that before what is
   said of all workers. Of several queues, the latest counts.
2. Without such an entry a worker has the concurrency of its command line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

MOST: Final = 10_000


class Reach(StrEnum):
    """The workers that an entry applies to: all, those of a queue, or one."""

    ALL = "all"
    QUEUE = "queue"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Scale:
    """A changed concurrency.

    * `name`: the queue's or the worker's; "" for all workers.
    * `size`: how many tasks each of the workers runs at the same time.
    * `at`: since when, UTC epoch seconds. `by`: the user and machine that set it.
    """

    reach: Reach
    name: str
    size: int
    at: float
    by: str = ""

    def __str__(self) -> str:
        return f"{self.reach.value} {self.name}" if self.name else "all workers"

    def packed(self) -> list[Any]:
        """The values that `read_scale` takes."""
        return [self.reach.value, self.name, self.size, self.at, self.by]


def read_scale(record: Any) -> Scale:
    """The entry in a document. Raises TypeError and ValueError if it is damaged."""
    reach, name, size, at, by = record
    if not isinstance(name, str) or not isinstance(by, str) or isinstance(at, bool):
        raise TypeError
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError
    if not math.isfinite(at) or not 1 <= size <= MOST:
        raise ValueError
    return Scale(Reach(reach), name, size, float(at), by)


def scale_of(scales: Iterable[Scale], worker: str, queues: Iterable[str]) -> Scale | None:
    """The entry that a worker obeys; None for the concurrency of its command line."""
    names = {Reach.WORKER: {worker}, Reach.QUEUE: set(queues), Reach.ALL: {""}}
    order = (Reach.ALL, Reach.QUEUE, Reach.WORKER)
    found = [each for each in scales if each.name in names[each.reach]]
    return max(found, key=lambda each: (order.index(each.reach), each.at), default=None)
