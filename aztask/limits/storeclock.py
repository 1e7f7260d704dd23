"""The result store's clock, which all workers share, as this process knows it.

Slots are times on this clock. It is read now and then, and in between this machine's clock of the
deadlines tells how much time has passed.
"""

from __future__ import annotations

from typing import Final

from aztask.stores.records.controls import ControlStore
from aztask.support.clock import Clock

KEPT_SECONDS: Final = 60.0
"""Seconds after which a remote store's clock is read again."""


class StoreClock:
    """Not thread-safe: one thread uses it."""

    def __init__(self, store: ControlStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._offset = 0.0
        self._read_at: float | None = None
        self.error = 0.0

    def refresh(self) -> None:
        """Read the store's clock if that is due. Raises BrokerUnavailable.

        `error` is then how far, in seconds, the known time may be off.
        """
        now = self._clock.monotonic()
        if self._read_at is not None and self.error and now - self._read_at < KEPT_SECONDS:
            return
        found = self._store.time()
        self._offset = found.at - (found.earliest + found.latest) / 2
        self.error = (found.latest - found.earliest) / 2
        self._read_at = now

    def now(self) -> float:
        """The store's time, in UTC epoch seconds. Call `refresh` first."""
        return self._clock.monotonic() + self._offset

    def deadline(self, at: float) -> float:
        """A time of the store on this machine's clock of the deadlines."""
        return at - self._offset
