"""The geometry of the report's charts: marks add up and keep within the chart."""

import pytest

from aztask.spark.report import charts
from aztask.spark.report.charts import (
    MAX_LENGTH,
    Circle,
    Label,
    Line,
    LogScale,
    MarkGroup,
    Rect,
    round_up,
)

HOSTILE = "<b>\x1b[31m\n\u202e" + 200 * "x"
COUNTS = dict.fromkeys((each.column for each in charts.OUTCOMES), 0)


def of(chart, kind):
    """The marks of a kind, those of groups included."""
    marks = [part for mark in chart.marks for part in getattr(mark, "marks", [mark])]
    return [mark for mark in marks if isinstance(mark, kind)]


def test_scales():
    assert round_up(565) == 600
    scale = LogScale([0.02, 5.0], 0.0, 300.0)
    assert scale.ticks() == pytest.approx([0.01, 0.1, 1.0, 10.0])
    assert scale.at(0.1) == pytest.approx(100.0)
    assert scale.at(0.0) == 0.0


def test_outcomes_over_time_are_stacked_in_their_step():
    rows = [
        {**COUNTS, "at": 0, "succeeded": 75, "failed": 25},
        {**COUNTS, "at": 120, "succeeded": 50},
    ]
    chart = charts.outcomes_over_time(rows, 60)
    first, failed, later = of(chart, Rect)
    assert [first.style, failed.style, later.style] == ["ok", "bad", "ok"]
    assert first.x == failed.x < later.x
    assert failed.y + failed.height == pytest.approx(first.y)
    assert first.height == pytest.approx(3 * failed.height)
    assert later.height == pytest.approx(2 * failed.height)
    assert failed.tip == "1970-01-01 00:00:00: 25 failed"


def test_outcome_shares_fill_the_same_width_for_every_task():
    rows = [{**COUNTS, "task": "a", "succeeded": 3, "failed": 1}, {**COUNTS, "task": "b"}]
    rows[1]["cancelled"] = 9
    bars = of(charts.outcome_shares(rows), Rect)
    assert sum(bar.width for bar in bars[:2]) == pytest.approx(bars[2].width)
    assert [bar.tip for bar in bars] == [
        "a: 3 succeeded (75.0 %)", "a: 1 failed (25.0 %)", "b: 9 cancelled (100.0 %)"
    ]  # fmt: skip


def test_a_spread_goes_from_the_median_to_the_longest():
    row = {"task": "a", "run_p50": 0.1, "run_p90": 1.0, "run_p99": 10.0, "run_max": 100.0}
    none = {"task": "b", **dict.fromkeys(("run_p50", "run_p90", "run_p99", "run_max"))}
    chart = charts.spreads("Run times by task", [row, none], "task", "run")
    (group,) = [mark for mark in chart.marks if isinstance(mark, MarkGroup)]
    assert group.tip == "a: median 100 ms, 90th percentile 1 s, 99th 10 s, longest 100 s"
    p90, p99 = of(chart, Rect)
    assert p90.x + p90.width == pytest.approx(p99.x)
    assert p90.width == pytest.approx(p99.width)  # a factor of ten each
    assert p99.x + p99.width < of(chart, Circle)[0].x


def test_a_margin_below_zero_is_marked():
    row = {"queue": "q", "lease_max": 60.0, "margin_p01": 1.0, "margin_p10": 5.0}
    late = {**row, "margin_min": -2.0, "margin_p50": 50.0}
    fine = {**row, "margin_min": 1.0, "margin_p50": 50.0}
    chart = charts.margins([late, fine])
    assert [dot.style for dot in of(chart, Circle)] == ["dotbad", "dot"]
    assert of(chart, Rect)[0].style == "danger"
    assert all(0 <= line.x1 <= charts.WIDTH and 0 <= line.x2 <= charts.WIDTH
               for line in of(chart, Line))  # fmt: skip


def test_more_runs_are_darker():
    rows = [
        {"queue": "q", "hour": hour * 3600, "runs": runs} for hour, runs in enumerate((0, 1, 4))
    ]
    assert [cell.opacity for cell in of(charts.runs_by_hour(rows), Rect)] == pytest.approx(
        [0.05, 0.56, 1.0]
    )


def test_names_from_events_are_one_short_line_without_control_characters():
    rows = [{"queue": HOSTILE, "hour": 0, "runs": 1}]
    chart = charts.runs_by_hour(rows)
    texts = [mark.text for mark in of(chart, Label)] + [mark.tip for mark in of(chart, Rect)]
    for text in texts:
        assert not set("\x1b\n\u202e") & set(text)
        assert len(text) < MAX_LENGTH + 20  # cut before its escapes are written
    assert any("<b>" in text for text in texts)  # escaping is the templates' work
