"""Slots of a rate, without I/O."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.canvas.limits import Rate
from aztask.limits.rates import AHEAD, HORIZON, SLACK, RateState, spacing
from aztask.limits.slots import MOST_SLOTS, Slot, slots_of, slots_text

TEN = Rate(10, 1.0)


def test_slots_follow_each_other() -> None:
    first, state = RateState().claim(TEN, 3, 100.0, 100.0)
    assert first == pytest.approx([100.0, 100.0 + spacing(TEN), 100.0 + 2 * spacing(TEN)])
    second, _ = state.claim(TEN, 1, 100.0, 100.0)
    assert second == pytest.approx([100.0 + 3 * spacing(TEN)])


def test_after_a_quiet_time_a_burst_starts_at_once() -> None:
    times, state = RateState(free_at=50.0).claim(Rate(10, 1.0, burst=3), 5, 100.0, 100.0)
    gap = spacing(TEN)
    assert times == pytest.approx([100.0, 100.0, 100.0, 100.0 + gap, 100.0 + 2 * gap])
    more, _ = state.claim(Rate(10, 1.0, burst=3), 1, 100.0, 100.0)
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
        times, state = state.claim(rate, number, now, now)
        starts += times
    starts = sorted(at + SLACK * 0.999 * late.random() for at in starts)
    for number, at in enumerate(starts):
        inside = [each for each in starts[number:] if each < at + period - 1e-6]
        assert len(inside) <= count + burst - 1


def test_a_changed_rate_voids_slots_but_not_those_in_hand() -> None:
    _, state = RateState().under(TEN, 100.0).claim(TEN, 1000, 100.0, 100.0)
    assert state.under(TEN, 100.0) == state
    changed = state.under(Rate(100, 1.0), 100.0)
    assert changed.epoch == state.epoch + 1
    assert changed.free_at == 100.0 + AHEAD + SLACK, "behind those that are kept in hand"
    idle = RateState(free_at=99.0, numbers="old").under(TEN, 100.0)
    assert idle.free_at == 99.0


def test_nothing_is_handed_out_beyond_the_horizon() -> None:
    state = RateState(free_at=100.0 + HORIZON + 1.0)
    assert state.claim(TEN, 5, 100.0, 100.0) == ([], state)


def test_a_state_is_read_as_it_was_written_and_no_two_writers_write_the_same() -> None:
    state = RateState(123.456, 7, str(TEN))
    assert RateState.from_data(state.to_data()) == state
    assert state.to_data() != state.to_data()


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"{}", b"[1]", b'[9,1,1,"",""]', b'[1,"x",1,"",""]']
)
def test_a_damaged_entry_is_a_new_state(data: bytes) -> None:
    assert RateState.from_data(data) == RateState()


def test_the_slots_of_a_message() -> None:
    slots = [Slot("limit-rate-a", 3, 1234.5), Slot("limit-rate-b", 1, 99.0)]
    assert slots_of(slots_text(slots)) == {slot.entry: slot for slot in slots}
    for text in (None, "", "x", "a@b@c", "a@1@nan", "a@1"):
        assert slots_of(text) == {}
    assert len(slots_of(";".join(f"e{n}@1@1.0" for n in range(1000)))) == MOST_SLOTS
