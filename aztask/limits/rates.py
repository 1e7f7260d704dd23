"""Slots of a rate: the times at which starts are allowed, one after the other.

The entry of a limit holds the time of the next free slot. A claim takes some slots and moves that
time on, by compare-and-set. Nothing here does I/O.

Rules
1. Slots are (period + `SLACK`) / count seconds apart. A start happens within `SLACK` of its slot,
   so a half-open period never has more than `count` starts (with a burst: burst - 1 more).
2. A slot that was not used stays unused.
3. When the limit's numbers change, the epoch rises, and slots of earlier epochs are void. Those
   that deliveries in hand hold may still be used, so new slots begin behind them.
"""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import dataclass, replace
from typing import Final

from aztask.canvas.limits import Rate

SLACK: Final = 0.045
"""Seconds after its slot in which a start may happen, clocks included."""

AHEAD: Final = 1.0
"""Seconds for which a worker keeps a delivery in hand until its slot comes."""

HORIZON: Final = 86400.0
"""Seconds from now within which slots are handed out."""

ENTRY_PREFIX: Final = "limit-"
ENTRY_SECONDS: Final = 2 * HORIZON
"""An entry that no worker has written for so long is deleted: all its slots have passed."""

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class RateState:
    """The state of a rate. `free_at`: the next free slot, in the store's UTC epoch seconds.

    `numbers`: the rate that it was made with, as text.
    """

    free_at: float = 0.0
    epoch: int = 1
    numbers: str = ""

    def under(self, rate: Rate, now: float) -> RateState:
        """The state for these numbers: the next epoch if they have changed."""
        if self.numbers == str(rate):
            return self
        if not self.numbers:
            return replace(self, numbers=str(rate))
        free_at = min(self.free_at, now + AHEAD + SLACK)
        return RateState(free_at, self.epoch + 1, str(rate))

    def claim(
        self, rate: Rate, count: int, now: float, earliest: float
    ) -> tuple[list[float], RateState]:
        """Take up to `count` slots; returns their times, and the state after that.

        now: the store's time. earliest: no start can happen before that. Fewer slots are returned
        if the next ones are beyond `HORIZON`.
        """
        gap = spacing(rate)
        at = max(self.free_at, earliest - (rate.burst - 1) * gap)
        times: list[float] = []
        while len(times) < count and at <= now + HORIZON:
            times.append(max(at, earliest))
            at += gap
        return times, replace(self, free_at=at) if times else self

    def to_data(self) -> bytes:
        """The entry's bytes; no two calls return the same."""
        record = [VERSION, self.free_at, self.epoch, self.numbers, uuid.uuid4().hex]
        return json.dumps(record, separators=(",", ":")).encode()

    @classmethod
    def from_data(cls, data: bytes) -> RateState:
        """The state in an entry; a new one if the entry is damaged.

        Then slots are handed out twice at most for those that were claimed before. That is better
        than a task that never runs.
        """
        try:
            version, free_at, epoch, numbers, _ = json.loads(data)
            if version == VERSION and math.isfinite(free_at) and isinstance(numbers, str):
                return cls(float(free_at), int(epoch), numbers)
        except (ValueError, TypeError, OverflowError, RecursionError):
            pass
        return cls()


def spacing(rate: Rate) -> float:
    """Seconds between two slots (rule 1)."""
    return (rate.period + SLACK) / rate.count
