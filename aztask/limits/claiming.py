"""Claims slots of rates in the result store, many at once, by compare-and-set.

Crash window: if a worker dies with slots that no message carries yet, they stay unused (at most
`AHEAD` seconds' worth). Nothing else is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
class SlotClaim:
    """What a claim makes of a state. `without`: the same state, without the slots of the claim.

    `at`: the first of these slots.
    """

    state: RateState
    without: RateState
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Correction:
    """What a slot of this epoch, at this time, was claimed for and not used; below 0: used more."""

    epoch: int
    unused: int
    at: float


@dataclass(frozen=True, slots=True)
class Doubt:
    """A write that may have been made: its answer is missing.

    * `data`: what was written; no two writes are equal. `tag`: of the state that it replaces.
    * `without`: see `SlotClaim`. `corrections`: those that it contains.
    """

    data: bytes
    tag: str | None
    without: RateState
    corrections: Sequence[Correction]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Slots that are wanted of one rate, one for each of `weights`.

    * `rate`: this worker's; while workers with other numbers run, the newest ones count.
    * `ahead`: seconds within which the slots before it must end.
    * `changed_at`: see `Limit`. `weighed`: it has a cost.
    """

    entry: str
    rate: Rate
    weights: Sequence[int] = (1,)
    ahead: float = HORIZON
    changed_at: float | None = None
    weighed: bool = False


class RateCells:
    """The states of some rates, for `aztask.stores.rows.change`. What is known is tried first.

    Entries cannot change in one transaction. If one of them was changed by another worker, what was
    claimed of the others is taken back, and the next try claims all of them again.
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

    def write(self, claimed: list[SlotClaim], before: list[Known]) -> bool:
        """Replace the states, unless another worker has changed one of them."""
        made = self._claims.write([each.entry for each in self._wanted], claimed, before)
        if all(made):
            return True
        for each, claim, written in zip(self._wanted, claimed, made, strict=True):
            if written:
                self._claims.take_back(each, claim)
        return False


class Claims:
    """The slots of all rates. One thread claims; any thread may call `correct`.

    Crash window: corrections that are not written yet are lost with the worker. A start then counts
    as much as it was claimed for.

    After an error of a write, the next read of the entry tells whether it was made. If another
    worker has changed the entry since, that is not known: its credits are dropped then, so that
    none is given twice, and its charges are written again.
    """

    def __init__(self, store: ControlStore, clock: StoreClock) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, Known] = {}
        self._lock = threading.Lock()
        self._corrections: dict[str, list[Correction]] = {}  # by entry
        self._applied: dict[str, int] = {}  # how many of them are in the state that is written next
        self._doubts: dict[str, Doubt] = {}

    def claim(self, wanted: Wanted, earliest: float) -> list[Slot]:
        """Claim these slots at `earliest` or later; fewer if they are too far `ahead`.

        The state that this process wrote last is tried first, so that a claim without
        competitors costs one request. Raises BrokerUnavailable.
        """

        def claimed(known: list[Known]) -> New[list[SlotClaim], list[Slot]] | Kept[list[Slot]]:
            now = self._clock.now()
            state, used = self._state_for(wanted, known[0], now)
            first = max(earliest, now)
            times, after = state.claim(
                used, wanted.weights, now, first, wanted.ahead, weighed=wanted.weighed
            )
            if not times:
                return Kept([])
            pairs = zip(times, wanted.weights, strict=False)
            slots = [Slot(wanted.entry, after.epoch, at, weight) for at, weight in pairs]
            return New([SlotClaim(after, state, times[0])], slots)

        return self._change([wanted], claimed) or self._refused([wanted])

    def claim_together(self, wanted: Sequence[Wanted], earliest: float) -> list[Slot]:
        """Claim one slot of each of these rates, all at the same time; none if one is too far.

        Crash window: if the worker dies after it wrote some of the entries, what it claimed of them
        stays unused. Raises BrokerUnavailable.
        """

        def claimed(known: list[Known]) -> New[list[SlotClaim], list[Slot]] | Kept[list[Slot]]:
            now = self._clock.now()
            pairs = zip(wanted, known, strict=True)
            found = [(each, *self._state_for(each, before, now)) for each, before in pairs]
            first = max(earliest, now)
            at = max(state.opens(used, each.weights[0], first) for each, state, used in found)
            claims, slots = [], []
            for each, state, used in found:
                times, after = state.claim(
                    used, each.weights, now, at, each.ahead, weighed=each.weighed
                )
                if not times:
                    return Kept([])
                claims.append(SlotClaim(after, state, times[0]))
                slots.append(Slot(each.entry, after.epoch, times[0], each.weights[0]))
            return New(claims, slots)

        return self._change(wanted, claimed) or self._refused(wanted)

    def _refused(self, wanted: Sequence[Wanted]) -> list[Slot]:
        """No slot was near enough. New numbers are written all the same: they count from now on."""
        for each in wanted:
            now = self._clock.now()

            def renumbered(
                known: list[Known], each: Wanted = each, now: float = now
            ) -> New[list[SlotClaim], None] | Kept[None]:
                state, _ = self._state_for(each, known[0], now)
                same = state.epoch == known[0].state.epoch
                return Kept(None) if same else New([SlotClaim(state, state)], None)

            self._change([replace(each, weights=())], renumbered)
        return []

    def correct(self, slot: Slot, unused: int) -> None:
        """Credit what the start in this slot did not use; below 0: charge what it used more.

        It is written with the next claim, or by `settle`.
        """
        self._note(slot.entry, Correction(slot.epoch, unused, slot.at))

    def _note(self, entry: str, correction: Correction) -> None:
        if correction.unused:
            with self._lock:
                self._corrections.setdefault(entry, []).append(correction)

    def settle(self) -> None:
        """Write the corrections that no claim has written; an error does not stop the others.

        Raises BrokerUnavailable; what could not be written is written by the next call.
        """
        errors = []
        for entry in [*self._corrections, *self._doubts]:
            try:
                self._settle(entry)
            except Exception as error:  # noqa: BLE001  # raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def _settle(self, entry: str) -> None:
        def settled(known: list[Known]) -> New[list[SlotClaim], None] | Kept[None]:
            state = self._corrected(entry, known[0].state, self._clock.now())
            same = state is known[0].state
            return Kept(None) if same else New([SlotClaim(state, state)], None)

        self._change([Wanted(entry, Rate(1, 1.0), ())], settled)
        self._forget_applied(entry)

    def _change(
        self,
        wanted: Sequence[Wanted],
        decide: Callable[[list[Known]], New[list[SlotClaim], Result] | Kept[Result]],
    ) -> Result:
        return change(RateCells(self, wanted), decide, "the slots of this limit", tries=TRIES)

    def _forget_applied(self, entry: str) -> list[Correction]:
        """Remove the corrections of an entry that are written, or are of an earlier epoch."""
        with self._lock:
            found, count = self._corrections.get(entry, []), self._applied.pop(entry, 0)
            self._corrections[entry] = found[count:]
            if not self._corrections[entry]:
                del self._corrections[entry]
            return found[:count]

    def _state_for(self, wanted: Wanted, known: Known, now: float) -> tuple[RateState, Rate]:
        """The state to claim from, corrections included, and the rate that counts."""
        state, used = known.state.under(
            wanted.rate,
            now,
            self._clock.started_at,
            wanted.changed_at,
            weighed=wanted.weighed,
        )
        return self._corrected(wanted.entry, state, now), used

    def _corrected(self, entry: str, state: RateState, now: float) -> RateState:
        """The state with the corrections of its epoch; of earlier ones all slots are void."""
        with self._lock:
            found = list(self._corrections.get(entry, ()))
            self._applied[entry] = len(found)
        for each in sorted(found, key=lambda each: each.unused):  # what is owed comes first
            if each.epoch == state.epoch:
                state = state.corrected(each.unused, now, each.at)
        return state

    def known(self, entry: str) -> Known | None:
        """The state as this process wrote or read it last; None if it did neither."""
        return self._known.get(entry)

    def write(
        self, entries: Sequence[str], claimed: Sequence[SlotClaim], before: Sequence[Known]
    ) -> list[bool]:
        """Replace states that are known; False for each that another process has changed."""
        now = self._clock.now()
        changes = [
            EntryChange(entry, each.state.to_data(), known.tag)
            for entry, each, known in zip(entries, claimed, before, strict=True)
        ]
        try:
            tags = self._store.write(changes)
        except Exception:
            for each, claim in zip(changes, claimed, strict=True):
                self._doubt(each, claim.without, self._forget_applied(each.name))
            raise
        for entry, claim, tag in zip(entries, claimed, tags, strict=True):
            if tag is not None:
                self._forget_applied(entry)
                self._keep(entry, Known(claim.state, tag, now))
        return [tag is not None for tag in tags]

    def take_back(self, wanted: Wanted, claimed: SlotClaim) -> None:
        """Undo a claim that was written a moment ago.

        A claim may have moved the next free slot by far more than its weight. If another worker has
        claimed behind it already, its weight is credited. Raises BrokerUnavailable.
        """
        entry, weight = wanted.entry, sum(wanted.weights)
        credit = Correction(claimed.state.epoch, weight, claimed.at)
        change = EntryChange(entry, claimed.without.to_data(), self._known[entry].tag)
        try:
            (tag,) = self._store.write([change])
        except Exception:
            self._doubt(change, claimed.without, [credit])
            raise
        if tag is None:
            self._note(entry, credit)
        else:
            self._keep(entry, Known(claimed.without, tag, self._clock.now()))

    def _doubt(
        self, change: EntryChange, without: RateState, corrections: Sequence[Correction]
    ) -> None:
        """Note that a write may have been made; the next use of the entry reads it."""
        self._known.pop(change.name, None)
        self._doubts[change.name] = Doubt(change.data, change.tag, without, corrections)

    def _resolve(self, doubt: Doubt, entry: str, found: Entry | None) -> bool:
        """Keep the corrections that were not written; whether the doubtful write was made."""
        made = found is not None and found.data == doubt.data
        if not made:
            unmade = doubt.tag == (None if found is None else found.tag)
            for each in doubt.corrections:
                if unmade or each.unused < 0:
                    self._note(entry, each)
        return made

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
        doubt = self._doubts.pop(entry, None)
        if doubt is not None and self._resolve(doubt, entry, found):
            state = doubt.without  # nothing was started in the slots of that claim
        return self._keep(entry, Known(state, tag, self._clock.now()))

    def _keep(self, entry: str, known: Known) -> Known:
        self._known.pop(entry, None)
        self._known[entry] = known
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        return known
