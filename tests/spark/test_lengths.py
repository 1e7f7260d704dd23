"""The lengths of runs, when some were cut off: against plain Python, and what it must not say."""

import math
import random
from itertools import count

import pytest
from events_reference import lengths, lengths_over_time, survived
from events_site import as_frame, write_log

from aztask.spark import read_events
from aztask.spark.events.lengths import LEVELS, SHARES, classes_of, run_lengths
from aztask.spark.recommendation.recommend import observe
from aztask.spark.report.charts import durations_over_time
from aztask.spark.report.summary import remarks, shown_run, summarize
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
    return {(row["task"], row["queue"]): row for row in run_lengths(frame).rows}


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
    found = [row for row in run_lengths(frame).rows if row["level"] == LEVELS["task"]]
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


STEP = 7200


@pytest.fixture(scope="module")
def timed(frame):
    """{(level, queue, hour, at): its row} of the hours and steps with runs that were cut off."""
    names = ("level", "queue", "hour", "at")
    rows = run_lengths(frame, STEP).rows
    return {tuple(row[name] for name in names): row for row in rows if row["level"] > 3}


def test_hours_and_steps_count_cut_off_runs_as_such(timed, events):
    """Each row is that of plain Python: a stopped run is no completed one in its hour either."""
    compared = 0
    for level, length, name in (("queue_hour", 3600, "hour"), ("step", STEP, "at")):
        expected = lengths_over_time(events, length, by_queue=level == "queue_hour")
        rows = {(key[1], row[name]): row for key, row in timed.items() if key[0] == LEVELS[level]}
        assert rows.keys() == {k for k, runs in expected.items() if any(cut for _, cut in runs)}
        for key, row in rows.items():
            runs = expected[key]
            assert row["run_cut_off"] == sum(cut for _, cut in runs)
            assert row["run_ended"] == sum(not cut for _, cut in runs)
            assert row["run_longest"] == pytest.approx(max(seconds for seconds, _ in runs))
            for share, part in SHARES.items():
                truth, found = survived(runs, part), row[f"run_{share}"]
                assert (found is None) == (truth is None)
                assert truth is None or truth * (1 - 1e-9) <= found <= truth * 1.011
                compared += truth is not None
    assert compared > 50


def test_the_summary_has_no_completed_length_where_all_runs_were_cut_off(spark, tmp_path):
    slow = [event for event in log() if event.task == "all.cut"]
    write_log(tmp_path, slow)
    summary = summarize(read_events(spark, tmp_path))
    assert sum(row["run_cut_off"] for row in summary.queue_hours) == 2000
    assert sum(row["run_cut_off"] for row in summary.timeline) == 2000
    for row in summary.queue_hours:
        if row["run_cut_off"]:
            assert (row["run_p50"], row["run_p99"], row["run_mean"]) == (None, None, None)
            assert row["run_max"] == pytest.approx(LEASE)
    for row in summary.timeline:
        assert row["run"] == ([None, None] if row["run_cut_off"] else None)
    chart = durations_over_time("Run", summary.timeline, summary.step_seconds, "run")
    tips = [mark.tip for mark in chart.marks if getattr(mark, "tip", "")]
    assert any("median > 60" in tip and "cut off" in tip for tip in tips), tips


def binned(values):
    """{bin: number} as `run_lengths` counts them."""
    found: dict[int, int] = {}
    for value in values:
        number = math.ceil(64 * math.log2(value / 1e-4) - 1e-9) if value > 1e-4 else 0
        found[number] = found.get(number, 0) + 1
    return found


@pytest.mark.parametrize("seed", range(8))
def test_one_wide_class_of_runs_is_not_two(seed):
    draw = random.Random(seed)
    shapes = (
        lambda: draw.lognormvariate(0, 1.5),
        lambda: draw.expovariate(1),
        lambda: draw.uniform(0.001, 10),
        lambda: 10 ** draw.uniform(-3, 2),
    )
    for shape in shapes:
        assert classes_of(binned([shape() for _ in range(1000)])) is None
    assert classes_of(binned([0.01] * 1000 + [50.0] * 10)) is None, "ten are too few"
    assert classes_of({}) is None


@pytest.mark.parametrize("share", [0.06, 0.5, 0.9])
def test_two_classes_are_told_apart(share):
    draw = random.Random(4)
    long = int(1000 * share)
    values = [draw.lognormvariate(-4, 0.4) for _ in range(1000 - long)]
    values += [draw.lognormvariate(2, 0.4) for _ in range(long)]
    both = classes_of(binned(values))
    assert both is not None
    assert [sum(each.values()) for each in both] == [1000 - long, long]


def test_two_classes_of_one_task_are_named(spark, tmp_path):
    draw = random.Random(4)
    kinds = {"two.kinds": lambda n: 0.02 if n % 4 else 30.0, "one.kind": lambda n: 1.0}
    ended = [
        Event("succeeded", f"{task}-{n}", task, "q", ts=1e9 + n, worker="w", id=f"{task}-{n}",
              duration_seconds=seconds(n) * draw.uniform(0.9, 1.1))
        for task, seconds in kinds.items() for n in range(400)
    ]  # fmt: skip
    write_log(tmp_path, ended)
    summary = summarize(read_events(spark, tmp_path))
    (found,) = summary.run_classes
    assert (found["task"], found["short_runs"], found["long_runs"]) == ("two.kinds", 300, 100)
    assert found["short_p50"] == pytest.approx(0.02, rel=0.1)
    assert found["long_p50"] == pytest.approx(30.0, rel=0.1)
    (text,) = remarks(summary, lambda value: f"{value:.2g} s")
    assert text.startswith("two.kinds has two classes of runs: 300 of about 0.02 s and 100 of ")
