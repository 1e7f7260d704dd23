"""The rhythm of looking at a queue, on a clock of the test."""

import random

import pytest

from aztask.queues.storagequeue.receiver import FLOOR, GATHER, Polling
from aztask.support.clock import Clock


class Stepper:
    """A polling whose waiting moves the clock."""

    def __init__(self, ceiling=1.0, seed=1):
        self.now = 0.0
        self.polling = Polling(
            ceiling, clock=Clock(monotonic=lambda: self.now), dice=random.Random(seed).random
        )

    def look(self, found=0, limit=32):
        """One look; how long the pause before it was."""
        pause = max(0.0, self.polling._next_poll - self.now)
        self.now += pause
        assert self.polling.wait(0.0)
        self.polling.polled(found, limit)
        return pause

    def looks_within(self, seconds):
        until, count = self.now + seconds, 0
        while self.now < until:
            self.look()
            count += 1
        return count


def test_after_a_full_batch_the_next_poll_is_at_once():
    stepper = Stepper()
    stepper.look(found=32)
    assert stepper.look(found=32) == 0.0


def test_after_a_smaller_batch_it_waits_for_more():
    stepper = Stepper()
    stepper.look(found=5)
    assert FLOOR < stepper.look() <= GATHER
    assert 0.0 < stepper.look() <= FLOOR


def test_the_pause_grows_to_the_ceiling_and_no_further():
    stepper = Stepper(ceiling=1.0)
    stepper.look(found=1)
    pauses = [stepper.look() for _ in range(200)]
    assert max(pauses) <= 1.0
    assert min(pauses[-50:]) >= 0.9


def test_within_a_second_of_the_last_message_the_pause_is_short():
    stepper = Stepper()
    stepper.look(found=1)
    while stepper.now < 1.0:
        assert stepper.look() <= 0.15


def test_a_message_brings_it_back_to_fast():
    stepper = Stepper()
    for _ in range(200):
        stepper.look()
    stepper.look(found=1)
    assert stepper.look() <= GATHER
    assert stepper.look() <= FLOOR


def test_a_ring_ends_the_pause():
    stepper = Stepper(ceiling=60.0)
    for _ in range(300):
        stepper.look()
    assert not stepper.polling.wait(0.0)
    stepper.polling.notify()
    assert stepper.polling.wait(0.0)
    stepper.polling.polled(0, 32)
    assert stepper.look() <= FLOOR


@pytest.mark.parametrize(("ceiling", "most"), [(1.0, 4000), (15.0, 300)])
@pytest.mark.parametrize("seed", range(5))
def test_an_idle_hour(ceiling, most, seed):
    stepper = Stepper(ceiling, seed)
    stepper.look(found=1)
    assert stepper.looks_within(3600.0) <= most


def test_closing_ends_every_wait():
    polling = Polling(60.0)
    for _ in range(3):
        polling.polled(0, 1)
    polling.close()
    assert not polling.wait(60.0)
    assert polling.closed
