"""Priorities: the queue of each one, and the checks of their names and weights."""

import pytest

from aztask import App
from aztask.address.priorities import check_priorities, priority_queue
from aztask.errors import ConfigurationError


@pytest.fixture
def app():
    made = App("shop", broker="local://:memory:")
    made.queue("orders", lease=30.0, sessions=False, priorities={"high": 4, "low": 1})
    yield made
    made.close()


def test_each_priority_has_a_queue_that_every_service_allows():
    assert priority_queue("orders", "high") == "orders-high"
    assert priority_queue("orders", "normal") == "orders"


@pytest.mark.parametrize(
    "given",
    [
        {},
        ["high"],
        {"High": 1},
        {"very-high": 1},
        {"poison": 1},
        {"high": 0},
        {"high": 101},
        {"high": True},
        {"high": 1.5},
        {7: 1},
        {f"p{n}": 1 for n in range(9)},
    ],
)
def test_wrong_priorities_are_refused(given):
    with pytest.raises(ConfigurationError, match="priorities"):
        check_priorities("priorities", given)


def test_the_queue_itself_is_the_priority_normal():
    assert check_priorities("priorities", {"high": 4}) == {"normal": 1, "high": 4}
    assert check_priorities("priorities", {"normal": 2, "low": 1}) == {"normal": 2, "low": 1}


def test_the_app_names_all_queues_and_their_weights(app):
    assert {"orders", "orders-high", "orders-low"} <= set(app.queue_names())
    assert app.queue_weights() == {"orders": 1, "orders-high": 4, "orders-low": 1}
    assert app.priority_queues("orders") == ["orders", "orders-high", "orders-low"]
    assert app.priority_queues("mail") == ["mail"]


def test_the_queue_of_a_priority_has_the_settings_and_tasks_of_its_queue(app):
    @app.task(queue="orders")
    def pay() -> None: ...

    assert app.lease_seconds("orders-high") == 30.0
    assert [task.name for task in app.queue_plan("orders-low").tasks] == [pay.name]
    assert app.queue_options("orders-low").lease == 30.0
    app.queue("orders-low", lease=90.0)
    assert app.lease_seconds("orders-low") == 90.0, "settings of its own come first"
    assert [task.name for task in app.queue_plan("orders-low").tasks] == [pay.name]


def test_a_queue_that_is_declared_again_forgets_its_former_priorities(app):
    app.queue("orders", priorities={"urgent": 9})
    assert app.queue_weights() == {"orders": 1, "orders-urgent": 9}
    assert "orders-high" not in app.queue_names()


def test_the_priority_of_a_send_comes_before_that_of_the_task(app):
    @app.task(queue="orders", priority="high")
    def pay() -> None: ...

    assert app.queue_for(pay, {}) == "orders-high"
    assert app.queue_for(pay, {"priority": "low"}) == "orders-low"
    assert app.queue_for(pay, {"priority": "normal"}) == "orders"
    assert app.queue_for(pay, {"queue": "mail"}) == "mail", "it is the task's, in its own queue"
    assert app.queue_for(pay, {"queue": "orders", "priority": "low"}) == "orders-low"
    assert app.queue_for(None, {"queue": "orders", "priority": "high"}) == "orders-high"


def test_an_unknown_priority_is_an_error_at_the_send(app):
    @app.task(queue="orders")
    def pay() -> None: ...

    with pytest.raises(ConfigurationError, match=r"no priority 'hihg'\. Did you mean 'high'"):
        pay.with_options(priority="hihg").delay()
    with pytest.raises(ConfigurationError, match=r"declare them with app.queue\('mail', priorit"):
        app.send("other.task", queue="mail", priority="high")
    with pytest.raises(ConfigurationError, match="priority takes a text"):
        pay.with_options(priority=3)
    assert app.broker.listing().queues == (), "nothing was sent"


def test_signatures_have_priorities(app):
    @app.task(queue="orders", priority="high")
    def pay() -> None: ...

    signature = pay.s().with_options(priority="low")
    assert app.workflows._queue_of(signature) == "orders-low"
    assert app.workflows._queue_of(pay.s()) == "orders-high"
    plan = app.schedule("nightly", signature, every=60)
    assert app.schedules._definition(plan).message.queue == "orders-low"


def test_a_worker_is_warned_of_priorities_that_it_does_not_serve(app):
    assert app.unserved([]) == [], "it serves all queues of the app"
    assert app.unserved(["orders", "orders-high", "orders-low"]) == []
    assert app.unserved(["mail"]) == []
    (line,) = app.unserved(["orders", "orders-low"])
    assert line.startswith("this worker does not serve orders-high, which belongs to the priorit")
    (line,) = app.unserved(["orders-high"])
    assert "orders, orders-low, which belong to" in line
