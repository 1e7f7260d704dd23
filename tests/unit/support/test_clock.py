"""The system's clocks."""

import time

from aztask.support.clock import SYSTEM_CLOCK, Clock


def test_deadlines_and_epoch_seconds_come_from_two_clocks():
    first = SYSTEM_CLOCK.monotonic()
    assert SYSTEM_CLOCK.monotonic() >= first
    assert abs(SYSTEM_CLOCK.wall() - time.time()) < 60.0
    still = Clock(monotonic=lambda: 1.0, wall=lambda: 2.0)
    assert (still.monotonic(), still.wall()) == (1.0, 2.0)
