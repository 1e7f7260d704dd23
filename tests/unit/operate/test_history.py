"""The history as the dashboard, the command line and agents show it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from aztask import App
from aztask.agents.queries import ask
from aztask.dashboard.access import Account, Logins
from aztask.dashboard.pages import charts
from aztask.dashboard.site import Ask, Site
from aztask.errors import ConfigurationError
from aztask.operate import controls
from aztask.operate.history import HistoryView, history, marks
from aztask.operate.requests import Role
from aztask.stores.records.backlogs import Backlogs
from aztask.stores.records.base import WorkerRecord
from aztask.stores.records.history import history_of
from aztask.stores.records.tallies import HOUR, Author, Hour, Tally, bucket_of

NOW = time.time() // HOUR * HOUR + 1800.0
"""The middle of an hour."""


def done(app: App, worker: str, at: float, queue: str, task: str, **counts: int) -> None:
    """Write what a worker did in one slot, as the one thing that it did in that hour."""
    begins = int(at // HOUR) * HOUR
    slot = int(at // 10) * 10
    runs = {bucket_of(0.5): counts.get("succeeded", 0)}
    tally = Tally(**counts, runs=runs, waits={bucket_of(2.0): 1})
    hour = Hour(Author(worker, begins, "1.0"), {(queue, task): {slot: tally}})
    kept = history_of(app.results)
    assert kept is not None
    kept.write(f"{worker}!{begins}", begins, hour, at)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    place = f"local://{tmp_path}/q.db"
    made = App("shop", broker=place, results=place)
    made.broker.declare("default")
    yield made
    made.close()


@pytest.fixture
def full(app: App) -> App:
    """Something in each window; all but the last two hours are merged."""
    done(app, "a", NOW - 600, "orders", "pay", succeeded=6, failed=1, retried=2, lost=1)
    done(app, "b", NOW - 1200, "orders", "ship", succeeded=3)
    done(app, "a", NOW - 5 * HOUR, "mail", "send", succeeded=10)
    done(app, "b", NOW - 3 * 24 * HOUR, "orders", "pay", succeeded=100)
    done(app, "b", NOW - 20 * 24 * HOUR, "orders", "pay", succeeded=1000)
    done(app, "b", NOW - 40 * 24 * HOUR, "orders", "pay", succeeded=10_000)
    kept = history_of(app.results)
    assert kept is not None
    assert kept.merge("m", NOW) == 4
    Backlogs(kept).add("orders", time.time(), 7)
    return app


def counts(view: HistoryView) -> dict[str, tuple[int, int]]:
    return {name: (each.ended, each.failed) for name, each in view.figures()}


@pytest.mark.parametrize(
    ("window", "by", "found"),
    [
        ("hour", "task", {"pay": (9, 1), "ship": (3, 0)}),
        ("hour", "queue", {"orders": (12, 1)}),
        ("hour", "worker", {"a": (9, 1), "b": (3, 0)}),
        ("day", "queue", {"orders": (12, 1), "mail": (10, 0)}),
        ("day", "worker", {"a": (19, 1), "b": (3, 0)}),
        ("week", "task", {"pay": (109, 1), "send": (10, 0), "ship": (3, 0)}),
        ("30d", "queue", {"orders": (1112, 1), "mail": (10, 0)}),
    ],
)
def test_a_window_has_what_was_done_in_it(
    full: App, window: str, by: str, found: dict[str, tuple[int, int]]
) -> None:
    view = history(full, window, by, now=NOW)
    assert counts(view) == found
    assert list(counts(view)) == sorted(found, key=lambda name: (-found[name][0], name))
    shown = [each for each in view.points if each is not None]
    assert sum(each.ended for each in shown) == view.figure.ended
    assert len(view.times) == len(view.points) == view.window.seconds // view.window.step
    assert view.times[0] == view.begins <= NOW - view.window.seconds + view.window.step
    # Merged or not, it is the same.
    kept = history_of(full.results)
    assert kept is not None
    kept.merge("m", NOW + HOUR)
    assert counts(history(full, window, by, now=NOW)) == found


def test_a_view_is_narrowed(full: App) -> None:
    assert counts(history(full, "week", "task", {"queue": "orders"}, now=NOW)) == {
        "pay": (109, 1),
        "ship": (3, 0),
    }
    assert counts(history(full, "hour", "queue", {"worker": "b"}, now=NOW)) == {"orders": (3, 0)}
    assert counts(history(full, "day", "worker", {"worker": "b"}, now=NOW)) == {"b": (3, 0)}
    assert history(full, "week", "queue", {"task": "no such"}, now=NOW).figure.ended == 0


@pytest.mark.parametrize(
    ("window", "by", "conditions", "why"),
    [
        ("year", "task", {}, "give one of hour, day, week, 30d"),
        ("day", "tenant", {}, "give one of queue, task, worker"),
        ("week", "worker", {}, "workers are kept for a day"),
        ("day", "worker", {"queue": "orders"}, "of one worker are kept for an hour"),
        ("day", "task", {"worker": "a"}, "of one worker are kept for an hour"),
    ],
)
def test_a_question_that_it_cannot_answer_says_so(
    app: App, window: str, by: str, conditions: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        history(app, window, by, conditions)


def test_gaps_are_no_zeros_and_the_last_point_counts_what_has_passed(full: App) -> None:
    view = history(full, "hour", "task", now=NOW)
    chart = view.chart()
    assert {name: len(each) for name, each in chart.items()} == dict.fromkeys(chart, 180)
    assert [each for each in chart["ended"] if each is not None] == [3 / 20, 9 / 20]
    assert chart["failed"].count(0.0) == 1
    assert [each for each in chart["wait_95"] if each is not None] == [
        pytest.approx(2.0, rel=0.2)
    ] * 2
    done(full, "c", NOW, "orders", "pay", succeeded=8)
    assert history(full, "hour", "task", now=NOW + 4.0).chart()["ended"][-1] == 8 / 4.0


def test_what_happened_beside_is_marked(full: App) -> None:
    now = time.time()
    assert full.results is not None
    for name, seen in (("gone", now - 300), ("alive", now), ("old", now - 2 * HOUR)):
        full.results.heartbeat(WorkerRecord(name, now - 900, seen, ("default",), 0, 5))
    controls.pause(full, controls.Names(queues=["default"]), checked=False).act(by="ann")
    for name in "abcde":
        done(full, f"pod-{name}", now, "orders", "pay", succeeded=1)
    view = history(full, "hour", now=now)
    found = marks(full, view)
    assert [each.at for each in found] == sorted(each.at for each in found)
    texts = {each.kind: each.text for each in found}
    assert texts["pause"].endswith("by ann")
    assert texts["silent"] == "worker gone reported for the last time"
    if now % HOUR > 1:  # the workers' first second is in the window
        assert "started, aztask 1.0" in texts["deploy"]


def test_a_deploy_names_the_versions_of_the_app(full: App) -> None:
    begins, kept = int(NOW // HOUR) * HOUR, history_of(full.results)
    assert kept is not None
    for number, release in enumerate(("1.0 shop-7", "1.0 shop-7", "1.1 shop-8")):
        hour = Hour(Author(f"pod-{number}", int(NOW) - 9, release))
        hour.series["orders", "pay"] = {begins: Tally(succeeded=1)}
        kept.write(f"pod-{number}", begins, hour, NOW)
    texts = [each.text for each in marks(full, history(full, "hour", now=NOW + 1.0))]
    assert texts[-1].endswith(
        "3 workers started, shop-7 (aztask 1.0), shop-8 (aztask 1.1): pod-0, pod-1, pod-2"
    )


def test_the_page_the_command_and_agents_have_the_same_figures(
    cli: Any, full: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZTASK_BROKER", "AZTASK_RESULTS"):
        monkeypatch.setenv(name, f"local://{tmp_path}/q.db")
    for window, by in (("hour", "task"), ("day", "worker"), ("week", "queue")):
        view = history(full, window, by)
        found = {name or None: asdict(each) for name, each in [("", view.figure), *view.figures()]}
        lines = cli("stats", "--json", "--window", window, "--by", by).out.splitlines()
        command = {}
        for line in map(json.loads, lines):
            assert line.pop("window") == window
            command[line.pop(by)] = line
        waited = command[None].pop("waiting")
        assert waited == {"most": 7, "most_at": ANY, "last": 7, "last_at": ANY}
        assert 0 <= waited["last_at"] - waited["most_at"] < 120
        assert command == found
        answer = ask(full, "history", {"window": window, "by": by})
        agents: dict[str | None, Any] = {each.pop(by): each for each in answer["items"]}
        agents[None] = answer["total"]
        assert {name: each["ended"] for name, each in agents.items()} == {
            name: each["ended"] for name, each in found.items()
        }
        assert (answer["waiting"]["most"], answer["waiting"]["last"]) == (7, 7)
        assert agents[None]["run_95"] == round(view.figure.run_95 or 0.0, 3)
        visitor = Logins({"a": Account(Role.READ, "")})
        asked = Ask("/history.json", {"window": window, "by": by}, visitor)  # type: ignore[arg-type]
        drawn = charts(Site(full), asked)
        assert drawn["times"] == view.times
        assert {each for each in drawn["waiting"] if each is not None} == {7}
        assert drawn["ended"][:-1] == view.chart()["ended"][:-1]


def test_as_a_table(cli: Any, full: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZTASK_BROKER", "AZTASK_RESULTS"):
        monkeypatch.setenv(name, f"local://{tmp_path}/q.db")
    lines = cli("stats", "--window", "week", "--by", "queue", "--queue", "orders").out.splitlines()
    assert lines[0].split()[:4] == ["QUEUE", "RUNS", "FAILED", "RETRIED"]
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["(all)", "112", "1"],
        ["orders", "112", "1"],
    ]
    assert "started, aztask 1.0" in lines[-1]
    answer = cli("stats", "--window", "week", "--by", "worker")
    assert answer.code == 4
    assert "workers are kept for a day" in answer.err


def test_without_history_the_page_says_so_and_a_store_without_rows_too(app: App) -> None:
    assert history(app).figure.ended == 0
    assert history(app).figure.wait_95 is None
    nothing = App("x", broker="local://:memory:")
    with pytest.raises(ConfigurationError):
        history(nothing)
    nothing.close()
