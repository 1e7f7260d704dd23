"""The decision: how long a lease should be, from what was seen."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.errors import ConfigurationError
from aztask.leaseadvice.advice import Evidence, decide
from aztask.queues.lease.bounds import LONGEST, Bounds

PLENTY = Evidence(samples=1000, p50_seconds=10.0, p99_seconds=60.0)


def test_the_lease_is_one_and_a_half_times_the_p99():
    advice = decide(PLENTY, 30.0, at=5.0)
    assert (advice.lease_seconds, advice.renew, advice.at) == (90.0, False, 5.0)
    assert "raised: 1.5 x the p99 of 60.0 s" in advice.reason


def test_it_is_not_shorter_than_thirty_seconds():
    assert decide(replace(PLENTY, p99_seconds=0.1), None).lease_seconds == 30.0


def test_above_the_cap_the_advice_is_to_renew_and_no_clamped_lease():
    advice = decide(replace(PLENTY, p99_seconds=250.0), 60.0, Bounds(most=300.0))
    assert advice.renew
    assert advice.lease_seconds == 60.0
    assert advice.reason.startswith("renew: the p99 of 250.0 s held needs 375.0 s")
    assert (
        decide(replace(PLENTY, p99_seconds=250.0), None, Bounds(most=300.0)).lease_seconds is None
    )


def test_too_few_deliveries_change_nothing():
    advice = decide(replace(PLENTY, samples=99), 30.0)
    assert advice.lease_seconds == 30.0
    assert advice.reason == "kept: 99 deliveries so far, 100 are needed"


def test_it_is_lowered_only_when_far_above():
    assert decide(PLENTY, 180.0).lease_seconds == 180.0
    assert decide(PLENTY, 181.0).lease_seconds == 90.0


def test_it_is_raised_only_when_far_below():
    assert decide(PLENTY, 72.0).lease_seconds == 72.0
    assert decide(PLENTY, 71.0).lease_seconds == 90.0


@pytest.mark.parametrize("field", ["cut_off", "lost_leases", "failed_settlements"])
def test_it_is_never_lowered_from_durations_that_were_cut_off(field):
    assert decide(replace(PLENTY, **{field: 1}), 600.0).lease_seconds == 600.0


@pytest.mark.parametrize("losses", [{"lost_leases": 3}, {"failed_settlements": 3}])
def test_losses_past_the_threshold_double_it_whatever_the_sample(losses):
    advice = decide(Evidence(samples=3, p99_seconds=1.0, **losses), 40.0)
    assert advice.lease_seconds == 80.0
    assert advice.reason.startswith("raised: ")


def test_losses_raise_it_to_what_the_p99_asks_for_when_that_is_more():
    assert decide(replace(PLENTY, lost_leases=5), 30.0).lease_seconds == 90.0


def test_few_losses_in_many_deliveries_raise_nothing():
    assert decide(replace(PLENTY, samples=10_000, lost_leases=9), 90.0).lease_seconds == 90.0
    assert decide(replace(PLENTY, samples=10_000, lost_leases=10), 90.0).lease_seconds == 180.0


def test_losses_at_the_upper_bound_are_said():
    advice = decide(replace(PLENTY, lost_leases=9), 300.0, Bounds(most=300.0))
    assert advice.lease_seconds == 300.0
    assert "kept at its upper bound" in advice.reason


def test_an_advice_that_changes_nothing_keeps_its_time_source_and_reason():
    first = decide(PLENTY, None, source="pipeline", at=5.0)
    second = decide(replace(PLENTY, samples=2000), first, source="worker", at=9.0)
    assert (second.at, second.source, second.evidence.samples) == (5.0, "pipeline", 2000)
    assert (second.reason, second.latest[:5]) == (first.reason, "kept:")


def test_the_same_evidence_settles_after_one_change():
    """No swinging: a second decision from the same evidence keeps what the first one chose."""
    first = decide(PLENTY, 30.0, at=1.0)
    assert decide(PLENTY, first, at=2.0).lease_seconds == first.lease_seconds


@given(
    st.integers(0, 10**9),
    st.floats(0, 1e9) | st.none(),
    st.integers(0, 10**6),
    st.floats(0.1, LONGEST) | st.none(),
)
def test_what_is_new_is_within_the_bounds(samples, p99, losses, current):
    bounds = Bounds(10.0, 3600.0)
    evidence = Evidence(samples, p99, p99, losses, losses, 0)
    lease = decide(evidence, current, bounds).lease_seconds
    assert lease is None or lease == round(current or 0, 3) or 10.0 <= lease <= 3600.0
    if losses and current is not None:
        assert lease is not None
        assert lease >= round(current, 3)


@pytest.mark.parametrize("wrong", [(0.0, 5.0), (9.0, 5.0), (1.0, 1e9), (float("nan"), 5.0)])
def test_bounds_that_make_no_sense(wrong):
    with pytest.raises(ConfigurationError, match="cannot be kept between"):
        Bounds(*wrong)
