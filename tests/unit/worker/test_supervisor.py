"""The supervisor's bookkeeping: what it tells of a delivery that is done with."""

from contextlib import closing

import pytest

from aztask import App
from aztask.worker.options import WorkerOptions
from aztask.worker.supervisor import Supervisor


class Session:
    """Stands for the slot of a session: notes what it is told."""

    def __init__(self):
        self.told = []

    def over(self, item):
        self.told.append(item)


@pytest.fixture
def app(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/tasks.db")
    for queue in ("default", "idle"):
        app.broker.declare(queue)
    yield app
    app.close()


def test_a_session_is_told_once_that_a_delivery_is_over(app):
    """It starts its next message when it is told: twice would run two of them side by side."""
    supervisor = Supervisor(app, "shop:app", WorkerOptions(queues=("idle",)))
    supervisor.keeper.start()
    supervisor._intakes.start()
    try:
        app.send("shop.place", ["order-1"])
        receiver = app.broker.receiver("default", lease=30.0)
        (delivery,) = receiver.receive(1, 1.0)
        session = Session()
        item = supervisor._deliveries.add("default", receiver, delivery, session)
        supervisor._over([item])
        supervisor._over([item])
        assert session.told == [item]
        receiver.close()
    finally:
        supervisor._shut()


def test_an_error_that_ends_the_worker_counts_as_a_start_of_what_was_begun(tmp_path, monkeypatch):
    """Its cause may be one of these deliveries: without a count it would end every worker."""
    address = f"local://{tmp_path}/tasks.db"
    with closing(App("shop", broker=address, results=address)) as app:
        app.task(name="shop.place")(len)
        supervisor = Supervisor(app, "shop:app", WorkerOptions(queues=("idle",)))
        monkeypatch.setattr(supervisor._pool, "fill", lambda: None)
        app.broker.declare("idle")
        for task_id in ("begun", "waiting"):
            app.send("shop.place", ["order-1"], task_id=task_id)
        receiver = app.broker.receiver("default", lease=30.0)
        items = [
            supervisor._deliveries.add("default", receiver, delivery)
            for delivery in receiver.receive(2, 1.0)
        ]
        supervisor.keeper.hold(receiver, [item.lease for item in items])
        supervisor.pipeline.open(items)
        supervisor.pipeline.claim([item for item in items if item.key.task_id == "begun"])

        def broken():
            raise RuntimeError("the loop broke")

        monkeypatch.setattr(supervisor, "_turn", broken)
        with pytest.raises(RuntimeError, match="the loop broke"):
            supervisor.run()
        assert app.broker.stats("default").active == 2, "both can be had at once"
        assert app.results.get("begun").starts == 1
        counts = {
            each.envelope.headers["id"]: each.delivery_count for each in receiver.receive(2, 1.0)
        }
        assert counts == {"begun": 2, "waiting": 1}
        receiver.close()
