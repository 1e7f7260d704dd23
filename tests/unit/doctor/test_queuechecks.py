"""Facts beside a plan: each contradiction is said, with what to do next."""

import pytest

from aztask import App, RetryPolicy
from aztask.errors import ConfigurationError, QueueNotFound
from aztask.operate.queuechecks import judge
from aztask.queues.base import Capabilities, QueueFacts
from aztask.support.finding import Level

BUS = Capabilities("bus", fixed_lease=True, duplicate_detection=True, max_lease_seconds=300.0)
GOOD = {
    "exists": True,
    "lease_seconds": 60.0,
    "duplicate_window": 600.0,
    "sessions": False,
    "max_deliveries": 1000,
    "dead_letters": True,
    "active": True,
}


@pytest.fixture
def app(tmp_path):
    made = App("shop", broker=f"local://{tmp_path}/q.db")
    yield made
    made.close()


def findings(app, can=BUS, **facts):
    """{check: finding} of what is not fine."""
    found = list(judge(QueueFacts("q", **{**GOOD, **facts}), app.queue_plan("q"), can))
    return {each.check: each for each in found if each.level is not Level.OK}


def test_nothing_to_say_of_a_queue_that_fits(app):
    assert findings(app) == {}


@pytest.mark.parametrize(
    ("facts", "check", "level", "says", "advice"),
    [
        ({"exists": False}, "exists", "problem", "does not exist", "queues create q"),
        ({"lease_seconds": 30.0}, "lease", "problem", "30 s, but", "lease=30"),
        ({"duplicate_window": 0.0}, "duplicates", "warning", "is off", "queues create q"),
        ({"duplicate_window": 60.0}, "duplicates", "warning", "60 s, less", "--duplicate-window"),
        ({"max_deliveries": 10}, "deliveries", "problem", "10 deliveries, before", "1000"),
        ({"max_deliveries": 15}, "deliveries", "warning", "close to aztask's 10", "1000"),
        ({"sessions": True}, "sessions", "problem", "requires sessions", "sessions=True"),
        ({"active": False}, "active", "problem", "disabled", "enable"),
        ({"dead_letters": False}, "dead-letters", "problem", "no queue for", "queues create q"),
    ],
)
def test_each_contradiction(app, facts, check, level, says, advice):
    @app.task(queue="q", retry=RetryPolicy(max_delay=500.0))
    def ship() -> None: ...

    found = findings(app, **facts)
    assert list(found) == [check]
    assert found[check].level.value == level
    assert says in found[check].text
    assert advice in found[check].advice
    assert str(found[check]).isprintable()


def test_a_missing_queue_and_a_wrong_one_are_different_errors(app):
    assert isinstance(findings(app, exists=False)["exists"].error, QueueNotFound)
    assert isinstance(findings(app, lease_seconds=5.0)["lease"].error, ConfigurationError)


def test_a_queue_that_comes_into_being_by_itself_is_not_missed(app):
    assert findings(app, exists=False, made_on_use=True) == {}


def test_what_cannot_be_read_is_said_and_not_guessed(app):
    unknown = dict.fromkeys(GOOD)
    (finding,) = findings(app, **unknown, unread="needs the right to manage").values()
    assert finding.level is Level.WARNING
    assert "not checked (needs the right to manage)" in finding.text
    assert "assumes a lease of 60 s" in finding.text


def test_leases_of_tasks_that_the_queue_does_not_grant(app):
    @app.task(queue="q", lease=10.0)
    def quick() -> None: ...

    assert "requests a lease of 10 s; the queue decides: 60 s" in findings(app)["task-lease"].text

    @app.task(queue="q", max_lease=60.0)
    def capped() -> None: ...

    assert "not longer than the queue's 60 s" in findings(app)["task-lease"].text


def test_a_cap_that_is_no_longer_than_the_lock(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/q.db", lease=60.0, max_lease=60.2)
    assert "max_lease is 60.2 s" in findings(app, lease_seconds=60.3)["max-lease"].text
    app.close()


def test_sessions_that_the_app_wants(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/q.db")
    plan = app.queue_plan("q")
    object.__setattr__(plan.own, "sessions", True)
    (finding,) = [
        each for each in judge(QueueFacts("q", **GOOD), plan, BUS) if each.level is Level.PROBLEM
    ]
    assert "the queue has none" in finding.text
    app.close()


def test_duplicates_do_not_matter_where_a_retry_is_one_step(app):
    local = Capabilities("local", duplicate_detection=True, atomic_resubmit=True)
    assert findings(app, local, duplicate_window=0.0, lease_seconds=None) == {}
