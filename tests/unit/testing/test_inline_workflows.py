"""Inline mode runs workflows: each task at once, through the real engine."""

import pytest

from aztask import App, RetryPolicy, chain, chord, group
from aztask.errors import ResultTimeout, TaskCancelled, TaskFailed


@pytest.fixture
def app():
    """An app whose broker cannot be reached: nothing may leave the process."""
    app = App("shop", broker="servicebus://nowhere.invalid", retry=RetryPolicy(1, delay=100.0))
    app.runs = []

    @app.task(name="shop.add")
    def add(a: int, b: int) -> int:
        app.runs.append(("add", a, b))
        return a + b

    @app.task(name="shop.total")
    def total(values: list) -> str:
        return " ".join("error" if isinstance(each, Exception) else str(each) for each in values)

    @app.task(name="shop.fail")
    def fail(value: int) -> None:
        app.runs.append(("fail", value))
        raise ValueError(f"{value} is wrong")

    @app.task(name="shop.alarm")
    def alarm(failures: list) -> None:
        app.runs.append(("alarm", failures[0]["error"]))

    app.add, app.total, app.fail, app.alarm = add, total, fail, alarm
    return app


def test_a_workflow_runs_at_its_start(app):
    with app.inline() as inline:
        graph = chain(app.add.s(1, 1), group(app.add.s(n) for n in range(3)), app.total.s())
        result = graph.delay(workflow_id="w")
        assert result.ready()
        assert result.get(timeout=0) == "2 3 4"
        assert [each.id for each in inline.sent] == ["w.1", "w.3", "w.4", "w.5", "w.6"]
        assert inline.assert_sent(app.add, 2).id == "w.5"
        assert graph.delay(workflow_id="w").get(timeout=0) == "2 3 4"
        assert len(app.runs) == 4, "a known workflow is not started again"


def test_failures_go_to_on_error_and_into_the_list(app):
    with app.inline():
        result = chord([app.fail.s(1)], app.total.s(), on_error=app.alarm.s()).delay()
        with pytest.raises(TaskFailed, match="1 is wrong"):
            result.get()
        assert app.runs == [("fail", 1), ("fail", 1), ("alarm", "1 is wrong")]
        members = [app.add.s(1, 1), app.fail.s(2)]
        result = chord(members, app.total.s(), return_errors=True).delay()
        assert result.get() == "2 error"


def test_a_delayed_task_of_a_workflow_waits_for_its_time(app):
    with app.inline() as inline:
        later = app.add.s(1).with_options(delay=60)
        result = chain(app.add.s(1, 1), later, app.add.s(1)).delay()
        assert result.progress.done == 1, "the tasks of a chain count as they end"
        assert len(app.runs) == 1
        with pytest.raises(ResultTimeout, match="nothing is due"):
            result.get()
        inline.advance(59)
        assert not result.ready()
        inline.advance(1)
        assert result.get(timeout=0) == 4


def test_a_cancelled_workflow_starts_nothing_more(app):
    with app.inline() as inline:
        result = chain(app.add.s(1, 1), app.add.s(1).with_options(delay=60)).delay()
        assert result.cancel()
        inline.advance(60)
        assert len(app.runs) == 1
        with pytest.raises(TaskCancelled):
            result.get()


def test_a_task_may_start_a_workflow_and_wait_for_it(app):
    @app.task(name="shop.outer")
    def outer(number: int) -> int:
        return chain(app.add.s(number, 1), app.add.s(1)).delay().get()

    with app.inline():
        assert outer.delay(5).get() == 7


def test_what_is_kept_runs_when_it_is_asked_for(app):
    with app.inline(run=False) as inline:
        result = chain(app.add.s(1, 1), app.add.s(1)).delay()
        assert not result.ready()
        assert not app.runs
        inline.run()
        assert result.get(timeout=0) == 3


def test_sends_of_workflows_are_events(app):
    seen = []
    app.on_event(seen.append)
    with app.inline():
        chain(app.add.s(1, 1), app.add.s(1)).delay(workflow_id="w")
    enqueued = [each for each in seen if each.event == "enqueued"]
    assert [(each.task_id, each.workflow_id, each.parent_id) for each in enqueued] == [
        ("w.1", "w", None),
        ("w.2", "w", "w.1"),
    ]
    others = [each for each in seen if each.event == "succeeded"]
    assert [(each.task_id, each.workflow_id, each.parent_id) for each in others] == [
        ("w.1", "w", None),
        ("w.2", "w", "w.1"),
    ]
