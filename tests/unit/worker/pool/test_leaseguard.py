"""The guard of a pool process: leases that end without news from the worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from still import Still

from aztask.context import TaskLease
from aztask.support.clock import Clock
from aztask.worker.pool.leaseguard import EARLY_RENEWALS, NO_DEADLINE, STOP_GRACE, LeaseGuard

START = 1000.0


class Bench:
    """A guard on a clock that stands still, and the writing end of its control pipe."""

    def __init__(self) -> None:
        self.time = Still(START)
        self.clock = Clock(monotonic=self.time.monotonic, wall=self.time.wall)
        self.control, self.writer = os.pipe()
        self.guard = LeaseGuard(self.control, clock=self.clock)

    def begin(self, number: int = 7, deadline: float = START + 3.0) -> TaskLease:
        lease = TaskLease(deadline, ask=lambda seconds: None, clock=self.clock)
        self.guard.begin(number, lease, deadline)
        return lease

    def at(self, now: float) -> tuple[list[int], int | None]:
        self.time.now = START + now
        return self.guard.overdue(self.time.now)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    os.close(made.control)
    os.close(made.writer)


def test_a_run_is_interrupted_once_at_its_deadline_and_its_process_ends_a_grace_later(
    bench: Bench,
) -> None:
    lease = bench.begin()
    assert bench.at(2.999) == ([], None)
    assert not lease.lost
    assert bench.at(3.0) == ([7], None)
    assert lease.lost
    assert bench.at(3.0 + STOP_GRACE - 0.001) == ([], None)
    assert bench.at(3.0 + STOP_GRACE) == ([], 7)


def test_a_machine_that_was_suspended_past_the_deadline_still_interrupts_first(
    bench: Bench,
) -> None:
    bench.begin()
    assert bench.at(600.0) == ([7], None)
    assert bench.at(600.0 + STOP_GRACE) == ([], 7)


def test_renewals_move_the_deadline(bench: Bench) -> None:
    lease = bench.begin()
    bench.guard.renewed(7, START + 5.0)
    assert bench.at(4.999) == ([], None)
    assert not lease.lost
    assert bench.at(5.0) == ([7], None)


def test_a_renewal_that_overtook_its_delivery_counts(bench: Bench) -> None:
    bench.guard.renewed(7, START + 9.0)
    lease = bench.begin()
    assert bench.at(8.999) == ([], None)
    assert lease.remaining_seconds == pytest.approx(0.001)


def test_renewals_of_runs_that_have_ended_are_forgotten_in_time(bench: Bench) -> None:
    for number in range(EARLY_RENEWALS + 50):
        bench.guard.renewed(number, START + 9.0)
    assert len(bench.guard._early) == EARLY_RENEWALS


def test_a_run_that_ended_is_left_alone(bench: Bench) -> None:
    bench.begin()
    bench.guard.end(7)
    assert bench.at(60.0) == ([], None)


def test_a_message_that_is_settled_already_has_no_deadline(bench: Bench) -> None:
    bench.begin(deadline=NO_DEADLINE)
    assert bench.at(1e9) == ([], None)


def test_what_the_worker_interrupted_is_not_interrupted_again_but_ends(bench: Bench) -> None:
    """The worker may be stopped after it interrupted the task, and before it killed it."""
    lease = bench.begin()
    bench.time.now = START + 2.7
    bench.guard.lose(7, "its lease was not renewed in time")
    assert lease.lost
    assert bench.at(3.5) == ([], None)
    assert bench.at(3.0 + STOP_GRACE) == ([], 7)


def test_each_run_has_its_own_deadline(bench: Bench) -> None:
    bench.begin(7)
    bench.begin(8, START + 60.0)
    assert bench.at(3.0) == ([7], None)
    bench.guard.end(7)
    assert bench.at(59.0) == ([], None)


def test_packets_come_before_deadlines(bench: Bench) -> None:
    bench.begin(deadline=START - 1.0)
    os.write(bench.writer, b"x")
    assert bench.guard.wait() is None
    os.read(bench.control, 1)
    assert bench.guard.wait() == START


def test_news_that_came_while_a_task_held_the_gil_comes_before_the_deadline(bench: Bench) -> None:
    """The wait had timed out, and then this thread got no processor time until the news came."""
    bench.begin(deadline=START - 1.0)
    selector = bench.guard._selector

    class Delayed:
        def select(self, seconds: float | None) -> Any:
            ready = selector.select(0)
            os.write(bench.writer, b"x")
            return ready

    bench.guard._selector = Delayed()  # type: ignore[assignment]
    assert bench.guard.wait() is None


def test_the_first_run_wakes_a_guard_that_waits_for_ever(bench: Bench) -> None:
    assert bench.guard._next_at(START) == float("inf")
    bench.begin()
    assert bench.guard.wait() == START, "the wait returns at once, although nothing is due"
    assert bench.guard._next_at(START) == START + 1.0, "a suspend is noticed within a second"
    bench.guard.end(7)
    bench.time.now = START
    assert bench.guard._next_at(START) == float("inf")
