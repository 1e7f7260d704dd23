"""The states in which a schedule is shown: one time that has passed is never active."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from aztask import App
from aztask.errors import MessageTooLarge
from aztask.operate.findings import schedule_findings
from aztask.schedules.states import state_of
from aztask.support.finding import Level

PAST = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def app():
    made = App("shop", broker="local://:memory:", results="local://:memory:")

    @made.task
    def report(region="eu"):
        return region

    made.report = report
    yield made
    made.close()


def turns(app, count=2):
    """What a worker does for schedules."""
    runner = app.schedules.runner("worker")
    for _ in range(count):
        runner._look_at = 0.0
        runner.turn()
    return runner


def state(app, name="s"):
    engine, view = app.schedules.engine, app.schedules.view(name)
    return state_of(engine, view, engine.store.now())


def findings(app):
    return {each.check: each for each in schedule_findings(app, app.results, named=True)}


def change(app, **fields):
    full = app.schedules.full_name("s")
    app.schedules.engine.change(full, lambda view: replace(view.schedule, **fields))


def test_a_time_that_had_passed_is_missed(app):
    app.schedule("s", app.report.s(), at=PAST)
    turns(app)
    assert state(app) == "missed"
    assert app.schedules.view("s").schedule.made == 0
    found = findings(app)["missed"]
    assert found.level is Level.WARNING
    assert "shop.s" in found.text
    assert "trigger" in found.advice


def test_so_it_is_when_it_was_made_at_run_time(app):
    app.schedules.create("s", app.report.s(), at=PAST)
    assert state(app) == "missed"


def test_a_time_to_come_is_active_and_ended_once_it_was_sent(app):
    at = datetime.now(UTC) + timedelta(hours=1)
    app.schedule("s", app.report.s(), at=at)
    runner = turns(app)
    assert state(app) == "active"
    assert "missed" not in findings(app)
    app.schedules.engine.store.now = lambda: at.timestamp() + 5.0
    runner._look_at = 0.0
    runner.turn()
    assert state(app) == "ended"
    assert findings(app).keys() == {"schedules"}
    assert len(app.broker.peek("default")) == 1


def test_a_time_that_passed_while_it_was_paused_is_missed_once_it_is_resumed(app):
    at = datetime.now(UTC) + timedelta(hours=1)
    app.schedules.create("s", app.report.s(), at=at)
    app.schedules.pause("s")
    app.schedules.engine.store.now = lambda: at.timestamp() + 5.0
    assert state(app) == "paused"
    app.schedules.resume("s")
    assert state(app) == "missed"


def test_one_that_was_missed_or_has_ended_is_paused_like_any_other(app):
    app.schedules.create("s", app.report.s(), at=PAST)
    app.schedules.pause("s")
    assert state(app) == "paused"
    app.schedules.resume("s")
    assert state(app) == "missed"


def test_a_task_that_was_sent_by_hand_is_not_that_of_the_time(app):
    app.schedules.create("s", app.report.s(), at=PAST)
    app.schedules.trigger("s")
    assert state(app) == "missed"
    app.schedules.backfill("s", PAST, PAST + timedelta(seconds=1))
    assert state(app) == "ended"


def test_one_that_is_sent_at_its_very_time_has_ended(app):
    at = datetime(2030, 1, 2, tzinfo=UTC)
    app.schedules.create("s", app.report.s(), at=at)
    engine = app.schedules.engine
    engine.store.now = at.timestamp
    view = engine.fire(app.schedules.view("s"), "worker")
    engine.send(view, view.open[0])
    assert app.schedules.view("s").schedule.watermark == at.timestamp()
    assert state(app) == "ended"


def test_one_that_could_not_be_sent_is_missed(app, monkeypatch):
    app.schedules.create("s", app.report.s(), at=PAST)

    def refuse(*arguments):
        raise MessageTooLarge("it is too large")

    monkeypatch.setattr(app.sends, "send_occurrence", refuse)
    assert app.schedules.backfill("s", PAST, PAST + timedelta(seconds=1)) == []
    assert state(app) == "missed"
    monkeypatch.undo()
    app.schedules.trigger("s")
    assert state(app) == "missed", "a task that was sent by hand is another one"


def test_an_occurrence_that_is_not_sent_yet_is_active(app):
    at = datetime.now(UTC) + timedelta(minutes=1)
    app.schedule("s", app.report.s(), at=at)
    turns(app)
    engine = app.schedules.engine
    engine.store.now = lambda: at.timestamp() + 5.0
    view = engine.fire(app.schedules.view("s"), "worker")
    assert view.open
    assert state(app) == "active"


def test_a_definition_that_cannot_be_read_keeps_the_state_of_its_row(app):
    app.schedules.create("s", app.report.s(), at=PAST)
    change(app, template=b"damaged")
    assert state(app) == "active"  # `aztask schedule list` shows it as unreadable


def test_schedules_of_other_times_are_as_before(app):
    app.schedules.create("s", app.report.s(), every=60)
    assert state(app) == "active"
    app.schedules.pause("s")
    assert state(app) == "paused"
