"""What may be sent into a session: every refusal is one line, before anything is sent."""

import pytest

from aztask import App
from aztask.errors import CapabilityError, ConfigurationError
from aztask.sending.sessionrules import IN_ORDER, strategy_in_session


@pytest.fixture
def app():
    made = App("shop", broker="local://:memory:")
    made.queue("orders", sessions=True)
    made.queue("plain", sessions=False)
    yield made
    made.close()


def task_of(app, **options):
    return app.task(name=f"task{len(app.tasks)}", **{"queue": "orders", **options})(lambda: None)


def sent(app, queue="orders"):
    return [peeked.envelope for peeked in app.broker.peek(queue)]


def test_a_send_carries_its_session_and_its_order(app):
    task = task_of(app)
    task.with_options(session="a").delay()
    task.with_options(session="b", ordered=False).map([(), ()])
    app.send(task.name, queue="orders", session="c")
    assert [envelope.session for envelope in sent(app)] == ["a", "b", "b", "c"]
    messages = [app.codec.from_envelope(envelope, "orders") for envelope in sent(app)]
    assert [message.ordered for message in messages] == [True, False, False, True]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, ConfigurationError, "queue 'orders' has sessions: name one for task0"),
        ({"ordered": False}, ConfigurationError, "give session=... too"),
        (
            {"session": "a", "queue": "plain"},
            ConfigurationError,
            "app.queue('plain', sessions=True",
        ),
        ({"session": "a", "queue": "new"}, ConfigurationError, "app.queue('new', sessions=True"),
        ({"session": ""}, ConfigurationError, "session takes a text"),
        ({"session": 7}, ConfigurationError, "session takes a text, not 7"),
        ({"session": "x" * 129}, ConfigurationError, "1 to 128 printable characters"),
        ({"session": "a\nb"}, ConfigurationError, "1 to 128 printable characters"),
        ({"session": "a", "ordered": 1}, ConfigurationError, "ordered is True or False"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(app, options, error, says):
    task = task_of(app)
    with pytest.raises(error, match=says.replace("(", r"\(")) as raised:
        task.with_options(**options).delay()
    assert "\n" not in str(raised.value)
    assert app.broker.queues() == [] or not sent(app)


@pytest.mark.parametrize("options", [{"retry_strategy": "resubmit"}, {"delivery": "at-most-once"}])
def test_what_cannot_keep_the_order_needs_ordered_false(app, options):
    task = task_of(app, **options)
    with pytest.raises(ConfigurationError, match="ordered=False"):
        task.with_options(session="a").delay()
    task.with_options(session="a", ordered=False).delay()
    task_of(app, ordered=False, **options).with_options(session="a").delay()
    assert len(sent(app)) == 2


def test_an_apps_own_strategy_is_no_mistake_of_the_task(app):
    """`resubmit` is what every task has that says nothing: in a session it becomes `hold`."""
    task = task_of(app)
    assert task.retry_strategy == "resubmit"
    task.with_options(session="a").delay()
    assert strategy_in_session(task, "resubmit", ordered=True) == "hold"
    assert strategy_in_session(None, "defer", ordered=True) == "hold"
    assert strategy_in_session(task, "hold", ordered=False) == "resubmit"
    assert strategy_in_session(None, "defer", ordered=False) == "resubmit"


@pytest.mark.parametrize("strategy", IN_ORDER)
def test_strategies_that_keep_the_place_are_left_alone(app, strategy):
    task = task_of(app, retry_strategy=strategy)
    task.with_options(session="a").delay()
    for ordered in (True, False):
        assert strategy_in_session(task, "resubmit", ordered=ordered) == strategy


def test_defer_is_not_for_sessions_ordered_or_not(app):
    task = task_of(app, retry_strategy="defer")
    for ordered in (True, False):
        with pytest.raises(ConfigurationError, match="does not work in sessions"):
            task.with_options(session="a", ordered=ordered).delay()


def test_storage_queues_have_no_sessions():
    app = App("shop", broker="UseDevelopmentStorage=true")
    app.queue("orders", sessions=True)
    with pytest.raises(CapabilityError, match="no sessions"):
        app.send("shop.ship", queue="orders", session="a")
    app.close()
