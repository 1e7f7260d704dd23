"""What an app knows of lease advice: cached, last known good, within bounds."""

import logging

import pytest

from aztask import App
from aztask.config import Settings
from aztask.errors import ConfigurationError
from aztask.leaseadvice.advice import Evidence, decide
from aztask.leaseadvice.advisor import LeaseAdvisor, bounds_of
from aztask.leaseadvice.document import publish_advice
from aztask.message.message import TaskMessage
from aztask.queues.base import Capabilities

LONG = decide(Evidence(1000, 100.0, 100.0), 60.0, source="pipeline", at=5.0)


class Now:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def path(tmp_path):
    return tmp_path / "leases.json"


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def advisor(path, now):
    return LeaseAdvisor(Settings(lease_advice=str(path)), None, now=now)


def publish(advisor, advice=LONG):
    assert publish_advice(advisor.store, {"q": advice}, advisor.store.load())


def test_it_is_read_again_when_it_is_old(advisor, now):
    assert advisor.lease_seconds("q") is None
    publish(advisor)
    now.seconds = 1.9
    assert advisor.lease_seconds("q") is None
    now.seconds = 2.0
    assert advisor.lease_seconds("q") == 150.0
    assert advisor.lease_seconds("other") is None


@pytest.mark.parametrize(
    "garble",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "{}",
        lambda text: text.replace('"version": 1', '"version": 9'),
        lambda text: text.replace("150.0", "-1"),
        lambda text: text.replace("150.0", "1e99"),
        lambda text: text.replace("150.0", "NaN"),
        lambda text: text.replace("150.0", '"150"'),
        lambda text: text.replace("150.0", "[150]"),
    ],
    ids=["torn", "empty", "nothing", "version", "negative", "huge", "NaN", "text", "list"],
)
def test_what_cannot_be_read_leaves_the_last_good_and_is_said_once(
    advisor, now, path, caplog, garble
):
    publish(advisor)
    assert advisor.lease_seconds("q") == 150.0
    good = path.read_text()
    assert garble(good) != good
    path.write_text(garble(good))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            now.seconds += 100.0
            assert advisor.lease_seconds("q") == 150.0
        assert advisor.read().entry("q").advice == LONG
    assert [
        record.getMessage().count("the last one stays in force") for record in caplog.records
    ] == [1]
    path.write_text(good)
    now.seconds += 100.0
    assert advisor.lease_seconds("q") == 150.0
    path.write_text(garble(good))
    now.seconds += 100.0
    assert advisor.lease_seconds("q") == 150.0
    assert len(caplog.records) == 2


def test_without_a_place_nothing_is_read():
    advisor = LeaseAdvisor(Settings(), None)
    assert not advisor.enabled
    assert advisor.lease_seconds("q") is None
    assert advisor.advice("q") is None


@pytest.mark.parametrize(
    ("settings", "longest", "bounds"),
    [
        ({}, 7 * 86400.0, (30.0, 1800.0)),
        ({"max_lease": 40.0, "lease": 10.0}, 7 * 86400.0, (20.0, 20.0)),
        ({"adaptive": (5, 900)}, 300.0, (5.0, 300.0)),
        ({"adaptive": (400, 900)}, 300.0, (300.0, 300.0)),
    ],
)
def test_the_bounds(settings, longest, bounds):
    found = bounds_of(Settings.from_options(settings), longest)
    assert (found.least, found.most) == bounds


@pytest.mark.parametrize(
    "wrong",
    [{"adaptive": (9, 5)}, {"adaptive": (5, 3600)}, {"adaptive": "yes"}, {"adaptive": (1,)}],
)
def test_wrong_bounds_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        App("shop", broker="local://:memory:", **wrong)
    app = App("shop", broker="local://:memory:")
    if wrong["adaptive"] != (5, 3600):
        with pytest.raises(ConfigurationError):
            app.queue("slow", **wrong)


@pytest.fixture
def app(tmp_path, path):
    made = App("shop", broker=f"local://{tmp_path}/q.db", lease_advice=str(path), lease=60.0)
    made.queue("bounded", adaptive=(10, 100))
    made.queue("fixed", adaptive=False)
    yield made
    made.close()


def test_the_lease_of_now_is_the_advised_one_within_the_queues_bounds(app):
    names = ("q", "bounded", "fixed", "unknown")
    assert [app.lease_now(name) for name in names] == [60.0] * 4
    advice = dict.fromkeys(names[:3], LONG)
    assert publish_advice(app.leases.store, advice, app.leases.store.load())
    app.leases.read()
    assert [app.lease_now(name) for name in names] == [150.0, 100.0, 60.0, 60.0]
    assert app.lease_seconds("q") == 60.0


def test_senders_write_the_advised_lease_into_messages(app):
    publish(app.leases)
    app.send("shop.t", queue="q")
    app.send("shop.t", queue="unknown")
    found = {}
    for queue in ("q", "unknown"):
        (peeked,) = app.broker.peek(queue)
        message = app.codec.from_envelope(peeked.envelope, queue)
        assert isinstance(message, TaskMessage)
        found[queue] = (message.lease_seconds, "aztask-lease-seconds" in peeked.envelope.headers)
    assert found == {"q": (150.0, True), "unknown": (None, False)}


def test_an_account_without_a_place_is_refused():
    with pytest.raises(ConfigurationError, match="without lease_advice"):
        App("shop", lease_advice_account="UseDevelopmentStorage=true")


def test_the_environment_names_the_place(monkeypatch, path):
    monkeypatch.setenv("AZTASK_LEASE_ADVICE", str(path))
    assert App("shop", broker="local://:memory:").leases.enabled


def test_where_the_service_fixes_the_lease_it_is_advised_and_not_asked_for(advisor):
    publish(advisor)
    settings = Settings()
    free, fixed = Capabilities("free"), Capabilities("fixed", fixed_lease=True)
    assert advisor.lease_now("q", 60.0, settings, free) == 150.0
    assert advisor.lease_now("q", 60.0, settings, fixed) == 60.0
    assert advisor.advice("q") == LONG
