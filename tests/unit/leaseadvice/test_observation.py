"""Histograms of held time: percentiles, adding up, fading."""

import random

import pytest

from aztask.leaseadvice.advice import HALF_LIFE, LAST_BIN, Observation, bin_of, edge_of


def observed(*seconds, **more):
    bins = {}
    for each in seconds:
        bins[bin_of(each)] = bins.get(bin_of(each), 0.0) + 1.0
    return Observation(held=bins, **more)


@pytest.mark.parametrize("seconds", [0.011, 0.5, 1.0, 30.0, 299.0, 3600.0, 6e5])
def test_a_time_is_in_a_bin_that_ends_at_most_nine_percent_above_it(seconds):
    assert seconds <= edge_of(bin_of(seconds)) * (1 + 1e-9)
    assert edge_of(bin_of(seconds)) <= 1.091 * seconds


@pytest.mark.parametrize(
    ("seconds", "number"), [(0.0, 0), (-5.0, 0), (float("nan"), 0), (1e300, LAST_BIN)]
)
def test_odd_times_have_a_bin_too(seconds, number):
    assert bin_of(seconds) == number


def test_the_percentiles_are_those_of_the_times_to_nine_percent():
    times = [random.Random(3).lognormvariate(2, 1) for _ in range(5000)]
    evidence = observed(*times).evidence()
    times.sort()
    for value, exact in ((evidence.p50_seconds, times[2499]), (evidence.p99_seconds, times[4949])):
        assert exact <= value <= 1.1 * exact


def test_nothing_seen_has_no_percentile():
    assert Observation().evidence().p99_seconds is None


def test_times_cut_off_count_as_at_least_so_long():
    evidence = observed(1.0, cut={bin_of(50.0): 3.0}, lost=3.0).evidence()
    assert (evidence.samples, evidence.cut_off, evidence.lost_leases) == (4, 3, 3)
    assert evidence.p99_seconds >= 50.0


def test_counts_of_two_workers_add_up():
    both = observed(1.0, 2.0, lost=1.0, lost_ever=1).plus(observed(2.0, failed=2.0, failed_ever=2))
    evidence = both.evidence()
    assert (evidence.samples, evidence.losses) == (3, 3)
    assert (both.lost_ever, both.failed_ever) == (1, 2)


def test_counts_fade_to_a_half_and_are_forgotten_in_the_end():
    seen = observed(*[1.0] * 8, lost=4.0, lost_ever=4, at=1000.0)
    later = seen.faded(1000.0 + HALF_LIFE)
    assert (later.evidence().samples, later.lost, later.lost_ever) == (4, 2.0, 4)
    assert seen.faded(1000.0 + 40 * HALF_LIFE).held == {}


def test_a_clock_that_runs_backwards_fades_nothing():
    seen = observed(1.0, at=1000.0)
    assert seen.faded(10.0) == seen


def test_after_a_change_losses_of_before_do_not_count():
    seen = observed(1.0, lost=4.0, failed=2.0, lost_ever=4, failed_ever=2).after_change()
    assert seen.evidence().losses == 0
    assert (seen.lost_ever, seen.failed_ever) == (4, 2)
