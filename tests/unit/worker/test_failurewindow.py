"""Counting the runs of the last seconds in a memory that does not grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aztask.worker.breaking import PARTS, FailureWindow


def test_runs_leave_the_window() -> None:
    window = FailureWindow(60.0)
    for second in range(30):
        window.add(float(second), failed=second % 3 == 0)
    assert window.counts(29.0) == (30, 10)
    assert window.counts(60.0) == (30, 10)
    assert window.counts(200.0) == (0, 0)
    window.add(200.0, failed=True)
    assert window.counts(200.0) == (1, 1)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.booleans()), max_size=200))
def test_no_run_of_the_window_is_missing_and_none_is_much_older(
    steps: list[tuple[float, bool]],
) -> None:
    window, now, runs = FailureWindow(60.0), 0.0, []
    for step, failed in steps:
        now += step
        runs.append((now, failed))
        window.add(now, failed=failed)
        assert len(window._parts) <= PARTS + 1
    count, failures = window.counts(now)
    inside = [failed for at, failed in runs if now - at <= 60.0]
    near = [failed for at, failed in runs if now - at <= 60.0 * (1 + 1 / PARTS)]
    assert len(inside) <= count <= len(near)
    assert sum(inside) <= failures <= sum(near)


def test_a_run_counts_until_the_tenth_of_the_window_behind_it_has_passed() -> None:
    window = FailureWindow(100.0)
    window.add(9.0, failed=True)
    window.add(5.0 + 10.0, failed=False)
    assert window.counts(109.9) == (2, 1), "the part up to 10 s is still there"
    assert window.counts(110.0) == (1, 0)
    assert window.counts(120.0) == (0, 0)


def test_runs_of_one_part_are_counted_together_and_of_others_beside_them() -> None:
    window = FailureWindow(100.0)
    for at, failed in ((1.0, True), (2.0, False), (11.0, True), (12.0, True), (35.0, False)):
        window.add(at, failed=failed)
    assert window.counts(35.0) == (5, 3)
