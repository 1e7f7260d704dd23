"""Slots of a rate: the times at which starts are allowed, one after the other.

The entry of a limit holds the time of the next free slot. A claim takes some slots and moves that
time on, by compare-and-set. Nothing here does I/O.

Rules
1. Slots are (period + `SLACK`) / count seconds apart. A start happens within `SLACK` of its slot,
   so a half-open period never has more than `count` starts (with a burst: burst - 1 more).
2. A slot that was not used stays unused.
3. When the limit's numbers change, the epoch rises, and slots of earlier epochs are void. Those
   that deliveries in hand hold may still be used, so new slots begin one new gap behind them: a
   change never makes two starts come sooner after each other than both numbers allow. Of a limit
   with a cost hardly any slot is void, and what calls were charged stays owed, in the new numbers.
4. While old and new workers run together, they have different numbers for one limit. All of them
   use those whose *first* worker started last. Numbers that no worker claimed with for ten minutes
   no longer count. So the epoch rises once, and not with each claim. Numbers that an operator set
   count from that moment on, as if a worker had started then.
5. An entry says which numbers live in a part that releases before 0.2 do not read. They drop it
   with each claim, so beside them the epoch changes as often as it did before.
6. A claim has a weight: how much of the rate the start uses. Its slot comes when the whole weight
   is free, and the next slot is that much later.
7. What a start used less than its weight is credited, and what it used more is charged: the next
   free slot moves. Credits bring it at most one burst before the slots that are handed out, as an
   idle time does, so they never add up to more than a burst at once. Nor do they bring it where no
   idle time could have: if all of a burst was free once since a start, its credit is worth nothing.
8. Slots with weights are handed out while they begin within `WEIGHED_AHEAD`. Further ahead they
   would be handed out by estimates, and no credit could bring them forward. So are slots of several
   rates at one time: those of the faster rate before that time stay unused (rule 2), and tasks that
   need the faster rate alone would wait behind the slower one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from aztask.limits.declaration import Rate
from aztask.support import chance

SLACK: Final = 0.045
"""Seconds after its slot in which a start may happen, clocks included."""

AHEAD: Final = 1.0
"""Seconds for which a worker keeps a delivery in hand until its slot comes."""

HORIZON: Final = 86400.0
"""Seconds from now within which slots are handed out."""

WEIGHED_AHEAD: Final = 2.0
"""As `HORIZON`, for slots of limits with a cost, and of several rates at one time."""

ENTRY_PREFIX: Final = "limit-"
ENTRY_SECONDS: Final = 2 * HORIZON
"""An entry that no worker has written for so long is deleted: all its slots have passed."""

VERSION: Final = 1
LIVES_SECONDS: Final = 600.0
MOST_LIVING: Final = 20
MOST_ROOMS: Final = 8
_NUMBERS: Final = re.compile(r"(\d{1,10})/([0-9.]{1,12})s, burst (\d{1,10})", re.ASCII)


@dataclass(frozen=True, slots=True)
class RateState:
    """The state of a rate. `free_at`: the next free slot, in the store's UTC epoch seconds.

    `numbers`: the rate that it was made with, as text.

    `living`: by such a text, when its first worker started, and when one claimed with it last.

    `taken`: the end of the last slot that was handed out, if credits brought `free_at` before it;
    else 0.0.

    `rooms`: of claims with a cost, from when their slots were wanted, and how many seconds credits
    for earlier slots may bring `free_at` forward: as many as were not free then. Both rise.
    """

    free_at: float = 0.0
    epoch: int = 1
    numbers: str = ""
    living: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    taken: float = 0.0
    rooms: tuple[tuple[float, float], ...] = ()

    def under(
        self,
        rate: Rate,
        now: float,
        started_at: float = 0.0,
        changed_at: float | None = None,
        *,
        weighed: bool = False,
    ) -> tuple[RateState, Rate]:
        """The state for a claim, and the rate that counts (rule 4): the next epoch if it is new.

        * `rate`: the numbers of the worker that claims; `started_at`: when it started.
        * `changed_at`: when an operator gave it these numbers, or its own ones again.
        * `weighed`: the limit has a cost, so its slots end soon and charges delay the next one.
        """
        own = str(rate)
        living = {key: at for key, at in self.living.items() if now - at[1] <= LIVES_SECONDS}
        since = started_at if changed_at is None else changed_at
        if own in living:
            known = living[own][0]
            since = known if changed_at is None else max(known, changed_at)
        living[own] = (since, now)
        newest = max(living, key=lambda key: (living[key][0], key))
        found = rate if newest == own else _rate_of(newest)
        if found is None:  # damaged
            newest, found = own, rate
        if len(living) > MOST_LIVING:
            living = {newest: living[newest], own: living[own]}
        if not self.numbers or self.numbers == newest:
            return replace(self, numbers=newest, living=living), found
        free_at = min(self.free_at, now + AHEAD + SLACK + spacing(found))
        former = _rate_of(self.numbers)
        if weighed and former is not None:
            owed = max(0.0, self.free_at - now) * spacing(found) / spacing(former)
            free_at = max(free_at, min(now + owed, now + HORIZON))
        taken = self.taken if self.taken > free_at else 0.0
        return RateState(free_at, self.epoch + 1, newest, living, taken), found

    def claim(
        self,
        rate: Rate,
        weights: Sequence[int],
        now: float,
        earliest: float,
        ahead: float = HORIZON,
        *,
        weighed: bool = False,
    ) -> tuple[list[float], RateState]:
        """Take a slot for each of these weights; returns their times, and the state after that.

        now: the store's time. earliest: no start can happen before that. Fewer slots are returned
        if what is taken does not begin within `ahead` seconds: an `earliest` far ahead, which
        another limit asks for, would leave all slots before it unused. weighed: see `under`.
        """
        gap = spacing(rate)
        full = earliest - (rate.burst - 1) * gap
        at = max(self.free_at, full)
        times: list[float] = []
        for weight in weights:
            if at > now + ahead:
                break
            # Beside workers with other numbers a weight may be more than the burst: it waits for
            # a full burst, and those behind it wait for the rest.
            times.append(max(at + (min(weight, rate.burst) - 1) * gap, earliest))
            at += weight * gap
        if not times:
            return times, self
        rooms = self._with_room(earliest, max(0.0, self.free_at - full)) if weighed else self.rooms
        taken = self.taken if self.taken > at else 0.0
        return times, replace(self, free_at=at, taken=taken, rooms=rooms)

    def _with_room(self, earliest: float, room: float) -> tuple[tuple[float, float], ...]:
        """`rooms` with those of a claim; of claims behind a slot, the one with the least counts."""
        earliest = max([earliest, *(at for at, _ in self.rooms)])  # clocks and limits differ
        rooms = [each for each in self.rooms if each[1] < room]
        if len(rooms) == MOST_ROOMS:
            rooms[:2] = [(rooms[1][0], rooms[0][1])]  # a little too strict for slots between them
        return (*rooms, (earliest, room))

    def opens(self, rate: Rate, weight: int, earliest: float) -> float:
        """When a claim of this weight would get its slot. earliest: as in `claim`."""
        gap = spacing(rate)
        at = max(self.free_at, earliest - (rate.burst - 1) * gap)
        return max(at + (min(weight, rate.burst) - 1) * gap, earliest)

    def corrected(self, unused: int, now: float, slot_at: float = math.inf) -> RateState:
        """The state after `unused` of what was claimed is credited (rule 7); below 0: charged.

        slot_at: of the slot that was not used as estimated.
        """
        rate = _rate_of(self.numbers)
        if rate is None:
            return self
        gap = spacing(rate)
        end = max(self.taken, self.free_at)
        if unused <= 0:
            free_at = min(self.free_at - unused * gap, max(self.free_at, now + HORIZON))
            return replace(self, free_at=free_at, taken=end if end > free_at else 0.0)
        credit = min([unused * gap, *(room for at, room in self.rooms if at > slot_at)])
        free_at = max(self.free_at - credit, end - rate.burst * gap)
        made = max(0.0, self.free_at - free_at)
        rooms = tuple((at, room - made if at > slot_at else room) for at, room in self.rooms)
        return replace(self, free_at=free_at, taken=end if end > free_at else 0.0, rooms=rooms)

    def to_data(self) -> bytes:
        """The entry's bytes; no two calls return the same."""
        living = {key: [round(at, 1) for at in times] for key, times in self.living.items()}
        own: dict[str, Any] = {
            "write": chance.token(),
            "living": living,
        }  # a text in releases before 0.2
        if self.taken:
            own["taken"] = self.taken
        if self.rooms:
            own["rooms"] = [[round(at, 3), round(room, 6)] for at, room in self.rooms]
        record = [VERSION, self.free_at, self.epoch, self.numbers, own]
        return json.dumps(record, separators=(",", ":")).encode()

    @classmethod
    def from_data(cls, data: bytes) -> RateState:
        """The state in an entry; a new one if the entry is damaged.

        Then slots are handed out twice at most for those that were claimed before. That is better
        than a task that never runs.
        """
        try:
            version, free_at, epoch, numbers, own = json.loads(data)
            if version == VERSION and math.isfinite(free_at) and isinstance(numbers, str):
                parts = _living_of(own), _taken_of(own), _rooms_of(own)
                return cls(float(free_at), int(epoch), numbers, *parts)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            pass
        return cls()


def spacing(rate: Rate) -> float:
    """Seconds between two slots (rule 1)."""
    return (rate.period + SLACK) / rate.count


def _living_of(own: Any) -> dict[str, tuple[float, float]]:
    """The numbers that live, in an entry; {} in one of a release before 0.2."""
    if not isinstance(own, dict):
        return {}
    found = {key: (float(first), float(seen)) for key, (first, seen) in own["living"].items()}
    if not all(math.isfinite(first) and math.isfinite(seen) for first, seen in found.values()):
        raise ValueError
    return found


def _taken_of(own: Any) -> float:
    """The end of the last slot in an entry; 0.0 in one that does not say it."""
    found = own.get("taken", 0.0) if isinstance(own, dict) else 0.0
    if not math.isfinite(found):
        raise ValueError
    return float(found)


def _rooms_of(own: Any) -> tuple[tuple[float, float], ...]:
    """The rooms of an entry; none in one that does not say them."""
    found = own.get("rooms", ()) if isinstance(own, dict) else ()
    rooms = tuple((float(at), float(room)) for at, room in found[:MOST_ROOMS])
    if not all(math.isfinite(at) and math.isfinite(room) for at, room in rooms):
        raise ValueError
    return rooms


def _rate_of(numbers: str) -> Rate | None:
    """The rate that `str` made this text of; None if it is damaged."""
    found = _NUMBERS.fullmatch(numbers)
    if found is None:
        return None
    count, period, burst = int(found[1]), float(found[2]), int(found[3])
    return Rate(count, period, burst) if count and period and burst else None
