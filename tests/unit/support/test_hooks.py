"""Hooks: their order, what their errors do, and what a send gives to them."""

import logging

import pytest

from aztask import App
from aztask.hooks import Hook, Listeners
from aztask.stores.events import Event


@pytest.fixture
def steps():
    return []


@pytest.fixture
def hook():
    return Hook("test")


def noting(steps, name):
    def around(value):
        steps.append(f"{name} before {value}")
        try:
            yield
        except ValueError as error:
            steps.append(f"{name} saw {error}")
            raise
        finally:
            steps.append(f"{name} after")

    return around


def test_the_first_registered_is_the_outermost(hook, steps):
    for name in "ab":
        hook(noting(steps, name))
    with hook.around(1):
        steps.append("work")
    assert steps == ["a before 1", "b before 1", "work", "b after", "a after"]


def test_an_order_goes_before_the_registration(hook, steps):
    hook.add(noting(steps, "late"))
    hook.add(noting(steps, "early"), order=-1)
    hook.add(noting(steps, "last"), order=5)
    with hook.around(1):
        pass
    assert [step.split()[0] for step in steps[:3]] == ["early", "late", "last"]


def test_a_hook_without_a_generator_has_nothing_to_do_after_the_work(hook, steps):
    hook(noting(steps, "a"))
    hook(lambda value: steps.append(f"b before {value}"))
    with hook.around(1):
        steps.append("work")
    assert steps == ["a before 1", "b before 1", "work", "a after"]


def test_a_hook_sees_the_error_of_the_work_and_cannot_swallow_it(hook, steps):
    hook(noting(steps, "a"))

    @hook
    def swallowing(value):
        try:
            yield
        except ValueError:
            steps.append("swallowed")

    with pytest.raises(ValueError, match="broken"), hook.around(1):
        raise ValueError("broken")
    assert steps == ["a before 1", "swallowed", "a saw broken", "a after"]


def test_an_error_before_the_work_stops_it_and_undoes_what_was_entered(hook, steps):
    hook(noting(steps, "a"))

    @hook
    def refusing(value):
        raise PermissionError("not you")
        yield

    with pytest.raises(PermissionError, match="not you"), hook.around(1):
        steps.append("work")
    assert steps == ["a before 1", "a after"]


def test_an_error_after_the_work_is_logged_alone(hook, steps, caplog):
    hook(noting(steps, "a"))

    @hook
    def failing(value):
        yield
        raise RuntimeError("too late")

    with caplog.at_level(logging.ERROR), hook.around(1):
        steps.append("work")
    assert steps == ["a before 1", "work", "a after"]
    assert "a hook of test failed after the work was done" in caplog.text


def test_a_hook_without_a_yield_stops_the_work_and_says_so(hook, steps):
    hook(noting(steps, "a"))

    @hook
    def empty(value):
        return
        yield

    with pytest.raises(RuntimeError, match="a hook of test ended without a yield"), hook.around(1):
        steps.append("work")
    assert steps == ["a before 1", "a after"]


def test_a_second_yield_is_logged_and_its_generator_closed(hook, steps, caplog):
    @hook
    def twice(value):
        try:
            yield
            yield
        finally:
            steps.append("closed")

    with hook.around(1):
        steps.append("work")
    assert steps == ["work", "closed"]
    assert "a hook of test has more than one yield" in caplog.text


@pytest.mark.parametrize(
    "error", [StopIteration("over"), ValueError("broken"), KeyboardInterrupt()]
)
def test_an_error_of_the_work_leaves_as_it_came(hook, steps, caplog, error):
    hook(noting(steps, "a"))
    with pytest.raises(type(error)) as raised, hook.around(1):
        raise error
    assert raised.value is error
    frames = [frame.name for frame in raised.traceback]
    assert frames == ["test_an_error_of_the_work_leaves_as_it_came"], "no frame of a hook"
    assert steps[-1] == "a after"
    assert not caplog.records


def test_a_hook_that_is_empty_costs_nothing(hook):
    assert not hook
    with hook.around(1):
        pass
    hook(noting([], "a"))
    assert hook


def test_a_listener_that_fails_stops_no_other(caplog):
    listeners, heard = Listeners("events"), []

    @listeners
    def failing(value):
        raise RuntimeError("deaf")

    listeners(heard.append)
    with caplog.at_level(logging.ERROR):
        listeners.notify(5)
    assert heard == [5]
    assert "a listener of events failed" in caplog.text


@pytest.fixture
def app(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/queues.db")
    app.task(name="shop.add")(lambda a, b: a + b)
    yield app
    app.close()


def envelopes(app):
    return [each.envelope for each in app.broker.peek("default")]


def test_a_send_hook_adds_headers_to_every_message_of_the_send(app):
    sends = []

    @app.around_send
    def tenant(sending):
        sends.append((sending.task, sending.queue, list(sending.ids)))
        sending.headers["tenant"] = "acme"
        sending.headers["traceparent"] = "00-1-2-01"
        yield

    single = app.tasks["shop.add"].delay(1, 2)
    many = app.tasks["shop.add"].map([(1, 2), (3, 4)])
    assert sends == [
        ("shop.add", "default", [single.id]),
        ("shop.add", "default", [each.id for each in many]),
    ]
    messages = [app.codec.from_envelope(each, "default") for each in envelopes(app)]
    assert [message.extra for message in messages] == [{"tenant": "acme"}] * 3
    assert {message.traceparent for message in messages} == {"00-1-2-01"}


def test_a_send_hook_can_refuse(app):
    @app.around_send
    def nobody(sending):
        raise PermissionError("read only")
        yield

    with pytest.raises(PermissionError):
        app.tasks["shop.add"].delay(1, 2)
    assert "default" not in app.broker.queues(), "nothing was sent"


def test_events_reach_listeners_without_any_file(app):
    events: list[Event] = []
    app.on_event(events.append)
    result = app.tasks["shop.add"].delay(1, 2)
    assert [(event.event, event.task_id) for event in events] == [("enqueued", result.id)]
