"""Recommendations that follow from a queue's deliveries. Without Spark."""

from collections import Counter

import pytest

from aztask.leaseadvice.advice import Advice, Evidence, bin_of, edge_of
from aztask.queues.lease.bounds import Bounds
from aztask.spark.recommendation.recommend import (
    QueueEvidence,
    Simulation,
    TaskEvidence,
    gathered,
    prefetch_of,
    recommended,
    split_of,
    survived,
)

BOUNDS = Bounds(30.0, 7 * 86400.0)


def task(seconds, count=1000, cut=()):
    """A task whose runs all take so long."""
    seen = TaskEvidence()
    seen.held[bin_of(seconds)] += count
    seen.run[bin_of(seconds)] += count
    for each in cut:
        seen.cut[bin_of(each)] += 1
    return seen


def queue(lease=None, lost=0, **tasks):
    seen = QueueEvidence("orders", lease, tasks)
    if lost:
        seen.lost[bin_of(lease)] = lost
    return seen


def published(lease, at=1000.0):
    return Advice(lease, False, "raised: before", Evidence(), "pipeline", at)


class TestSimulation:
    def test_what_a_lease_would_have_meant(self):
        seen = task(10.0, 900)
        seen.held[bin_of(100.0)] += 100
        found = recommended(queue(240.0, a=seen), None, BOUNDS, at=5.0)
        simulated = found.simulated
        assert (simulated.lost_at_least, simulated.lost_at_most) == (0.0, 0.0)
        text = str(Simulation.of(seen, 48.0, 240.0))
        assert text == (
            "10 % of these deliveries would have lost a lease of 48 s without a renewal, "
            "0 % one of 240 s; a killed worker's messages come again after 48 s at most instead "
            "of 240 s"
        )
        assert found.reasons["simulation"] == str(simulated)

    def test_how_long_those_took_that_were_cut_off_is_unknown(self):
        seen = task(10.0, 900, cut=[60.0] * 100)
        assert seen.between(30.0) == (0.1, 0.1)
        assert seen.between(120.0) == (0.0, 0.1)
        told = str(Simulation.of(seen, 120.0, None))
        assert told.startswith("0 to 10 % of these deliveries would have lost a lease of 120 s")
        all_cut = TaskEvidence(cut=Counter({bin_of(1.0): 16}))
        told = str(Simulation.of(all_cut, 30.0, 1.0))
        assert told.startswith("0 to 100 % of these deliveries would have lost a lease of 30 s")

    def test_nothing_is_known(self):
        found = recommended(queue(60.0), None, BOUNDS, at=5.0)
        assert found.simulated is None
        assert found.reasons["simulation"] == "none: nothing is known yet"


def test_runs_that_were_all_cut_off_have_no_length():
    """The p99 of 2,000 runs that were cut at 60 s is not 63 s."""
    seen = TaskEvidence(stopped=Counter({bin_of(60.0): 2000}))
    found = seen.runs()
    assert (found.samples, found.cut_off) == (2000, 2000)
    assert (found.p50_seconds, found.p99_seconds) == (None, None)
    prefetch, why = prefetch_of(found, 60.0)
    assert prefetch is None
    assert "2000 of 2000 runs were cut off" in why


def test_runs_that_were_cut_off_are_longer():
    """Against the definition: of 10 runs, the survivors of each bin."""
    ended = Counter({bin_of(float(n)): 1 for n in (1, 2, 4, 8, 16)})
    stopped = Counter({bin_of(float(n)): 1 for n in (1.5, 3, 6, 12, 24)})
    # 9/10, 7/8, 5/6, 3/4, 1/2 survive: 0.9, 0.79, 0.66, 0.49, 0.25
    assert survived(ended, stopped, 0.1) == edge_of(bin_of(1.0))
    assert survived(ended, stopped, 0.5) == edge_of(bin_of(8.0))
    assert survived(ended, stopped, 0.75) == edge_of(bin_of(16.0))
    assert survived(ended, stopped, 0.8) is None
    assert survived(ended, {}, 0.5) == edge_of(bin_of(4.0))


class TestLease:
    def test_from_the_p99_of_held_time(self):
        found = recommended(queue(60.0, a=task(100.0)), None, BOUNDS, at=5.0)
        assert found.advice.lease_seconds == pytest.approx(1.5 * 100, rel=0.1)
        assert found.advice.reason.startswith("raised: 1.5 x the p99 of")
        assert found.advice.evidence.samples == 1000
        assert (found.advice.source, found.advice.at) == ("pipeline", 5.0)

    def test_a_minimum_sample(self):
        found = recommended(queue(60.0, a=task(100.0, 99)), None, BOUNDS, at=5.0)
        assert found.advice.lease_seconds == 60.0
        assert "99 deliveries so far, 100 are needed" in found.reasons["lease"]

    def test_hysteresis_against_what_is_published(self):
        seen = queue(60.0, a=task(100.0))
        found = recommended(seen, published(140.0), BOUNDS, at=5.0)
        assert (found.current_lease_seconds, found.advice.lease_seconds) == (140.0, 140.0)
        assert "is not far from it" in found.reasons["lease"]
        assert found.advice.at == 1000.0  # nothing changed
        unfollowed = recommended(seen, published(140.0, at=0.0), BOUNDS, at=5.0)
        assert unfollowed.current_lease_seconds == 60.0

    def test_never_shortened_from_what_lost_leases_cut_off(self):
        cut = queue(600.0, a=task(10.0, cut=[600.0]))
        found = recommended(cut, None, BOUNDS, at=5.0)
        assert found.advice.lease_seconds == 600.0
        assert "measured durations are too short" in found.reasons["lease"]
        whole = recommended(queue(600.0, a=task(10.0)), None, BOUNDS, at=5.0)
        assert whole.advice.lease_seconds == 30.0

    def test_raised_where_too_many_were_lost_under_the_lease_in_force(self):
        seen = queue(40.0, lost=10, a=task(10.0))
        assert recommended(seen, None, BOUNDS, at=5.0).advice.lease_seconds == 80.0
        after = recommended(seen, published(80.0), BOUNDS, at=6.0)
        assert after.advice.lease_seconds == 80.0  # those were lost under the former one
        assert after.advice.evidence.losses == 0
        assert "10 deliveries cut off" in after.reasons["lease"]  # nor is it lowered for them

    def test_failed_settlements_count_like_losses(self):
        seen = queue(40.0, a=task(10.0))
        seen.failed[bin_of(40.0)] = 10
        found = recommended(seen, None, BOUNDS, at=5.0)
        assert found.advice.lease_seconds == 80.0
        assert "10 settlements came too late" in found.reasons["lease"]

    def test_above_the_cap_it_says_renew(self):
        found = recommended(queue(300.0, a=task(900.0)), None, Bounds(30.0, 300.0), at=5.0)
        assert found.advice.renew
        assert found.advice.lease_seconds == 300.0
        assert found.renewed_part == 1.0
        assert found.reasons["lease"].startswith("renew: ")
        assert found.reasons["renewal"].startswith("needed: ")

    def test_how_many_need_a_renewal(self):
        both = task(10.0, 900)
        both.add(task(100.0, 100))
        found = recommended(queue(60.0, a=both), published(60.0), Bounds(30.0, 3600.0), at=5.0)
        assert found.advice.lease_seconds > 100.0
        assert found.renewed_part == 0.0
        short = recommended(queue(140.0, a=both), published(140.0), Bounds(30.0, 3600.0), at=5.0)
        assert short.advice.lease_seconds == 140.0
        assert short.renewed_part == pytest.approx(0.1)
        assert "10 % of 1000 deliveries need one" in short.reasons["renewal"]


class TestPrefetch:
    @pytest.mark.parametrize(
        ("seconds", "lease", "count"),
        [(0.01, 30.0, 25), (0.1, 30.0, 3), (2.0, 30.0, 1), (10.0, 30.0, 0), (10.0, 60.0, 1)],
    )
    def test_a_quarter_of_a_second_of_work_within_a_quarter_of_the_lease(
        self, seconds, lease, count
    ):
        runs = Evidence(1000, seconds, seconds)
        assert prefetch_of(runs, lease)[0] == count

    def test_a_slow_tail_keeps_it_low(self):
        assert prefetch_of(Evidence(1000, 0.01, 1.0), 30.0)[0] == 7

    def test_too_little_is_known(self):
        count, reason = prefetch_of(Evidence(3, 0.1, 0.1), 30.0, 100)
        assert count is None
        assert "3 runs are too few" in reason


class TestSplit:
    def test_durations_an_order_of_magnitude_apart(self):
        seen = queue(60.0, thumb=task(0.2), mail=task(0.5), render=task(40.0), film=task(900.0))
        classes, reason = split_of(seen, Bounds(30.0, 300.0))
        assert [(each.queue, each.tasks) for each in classes] == [
            ("orders-fast", ("thumb", "mail")),
            ("orders-medium", ("render",)),
            ("orders-slow", ("film",)),
        ]
        assert [each.lease_seconds for each in classes][::2] == [30.0, 300.0]
        assert [each.renew for each in classes] == [False, False, True]
        assert "render to orders-medium" in reason

    def test_not_within_an_order_of_magnitude(self):
        classes, reason = split_of(queue(60.0, a=task(2.0), b=task(15.0)), BOUNDS)
        assert classes == ()
        assert "differ only by a factor of" in reason

    def test_not_where_all_are_quick(self):
        classes, reason = split_of(queue(60.0, a=task(0.01), b=task(0.5)), BOUNDS)
        assert classes == ()
        assert "too short to delay others" in reason

    def test_not_on_a_few_runs(self):
        classes, reason = split_of(queue(60.0, a=task(0.01), b=task(50.0, 19)), BOUNDS)
        assert classes == ()
        assert "enough runs" in reason

    def test_many_classes_and_long_names(self):
        tasks = {f"t{power}": task(0.01 * 20**power) for power in range(5)}
        seen = QueueEvidence("q" * 63, 60.0, tasks)
        classes, _ = split_of(seen, BOUNDS)
        assert [each.queue[-8:] for each in classes] == [f"-class-{n}" for n in range(1, 6)]
        assert max(len(each.queue) for each in classes) == 56


def test_rows_are_gathered_by_queue():
    newest = {"ts": 5.0, "seconds": 30.0}
    rows = [
        ("b", "t", "held", 3, 10, newest),
        ("a", "t", "held", 3, 10, newest),
        ("a", "t", "held", 4, 5, newest),
        ("a", "u", "cut", 3, 1, newest),
        ("a", "u", "run", 2, 7, newest),
        ("a", "t", "lease", 9, 2, {"ts": 9.0, "seconds": 60.0}),
        ("a", "u", "lease", 8, 2, {"ts": 8.0, "seconds": 20.0}),
        ("a", "u", "lost", 9, 4, newest),
        ("a", "u", "failed", 9, 6, newest),
    ]
    names = ("queue", "task", "kind", "bin", "count", "newest")
    found = gathered(dict(zip(names, row, strict=True)) for row in rows)
    assert list(found) == ["a", "b"]
    seen = found["a"]
    assert seen.lease_seconds == 60.0
    assert (seen.tasks["t"].held, seen.tasks["u"].cut) == ({3: 10, 4: 5}, {3: 1})
    assert (seen.lost, seen.failed, seen.tasks["u"].run) == ({9: 4}, {9: 6}, {2: 7})
    assert seen.all_tasks().held == {3: 10, 4: 5}
