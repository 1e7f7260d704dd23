"""The supervisor's bookkeeping: what it tells of a delivery that is done with."""

import pytest

from aztask import App
from aztask.worker.options import WorkerOptions
from aztask.worker.supervisor import Supervisor


class Session:
    """Stands for the slot of a session: notes what it is told."""

    def __init__(self):
        self.told = []

    def over(self, job):
        self.told.append(job)


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
        job = supervisor._deliveries.add("default", receiver, delivery, session)
        supervisor._over([job])
        supervisor._over([job])
        assert session.told == [job]
        receiver.close()
    finally:
        supervisor._shut()
