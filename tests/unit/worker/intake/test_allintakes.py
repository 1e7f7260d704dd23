"""All intakes of a worker: which kind each queue gets, and how much they may hold."""

import time
from types import SimpleNamespace

import pytest
import waiting
from runtimes import Noting, make_runtime

from aztask import App
from aztask.errors import CapabilityError, ConfigurationError
from aztask.worker.intake.allintakes import (
    FIRST_PREFETCH,
    MOST_PREFETCH,
    Intakes,
    prefetch,
    tell_ended,
)
from aztask.worker.intake.queueintake import Intake
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


def intakes_of(app, **options):
    options = {"queues": ("default", "orders"), "burst": True, **options}
    core, runtime = Noting(), make_runtime(app, **options)
    made = Intakes(runtime, SimpleNamespace(seconds=lambda queue: 30.0), core)
    made.core, made.runtime = core, runtime
    return made


@pytest.fixture
def intakes(app):
    made = intakes_of(app)
    yield made
    made.stop()
    made.runtime.mailbox.run()
    tell_ended(
        SimpleNamespace(session=source.session, settled=True) for source, _ in made.core.taken
    )
    made.join(PATIENCE)
    made.close()
    made.runtime.mailbox.close()


def test_a_queue_with_sessions_gets_an_intake_for_sessions(intakes):
    assert [type(each) for each in intakes._all] == [Intake, SessionIntake]
    assert [each.queue for each in intakes._all] == ["default", "orders"]
    intakes.start()


def test_nothing_is_received_before_there_is_room(app, intakes):
    app.send("shop.add", [1])
    intakes.start()
    intakes.allow(0, wait=False)
    intakes.runtime.mailbox.run()
    assert intakes.core.taken == []
    intakes.allow(5, wait=False)
    intakes.runtime.mailbox.wait(PATIENCE)
    ((source, deliveries),) = intakes.core.taken
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
    monkeypatch.setattr(App, "broker", broker)
    runtime = make_runtime(app, queues=("orders",), keeper=object())
    with pytest.raises(CapabilityError, match="'orders' is declared with sessions, but Storage"):
        Intakes(runtime, None, Noting())


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
    session = SimpleNamespace(ended=told.append)
    items = [SimpleNamespace(session=None), SimpleNamespace(session=session)]
    tell_ended(items)
    assert told == items[1:]


@pytest.mark.parametrize("refused", ["default", "orders"])
def test_one_queue_that_cannot_be_received_from_ends_the_worker(app, monkeypatch, refused):
    """With sessions and without: the loop is woken, and raises the error once it has shut down."""
    error, opened = ConfigurationError(f"no permission for {refused}"), app.broker.receiver

    def receiver(queue, **options):
        if queue == refused:
            raise error
        return opened(queue, **options)

    monkeypatch.setattr(app.broker, "receiver", receiver)
    made = intakes_of(app)
    made.raise_refusal()
    made.start()
    made.allow(10, wait=False)
    began = time.monotonic()
    while made.refusal is None:
        made.runtime.mailbox.wait(PATIENCE)
        assert time.monotonic() < began + PATIENCE, "the loop was not woken"
    made.stop()
    made.join(PATIENCE)
    made.close()
    with pytest.raises(ConfigurationError) as caught:
        made.raise_refusal()
    assert caught.value is error
