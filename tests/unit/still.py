"""Time that stands still until a test moves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Still:
    """A clock. now: seconds, of the lease clock and of the wall clock alike."""

    now: float = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
