"""Slots claimed in a real store, by several claimers at once."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from still import Still

from aztask.errors import BrokerUnavailable
from aztask.limits.claiming import EPOCH_SECONDS, Claims, Wanted
from aztask.limits.declaration import Rate
from aztask.limits.rates import WEIGHED_AHEAD, spacing
from aztask.limits.storeclock import StoreClock
from aztask.queues.engine import Database
from aztask.stores.records.local.store import LocalResults
from aztask.stores.rows import StoreTime

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
        assert len(claims.claim(Wanted("limit-a", TEN, [1] * 8), clock.now)) == 8
    assert (store.reads, store.writes) == (1, 5), "40 slots"


def test_claimers_at_once_get_different_slots(path: str) -> None:
    clock = Still()
    claimers = [claimer(path, clock)[0] for _ in range(3)]

    def claim(number: int) -> list[float]:
        return [
            slot.at for slot in claimers[number].claim(Wanted("limit-a", TEN, [1] * 5), clock.now)
        ]

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
    (slot, *_) = old.claim(Wanted("limit-a", TEN, [1] * 100), clock.now)
    assert new.valid(slot)
    clock.now += 1.0
    new.claim(Wanted("limit-a", Rate(20, 1.0)), clock.now)
    assert not new.valid(slot)
    clock.now += EPOCH_SECONDS + 0.1
    assert not old.valid(slot), "it has read the entry again"


def test_slots_in_a_mixed_fleet_stay_valid(path: str) -> None:
    """The first worker with 20 started last; both claim by turns, and no slot becomes void."""
    clock = Still()
    old, _ = claimer(path, clock)
    old.claim(Wanted("limit-a", TEN), clock.now)
    clock.now += 1.0
    new, _ = claimer(path, clock)
    slots = []
    for _ in range(5):
        slots += new.claim(Wanted("limit-a", Rate(20, 1.0), [1] * 2), clock.now)
        slots += old.claim(Wanted("limit-a", TEN, [1] * 2), clock.now)
        clock.now += EPOCH_SECONDS + 0.1
    assert {slot.epoch for slot in slots} == {2}
    assert all(new.valid(slot) and old.valid(slot) for slot in slots)
    gaps = [later.at - slot.at for slot, later in itertools.pairwise(slots[:4])]
    assert gaps == pytest.approx([spacing(Rate(20, 1.0))] * 3)


def test_an_entry_that_always_changes_is_given_up(path: str) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    tries = []
    store.write = lambda changes: [tries.append(changes)]
    with pytest.raises(BrokerUnavailable, match="keep changing the slots"):
        claims.claim(Wanted("limit-a", TEN), clock.now)
    assert len(tries) == 12


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
    clock.now += 59.9
    time.refresh()
    assert len(read) == 1
    clock.now += 0.1
    time.refresh()
    assert len(read) == 2


def test_the_clock_of_a_store_on_this_machine_is_always_read() -> None:
    """It is exact and costs nothing: a clock that is set is noticed at once."""
    clock, offset = Still(), [0.0]

    class Near:
        def time(self) -> StoreTime:
            at = clock.now + offset[0]
            return StoreTime(at, clock.now, clock.now)

    store: Any = Near()
    time = StoreClock(store, clock)
    time.refresh()
    offset[0] = 30.0
    time.refresh()
    assert (time.now(), time.error) == (clock.now + 30.0, 0.0)


def test_of_many_keys_the_oldest_are_forgotten(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aztask.limits.claiming.REMEMBERED", 2)
    clock = Still()
    claims, _ = claimer(path, clock)
    for name in ("limit-a", "limit-b", "limit-a", "limit-c"):
        claims.claim(Wanted(name, TEN), clock.now)
    assert claims.free_at("limit-b") == 0.0, "it was used before the others"
    assert min(claims.free_at("limit-a"), claims.free_at("limit-c")) > clock.now


def test_an_epoch_is_known_for_five_seconds(path: str) -> None:
    clock = Still()
    old, store = claimer(path, clock)
    (slot,) = old.claim(Wanted("limit-a", TEN), clock.now)
    clock.now += 1.0
    new, _ = claimer(path, clock)
    new.claim(Wanted("limit-a", Rate(20, 1.0)), clock.now)
    clock.now += 4.0
    store.reads = 0
    assert old.valid(slot), "its process has not looked again"
    assert store.reads == 0
    clock.now += 0.125
    assert not old.valid(slot)
    assert store.reads == 1


def test_a_process_is_as_old_as_its_start(path: str) -> None:
    """However late its first claim comes: old code must not win for a limit that is seldom used."""
    clock = Still()
    old, _ = claimer(path, clock)
    clock.now += 1.0
    new, _ = claimer(path, clock)
    new.claim(Wanted("limit-b", Rate(20, 1.0)), clock.now)
    clock.now += 1.0
    old.claim(Wanted("limit-b", TEN), clock.now)
    first, second = new.claim(Wanted("limit-b", Rate(20, 1.0), [1] * 2), clock.now)
    assert (first.epoch, second.epoch) == (1, 1), "the numbers have not changed"
    assert second.at - first.at == pytest.approx(spacing(Rate(20, 1.0)))


def test_no_slot_is_before_now_and_none_before_it_is_of_use(path: str) -> None:
    clock = Still()
    claims, _ = claimer(path, clock)
    (late,) = claims.claim(Wanted("limit-a", TEN), clock.now - 50.0)
    assert late.at == clock.now
    (early,) = claims.claim(Wanted("limit-a", TEN), clock.now + 50.0)
    assert early.at == clock.now + 50.0


def test_when_all_slots_of_a_day_are_taken_nothing_is_written(path: str) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    daily = Rate(1, 86400.0)
    assert len(claims.claim(Wanted("limit-a", daily, [1] * 5), clock.now)) == 1
    assert claims.free_at("limit-a") > clock.now + 86400.0
    store.writes = 0
    assert claims.claim(Wanted("limit-a", daily, [1] * 5), clock.now) == []
    assert store.writes == 0
    assert claims.free_at("limit-unknown") == 0.0


# -- weights, several limits, corrections ----------------------------------------------------

TOKENS = Rate(60, 60.0, burst=60)
GAP = spacing(TOKENS)


def opens(claims: Claims, clock: Still, entry: str = "limit-t", weight: int = 1) -> float:
    (known,) = claims.read([entry])
    return known.state.opens(TOKENS, weight, clock.now)


def test_slots_of_several_limits_are_at_the_same_time(path: str) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    claims.claim(Wanted("limit-t", TOKENS, [60]), clock.now)
    wanted = [Wanted("limit-t", TOKENS, (30,)), Wanted("limit-a", TEN)]
    store.reads = store.writes = 0
    slots = claims.claim_together(wanted, clock.now)
    assert [(slot.entry, slot.weight) for slot in slots] == [("limit-t", 30), ("limit-a", 1)]
    assert slots[0].at == slots[1].at == pytest.approx(clock.now + 30 * GAP)
    assert (store.reads, store.writes) == (1, 1)


def test_of_several_limits_all_are_taken_or_none(path: str) -> None:
    """Another worker changes one of them: what was taken of the other is given back."""
    clock = Still()
    mine, _ = claimer(path, clock)
    other, _ = claimer(path, clock)
    wanted = [Wanted("limit-t", TOKENS, (20,)), Wanted("limit-u", TOKENS, (20,))]
    mine.claim_together(wanted, clock.now)
    other.claim(Wanted("limit-u", TOKENS, [10]), clock.now)  # mine does not know that
    slots = mine.claim_together(wanted, clock.now)
    assert len({slot.at for slot in slots}) == 1
    assert opens(other, clock, "limit-t", 20) == clock.now, "40 of 60 are taken"
    assert opens(other, clock, "limit-u", 10) == clock.now, "50 of 60 are taken"
    assert opens(other, clock, "limit-t", 21) > clock.now
    assert opens(other, clock, "limit-u", 11) > clock.now


def test_beyond_the_horizon_nothing_is_taken_of_any(path: str) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    daily = Rate(1, 2 * 86400.0)
    claims.claim(Wanted("limit-d", daily), clock.now)
    store.writes = 0
    wanted = [Wanted("limit-t", TOKENS, (60,)), Wanted("limit-d", daily)]
    assert claims.claim_together(wanted, clock.now) == []
    assert store.writes == 0


def test_a_limit_with_a_cost_does_not_wait_for_another_one(path: str) -> None:
    """All its slots until then would stay unused: nothing is taken of any."""
    clock = Still()
    claims, store = claimer(path, clock)
    hourly = Rate(1, 3600.0)
    claims.claim(Wanted("limit-h", hourly), clock.now)
    store.writes = 0
    tokens, hour = Wanted("limit-t", TOKENS, (20,), WEIGHED_AHEAD), Wanted("limit-h", hourly)
    for wanted in ([tokens, hour], [hour, tokens]):
        assert claims.claim_together(wanted, clock.now) == []
    assert store.writes == 0
    assert opens(claims, clock, weight=60) == clock.now
    clock.now += 3600.0
    assert len(claims.claim_together([tokens, hour], clock.now)) == 2


def test_what_was_claimed_beside_a_refused_one_is_taken_back(path: str) -> None:
    """Not its weight alone: the claim of a slot in half a day moves the next free slot there."""
    clock = Still()
    mine, _ = claimer(path, clock)
    other, _ = claimer(path, clock)
    wanted = [Wanted("limit-a", TEN), Wanted("limit-d", Rate(1, 43200.0))]
    assert len(mine.claim_together(wanted, clock.now)) == 2
    assert len(other.claim(wanted[1], clock.now)) == 1  # mine does not know that
    assert mine.claim_together(wanted, clock.now) == []
    (slot,) = other.claim(wanted[0], clock.now)
    assert slot.at == pytest.approx(clock.now + spacing(TEN))


def test_a_correction_is_written_with_the_next_claim(path: str) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    (slot,) = claims.claim(Wanted("limit-t", TOKENS, [60]), clock.now)
    claims.correct(slot, 50)
    store.reads = store.writes = 0
    (second,) = claims.claim(Wanted("limit-t", TOKENS, [50]), clock.now)
    assert second.at == clock.now
    assert (store.reads, store.writes) == (0, 1)
    claims.settle()
    assert (store.reads, store.writes) == (0, 1), "it is written once"


def test_a_correction_that_no_claim_takes_is_written_by_itself(path: str) -> None:
    clock = Still()
    claims, _ = claimer(path, clock)
    other, _ = claimer(path, clock)
    (slot,) = claims.claim(Wanted("limit-t", TOKENS, [60]), clock.now)
    claims.correct(slot, -30)
    claims.settle()
    assert opens(other, clock) == pytest.approx(clock.now + 31 * GAP)


def test_a_correction_of_an_earlier_epoch_is_forgotten(path: str) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    (slot,) = claims.claim(Wanted("limit-t", TOKENS, [60]), clock.now)
    claims.correct(replace(slot, epoch=slot.epoch + 1), 60)
    before = store.writes
    claims.settle()
    claims.settle()
    assert store.writes == before
    assert claims._corrections == {}


def fail(store: Counting, *, made: bool) -> None:
    """Let each write raise, after it was made or without. ``del store.write`` ends that."""
    write = store._inner.write

    def lost(changes: Any) -> Any:
        if made:
            write(changes)
        raise BrokerUnavailable("the answer is lost")

    store.write = lost  # type: ignore[method-assign]


@pytest.mark.parametrize("made", [True, False])
def test_after_an_error_a_correction_is_written_once(path: str, made: bool) -> None:
    """A credit that is given twice would exceed the rate, a lost one would waste it."""
    clock = Still()
    claims, store = claimer(path, clock)
    (slot,) = claims.claim(Wanted("limit-t", TOKENS, [60]), clock.now)
    claims.correct(slot, 20)
    claims.correct(slot, -5)
    fail(store, made=made)
    for _ in range(1 if made else 3):  # once it was made, nothing is left to write
        with pytest.raises(BrokerUnavailable):
            claims.settle()
    del store.write
    for _ in range(2):
        claims.settle()
    assert opens(claims, clock, weight=60) == pytest.approx(clock.now + (60 - 20 + 5) * GAP)
    assert claims._corrections == {}
    assert claims._doubts == {}


def test_if_it_is_not_known_a_credit_is_dropped_and_a_charge_is_written(path: str) -> None:
    """Another worker has changed the entry since."""
    clock = Still()
    claims, store = claimer(path, clock)
    (slot,) = claims.claim(Wanted("limit-t", TOKENS, [60]), clock.now)
    claims.correct(slot, 20)
    claims.correct(slot, -5)
    fail(store, made=True)
    with pytest.raises(BrokerUnavailable):
        claims.settle()
    del store.write
    claimer(path, clock)[0].claim(Wanted("limit-t", TOKENS, [1]), clock.now)
    claims.settle()
    used = 60 - (20 - 5) + 1 + 5
    assert opens(claims, clock, weight=60) == pytest.approx(clock.now + used * GAP)


@pytest.mark.parametrize("made", [True, False])
def test_a_claim_that_failed_takes_no_slots(path: str, made: bool) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    claims.claim(Wanted("limit-t", TOKENS, [1]), clock.now)
    fail(store, made=made)
    with pytest.raises(BrokerUnavailable):
        claims.claim(Wanted("limit-t", TOKENS, [50]), clock.now)
    del store.write
    (slot,) = claims.claim(Wanted("limit-t", TOKENS, [59]), clock.now)
    assert slot.at == clock.now


def test_an_error_of_one_limit_delays_no_correction_of_another(path: str) -> None:
    clock = Still()
    claims, store = claimer(path, clock)
    for name in ("limit-t", "limit-u"):
        (slot,) = claims.claim(Wanted(name, TOKENS, [60]), clock.now)
        claims.correct(slot, 60)
    write = store._inner.write

    def refuse(changes: Any) -> Any:
        if any(each.name == "limit-t" for each in changes):
            raise BrokerUnavailable("refused")
        return write(changes)

    store.write = refuse  # type: ignore[method-assign]
    with pytest.raises(BrokerUnavailable):
        claims.settle()
    assert opens(claims, clock, "limit-u", 60) == clock.now
    del store.write
    claims.settle()
    assert opens(claims, clock, "limit-t", 60) == clock.now


def test_corrections_of_other_threads_are_all_kept(path: str) -> None:
    clock = Still()
    claims, _ = claimer(path, clock)
    (slot,) = claims.claim(Wanted("limit-t", TOKENS, [60]), clock.now)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(60):
            pool.submit(claims.correct, slot, 1)
            claims.settle()
    claims.settle()
    assert opens(claims, clock, weight=60) == clock.now
