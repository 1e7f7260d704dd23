"""What queues are created with, and what existing ones are compared with."""

import pytest

from aztask import App, RetryPolicy
from aztask.errors import ConfigurationError
from aztask.queues.base import Capabilities, QueueOptions

BUS = Capabilities("bus", fixed_lease=True, duplicate_detection=True, max_lease_seconds=300.0)
STORAGE = Capabilities("storage", default_lease_seconds=300.0)


@pytest.fixture
def app(tmp_path):
    made = App("shop", broker=f"local://{tmp_path}/q.db", lease=30.0)
    yield made
    made.close()


def test_a_queue_is_created_with_the_lease_that_its_worker_asks_for(app):
    options = app.queue_plan("orders").options(BUS)
    assert options.lease == app.lease_seconds("orders") == 30.0
    assert "lease" not in options.implied, "the app asked for it"
    app.queue("slow", lease=120.0)
    assert app.queue_plan("slow").options(BUS).lease == 120.0


def test_a_lease_that_nobody_asked_for_is_implied(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/q.db")
    options = app.queue_plan("orders").options(BUS)
    assert options.lease == 60.0
    assert "lease" in options.implied
    assert options.explicit().lease is None
    app.close()


def test_the_window_covers_the_longest_delay_and_a_redelivery(app):
    assert app.queue_plan("orders").window == 600.0

    @app.task(queue="orders", retry=RetryPolicy(max_delay=3600.0))
    def ship() -> None: ...

    @app.task(queue="orders", retry=RetryPolicy(max_retries=0, max_snoozes=0, max_delay=9e5))
    def never_again() -> None: ...

    assert app.queue_plan("orders").longest_delay == 3600.0
    assert app.queue_plan("orders").options(BUS).duplicate_window == 3660.0
    assert app.queue_plan("default").options(BUS).duplicate_window == 600.0

    @app.task(queue="orders", retry=RetryPolicy(max_delay=9e6))
    def ages() -> None: ...

    assert app.queue_plan("orders").options(BUS).duplicate_window == 7 * 86400.0


def test_a_window_of_ones_own_stands(app):
    app.queue("orders", duplicate_window=0.0)
    options = app.queue_plan("orders").options(BUS)
    assert options.duplicate_window == 0.0
    assert "duplicate_window" not in options.implied


def test_the_services_delivery_limit_is_well_above_ours(app):
    assert app.queue_plan("orders").options(BUS).max_deliveries == 1000
    app.queue("orders", max_deliveries=150)
    assert app.queue_plan("orders").options(BUS).max_deliveries == 1500
    app.queue("orders", max_deliveries=900)
    assert app.queue_plan("orders").options(BUS).max_deliveries == 2000


def test_other_services_get_what_was_asked_for_alone(app):
    assert app.queue_plan("orders").options(STORAGE) == QueueOptions()
    assert app.queue_options("orders") == QueueOptions()
    app.queue("orders", duplicate_window=60.0, time_to_live=90.0)
    assert app.queue_options("orders") == QueueOptions(duplicate_window=60.0, time_to_live=90.0)


def test_a_lease_that_the_service_cannot_hold_is_refused_at_creation(app):
    app.queue("slow", lease=900.0)
    with pytest.raises(ConfigurationError, match="300 s at most"):
        app.queue_plan("slow").options(BUS)


def test_what_is_given_is_asked_for():
    options = QueueOptions(lease=60.0, duplicate_window=600.0, implied=frozenset({"lease"}))
    assert options.explicit() == QueueOptions(duplicate_window=600.0)
    assert options.with_explicit(lease=9.0) == QueueOptions(lease=9.0, duplicate_window=600.0)


def test_what_is_implied_changes_no_queue_that_exists(app):
    app.broker.declare("q", QueueOptions(duplicate_window=5.0))
    implied = QueueOptions(duplicate_window=9.0, implied=frozenset({"duplicate_window"}))
    app.broker.declare("q", implied)
    assert app.broker.engine.queue("q").duplicate_window == 5.0
    app.broker.declare("r", implied)
    assert app.broker.engine.queue("r").duplicate_window == 9.0
