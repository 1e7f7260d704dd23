"""The supervisor's bookkeeping: what it tells of a delivery that is done with."""

from contextlib import closing

import pytest

from aztask import App
from aztask.errors import BrokerUnavailable
from aztask.worker.options import WorkerOptions
from aztask.worker.pipeline.work import ALWAYS, Stage
from aztask.worker.supervisor import Supervisor


class Session:
    """Stands for the slot of a session: notes what it is told."""

    def __init__(self):
        self.told = []

    def ended(self, item):
        self.told.append(item)


@pytest.fixture
def app(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/tasks.db")
    app.task(name="shop.place")(len)
    for queue in ("default", "idle"):
        app.broker.declare(queue)
    yield app
    app.close()


def test_a_session_is_told_once_that_a_delivery_is_over(app):
    """It starts its next message when it is told: twice would run two of them side by side."""
    supervisor = Supervisor(app, "shop:app", WorkerOptions(queues=("idle",)))
    supervisor.core.runtime.keeper.start()
    supervisor.core.intakes.start()
    try:
        app.send("shop.place", ["order-1"])
        receiver = app.broker.receiver("default", lease=30.0)
        (delivery,) = receiver.receive(1, 1.0)
        session = Session()
        item = supervisor.core.deliveries.add("default", receiver, delivery, session)
        supervisor.core.ended([item])
        supervisor.core.ended([item])
        assert session.told == [item]
        receiver.close()
    finally:
        supervisor.close()


def test_a_delivery_that_lost_its_lease_at_the_gate_is_not_claimed(app):
    """Another worker may run it: our claim would take the run from it."""
    supervisor = Supervisor(app, "shop:app", WorkerOptions(queues=("idle",)))
    supervisor.core.runtime.keeper.start()
    supervisor.core.intakes.start()
    try:
        app.send("shop.place", ["order-1"])
        receiver = app.broker.receiver("default", lease=30.0)
        (delivery,) = receiver.receive(1, 1.0)
        delivery.deadline = supervisor._clock.monotonic() - 1.0
        item = supervisor.core.deliveries.add("default", receiver, delivery)
        supervisor.core.pipeline.open([item])
        item.window = ALWAYS
        supervisor.core.admitted([item])
        assert item.stage is Stage.ENDED
        assert len(supervisor.core.claims) == 0
        receiver.close()
    finally:
        supervisor.close()


def test_an_error_that_ends_the_worker_counts_as_a_start_of_what_was_begun(tmp_path, monkeypatch):
    """Its cause may be one of these deliveries: without a count it would end every worker."""
    address = f"local://{tmp_path}/tasks.db"
    with closing(App("shop", broker=address, results=address)) as app:
        app.task(name="shop.place")(len)
        supervisor = Supervisor(app, "shop:app", WorkerOptions(queues=("idle",)))
        monkeypatch.setattr(supervisor.core.pool, "fill", list)
        app.broker.declare("idle")
        for task_id in ("begun", "waiting"):
            app.send("shop.place", ["order-1"], task_id=task_id)
        receiver = app.broker.receiver("default", lease=30.0)
        items = [
            supervisor.core.deliveries.add("default", receiver, delivery)
            for delivery in receiver.receive(2, 1.0)
        ]
        supervisor.core.runtime.keeper.hold(receiver, [item.lease for item in items])
        supervisor.core.pipeline.open(items)
        supervisor.core.pipeline.claim([item for item in items if item.key.task_id == "begun"])

        def broken():
            raise RuntimeError("the loop broke")

        monkeypatch.setattr(supervisor.core, "turn", broken)
        with pytest.raises(RuntimeError, match="the loop broke"):
            supervisor.run()
        assert app.broker.stats("default").active == 2, "both can be had at once"
        assert app.results.get("begun").starts == 1
        counts = {
            each.envelope.headers["id"]: each.delivery_count for each in receiver.receive(2, 1.0)
        }
        assert counts == {"begun": 2, "waiting": 1}
        receiver.close()


# -- the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("signals", [1, 2])
def test_a_run_that_has_finished_is_not_given_back_at_the_end(tmp_path, monkeypatch, signals):
    """While the store is unreachable it waits for its record: given back, it would run again."""
    address = f"local://{tmp_path}/tasks.db"
    with closing(App("shop", broker=address, results=address)) as app:
        app.task(name="shop.place")(len)
        supervisor = Supervisor(app, "shop:app", WorkerOptions(queues=("idle",)))
        monkeypatch.setattr(supervisor.core.pool, "fill", list)
        app.broker.declare("idle")
        supervisor.core.runtime.keeper.start()
        supervisor.core.intakes.start()
        for task_id in ("finished", "ready", "running"):
            app.send("shop.place", ["order-1"], task_id=task_id)
        receiver = app.broker.receiver("default", lease=30.0)
        items = {
            each.envelope.headers["id"]: supervisor.core.deliveries.add("default", receiver, each)
            for each in receiver.receive(3, 1.0)
        }
        supervisor.core.runtime.keeper.hold(receiver, [item.lease for item in items.values()])
        supervisor.core.pipeline.open(items.values())
        supervisor.core.pipeline.claim(list(items.values()))
        finished, ready, running = (items[each] for each in ("finished", "ready", "running"))
        supervisor.core.deliveries.ready.append(ready)
        running.sent()
        finished.sent()
        supervisor.core.pipeline.decisions.succeeded(finished, b"\x01")

        def away(finishes):
            raise BrokerUnavailable("the store is away")

        with monkeypatch.context() as patch:
            patch.setattr(app.results, "record", away)
            supervisor.core.finish([finished])
            supervisor.core.finishes.turn()
            assert finished.tries == 1
            supervisor.stop()
            assert supervisor.turn() is True
            assert app.broker.stats("default").active == 1, "what was ready is given back"
            assert supervisor.core.deliveries.of(finished.lease) is finished, "this one is not"
            if signals == 2:
                supervisor.stop()
                assert supervisor.turn() is False
        if signals == 1:
            assert supervisor.core.deliveries.due(float("inf")) == [finished]
            supervisor.core.pipeline.finish([finished])
            assert app.results.get("finished").state.value == "succeeded"
            supervisor.core.giving_back.running()
        starts = [app.results.get(each).starts for each in ("finished", "ready", "running")]
        assert starts == [1, 0, 0]
        left = {each.envelope.headers["id"] for each in receiver.receive(5, 0.1)}
        assert left == {"ready", "running"}, "it comes again when its lease ends, and not before"
        receiver.close()
        supervisor.close()
