"""What an app says about its schedules: options, names, and clear errors."""

import pytest

from aztask import App, Context, chain
from aztask.errors import ConfigurationError, DuplicateTask, MessageTooLarge
from aztask.message.message import TaskMessage


@pytest.fixture
def app(tmp_path):
    address = f"local://{tmp_path}/queues.db"
    made = App("shop", broker=address, results=address)

    @made.task(queue="reports", expires=60)
    def report(region: str) -> str:
        return region

    made.report = report
    yield made
    made.close()


def test_a_wrong_schedule_is_an_error_where_it_is_written(app):
    with pytest.raises(TypeError, match="missing a required argument: 'region'"):
        app.schedule("s", app.report.s(), every=60)
    with pytest.raises(ConfigurationError, match=r"one call of a task, such as report\.s"):
        app.schedule("s", chain(app.report.s("eu")), every=60)
    with pytest.raises(ConfigurationError, match="a schedule's name is a text"):
        app.schedule("", app.report.s("eu"), every=60)
    with pytest.raises(ConfigurationError, match="release takes a whole number, not -1"):
        app.schedule("s", app.report.s("eu"), every=60, release=-1)
    app.schedule("s", app.report.s("eu"), every=60)
    with pytest.raises(DuplicateTask, match=r"two schedules have the name shop\.s"):
        app.schedule("shop.s", app.report.s("eu"), every=60)


def test_without_a_result_store_one_line_says_what_to_do():
    app = App("shop", broker="local://:memory:")
    with pytest.raises(ConfigurationError, match=r"schedules need a result store.*results="):
        app.schedules.pause("s")
    assert not app.schedules.wanted


def test_the_code_owns_its_names(app):
    app.schedule("s", app.report.s("eu"), every=60)
    with pytest.raises(DuplicateTask, match="is one of the code"):
        app.schedules.create("s", app.report.s("us"), every=60)


def test_create_replaces_what_was_made_at_run_time(app):
    app.schedules.create("s", app.report.s("eu"), every=60)
    first = app.schedules.view("s").schedule
    app.schedules.create("s", app.report.s("us"), every=60)
    second = app.schedules.view("s").schedule
    assert first.digest != second.digest
    assert first.watermark == second.watermark
    assert app.schedules.wanted


def test_arguments_that_are_too_long_are_refused(app):
    with pytest.raises(MessageTooLarge, match=r"shop\.s: its arguments take .* bytes"):
        app.schedules.create("s", app.report.s("x" * 60_000), every=60)


def test_an_occurrence_is_a_task_like_any_other(app):
    call = app.report.s("eu").with_options(expires=30)
    app.schedules.create("s", call, every=60)
    task_id = app.schedules.trigger("s")
    (peeked,) = app.broker.peek("reports", limit=1)
    message = app.codec.from_envelope(peeked.envelope, "reports")
    assert (message.id, message.task) == (task_id, "shop.report")
    assert app.codec.decode_arguments(message) == (("eu",), {})
    assert message.expires is not None
    context = Context.for_testing()
    context.message = message
    assert context.schedule == "shop.s"
    assert abs(context.scheduled_at.timestamp() - peeked.enqueued_at) < 5
    assert app.result(task_id).state == "pending"


@pytest.mark.parametrize("value", [None, "soon", True, -1.0, float("nan"), 1e18])
def test_a_wrong_header_is_no_time(value):
    context = Context.for_testing()
    extra = {"aztask-scheduled-at": value, "aztask-schedule": 5}
    context.message = TaskMessage("id", "task", "queue", b"", extra=extra)
    assert (context.scheduled_at, context.schedule) == (None, None)


def test_headers_of_hooks_come_beside_ours(app):
    @app.around_send
    def tag(sending):
        sending.headers["tenant"] = "acme"
        yield

    app.schedules.create("s", app.report.s("eu"), every=60)
    app.schedules.trigger("s")
    (peeked,) = app.broker.peek("reports", limit=1)
    assert peeked.envelope.headers["tenant"] == "acme"
    assert peeked.envelope.headers["aztask-schedule"] == "shop.s"


def test_an_occurrence_that_was_sent_writes_an_event(app):
    events = []
    app.on_event(events.append)
    app.schedules.create("s", app.report.s("eu"), every=60)
    task_id = app.schedules.trigger("s")
    assert [event.event for event in events] == ["enqueued", "occurrence_sent"]
    sent = events[1]
    assert (sent.task_id, sent.task, sent.queue) == (task_id, "shop.report", "reports")
    assert sent.reason == "schedule shop.s"
    assert 0.0 <= sent.wait_seconds < 60.0
    assert sent.ts > 0.0


def test_an_occurrence_that_cannot_be_sent_writes_an_event(app, monkeypatch):
    events = []
    app.on_event(events.append)
    app.schedules.create("s", app.report.s("eu"), every=60)
    view = app.schedules.view("s")

    def refuse(*arguments):
        raise MessageTooLarge("it is too large")

    monkeypatch.setattr(app.schedules.engine, "_send", refuse)
    with pytest.raises(ConfigurationError, match="its task was not sent: it is too large"):
        app.schedules.trigger("s")
    (event,) = events
    assert event.event == "occurrence_skipped"
    assert event.reason == "schedule shop.s: it is too large"
    assert view is not None
