"""How long the messages of a paused task are put off, and so how soon they come back."""

import random

import pytest

from aztask.worker.pausing import FIRST_DELAY, LONGEST_DELAY, SPREAD, longest_delay

MINUTE = 60.0


def returns(paused, seed):
    """(seconds from the resume until a message comes back, how often it was put off)."""
    chance = random.Random(seed)
    at, times = 0.0, 0
    while at <= paused:
        at += longest_delay(times, at) * chance.uniform(1.0 - SPREAD, 1.0)
        times += 1
    return at - paused, times


@pytest.mark.parametrize("paused", [MINUTE, 5 * MINUTE, 10 * MINUTE, 40 * MINUTE, 600 * MINUTE])
def test_after_a_resume_messages_come_back_within_a_quarter_of_the_pause(paused):
    waits = [returns(paused, seed)[0] for seed in range(200)]
    assert max(waits) <= min(LONGEST_DELAY, paused / 4)


def test_the_documented_figures():
    for paused, average, times in [(1, 5, 10), (10, 75, 22), (60, 280, 31)]:
        found = [returns(paused * MINUTE, seed) for seed in range(500)]
        assert sum(wait for wait, _ in found) / 500 == pytest.approx(average, rel=0.25)
        assert sum(count for _, count in found) / 500 == pytest.approx(times, rel=0.1)


def test_a_message_that_arrives_late_in_a_long_pause_begins_with_short_delays():
    assert longest_delay(0, 3600.0) == FIRST_DELAY
    assert longest_delay(2, 3600.0) == 4 * FIRST_DELAY
    assert longest_delay(1000, 1e9) == LONGEST_DELAY


@pytest.mark.parametrize("age", [-3600.0, 0.0])
def test_a_clock_that_is_behind_only_shortens_delays(age):
    assert longest_delay(10, age) == FIRST_DELAY
