"""The system's clocks."""

import time

from aztask.support import clock
from aztask.support.clock import SYSTEM_CLOCK, Clock


def test_deadlines_and_epoch_seconds_come_from_two_clocks():
    first = SYSTEM_CLOCK.monotonic()
    assert SYSTEM_CLOCK.monotonic() >= first
    assert abs(SYSTEM_CLOCK.wall() - time.time()) < 60.0
    still = Clock(monotonic=lambda: 1.0, wall=lambda: 2.0)
    assert (still.monotonic(), still.wall()) == (1.0, 2.0)


def test_what_has_no_clock_of_its_own_is_on_the_one_that_replaces_the_systems():
    slept = []
    still = Clock(monotonic=lambda: 1.0, wall=lambda: 2.0, sleep=slept.append)
    with clock.replaced(still):
        clock.sleep(3.0)
        assert (clock.monotonic(), clock.wall(), slept) == (1.0, 2.0, [3.0])
        assert clock.current() is still
        with clock.replaced(SYSTEM_CLOCK):
            assert clock.wall() > 2.0
        assert clock.wall() == 2.0
    assert clock.current() is SYSTEM_CLOCK
