"""What the parts of a worker share."""

import pytest
from runtimes import Noting
from still import Still

from aztask import App
from aztask.worker.options import WorkerOptions
from aztask.worker.runtime import LANE_THREADS, PostedReports, WorkerRuntime
from aztask.worker.shell import ThreadShell


@pytest.fixture
def make():
    made = []

    def runtime(app, **options):
        core = Noting()
        made.append(
            WorkerRuntime.create(app, WorkerOptions(**options), ThreadShell(clock=Still()), core)
        )
        return made[-1], core

    yield runtime
    for each in made:
        each.mailbox.close()
        each.app.close()


def memory():
    return App("shop", broker="local://:memory:")


def test_a_worker_without_a_name_gets_one_of_its_own(make):
    first, second = make(memory())[0], make(memory())[0]
    assert first.name != second.name
    assert make(memory(), name="w7")[0].name == "w7"


def test_secrets_in_a_workers_name_are_masked(make):
    """The name is written into results, heartbeats and events."""
    assert "abcdefghijk" not in make(memory(), name="w?sig=abcdefghijk&se=1")[0].name


def test_the_keepers_news_arrive_in_the_supervisors_turn(make):
    runtime, core = make(memory())
    app = runtime.app
    app.send("shop.add", [1])
    receiver = app.broker.receiver("default", lease=30.0)
    (delivery,) = receiver.receive(1, 0.0)
    item = runtime.deliveries.add("default", receiver, delivery)
    reports = PostedReports(runtime.mailbox, core)
    reports.lost(item.lease)
    reports.renewed(item.lease, 0.5)
    assert (core.lost, core.renewed) == ([], [])
    runtime.mailbox.run()
    assert (core.lost, core.renewed) == ([item.lease], [(item.lease, 0.5)])


def test_local_stages_need_no_threads(make):
    runtime, _ = make(memory())
    assert runtime.lane_threads == 0


def test_stages_across_a_network_do(make):
    remote = App(
        "shop",
        broker="DefaultEndpointsProtocol=http;AccountName=shop;AccountKey=c2VjcmV0;"
        "QueueEndpoint=http://127.0.0.1:1/shop",
    )
    runtime, _ = make(remote)
    assert runtime.lane_threads == LANE_THREADS
