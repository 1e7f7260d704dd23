"""The service's clock, learned from the times on messages."""

import pytest

from aztask.queues.servicebus.clock import DRIFT, PIN_SECONDS, STEP_SECONDS, BusClock
from aztask.support.clock import Clock


def clock_at(now: float = 1000.0) -> BusClock:
    return BusClock(Clock(wall=lambda: now))


def test_nothing_learned_means_our_own_clock():
    clock = clock_at()
    assert not clock.known
    assert clock.now() == 1000.0


def test_the_latest_time_seen_is_nearest_to_the_truth():
    clock = clock_at()
    for written in (4599.0, 4599.9, 4599.5):  # an hour ahead, and up to a second on the way
        clock.learn(written)
    assert clock.now() == 4599.9


def test_a_clock_that_was_set_back_is_followed():
    clock = clock_at()
    clock.learn(4600.0)
    clock.learn(4600.0 - STEP_SECONDS / 2)
    assert clock.offset == 3600.0
    clock.learn(1000.5)
    assert clock.offset == 0.5


def test_a_pin_gets_wider_and_is_forgotten():
    now = [1000.0]
    clock = BusClock(Clock(monotonic=lambda: now[0], wall=lambda: 1_800_000_000.0))
    clock.pin(5000.0, 999.0, 1000.0)
    assert clock.pinned is not None
    assert (clock.pinned.low, clock.pinned.high) == (4000.0, 4001.0)
    now[0] += 1000.0
    assert clock.pinned.low == pytest.approx(4000.0 - 1000 * DRIFT)
    assert clock.pinned.high == pytest.approx(4001.0 + 1000 * DRIFT)
    now[0] += PIN_SECONDS
    assert clock.pinned is None
    clock.pin(5000.0, 999.0, now[0])
    clock.unpin()
    assert clock.pinned is None
