"""Claims slots of rates in the result store, many at once, by compare-and-set.

Crash window: if a worker dies with slots that no message carries yet, they stay unused (at most
`AHEAD` seconds' worth). Nothing else is lost.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final

from aztask.canvas.limits import Rate
from aztask.errors import BrokerUnavailable
from aztask.limits.rates import RateState
from aztask.limits.slots import Slot
from aztask.limits.storeclock import StoreClock
from aztask.results.controls import ControlStore, EntryChange

TRIES: Final = 12
EPOCH_SECONDS: Final = 5.0
"""Seconds for which a known epoch is trusted: so long after a change old slots may be used."""

REMEMBERED: Final = 10_000


@dataclass(slots=True)
class Known:
    """A state as this process wrote or read it last, at `at` in the store's time."""

    state: RateState
    tag: str | None
    at: float


class Claims:
    """The slots of all rates, for one thread."""

    def __init__(self, store: ControlStore, clock: StoreClock) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, Known] = {}

    def claim(self, entry: str, rate: Rate, count: int, earliest: float) -> list[Slot]:
        """Claim up to `count` slots at `earliest` or later. Raises BrokerUnavailable.

        The state that this process wrote last is tried first, so that a claim without
        competitors costs one request.
        """
        known = self._known.get(entry)
        for attempt in range(TRIES):
            if known is None or attempt:
                known = self._read(entry)
            now = self._clock.now()
            state = known.state.under(rate, now)
            times, after = state.claim(rate, count, now, max(earliest, now))
            if not times:
                return []
            (tag,) = self._store.write([EntryChange(entry, after.to_data(), known.tag)])
            if tag is not None:
                self._keep(entry, Known(after, tag, now))
                return [Slot(entry, after.epoch, at) for at in times]
            time.sleep(random.uniform(0.0, 0.002 * 2 ** min(attempt, 5)))  # noqa: S311  # no secret
        raise BrokerUnavailable("other workers keep claiming slots of this limit; try again")

    def valid(self, slot: Slot) -> bool:
        """Whether a carried slot is of the current epoch. Raises BrokerUnavailable."""
        known = self._known.get(slot.entry)
        if known is None or self._clock.now() - known.at > EPOCH_SECONDS:
            known = self._read(slot.entry)
        return known.state.epoch == slot.epoch

    def free_at(self, entry: str) -> float:
        """The next free slot as far as it is known; 0.0 if it is not."""
        known = self._known.get(entry)
        return 0.0 if known is None else known.state.free_at

    def _read(self, entry: str) -> Known:
        (found,) = self._store.read([entry])
        state = RateState() if found is None else RateState.from_data(found.data)
        return self._keep(
            entry, Known(state, None if found is None else found.tag, self._clock.now())
        )

    def _keep(self, entry: str, known: Known) -> Known:
        self._known.pop(entry, None)
        self._known[entry] = known
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        return known
