"""The page shows names from events as text, and numbers as a person writes them."""

import configparser
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import dom_of
from events_reference import Group
from events_site import random_event

from aztask.spark.events.statistics import SPREADS
from aztask.spark.report import charts
from aztask.spark.report import page as page_module
from aztask.spark.report.page import render
from aztask.spark.report.summary import MAX_STEPS, STEPS, Summary, step_of
from aztask.stores.events.event import Event

HOSTILE = (
    '</title><script>document.title="got"</script><img src=x onerror=alert(1)>"\'&\x1b[31m\u202e'
)


def row_of(events, **keys):
    """A row of figures, made in plain Python."""
    group = Group()
    for event in events:
        group.add(event)
    row = {**keys, **group.exact()}
    for name, shares in SPREADS.items():
        values = sorted(group.measures[name])
        for share, part in shares.items():
            row[f"{name}_{share}"] = values[int(part * (len(values) - 1))] if values else None
    return row


def summary_of(events, name="shop.resize", queue="default", place="events"):
    times = sorted(event.ts for event in events)
    step = step_of(times[-1] - times[0])
    at = math.floor(times[0] / step) * step
    counts = {"events": len(events), "files": 1, "compacted_files": 0, "duplicates": 0}
    return Summary(
        place,
        {**counts, "odd": {"torn line": 2}, "skipped": {name: 1}},
        row_of(events),
        [row_of(events, task=name)],
        [row_of(events, queue=queue)],
        [row_of(events, queue=queue, hour=int(times[0] // 3600) * 3600)],
        [{"task": name, "error_type": name, "runs": 3}],
        [{**row_of(events), "at": at, "wait": [0.1, 0.2], "run": None}],
        step,
        signatures=[
            {"task": name, "signature": name, "runs": 3, "first": times[0], "last": times[-1],
             "sample": name, "task_id": name}
        ],
        workers=[
            {"worker": name, "runs": 5, "failed": 1, "retried": 2, "lost": 1, "silence": 90.0,
             "untold": 2, "run_p50": None, "first": times[0], "last": times[-1]}
        ],
    )  # fmt: skip


def some_events(number=400):
    draw = random.Random(9)
    return [random_event(draw, each) for each in range(number)]


class Tags(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.names = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}


def test_hostile_names_are_text(tmp_path):
    page = render(summary_of(some_events(), HOSTILE, HOSTILE, HOSTILE), made_at=0.0)
    found = Tags(page)
    assert page.count("&lt;script&gt;") > 10
    assert not {"script", "img", "iframe", "link", "object"} & set(found.tags)
    assert not {name for name in found.names if name.startswith("on")} | (
        {"src", "href"} & found.names
    )
    assert "\x1b" not in page
    assert "\u202e" not in page
    path = tmp_path / "page.html"
    path.write_text(page)
    dom = dom_of(path)
    assert "<title>Tasks: " in dom
    assert "got</title>" not in dom
    assert "<img" not in dom


def test_a_worker_that_was_frozen_stands_out_and_errors_have_a_sample():
    page = render(summary_of(some_events()), made_at=0.0)
    assert re.search(r'<td class="warn">1.5 min</td>|<td class="warn">90 s</td>', page)
    assert "<h2>Errors</h2>" in page
    assert "Failures by queue and hour" in page


def test_a_page_is_the_same_for_the_same_figures():
    summary = summary_of(some_events())
    assert render(summary, made_at=5.0) == render(summary, made_at=5.0)


def test_every_chart_has_a_title_for_those_who_do_not_see_it():
    page = render(summary_of(some_events()), made_at=0.0)
    drawn = re.findall(r'<svg[^>]*role="img"[^>]*aria-labelledby="(\w+)"><title id="(\w+)">', page)
    assert len(drawn) == 9
    assert all(label == title for label, title in drawn)
    assert len({title for _, title in drawn}) == 9


@pytest.mark.parametrize(
    "events",
    [
        [Event("enqueued", "t", "", "", ts=1.0, id="1")],
        [Event("dead_lettered", "t", "", "q", ts=-5.0, id="1")],
        [
            Event("succeeded", "t", "t", "q", ts=ts, id=str(ts), duration_seconds=0.0,
                  margin_seconds=-3.0, held_seconds=0.0)
            for ts in (0.0, 9e14)
        ],
    ],
    ids=["one enqueued", "undecodable", "clocks at both ends"],
)  # fmt: skip
def test_odd_logs_make_a_page_too(events):
    page = render(summary_of(events))
    assert page.endswith("</html>\n")
    assert "nan" not in page.replace("resonance", "")


@pytest.mark.parametrize("name", ["page.html", "chart.svg"])
def test_templates_escape_every_value(name):
    """No template may mark a text as safe, or switch escaping off."""
    source = Path(page_module.__file__).parent.joinpath("templates", name).read_text()
    assert not re.search(r"\|\s*safe|autoescape|Markup", source)


def test_templates_are_in_the_wheel():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    patterns = setup["options.package_data"]["aztask.spark.report"].split()
    report = Path(page_module.__file__).parent
    packed = {path for pattern in patterns for path in report.glob(pattern)}
    other = {path for path in report.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert packed
    assert packed == {path for path in other if path.suffix != ".py"}


def test_no_events_make_a_page_that_says_so():
    counts = {"events": 0, "files": 0, "compacted_files": 0, "duplicates": 0, "odd": {}}
    empty = Summary("x", {**counts, "skipped": {}}, None, [], [], [], [], [], 1)
    assert "There are no events" in render(empty)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.0, "0 s"),
        (0.0000123, "12.3 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (-3.0, "-3 s"),
        (300.0, "5 min"),
        (7200.0, "2 h"),
        (864000.0, "10 d"),
    ],
)
def test_durations(value, shown):
    assert charts.seconds(value) == shown


def test_shares_and_moments():
    assert charts.share(0.00001) == "< 0.01 %"
    assert charts.share(0.0) == "0.00 %"
    assert charts.share(0.5) == "50.0 %"
    assert charts.moment(9e18) == "9e+18"
    assert charts.per_second(0.01) == "36/h"


def test_steps_are_few():
    for span in (0.0, 1.0, 59.0, 86400.0, 4e6):
        step = step_of(span)
        assert step in STEPS
        assert span / step <= MAX_STEPS


def test_what_runs_that_were_cut_off_do_not_tell_is_beyond_the_longest():
    row = {"task": "t", "run_p50": 1.0, "run_p90": None, "run_p99": None, "run_max": 60.0}
    shown = charts.spreads("Run", [row], "task", "run")
    (group,) = [mark for mark in shown.marks if hasattr(mark, "marks")]
    beyond = f"> {charts.seconds(60.0)}"
    assert f"99th {beyond}" in group.tip
    assert [mark.text for mark in group.marks if hasattr(mark, "text")][-1] == beyond
