"""Claims slots of rates in the result store, many at once, by compare-and-set.

Crash window: if a worker dies with slots that no message carries yet, they stay unused (at most
`AHEAD` seconds' worth). Nothing else is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aztask.limits.declaration import Rate
from aztask.limits.rates import RateState
from aztask.limits.slots import Slot
from aztask.limits.storeclock import StoreClock
from aztask.stores.records.controls import ControlStore, EntryChange
from aztask.stores.rows import Kept, New, change

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


class RateCell:
    """The state of one rate, for `aztask.stores.rows.change`. What is known is tried first."""

    def __init__(self, claims: Claims, entry: str) -> None:
        self._claims = claims
        self._entry = entry
        self._known = claims.known(entry)

    def read(self) -> Known:
        """The state that this process knows; afterwards that of the store."""
        known, self._known = self._known, None
        return self._claims.read(self._entry) if known is None else known

    def write(self, state: RateState, before: Known) -> bool:
        """Replace the state, unless another worker has changed it."""
        return self._claims.write(self._entry, state, before)


class Claims:
    """The slots of all rates, for one thread."""

    def __init__(self, store: ControlStore, clock: StoreClock) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, Known] = {}
        self._started_at: float | None = None

    def claim(self, entry: str, rate: Rate, count: int, earliest: float) -> list[Slot]:
        """Claim up to `count` slots at `earliest` or later. Raises BrokerUnavailable.

        * `rate`: this worker's; while workers with other numbers run, the newest ones count.

        The state that this process wrote last is tried first, so that a claim without
        competitors costs one request.
        """

        def claimed(known: Known) -> New[RateState, list[Slot]] | Kept[list[Slot]]:
            now = self._clock.now()
            if self._started_at is None:
                self._started_at = now
            state, used = known.state.under(rate, now, self._started_at)
            times, after = state.claim(used, count, now, max(earliest, now))
            if not times:
                return Kept([])
            return New(after, [Slot(entry, after.epoch, at) for at in times])

        return change(RateCell(self, entry), claimed, "the slots of this limit", tries=TRIES)

    def known(self, entry: str) -> Known | None:
        """The state as this process wrote or read it last; None if it did neither."""
        return self._known.get(entry)

    def write(self, entry: str, state: RateState, known: Known) -> bool:
        """Replace the state that is known; False if another process has changed it."""
        now = self._clock.now()
        (tag,) = self._store.write([EntryChange(entry, state.to_data(), known.tag)])
        if tag is not None:
            self._keep(entry, Known(state, tag, now))
        return tag is not None

    def valid(self, slot: Slot) -> bool:
        """Whether a carried slot is of the current epoch. Raises BrokerUnavailable."""
        known = self._known.get(slot.entry)
        if known is None or self._clock.now() - known.at > EPOCH_SECONDS:
            known = self.read(slot.entry)
        return known.state.epoch == slot.epoch

    def free_at(self, entry: str) -> float:
        """The next free slot as far as it is known; 0.0 if it is not."""
        known = self._known.get(entry)
        return 0.0 if known is None else known.state.free_at

    def read(self, entry: str) -> Known:
        """The state in the store, which is known from now on."""
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
