"""Claims slots of rates in the result store, many at once, by compare-and-set.

Crash window: if a worker dies with slots that no message carries yet, they stay unused (at most
`AHEAD` seconds' worth). Nothing else is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from aztask.limits.declaration import Rate
from aztask.limits.rates import HORIZON, RateState
from aztask.limits.slots import Slot
from aztask.limits.storeclock import StoreClock
from aztask.stores.records.controls import ControlStore, Entry, EntryChange
from aztask.stores.rows import Kept, New, change

Result = TypeVar("Result")

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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Slots that are wanted of one rate, one for each of `weights`.

    * `rate`: this worker's; while workers with other numbers run, the newest ones count.
    * `ahead`: seconds within which the slots before it must end.
    """

    entry: str
    rate: Rate
    weights: Sequence[int] = (1,)
    ahead: float = HORIZON


class RateCells:
    """The states of some rates, for `aztask.stores.rows.change`. What is known is tried first.

    Entries cannot change in one transaction. If one of them was changed by another worker, what was
    claimed of the others is credited, and the next try claims all of them again.
    """

    def __init__(self, claims: Claims, wanted: Sequence[Wanted]) -> None:
        self._claims = claims
        self._wanted = wanted
        self._first = True

    def read(self) -> list[Known]:
        """The states that this process knows; afterwards those of the store."""
        first, self._first = self._first, False
        found = [self._claims.known(each.entry) if first else None for each in self._wanted]
        if None in found:
            return self._claims.read([each.entry for each in self._wanted])
        return [known for known in found if known is not None]

    def write(self, states: list[RateState], before: list[Known]) -> bool:
        """Replace the states, unless another worker has changed one of them."""
        made = self._claims.write([each.entry for each in self._wanted], states, before)
        if not all(made):
            for each, state, written in zip(self._wanted, states, made, strict=True):
                if written:
                    self._claims.correct(each.entry, state.epoch, sum(each.weights))
        return all(made)


class Claims:
    """The slots of all rates. One thread claims; any thread may call `correct`.

    Crash window: corrections that are not written yet are lost with the worker. A start then counts
    as much as it was claimed for.
    """

    def __init__(self, store: ControlStore, clock: StoreClock) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, Known] = {}
        self._started_at: float | None = None
        self._lock = threading.Lock()
        self._corrections: dict[str, list[tuple[int, int]]] = {}  # by entry: (epoch, unused)
        self._applied: dict[str, int] = {}  # how many of them are in the state that is written next

    def claim(self, wanted: Wanted, earliest: float) -> list[Slot]:
        """Claim these slots at `earliest` or later; fewer if they are too far `ahead`.

        The state that this process wrote last is tried first, so that a claim without
        competitors costs one request. Raises BrokerUnavailable.
        """

        def claimed(known: list[Known]) -> New[list[RateState], list[Slot]] | Kept[list[Slot]]:
            now = self._clock.now()
            state, used = self._state_for(wanted, known[0], now)
            times, after = state.claim(used, wanted.weights, now, max(earliest, now), wanted.ahead)
            if not times:
                return Kept([])
            pairs = zip(times, wanted.weights, strict=False)
            slots = [Slot(wanted.entry, after.epoch, at, weight) for at, weight in pairs]
            return New([after], slots)

        return self._change([wanted], claimed)

    def claim_together(self, wanted: Sequence[Wanted], earliest: float) -> list[Slot]:
        """Claim one slot of each of these rates, all at the same time; none if one is too far.

        Crash window: if the worker dies after it wrote some of the entries, what it claimed of them
        stays unused. Raises BrokerUnavailable.
        """

        def claimed(known: list[Known]) -> New[list[RateState], list[Slot]] | Kept[list[Slot]]:
            now = self._clock.now()
            pairs = zip(wanted, known, strict=True)
            found = [(each, *self._state_for(each, before, now)) for each, before in pairs]
            first = max(earliest, now)
            at = max(state.opens(used, each.weights[0], first) for each, state, used in found)
            states, slots = [], []
            for each, state, used in found:
                times, after = state.claim(used, each.weights, now, at, each.ahead)
                if not times:
                    return Kept([])
                states.append(after)
                slots.append(Slot(each.entry, after.epoch, times[0], each.weights[0]))
            return New(states, slots)

        return self._change(wanted, claimed)

    def correct(self, entry: str, epoch: int, unused: int) -> None:
        """Credit what a start of this epoch did not use; below 0: charge what it used more.

        It is written with the next claim, or by `settle`.
        """
        if unused:
            with self._lock:
                self._corrections.setdefault(entry, []).append((epoch, unused))

    def settle(self) -> None:
        """Write the corrections that no claim has written. Raises BrokerUnavailable."""
        for entry in list(self._corrections):

            def settled(known: list[Known]) -> New[list[RateState], None] | Kept[None]:
                state = self._corrected(entry, known[0].state, self._clock.now())  # noqa: B023
                return Kept(None) if state is known[0].state else New([state], None)

            self._change([Wanted(entry, Rate(1, 1.0), ())], settled)
            self._forget_applied(entry)

    def _change(
        self,
        wanted: Sequence[Wanted],
        decide: Callable[[list[Known]], New[list[RateState], Result] | Kept[Result]],
    ) -> Result:
        """Change the entries. After an error a credit is dropped, which may have been written.

        So it is never given twice. A charge is written again.
        """
        try:
            return change(RateCells(self, wanted), decide, "the slots of this limit", tries=TRIES)
        except Exception:
            for each in wanted:
                for epoch, unused in self._forget_applied(each.entry):
                    self.correct(each.entry, epoch, min(0, unused))
            raise

    def _forget_applied(self, entry: str) -> list[tuple[int, int]]:
        """Remove the corrections of an entry that are written, or are of an earlier epoch."""
        with self._lock:
            found, count = self._corrections.get(entry, []), self._applied.pop(entry, 0)
            self._corrections[entry] = found[count:]
            if not self._corrections[entry]:
                del self._corrections[entry]
            return found[:count]

    def _state_for(self, wanted: Wanted, known: Known, now: float) -> tuple[RateState, Rate]:
        """The state to claim from, corrections included, and the rate that counts."""
        if self._started_at is None:
            self._started_at = now
        state, used = known.state.under(wanted.rate, now, self._started_at)
        return self._corrected(wanted.entry, state, now), used

    def _corrected(self, entry: str, state: RateState, now: float) -> RateState:
        """The state with the corrections of its epoch; of earlier ones all slots are void."""
        with self._lock:
            found = list(self._corrections.get(entry, ()))
            self._applied[entry] = len(found)
        unused = sum(each for epoch, each in found if epoch == state.epoch)
        return state.corrected(unused, now) if unused else state

    def known(self, entry: str) -> Known | None:
        """The state as this process wrote or read it last; None if it did neither."""
        return self._known.get(entry)

    def write(
        self, entries: Sequence[str], states: Sequence[RateState], before: Sequence[Known]
    ) -> list[bool]:
        """Replace states that are known; False for each that another process has changed."""
        now = self._clock.now()
        changes = [
            EntryChange(entry, state.to_data(), known.tag)
            for entry, state, known in zip(entries, states, before, strict=True)
        ]
        tags = self._store.write(changes)
        for entry, state, tag in zip(entries, states, tags, strict=True):
            if tag is not None:
                self._forget_applied(entry)
                self._keep(entry, Known(state, tag, now))
        return [tag is not None for tag in tags]

    def valid(self, slot: Slot) -> bool:
        """Whether a carried slot is of the current epoch. Raises BrokerUnavailable."""
        known = self._known.get(slot.entry)
        if known is None or self._clock.now() - known.at > EPOCH_SECONDS:
            (known,) = self.read([slot.entry])
        return known.state.epoch == slot.epoch

    def free_at(self, entry: str) -> float:
        """The next free slot as far as it is known; 0.0 if it is not."""
        known = self._known.get(entry)
        return 0.0 if known is None else known.state.free_at

    def read(self, entries: Sequence[str]) -> list[Known]:
        """The states in the store, which are known from now on."""
        found = self._store.read(entries)
        return [self._read(entry, each) for entry, each in zip(entries, found, strict=True)]

    def _read(self, entry: str, found: Entry | None) -> Known:
        state = RateState() if found is None else RateState.from_data(found.data)
        tag = None if found is None else found.tag
        return self._keep(entry, Known(state, tag, self._clock.now()))

    def _keep(self, entry: str, known: Known) -> Known:
        self._known.pop(entry, None)
        self._known[entry] = known
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        return known
