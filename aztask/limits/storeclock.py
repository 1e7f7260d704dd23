"""The result store's clock, which all workers share, as this process knows it.

Slots are times on this clock. It is read now and then, and in between this machine's clock of the
deadlines tells how much time has passed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from aztask.stores.records.controls import ControlStore
from aztask.support.clock import Clock

KEPT_SECONDS: Final = 60.0
"""Seconds after which a remote store's clock is read again."""
AGREEING_SECONDS: Final = 2.0
"""A machine's wall clock that is no further off is taken as it is; Tables tells whole seconds."""


class StoreClock:
    """One thread refreshes it; the others may read it."""

    def __init__(self, store: ControlStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._made_at = clock.monotonic()
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

    @property
    def known(self) -> bool:
        """Whether the store's clock has been read."""
        return self._read_at is not None

    def corrected(self) -> Clock:
        """This machine's clock, with the store's wall time where the two do not agree.

        A machine whose wall clock is wrong, or jumps, then neither records wrong times nor deletes
        what is not old. Until the store's clock is known, the machine's own counts.
        """
        return replace(self._clock, wall=self._wall)

    def _wall(self) -> float:
        own = self._clock.wall()
        if self._read_at is None or abs(own - self.now()) <= AGREEING_SECONDS + self.error:
            return own
        return self.now()

    def now(self) -> float:
        """The store's time, in UTC epoch seconds. Call `refresh` first."""
        return self._clock.monotonic() + self._offset

    @property
    def started_at(self) -> float:
        """When this was made, as the worker started; as `now`."""
        return self._made_at + self._offset

    def deadline(self, at: float) -> float:
        """A time of the store on this machine's clock of the deadlines."""
        return at - self._offset
