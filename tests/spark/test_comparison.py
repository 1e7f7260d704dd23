"""Two spans of a log beside each other: the figures by DuckDB, the marks where they belong."""

import itertools
import json
import math
import random
from dataclasses import replace
from datetime import UTC, datetime

import duckdb
import pytest
from browser import opened
from events_site import write_log

from aztask.errors import ConfigurationError
from aztask.operate.cli.main import run
from aztask.spark import read_events
from aztask.spark.report import comparison
from aztask.spark.report.comparison import (
    LEAST_STEPS,
    MEASURED,
    STEPS,
    Span,
    compare,
    discoveries,
    rank_sum,
    spans_of,
)
from aztask.spark.report.page import render
from aztask.spark.report.summary import summarize
from aztask.stores.events.event import Event

BEGIN = 1_790_000_000 // 3600 * 3600
LENGTH = 2000.0
DEPLOY = BEGIN + LENGTH + 600.0


def log(seed=3):
    """Tasks that are steady, and ones that change half-way, or with a deploy 600 s later."""
    draw = random.Random(seed)
    events = []

    def emit(kind, task, queue, at, **more):
        number = len(events)
        events.append(
            Event(kind, f"{task}-{number}", task, queue, ts=round(at, 6), worker=f"w{number % 3}",
                  id=f"e-{number}", **more)
        )  # fmt: skip

    def tell(task, queue, at, run, wait, retried=0.0, dead=0.0):
        emit("started", task, queue, at - run, wait_seconds=wait)
        fate = draw.random()
        about = {"error_type": "OSError", "error": "no"} if fate < retried + dead else {}
        kind = "resubmitted" if fate < retried else "failed" if about else "succeeded"
        emit(kind, task, queue, at, duration_seconds=run, **about)
        if kind == "failed":
            emit("dead_lettered", task, queue, at)

    for number in range(4000):
        at = BEGIN + 1.0 + number * (2 * LENGTH - 2) / 4000
        late, deployed = at >= BEGIN + LENGTH, at >= DEPLOY
        run, wait = draw.lognormvariate(-2, 0.5), draw.expovariate(5)
        tell("shop.steady", "calm", at, run, wait, 0.05, 0.02)
        tell("shop.slow", "busy", at, run * (1.6 if deployed else 1), wait * (3 if late else 1))
        tell("shop.shaky", "busy", at, run, wait, 0.2 if deployed else 0.02)
    # One outage: 300 retries within a few seconds of the second half, and none besides.
    for number in range(300):
        emit("resubmitted", "shop.steady", "calm", BEGIN + 1.5 * LENGTH + number / 100,
             duration_seconds=0.1, error_type="OSError")  # fmt: skip
    emit("enqueued", "shop.rare", "calm", BEGIN)
    emit("enqueued", "shop.rare", "calm", BEGIN + 2 * LENGTH)
    return events


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of the log, its events)"""
    folder = tmp_path_factory.mktemp("compared")
    events = log()
    write_log(folder, events)
    return folder, events


@pytest.fixture(scope="module")
def summary(spark, made):
    read = read_events(spark, made[0])
    yield summarize(read, deploy=DEPLOY)
    read.close()


FIGURES_SQL = """
SELECT {key}, ts >= $split AS after,
    count(*) AS events,
    count(*) FILTER (event = 'succeeded') AS done,
    count(*) FILTER (event = 'resubmitted') AS retried,
    count(*) FILTER (event = 'dead_lettered') AS dead_lettered,
    count(*) FILTER (event IN ('succeeded', 'failed', 'resubmitted', 'snoozed', 'waiting')) AS runs,
    count(*) FILTER (event IN ('succeeded', 'dead_lettered', 'cancelled', 'expired')) AS ended,
    count(*) FILTER (event = 'enqueued') AS enqueued,
    list_sort(list(wait_seconds) FILTER (event = 'started' AND wait_seconds IS NOT NULL)) AS wait,
    list_sort(list(duration_seconds) FILTER (
        event IN ('succeeded', 'failed', 'resubmitted', 'snoozed', 'waiting')
        AND duration_seconds IS NOT NULL)) AS run
FROM e WHERE ts BETWEEN $begin AND $end GROUP BY ALL
"""
TEXTS = ("id", "event", "task_id", "task", "queue", "worker", "error_type")
NUMBERS = ("ts", "duration_seconds", "wait_seconds")
COUNTS = ("events", "done", "retried", "dead_lettered", "runs", "ended", "enqueued")


def test_every_figure_is_duckdbs(summary, made):
    database = duckdb.connect()
    types = {**dict.fromkeys(TEXTS, "VARCHAR"), **dict.fromkeys(NUMBERS, "DOUBLE")}
    database.execute(
        "CREATE TABLE e AS SELECT * FROM read_json(?, format = 'newline_delimited', "
        "hive_partitioning = false, columns = ?)",
        [f"{made[0]}/**/*.jsonl", types],
    )
    checked = 0
    assert [each["about"] for each in summary.comparisons] == ["period", "deploy"]
    for each in summary.comparisons:
        for key in ("queue", "task"):
            cursor = database.execute(
                FIGURES_SQL.format(key=key),
                {name: each[name] for name in ("begin", "split", "end")},
            )
            names = [column[0] for column in cursor.description]
            expected = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
            rows = {row[key]: row for row in each[f"{key}s"]}
            assert rows.keys() == {row[key] for row in expected}
            for truth in expected:
                found = rows[truth[key]]["after" if truth["after"] else "before"]
                checked += check_side(found, truth)
    assert checked > 150


def check_side(found, truth):
    """The counts are the same, and percentiles are values of about that rank."""
    for name in COUNTS:
        assert found[name] == truth[name], name
    for name in MEASURED:
        measure, share = name.split("_p")
        values = truth[measure]
        if not values:
            assert found[name] is None
            continue
        rank = int(share) / 100 * len(values)
        slack = len(values) / comparison.ACCURACY + 1
        near = values[max(0, math.floor(rank - slack)) : math.ceil(rank + slack) + 1]
        assert found[name] in near, name
    return len(COUNTS) + len(MEASURED)


def changed(summary, about, key):
    (found,) = (each for each in summary.comparisons if each["about"] == about)
    return {row[key]: row["changed"] for row in found[f"{key}s"]}


def test_what_changed_is_marked_and_nothing_else(summary):
    period, deploy = (changed(summary, about, "task") for about in ("period", "deploy"))
    assert period["shop.steady"] == deploy["shop.steady"] == {}, "one outage is one step"
    assert period["shop.rare"] == {}
    waits = {"wait_p50": "more", "wait_p95": "more"}
    runs = {"run_p50": "more", "run_p95": "more"}
    assert period["shop.slow"].items() >= waits.items()
    assert deploy["shop.slow"].items() >= runs.items()
    assert deploy["shop.shaky"] == {"done": "less", "retried": "more"}
    assert changed(summary, "deploy", "queue")["calm"] == {}


def test_every_test_is_recomputed_from_the_steps(summary, made):
    """The p of each figure, with the ranks of the steps' figures counted pair by pair."""
    checked = 0
    for each in summary.comparisons:
        length = each["split"] - each["begin"]
        for row in each["tasks"]:
            steps = {}
            for event in made[1]:
                if event.task != row["task"] or not each["begin"] <= event.ts <= each["end"]:
                    continue
                after = event.ts >= each["split"]
                since = event.ts - (each["split"] if after else each["begin"])
                place = (after, min(STEPS - 1, int(since / length * STEPS)))
                steps.setdefault(place, []).append(event)
            for name, figure in PLAIN.items():
                sides = [
                    [
                        value
                        for at in range(STEPS)
                        if (value := figure(steps.get((after, at), []))) is not None
                    ]
                    for after in (False, True)
                ]
                expected = plain_p(*sides)
                if expected is None:
                    assert row["p"][name] is None
                else:
                    assert row["p"][name] == pytest.approx(expected, rel=1e-9), (row["task"], name)
                    checked += 1
    assert checked > 15


def number_of(events, *kinds):
    return sum(event.event in kinds for event in events)


def part_of(events, kinds, whole):
    return (
        number_of(events, *kinds) / number_of(events, *whole) if events_of(events, whole) else None
    )


def events_of(events, kinds):
    return [event for event in events if event.event in kinds]


RAN = ("succeeded", "failed", "resubmitted", "snoozed", "waiting")
ENDED = ("succeeded", "dead_lettered", "cancelled", "expired")
PLAIN = {
    "done": lambda events: float(number_of(events, "succeeded")),
    "retried": lambda events: part_of(events, ("resubmitted",), RAN),
    "dead_lettered": lambda events: part_of(events, ("dead_lettered",), ENDED),
}


def plain_p(before, after):
    if min(len(before), len(after)) < LEAST_STEPS:
        return None
    wins = sum((b < a) + (b == a) / 2 for b, a in itertools.product(before, after))
    every = before + after
    ties = sum(each**3 - each for each in map(every.count, set(every)))
    total, pairs = len(every), len(before) * len(after)
    variance = pairs / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance == 0:
        return 1.0
    distance = max(0.0, abs(wins - pairs / 2) - 0.5) / math.sqrt(variance)
    return math.erfc(distance / math.sqrt(2))


def test_the_p_is_near_that_of_all_orders():
    """The exact test counts, of all ways to choose the steps after the split, the extreme ones."""
    draw = random.Random(8)
    for shift in (0.0, 0.5, 1.0, 2.0):
        before = [draw.gauss(0, 1) for _ in range(6)]
        after = [draw.gauss(shift, 1) for _ in range(6)]
        every = sorted(before + after)
        ranks = [every.index(value) for value in after]
        middle = len(after) * (len(every) - 1) / 2
        sums = [sum(chosen) for chosen in itertools.combinations(range(12), 6)]
        exact = sum(abs(each - middle) >= abs(sum(ranks) - middle) for each in sums) / len(sums)
        found = rank_sum(before, after)
        assert found[0] == pytest.approx(exact, abs=0.02)


def test_chance_alone_is_seldom_marked():
    """Ten queues with seven figures each that did not change, many times: 1 % of tables."""
    draw = random.Random(5)
    marked = 0
    for _ in range(100):
        found = [
            rank_sum(*([draw.lognormvariate(0, 1) for _ in range(STEPS)] for _ in range(2)))[0]
            for _ in range(70)
        ]
        marked += discoveries(found) >= 0
    assert marked <= 4


def test_too_few_and_equal_steps_say_nothing():
    assert rank_sum([1.0] * 4, [5.0] * 20) is None
    assert rank_sum([0.0] * 20, [0.0] * 20)[0] == 1.0
    assert discoveries([]) == discoveries([0.02, 0.5]) == -1.0
    assert discoveries([0.001, 0.9, 0.006]) == 0.006


@pytest.mark.parametrize(
    ("period", "deploy", "expected"),
    [
        (None, None, [Span("period", 100, 200, 300)]),
        (50.0, None, [Span("period", 200, 250, 300)]),
        (1000.0, None, [Span("period", 100, 200, 300)]),
        (None, 280.0, [Span("period", 100, 200, 300), Span("deploy", 260, 280, 300)]),
        (50.0, 180.0, [Span("period", 200, 250, 300), Span("deploy", 130, 180, 230)]),
    ],
)
def test_both_spans_are_as_long_and_within_the_log(period, deploy, expected):
    assert spans_of(100.0, 300.0, period=period, deploy=deploy) == expected


def test_a_log_without_length_has_no_periods():
    assert spans_of(100.0, 100.0) == []


@pytest.mark.parametrize("deploy", [99.0, 100.0, 300.0, 1e12])
def test_a_deploy_outside_the_log_is_refused(deploy):
    with pytest.raises(ConfigurationError, match="not within the log"):
        spans_of(100.0, 300.0, deploy=deploy)


def test_the_driver_gets_the_busiest_only(spark, tmp_path, monkeypatch):
    events = [
        Event("succeeded", f"{task}-{n}", f"t{task}", "q", ts=BEGIN + n, worker="w",
              id=f"{task}-{n}", duration_seconds=0.1)
        for task in range(5) for n in range(10 + task)
    ]  # fmt: skip
    write_log(tmp_path, events)
    monkeypatch.setattr(comparison, "MOST_ROWS", 2)
    read = read_events(spark, tmp_path).events
    (found,) = compare(read, spans_of(BEGIN, BEGIN + 13))
    assert [row["task"] for row in found["tasks"]] == ["t4", "t3"]


def test_the_command_and_the_page(spark, made, tmp_path, capsys):
    page = tmp_path / "report.html"
    about = ["--deploy", "2026-09-21T00:00Z"]
    assert run(["spark", "stats", str(made[0]), *about]) == 4
    assert "not within the log" in capsys.readouterr().err
    when = datetime.fromtimestamp(DEPLOY, UTC).replace(tzinfo=None).isoformat()
    stats = ["spark", "stats", str(made[0]), "--period", "30m", "--deploy", when]
    assert run([*stats, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    period, deploy = found["comparisons"]
    assert deploy["split"] == DEPLOY
    assert period["end"] - period["split"] == period["split"] - period["begin"] == 1800
    for dark in (False, True):
        with opened(page.as_uri(), dark=dark) as shown:
            text = shown.locator("section", has_text="Before and after the deploy").inner_text()
            assert "done" in text
            marked = shown.locator("section", has_text="the one before it").locator("td.warn")
            assert marked.count() >= 1
            assert ", more" in marked.first.text_content()
    assert run(stats) == 0
    out = capsys.readouterr().out
    assert "(deploy)" in out
    shaky = [each for each in out.splitlines() if each.startswith("shop.shaky")]
    assert any(", more" in each for each in shaky)


def test_a_page_without_comparisons_has_no_such_section(summary):
    assert render(summary).count("is larger than chance") == 2
    assert "is larger than chance" not in render(replace(summary, comparisons=[]))
