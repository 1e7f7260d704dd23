"""Slots of a rate, without I/O."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.limits.declaration import Rate
from aztask.limits.rates import (
    AHEAD,
    HORIZON,
    LIVES_SECONDS,
    MOST_LIVING,
    MOST_ROOMS,
    SLACK,
    WEIGHED_AHEAD,
    RateState,
    spacing,
)
from aztask.limits.slots import MOST_SLOTS, Slot, slots_of, slots_text

TEN = Rate(10, 1.0)


def test_slots_follow_each_other() -> None:
    first, state = RateState().claim(TEN, [1] * 3, 100.0, 100.0)
    assert first == pytest.approx([100.0, 100.0 + spacing(TEN), 100.0 + 2 * spacing(TEN)])
    second, _ = state.claim(TEN, [1], 100.0, 100.0)
    assert second == pytest.approx([100.0 + 3 * spacing(TEN)])


def test_slots_are_so_far_apart_that_each_may_be_used_late() -> None:
    assert spacing(Rate(1, 1.0)) == pytest.approx(1.045)
    assert spacing(TEN) == pytest.approx(0.1045)
    assert spacing(Rate(600, 60.0)) == pytest.approx(60.045 / 600)


def test_after_a_quiet_time_a_burst_starts_at_once() -> None:
    times, state = RateState(free_at=50.0).claim(Rate(10, 1.0, burst=3), [1] * 5, 100.0, 100.0)
    gap = spacing(TEN)
    assert times == pytest.approx([100.0, 100.0, 100.0, 100.0 + gap, 100.0 + 2 * gap])
    more, _ = state.claim(Rate(10, 1.0, burst=3), [1], 100.0, 100.0)
    assert more == pytest.approx([100.0 + 3 * gap])


@given(
    count=st.integers(1, 50),
    period=st.sampled_from([1.0, 10.0, 60.0]),
    burst=st.integers(1, 5),
    claims=st.lists(st.tuples(st.integers(1, 20), st.floats(0.0, 3.0)), max_size=10),
    seed=st.integers(0, 1000),
)
def test_no_period_has_more_starts_than_the_rate_allows(
    count: int,
    period: float,
    burst: int,
    claims: list[tuple[int, float]],
    seed: int,
) -> None:
    """For any order of claims, and any delay of a start that its slack allows."""
    rate, state, now, starts = Rate(count, period, burst), RateState(), 1000.0, []
    late = random.Random(seed)
    for number, pause in claims:
        now += pause
        times, state = state.claim(rate, [1] * number, now, now)
        starts += times
    starts = sorted(at + SLACK * 0.999 * late.random() for at in starts)
    for number, at in enumerate(starts):
        inside = [each for each in starts[number:] if each < at + period - 1e-6]
        assert len(inside) <= count + burst - 1


def test_a_changed_rate_voids_slots_but_not_those_in_hand() -> None:
    made, _ = RateState().under(TEN, 100.0, 50.0)
    _, state = made.claim(TEN, [1] * 1000, 100.0, 100.0)
    assert state.under(TEN, 100.0, 90.0) == (state, TEN)
    changed, used = state.under(Rate(100, 1.0), 100.0, 60.0)
    assert used == Rate(100, 1.0)
    assert changed.epoch == state.epoch + 1
    behind = 100.0 + AHEAD + SLACK + spacing(Rate(100, 1.0))
    assert changed.free_at == behind, "behind those that are kept in hand"
    idle, _ = RateState(free_at=99.0, numbers="old").under(TEN, 100.0, 50.0)
    assert idle.free_at == 99.0


def test_a_mixed_fleet_changes_the_epoch_once_and_uses_the_newest_numbers() -> None:
    old, new = Rate(10, 1.0), Rate(600, 86400.0, burst=3)
    state, _ = RateState().under(old, 100.0, 50.0)
    epochs = []
    for second in range(100, 1100, 50):
        for rate, started in ((new, 90.0), (old, 50.0), (old, 1000.0)):  # one of them restarts
            state, used = state.under(rate, float(second), started)
            state = RateState.from_data(state.to_data())
            assert used == new
            epochs.append(state.epoch)
    assert set(epochs) == {state.epoch}
    assert state.numbers == str(new)
    alone, used = state.under(old, 1050.0 + LIVES_SECONDS + 1.0, 50.0)
    assert used == old, "no worker claims with the other numbers"
    assert alone.epoch == state.epoch + 1


def test_numbers_live_until_ten_minutes_after_their_last_claim() -> None:
    old, new = Rate(10, 1.0), Rate(20, 1.0)
    state, _ = RateState().under(new, 100.0, 90.0)
    for after, expected in ((LIVES_SECONDS, new), (LIVES_SECONDS + 0.5, old)):
        _, used = state.under(old, 100.0 + after, 50.0)
        assert used == expected


def test_a_worker_of_which_no_start_is_known_is_the_oldest() -> None:
    old, new = Rate(10, 1.0), Rate(20, 1.0)
    state, _ = RateState().under(new, 100.0, 0.5)
    assert state.under(old, 100.0)[1] == new


def test_numbers_that_cannot_be_read_do_not_count() -> None:
    damaged = RateState(numbers="x", living={"x": (90.0, 100.0), "0/1s, burst 1": (95.0, 100.0)})
    state, used = damaged.under(TEN, 100.0, 50.0)
    assert used == TEN
    assert state.numbers == str(TEN)


@pytest.mark.parametrize(
    "text", ["x", "", "0/1s, burst 1", "1/0s, burst 1", "1/1s, burst 0", "1/1s", "1/1s, burst 1;"]
)
def test_damaged_numbers_never_count_however_late_their_worker_started(text: str) -> None:
    state, used = RateState(living={text: (95.0, 100.0)}).under(TEN, 100.0, 50.0)
    assert (used, state.numbers) == (TEN, str(TEN))


@pytest.mark.parametrize("rate", [Rate(7, 90.0, 3), Rate(1, 0.5), Rate(2, 604800.0, 9)], ids=str)
def test_the_numbers_of_another_worker_are_read_from_the_entry(rate: Rate) -> None:
    theirs, _ = RateState().under(rate, 100.0, 90.0)
    state, used = theirs.under(TEN, 100.0, 50.0)
    assert used == rate
    assert state.numbers == str(rate)


def test_an_entry_says_who_lives_to_a_tenth_of_a_second() -> None:
    state, _ = RateState().under(TEN, 100.26, 50.04)
    *_, own = json.loads(state.to_data())
    assert own["living"] == {str(TEN): [50.0, 100.3]}
    assert "write" in own


@pytest.mark.parametrize("time", ["NaN", "Infinity"])
@pytest.mark.parametrize("place", [0, 1])
def test_an_entry_with_a_time_that_is_none_is_damaged(place: int, time: str) -> None:
    times = ["1.0", "2.0"]
    times[place] = time
    living = f'{{"a":[{",".join(times)}],"b":[1.0,2.0]}}'
    data = f'[1,9.0,3,"{TEN}",{{"living":{living}}}]'.encode()
    assert RateState.from_data(data) == RateState()
    for free_at in ("NaN", "Infinity"):
        assert RateState.from_data(f'[1,{free_at},3,"",""]'.encode()) == RateState()
    for numbers in ("5", "null"):
        assert RateState.from_data(f'[1,9.0,3,{numbers},""]'.encode()) == RateState()


def test_of_workers_that_started_at_once_the_same_numbers_count_for_all() -> None:
    other = Rate(20, 1.0)
    used = set()
    for first, second in ((TEN, other), (other, TEN)):
        state, _ = RateState().under(first, 100.0, 50.0)
        used.add(state.under(second, 100.0, 50.0)[1])
    assert len(used) == 1


def test_slots_are_handed_out_for_a_day() -> None:
    daily = Rate(1, 86400.0 - 0.045)
    assert spacing(daily) == 86400.0
    times, state = RateState().claim(daily, [1] * 5, 100.0, 100.0)
    assert times == [100.0, 86500.0]
    assert state.claim(daily, [1], 100.0, 100.0) == ([], state)


def test_new_numbers_begin_behind_the_slots_of_the_next_second() -> None:
    made, _ = RateState().under(TEN, 100.0, 50.0)
    _, state = made.claim(TEN, [1] * 1000, 100.0, 100.0)
    changed, _ = state.under(Rate(20, 1.0), 100.0, 60.0)
    assert changed.free_at == pytest.approx(101.045 + 1.045 / 20)
    assert changed.living.keys() == {str(TEN), str(Rate(20, 1.0))}


@given(
    rates=st.lists(
        st.sampled_from([Rate(1, 100.0), Rate(1, 99.0), Rate(60, 3600.0), Rate(2, 1.0), TEN]),
        min_size=2,
        max_size=3,
        unique=True,
    ),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.floats(0.0, 120.0))),
)
def test_no_change_lets_two_starts_come_sooner_than_all_numbers_allow(
    rates: list[Rate], steps: list[tuple[int, int, float]]
) -> None:
    """However often operators change them: each change would be a start that no rate allows."""
    state, now, slots = RateState(), 1000.0, list[float]()
    for number, count, pause in steps:
        now, epoch = now + pause, state.epoch
        state, used = state.under(rates[number % len(rates)], now, changed_at=now)
        if state.epoch != epoch:  # only those that are kept in hand may still be used
            slots = [at for at in slots if at <= now + AHEAD]
        times, state = state.claim(used, [1] * count, now, now)
        slots += times
    slots.sort()
    least = min(map(spacing, rates))
    assert all(b - a > least - 1e-6 for a, b in pairwise(slots))


def test_few_numbers_are_remembered() -> None:
    state = RateState()
    for number in range(1, 200):
        state, used = state.under(Rate(number, 1.0), 100.0, float(number))
        assert used == Rate(number, 1.0)
    assert len(state.living) <= MOST_LIVING + 1


def test_a_release_before_owners_reads_the_entry() -> None:
    state, _ = RateState().under(TEN, 100.0, 50.0)
    version, free_at, epoch, numbers, _ = json.loads(state.to_data())
    assert (version, free_at, epoch, numbers) == (1, 0.0, 1, str(TEN))
    theirs = json.dumps([version, 7.0, epoch, numbers, "a text"]).encode()
    assert RateState.from_data(theirs) == RateState(7.0, epoch, numbers)


def test_nothing_is_handed_out_beyond_the_horizon() -> None:
    state = RateState(free_at=100.0 + HORIZON + 1.0)
    assert state.claim(TEN, [1] * 5, 100.0, 100.0) == ([], state)


def test_a_state_is_read_as_it_was_written_and_no_two_writers_write_the_same() -> None:
    state = RateState(123.456, 7, str(TEN))
    assert RateState.from_data(state.to_data()) == state
    assert state.to_data() != state.to_data()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{}",
        b"[1]",
        b'[9,1,1,"",""]',
        b'[1,"x",1,"",""]',
        b'[1,1,1,"",{}]',
        b'[1,1,1,"",{"living":{"a":1}}]',
        b'[1,1,1,"",{"living":[]}]',
    ],
)
def test_a_damaged_entry_is_a_new_state(data: bytes) -> None:
    assert RateState.from_data(data) == RateState()


def test_the_slots_of_a_message() -> None:
    slots = [Slot("limit-rate-a", 3, 1234.5), Slot("limit-rate-b", 1, 99.0, weight=1200)]
    assert slots_of(slots_text(slots)) == {slot.entry: slot for slot in slots}
    for text in (
        None,
        "",
        "x",
        "a@1@2@0",
        "a@1@2@x",
        "a@1@2@3@4",
        "a@b@c",
        "a@1@nan",
        "a@1@inf",
        "a@1",
        "a@1.0@1@2",
    ):
        assert slots_of(text) == {}
    assert len(slots_of(";".join(f"e{n}@1@1.0" for n in range(1000)))) == MOST_SLOTS


def test_a_damaged_slot_does_not_spoil_the_one_behind_it() -> None:
    good = Slot("limit-rate-b", 1, 99.0)
    for damaged in ("a@1", "a@x@1.0", "a@1@nan"):
        assert slots_of(f"{damaged};{slots_text([good])}") == {good.entry: good}
    assert slots_text([good]) == "limit-rate-b@1@99.000000"


# -- weights ---------------------------------------------------------------------------------

TOKENS = Rate(60, 60.0, burst=60)


def tokens(free_at: float = 0.0) -> RateState:
    return RateState(free_at, numbers=str(TOKENS))


def test_a_weight_waits_until_all_of_it_is_free() -> None:
    gap = spacing(TOKENS)
    (first, second), state = tokens().claim(TOKENS, [60, 30], 1000.0, 1000.0)
    assert first == 1000.0, "a whole period's count, after a quiet time"
    assert second == pytest.approx(1000.0 + 30 * gap)
    (third,), _ = state.claim(TOKENS, [1], 1000.0, 1000.0)
    assert third == pytest.approx(1000.0 + 31 * gap), "a small one does not overtake"


def test_a_weight_of_one_is_a_slot() -> None:
    rate = Rate(10, 1.0, burst=3)
    for earliest in (50.0, 100.0, 101.0):
        state = RateState(100.0)
        (at,), _ = state.claim(rate, [1], 100.0, earliest)
        assert at == state.opens(rate, 1, earliest) == max(100.0, earliest)


def test_a_weight_above_the_burst_of_other_numbers_waits_for_a_full_burst() -> None:
    small = Rate(60, 60.0, burst=10)
    (at, behind), _ = RateState().claim(small, [30, 1], 1000.0, 1000.0)
    assert at == 1000.0
    assert behind == pytest.approx(1000.0 + 21 * spacing(small))


def test_a_credit_brings_the_next_slot_and_a_charge_delays_it() -> None:
    gap = spacing(TOKENS)
    _, state = tokens().claim(TOKENS, [60, 60], 1000.0, 1000.0)
    credited = state.corrected(20, 1000.0)
    assert credited.opens(TOKENS, 10, 1000.0) == pytest.approx(1000.0 + 50 * gap)
    charged = credited.corrected(-40, 1000.0)
    assert charged.opens(TOKENS, 10, 1000.0) == pytest.approx(1000.0 + 90 * gap)
    assert RateState.from_data(credited.to_data()) == credited
    assert RateState.from_data(charged.to_data()) == charged


def test_credits_never_add_up_to_more_than_a_burst() -> None:
    _, state = tokens().claim(TOKENS, [60] * 4, 1000.0, 1000.0)
    end = state.free_at
    for _ in range(10):
        state = state.corrected(60, 1000.0)
    assert state.free_at == pytest.approx(end - 60 * spacing(TOKENS))
    assert RateState(numbers="x").corrected(5, 1.0) == RateState(numbers="x"), "damaged"


def test_no_credit_is_worth_anything_once_all_of_a_burst_was_free() -> None:
    """A missed slot with a full bucket behind it: its credit would be one more than a burst."""
    rate = Rate(12, 60.0, 6)
    _, state = RateState(numbers=str(rate)).claim(rate, [1], 1000.0, 1000.0, weighed=True)
    (at, *_), full = state.claim(rate, [1] * 2, 1007.5, 1007.5, weighed=True)
    assert full.corrected(1, 1007.6, 1000.0).free_at == full.free_at
    assert full.corrected(1, 1007.6, at).free_at == full.free_at - spacing(rate), "of those behind"
    (at, *_), spent = state.claim(rate, [1] * 2, 1002.0, 1002.0, weighed=True)
    credited = spent.corrected(1, 1002.1, 1000.0)
    assert spent.free_at - credited.free_at == pytest.approx(spacing(rate) - 2.0), "2 s were idle"
    assert RateState.from_data(credited.to_data()).rooms == ((1000.0, 0.0), (1002.0, 0.0))


def test_what_a_claim_found_free_counts_behind_a_later_one_that_wants_earlier_slots() -> None:
    """Clocks differ, and another limit may ask for later slots."""
    rate = Rate(12, 60.0, 6)
    _, state = RateState(numbers=str(rate)).claim(rate, [1], 1000.0, 1000.0, weighed=True)
    _, full = state.claim(rate, [1], 1007.0, 1007.5, weighed=True)
    assert [room for _, room in full.rooms] == [0.0]
    _, then = full.claim(rate, [1], 1007.1, 1007.1, weighed=True)
    assert then.rooms == ((1007.5, 0.0), (1007.5, pytest.approx(5.40375)))
    assert then.corrected(1, 1007.6, 1000.0).free_at == then.free_at
    assert then.corrected(1, 1007.6, 1007.2).free_at == then.free_at, "it was free then"


def test_the_rooms_of_claims_are_few() -> None:
    state = tokens(1_000.0)
    for number in range(40):
        now = 1000.0 + number * 0.1
        _, state = state.claim(TOKENS, [2], now, now, weighed=True)
    assert len(state.rooms) == MOST_ROOMS
    assert state.rooms == tuple(sorted(state.rooms)), "times and rooms rise"
    assert len({room for _, room in state.rooms}) == MOST_ROOMS


def test_weights_are_not_handed_out_far_ahead() -> None:
    _, state = tokens().claim(TOKENS, [60], 1000.0, 1000.0)
    (far,), state = state.claim(TOKENS, [30, 30], 1000.0, 1000.0, ahead=WEIGHED_AHEAD)
    assert far == pytest.approx(1000.0 + 30 * spacing(TOKENS)), "all of it is reserved"
    assert state.claim(TOKENS, [1], 1000.0, 1000.0, ahead=WEIGHED_AHEAD) == ([], state)
    later = 1000.0 + 29.5 * spacing(TOKENS)
    assert state.claim(TOKENS, [1], later, later, ahead=WEIGHED_AHEAD)[0] != []


def test_no_charge_delays_for_more_than_a_day() -> None:
    _, state = tokens().claim(TOKENS, [60], 1000.0, 1000.0)
    assert state.corrected(-(10**9), 1000.0).free_at == 1000.0 + HORIZON


def test_what_calls_were_charged_is_owed_in_the_new_numbers_too() -> None:
    state, _ = RateState().under(TOKENS, 1000.0)
    _, state = state.claim(TOKENS, [60], 1000.0, 1000.0)
    owing = state.corrected(-600, 1000.0)
    for rate, seconds in ((Rate(120, 60.0, 60), 300.0), (Rate(30, 60.0, 60), 1200.0)):
        changed, _ = owing.under(rate, 1000.0, changed_at=1000.0, weighed=True)
        assert changed.free_at - 1000.0 == pytest.approx(seconds, rel=0.01)
        back, _ = changed.under(TOKENS, 1000.0, changed_at=1001.0, weighed=True)
        assert back.free_at == pytest.approx(owing.free_at), "and once only"
    slow, _ = owing.under(Rate(1, 86400.0, 60), 1000.0, changed_at=1000.0, weighed=True)
    assert slow.free_at == 1000.0 + HORIZON


def test_credits_of_new_numbers_end_where_their_slots_began() -> None:
    """The end of the last slot is known behind a change, so that no credit goes back too far."""
    _, state = tokens().claim(TOKENS, [60] * 2, 1000.0, 1000.0)
    state, end = state.corrected(60, 1000.0), state.free_at
    changed, used = state.under(Rate(60, 60.0, 30), 1000.0, changed_at=1000.0, weighed=True)
    credited = changed.corrected(60, 1000.0)
    assert credited.free_at == pytest.approx(end - 30 * spacing(used))


@given(
    burst=st.integers(10, 40),
    calls=st.lists(
        st.tuples(st.integers(1, 10), st.integers(0, 10), st.floats(0.0, 20.0), st.floats(0, 30)),
        max_size=30,
    ),
)
def test_no_period_uses_more_than_the_rate_allows_whatever_is_credited(
    burst: int, calls: list[tuple[int, int, float, float]]
) -> None:
    """Each call claims, starts in its slot, and is credited some time after its start."""
    rate, now = Rate(20, 10.0, burst), 1000.0
    state = RateState(numbers=str(rate))
    used: list[tuple[float, int]] = []
    due: list[tuple[float, int, float]] = []
    for weight, unused, pause, length in calls:
        now += pause
        for at, amount, slot_at in sorted(due):
            if at <= now:
                state = state.corrected(amount, at, slot_at)
                due.remove((at, amount, slot_at))
        (at,), state = state.claim(rate, [weight], now, now, weighed=True)
        used.append((at, max(0, weight - unused)))
        due.append((at + length, min(unused, weight), at))
    for begin, _ in used:
        inside = sum(amount for at, amount in used if begin <= at < begin + 10.0)
        assert inside <= 20 + burst
