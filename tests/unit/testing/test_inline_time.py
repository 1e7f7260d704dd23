"""The clock of inline mode: only `advance` moves it, and schedules follow it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from aztask import App, Context
from aztask.errors import ConfigurationError
from aztask.support import clock

NOON = datetime(2026, 1, 9, 12, tzinfo=UTC)


@pytest.fixture
def app() -> Iterator[App]:
    made = App("shop", broker="local://:memory:")

    @made.task_with_context(name="report")
    def report(context: Context, region: str) -> float:
        assert context.scheduled_at is not None
        return context.scheduled_at.timestamp()

    @made.task(name="store")
    def store(at: float) -> float:
        return at

    @made.task(name="index", unique="arguments", debounce=30)
    def index(shop: str) -> str:
        return shop

    yield made
    made.close()


def ids(found: list[object]) -> list[str]:
    return [each.id.partition("@")[2] for each in found]  # type: ignore[attr-defined]


def test_a_schedule_is_due_when_time_is_moved_there(app: App) -> None:
    report = app.tasks["report"]
    app.schedule("nightly", report.s("eu"), cron="0 2 * * *", tz="Europe/Berlin")
    with app.inline(now=NOON) as inline:
        assert inline.now == NOON
        inline.run()
        inline.advance(timedelta(hours=12, minutes=59))
        inline.assert_not_sent(report)
        inline.advance(60)
        inline.assert_sent(report, "eu")
        assert app.result("shop.nightly@2026-01-10T01:00:00Z").get() == 1768006800.0
        inline.advance(timedelta(days=3))
        assert len(inline.sent_to(report)) == 4
        assert inline.now == NOON + timedelta(days=3, hours=13)


def test_each_occurrence_comes_in_its_turn_with_what_else_is_due(app: App) -> None:
    report, index = app.tasks["report"], app.tasks["index"]
    app.schedule("hourly", report.s("eu"), every=3600)
    with app.inline(now=NOON) as inline:
        index.delay("a")
        late = index.with_options(delay=5400).delay("b")
        inline.advance(7200)
        assert late.state == "succeeded"
        assert ids(inline.sent_to(report)) == ["2026-01-09T13:00:00Z", "2026-01-09T14:00:00Z"]


def test_a_schedule_that_is_made_in_the_block(app: App) -> None:
    report = app.tasks["report"]
    with app.inline(now=NOON) as inline:
        app.schedules.create("poll", report.s("us"), every=60)
        inline.advance(150)
        assert len(inline.sent_to(report)) == 2
        app.schedules.pause("poll")
        inline.advance(600)
        assert len(inline.sent_to(report)) == 2
        assert app.schedules.delete("poll")
        inline.advance(600)
    assert app.schedules.declared == {}


def test_a_schedule_of_a_workflow(app: App) -> None:
    report, store = app.tasks["report"], app.tasks["store"]
    app.schedule("import", report.s("eu") | store.s(), at=NOON + timedelta(minutes=5))
    with app.inline(now=NOON) as inline:
        inline.advance(299)
        assert inline.sent == []
        inline.advance(1)
        workflow = app.workflows.result("shop.import@2026-01-09T12:05:00Z")
        assert workflow.get() == (NOON + timedelta(minutes=5)).timestamp()


@pytest.mark.parametrize(("overlap", "runs"), [("allow", 4), ("skip", 2), ("queue", 2)])
def test_overlap_looks_at_the_task_that_still_waits(app: App, overlap: str, runs: int) -> None:
    report = app.tasks["report"]
    call = report.s("eu").with_options(delay=90)
    app.schedule("poll", call, every=30, overlap=overlap)
    with app.inline(now=NOON) as inline:
        inline.advance(121)
        assert len(inline.sent_to(report)) == runs


def test_debounced_calls_are_one_task_after_the_quiet_time(app: App) -> None:
    index = app.tasks["index"]
    with app.inline() as inline:
        results = [index.delay("a") for _ in range(3)]
        inline.advance(29)
        assert {each.state for each in results} == {"pending"}
        inline.advance(timedelta(seconds=2))
        assert {each.get() for each in results} == {"a"}
        assert len({each.id for each in results}) == 1


def test_an_eta_counts_from_the_time_of_the_block(app: App) -> None:
    with app.inline(now=NOON) as inline:
        later = app.tasks["store"].with_options(eta=NOON + timedelta(hours=1)).delay(1.0)
        inline.advance(3599)
        assert later.state == "pending"
        inline.advance(1)
        assert later.state == "succeeded"


def test_the_clock_is_the_machines_again_after_the_block(app: App) -> None:
    with app.inline(now=NOON):
        assert clock.wall() == NOON.timestamp()
    assert abs(clock.wall() - time.time()) < 5
    with pytest.raises(ConfigurationError, match="a datetime with a time zone"):
        app.inline(now=datetime(2026, 1, 9))
