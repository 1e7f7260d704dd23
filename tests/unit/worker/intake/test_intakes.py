"""All intakes of a worker: which kind each queue gets, and how much they may hold."""

from types import SimpleNamespace

import pytest
import waiting

from aztask import App
from aztask.errors import CapabilityError
from aztask.worker.intake.intake import Intake
from aztask.worker.intake.intakes import (
    FIRST_PREFETCH,
    MOST_PREFETCH,
    Intakes,
    prefetch,
    tell_over,
)
from aztask.worker.intake.sessions import SessionIntake
from aztask.worker.options import WorkerOptions

PATIENCE = 10.0


@pytest.fixture
def app():
    made = App("shop", broker="local://:memory:")
    made.queue("orders", sessions=True)
    for queue in ("default", "orders"):
        made.broker.declare(queue, made.queue_options(queue))
    yield made
    made.close()


@pytest.fixture
def intakes(app):
    got = []
    made = Intakes(
        app,
        WorkerOptions(queues=("default", "orders"), burst=True),
        lambda queue: 30.0,
        lambda source, deliveries, asked_at: got.append((source, deliveries)),
    )
    made.got = got
    yield made
    made.stop()
    tell_over(
        SimpleNamespace(session=source, settled=True)
        for source, _ in got
        if hasattr(source, "over")
    )
    made.join(PATIENCE)
    made.close()


def test_a_queue_with_sessions_gets_an_intake_for_sessions(intakes):
    assert [type(each) for each in intakes._all] == [Intake, SessionIntake]
    assert [each.queue for each in intakes._all] == ["default", "orders"]
    intakes.start()


def test_nothing_is_received_before_there_is_room(app, intakes):
    app.send("shop.add", [1])
    intakes.start()
    intakes.allow(0, wait=False)
    assert intakes.got == []
    intakes.allow(5, wait=False)
    waiting.wait_until(lambda: intakes.got, PATIENCE, "it is received")
    ((source, deliveries),) = intakes.got
    assert (source.queue, len(deliveries)) == ("default", 1)


def test_plain_queues_may_wait_for_a_fuller_batch(app, intakes):
    app.send("shop.add", [1])
    intakes.start()
    intakes.allow(5, wait=True)
    assert intakes._plain[0]._room == 0
    assert intakes._sessions[0]._room == 5


def test_intakes_that_find_nothing_are_idle(intakes):
    assert not intakes.idle
    intakes.start()
    intakes.allow(5, wait=False)
    waiting.wait_until(lambda: intakes.idle, PATIENCE, "nothing is found")


def test_a_broker_without_sessions_is_refused(app, monkeypatch):
    broker = SimpleNamespace(capabilities=SimpleNamespace(sessions=False, name="Storage queues"))
    stub = SimpleNamespace(broker=broker, has_sessions=lambda queue: True)
    with pytest.raises(CapabilityError, match="'orders' is declared with sessions, but Storage"):
        Intakes(stub, WorkerOptions(queues=("orders",)), lambda queue: 1.0, lambda *_: None)


@pytest.mark.parametrize(
    ("given", "mean", "expected"),
    [
        (7, 0.001, 7),
        (0, None, 0),
        (None, None, FIRST_PREFETCH),
        (None, 0.01, 200),
        (None, 60.0, 0),
        (None, 0.0, MOST_PREFETCH),
    ],
)
def test_the_prefetch_follows_the_speed(given, mean, expected):
    pool = SimpleNamespace(mean_seconds=mean, capacity=8)
    assert prefetch(WorkerOptions(prefetch=given), pool) == expected


def test_only_sessions_are_told_of_the_end():
    told = []
    session = SimpleNamespace(over=told.append)
    items = [SimpleNamespace(session=None), SimpleNamespace(session=session)]
    tell_over(items)
    assert told == items[1:]
