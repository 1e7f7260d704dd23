"""A wrong wall clock of a machine is corrected by the result store's."""

from __future__ import annotations

from typing import Any

import pytest

from aztask.limits.storeclock import AGREEING_SECONDS, StoreClock
from aztask.stores.rows import StoreTime
from aztask.support.clock import Clock


class Machine:
    """A machine with two clocks, beside a store with one of its own."""

    def __init__(self, ahead: float) -> None:
        self.passed, self.ahead = 100.0, ahead
        clock = Clock(monotonic=lambda: self.passed, wall=lambda: 1e9 + self.passed + self.ahead)
        store: Any = self
        self.known = StoreClock(store, clock)
        self.clock = self.known.corrected()

    def time(self) -> StoreTime:
        return StoreTime(1e9 + self.passed, self.passed - 0.5, self.passed + 0.5)

    def off(self) -> float:
        return self.clock.wall() - 1e9 - self.passed


@pytest.mark.parametrize("ahead", [-86400.0, -3.0, 3.0, 4000.0, 1e9])
def test_a_wall_clock_that_is_wrong_is_corrected(ahead: float) -> None:
    machine = Machine(ahead)
    assert (machine.known.known, machine.off()) == (False, ahead)
    machine.known.refresh()
    assert (machine.known.known, machine.off()) == (True, 0.0)
    machine.passed += 3600.0
    assert machine.off() == 0.0
    assert machine.clock.monotonic() == machine.passed


@pytest.mark.parametrize("ahead", [-AGREEING_SECONDS, 0.0, 0.25, AGREEING_SECONDS])
def test_a_wall_clock_that_agrees_is_taken_as_it_is(ahead: float) -> None:
    machine = Machine(ahead)
    machine.known.refresh()
    assert machine.off() == ahead


def test_a_jump_between_two_readings_is_corrected_at_once() -> None:
    machine = Machine(0.0)
    machine.known.refresh()
    machine.ahead = -7200.0
    assert machine.off() == 0.0
    machine.ahead = 7200.0
    assert machine.off() == 0.0


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_since_when_a_worker_runs_is_told_by_the_clock_of_the_store(ahead: float) -> None:
    machine = Machine(ahead)
    machine.passed += 50.0
    machine.known.refresh()
    assert machine.known.started_at == 1e9 + 100.0
    machine.passed += 3600.0
    assert machine.known.started_at == 1e9 + 100.0
