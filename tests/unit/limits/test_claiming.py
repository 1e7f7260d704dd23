"""Slots claimed in a real store, by several claimers at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from still import Still

from aztask.canvas.limits import Rate
from aztask.engine import Database
from aztask.errors import BrokerUnavailable
from aztask.limits.claiming import EPOCH_SECONDS, Claims
from aztask.limits.rates import spacing
from aztask.limits.storeclock import KEPT_SECONDS, StoreClock
from aztask.results.controls import StoreTime
from aztask.results.local.store import LocalResults

TEN = Rate(10, 1.0)


class Counting:
    """A store that counts the requests."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.reads = self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, names: Any) -> Any:
        self.reads += 1
        return self._inner.read(names)

    def write(self, changes: Any) -> Any:
        self.writes += 1
        return self._inner.write(changes)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "results.db")


def claimer(path: str, clock: Still) -> tuple[Claims, Counting]:
    store: Any = Counting(LocalResults(Database(path), clock=clock).controls)
    time = StoreClock(store, clock)
    time.refresh()
    return Claims(store, time), store


def test_a_claim_without_competitors_costs_one_request(path: str) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    for _ in range(5):
        assert len(claims.claim("limit-a", TEN, 8, clock.now)) == 8
    assert (store.reads, store.writes) == (1, 5), "40 slots"


def test_claimers_at_once_get_different_slots(path: str) -> None:
    clock = Still()
    claimers = [claimer(path, clock)[0] for _ in range(3)]

    def claim(number: int) -> list[float]:
        return [slot.at for slot in claimers[number].claim("limit-a", TEN, 5, clock.now)]

    taken: list[float] = []
    with ThreadPoolExecutor(3) as threads:
        for _ in range(4):
            for times in threads.map(claim, range(3)):
                taken += times
    gaps = [b - a for a, b in zip(sorted(taken), sorted(taken)[1:], strict=False)]
    assert len(taken) == 60
    assert gaps == pytest.approx([spacing(TEN)] * 59)


def test_slots_of_an_earlier_rate_are_void_as_soon_as_that_is_known(path: str) -> None:
    clock = Still()
    old, _ = claimer(path, clock)
    new, _ = claimer(path, clock)
    (slot, *_) = old.claim("limit-a", TEN, 100, clock.now)
    assert new.valid(slot)
    new.claim("limit-a", Rate(20, 1.0), 1, clock.now)
    assert not new.valid(slot)
    clock.now += EPOCH_SECONDS + 0.1
    assert not old.valid(slot), "it has read the entry again"


def test_an_entry_that_always_changes_is_given_up(path: str) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    store.write = lambda changes: [None]
    with pytest.raises(BrokerUnavailable, match="keep claiming"):
        claims.claim("limit-a", TEN, 1, clock.now)


def test_the_clock_of_a_remote_store_is_read_once_a_minute() -> None:
    """It is an hour ahead of ours, and known to within half a request."""
    clock, read = Still(), []

    class Remote:
        def time(self) -> StoreTime:
            read.append(clock.now)
            return StoreTime(clock.now + 3600.01, clock.now, clock.now + 0.02)

    store: Any = Remote()
    time = StoreClock(store, clock)
    time.refresh()
    time.refresh()
    assert time.now() == pytest.approx(clock.now + 3600.0)
    assert time.error == pytest.approx(0.01)
    assert time.deadline(clock.now + 3601.0) == pytest.approx(clock.now + 1.0)
    clock.now += KEPT_SECONDS + 1.0
    time.refresh()
    assert len(read) == 2
