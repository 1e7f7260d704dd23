"""The lengths of runs, when some were cut off: against plain Python, and what it must not say."""

import math
import random
from itertools import count

import pytest
from events_reference import lengths, survived
from events_site import as_frame, write_log

from aztask.spark import read_events
from aztask.spark.events.lengths import LEVELS, SHARES, run_lengths
from aztask.spark.recommendation.recommend import observe
from aztask.spark.report.summary import shown_run
from aztask.stores.events.event import Event

LEASE = 60.0


def log():
    """Runs that ended, were stopped at a limit, were killed, lost their lease, or never started."""
    draw, number, ids = random.Random(3), count(), count()

    def event(kind, task, name, ts, **rest):
        about = {"queue": "slow" if task == "all.cut" else "q", "worker": "w", **rest}
        return Event(kind, name, task, ts=ts, id=f"e{next(ids)}", lease_seconds=LEASE, **about)

    for _ in range(2000):
        name, ts = f"t{next(number)}", draw.uniform(0, 1e5)
        yield event("started", "all.cut", name, ts)
        yield event("lease_lost", "all.cut", name, ts + LEASE, held_seconds=LEASE + 1)
    for _ in range(200):  # lost while it waited for a slot
        name, ts = f"t{next(number)}", draw.uniform(0, 1e5)
        yield event("received", "mixed", name, ts)
        yield event("lease_lost", "mixed", name, ts + LEASE, held_seconds=LEASE)
    for _ in range(600):
        name, ts, took = f"t{next(number)}", draw.uniform(0, 1e5), draw.expovariate(1 / 40)
        worker = f"w-{next(number) % 5}"
        yield event("started", "mixed", name, ts, worker=worker)
        if worker == "w-0" and took > 20:  # killed, after one renewal
            yield event("renewed", "mixed", name, ts + 20.0, worker=worker)
        elif worker == "w-1" and took > 30:  # frozen for an hour, its lease was not renewed
            late = ts + 3600.0
            yield event("lease_lost", "mixed", name, late, worker=worker, held_seconds=3600.0)
        elif took > 100:
            kind = {"error_type": "TimeLimitExceeded", "duration_seconds": 100.0}
            yield event("failed", "mixed", name, ts + 100.0, worker=worker, **kind)
        else:
            end = ts + took
            yield event("succeeded", "mixed", name, end, worker=worker, duration_seconds=took)


@pytest.fixture(scope="module")
def events():
    return list(log())


@pytest.fixture(scope="module")
def frame(spark, events, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    write_log(folder, events)
    return read_events(spark, folder).events


@pytest.fixture(scope="module")
def figures(frame):
    """{(task, queue): its row}."""
    return {(row["task"], row["queue"]): row for row in run_lengths(frame)}


def test_the_figures_are_those_of_plain_python(figures, events):
    expected = lengths(events)
    assert figures.keys() == expected.keys()
    told = 0
    for key, runs in expected.items():
        row = figures[key]
        assert row["level"] == LEVELS["task" if key[0] else "queue" if key[1] else "total"]
        assert row["run_cut_off"] == sum(cut for _, cut in runs)
        assert row["run_ended"] == sum(not cut for _, cut in runs)
        assert row["run_longest"] == pytest.approx(max(seconds for seconds, _ in runs))
        for share, part in SHARES.items():
            truth, found = survived(runs, part), row[f"run_{share}"]
            assert (found is None) == (truth is None)
            assert truth is None or truth * (1 - 1e-9) <= found <= truth * 1.011
            told += truth is not None
    assert told >= 2


def test_a_queue_whose_runs_were_all_cut_off_has_no_length(figures):
    row = figures["all.cut", None]
    assert (row["run_ended"], row["run_cut_off"]) == (0, 2000)
    assert row["run_longest"] == pytest.approx(LEASE)
    for share in SHARES:
        assert [row[f"run_{share}{end}"] for end in ("", "_low", "_high")] == [None] * 3
    shown = {**row, "run_max": row["run_longest"]}
    assert shown_run(shown, "p99", lambda value: f"{value:.0f} s") == "> 60 s"


def test_a_delivery_that_lost_its_lease_before_it_started_is_no_run(figures):
    row = figures["mixed", None]
    assert row["run_ended"] + row["run_cut_off"] == 600


def test_cut_off_runs_do_not_shorten_the_estimate(figures, events):
    """The truth is known here: an exponential with a mean of 40 s. Completed runs alone mislead."""
    row = figures["mixed", None]
    median = 40 * math.log(2)
    completed = sorted(seconds for seconds, cut in lengths(events)["mixed", None] if not cut)
    assert completed[len(completed) // 2] < row["run_p50_low"]
    assert row["run_p50_low"] <= median <= row["run_p50_high"]
    assert row["run_p50_high"] - row["run_p50_low"] < 12
    assert shown_run(row, "p50", lambda value: f"{value:.0f}").startswith("~")


def test_nineteen_of_twenty_intervals_hold_the_truth(spark):
    """200 tasks of 40 runs each, whose true median is known."""
    draw, ids = random.Random(8), count()
    ended = [
        Event("succeeded", f"t{next(ids)}", f"task-{task}", "q", ts=1.0, worker="w",
              duration_seconds=draw.expovariate(1 / 40))
        for task in range(200) for _ in range(40)
    ]  # fmt: skip
    names = "event STRING, task STRING, queue STRING, duration_seconds DOUBLE"
    rows = [(each.event, each.task, each.queue, each.duration_seconds) for each in ended]
    frame = as_frame(spark, rows, names)
    found = [row for row in run_lengths(frame) if row["level"] == LEVELS["task"]]
    median = 40 * math.log(2)
    held = sum(row["run_p50_low"] <= median <= row["run_p50_high"] for row in found)
    assert len(found) == 200
    assert 180 <= held <= 199
    assert all(row["run_p99_high"] is None for row in found), "40 runs do not tell it"


def test_advice_takes_only_what_started(frame):
    seen = observe(frame)
    assert seen["q"].lost.total() > 200
    assert seen["q"].tasks["mixed"].cut.total() < 100
    assert seen["slow"].tasks["all.cut"].cut.total() == 2000
    assert seen["slow"].tasks["all.cut"].runs().p99_seconds is None
