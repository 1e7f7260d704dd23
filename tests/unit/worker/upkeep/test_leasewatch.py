"""What a worker counts and tells: with a store that is away, at a bounded rate, to the last."""

import pytest
from runtimes import make_runtime

from aztask import App
from aztask.settlement import Complete
from aztask.stores.records.base import Outcome, State
from aztask.support.clock import Clock
from aztask.worker.pipeline.work import Run, Stop
from aztask.worker.upkeep.leasewatch import LOSS_SECONDS, SHARE_SECONDS, LeaseWatch


class Told:
    """A watch on a local broker, its clock, and what it tells."""

    def __init__(self, folder, **options):
        self.now = 1000.0
        self.folder = folder
        self.app = App(
            "shop",
            broker="local://:memory:",
            lease_advice=str(folder / "leases.json"),
            lease=10.0,
            adaptive=(1.0, 600.0),
        )
        self.clock = Clock(monotonic=lambda: self.now, wall=lambda: 1e9 + self.now)
        runtime = make_runtime(self.app, clock=self.clock, queues=("q",), **options)
        self.mailbox, self.deliveries = runtime.mailbox, runtime.deliveries
        self.watch = LeaseWatch(runtime)

    def item(self, held=1.0):
        self.app.send("shop.t", queue="q")
        receiver = self.app.broker.receiver("q", lease=10.0)
        (delivery,) = receiver.receive(1, 0.0)
        item = self.deliveries.add("q", receiver, delivery)
        self.now += held
        return item

    def lost(self, times, stop_reason=""):
        for _ in range(times):
            item = self.item()
            item.note("lease_lost", "gone")
            item.run = Run(stop=Stop(stop_reason, 0.0) if stop_reason else None)
            self.watch.ended(item)

    def tick(self):
        self.watch.tick(self.now)
        lane = self.watch._lane
        while len(lane):
            self.mailbox.run()
        self.mailbox.run()

    @property
    def document(self):
        return self.app.leases.store.load().document

    @property
    def observed(self):
        return self.document.entry("q").observed


@pytest.fixture
def told(tmp_path):
    made = Told(tmp_path)
    yield made
    made.watch.stop()
    made.app.close()


def test_losses_are_told_after_a_few_seconds_and_the_lease_follows(told):
    told.lost(3)
    told.tick()
    assert told.document.revision == 0
    told.now += LOSS_SECONDS
    told.tick()
    assert told.observed.lost_ever == 3
    assert told.watch.seconds("q") == 20.0


def test_nothing_is_written_while_there_is_nothing_to_tell(told):
    for _ in range(5):
        told.now += 2 * SHARE_SECONDS
        told.tick()
    assert told.document.revision == 0


def test_at_most_one_write_a_minute_without_losses(told):
    for _ in range(240):
        item = told.item(held=1.0)
        item.decide(Complete(), Outcome(State.SUCCEEDED, Complete()))
        item.settled = True
        told.watch.ended(item)
        told.tick()
    assert 1 <= told.document.revision <= 5
    assert told.observed.lost_ever == 0


def test_runs_that_reached_max_lease_say_nothing_about_the_lease(told):
    """However long they ran: with a longer lease they would have run for as long."""
    for _ in range(20):
        item = told.item(held=3600.0)
        item.run = Run(stop=Stop("it would hold its message for too long", 0.0, failed=True))
        told.watch.ended(item)
        told.tick()
    told.now += 2 * SHARE_SECONDS
    told.tick()
    assert told.document.revision == 0
    assert told.watch.seconds("q") == 10.0


def test_what_could_not_be_told_is_told_when_the_store_is_back(told):
    told.app.leases.store.path = told.folder / "file" / "leases.json"
    (told.folder / "file").write_text("")
    told.lost(2)
    told.now += LOSS_SECONDS
    told.tick()
    (told.folder / "file").unlink()
    told.lost(1)
    told.now += 2 * SHARE_SECONDS
    told.tick()
    assert told.observed.lost_ever == 3


def test_a_damaged_document_is_set_aside_once_and_nothing_that_was_counted_is_lost(told, caplog):
    path = told.folder / "leases.json"
    path.write_bytes(b"\x00damaged")
    told.lost(3)
    told.now += LOSS_SECONDS
    told.tick()
    assert told.observed.lost_ever == 3
    assert (told.folder / "leases.json.damaged").read_bytes() == b"\x00damaged"
    told.lost(1)
    told.now += SHARE_SECONDS * 2
    told.tick()
    assert told.observed.lost_ever == 4
    messages = [record.getMessage() for record in caplog.records]
    said = [each for each in messages if "It was moved to" in each]
    assert len(said) == 1
    assert said[0].isprintable()


def test_a_newer_document_is_left_alone_and_the_counts_wait(told):
    path = told.folder / "leases.json"
    newer = path.with_name("newer")
    path.write_bytes(b'{"version": 2, "queues": {}}')
    told.lost(3)
    told.now += LOSS_SECONDS
    told.tick()
    path.rename(newer)
    assert newer.read_bytes() == b'{"version": 2, "queues": {}}'
    told.now += SHARE_SECONDS * 2
    told.tick()
    assert told.observed.lost_ever == 3


def test_a_worker_that_ends_tells_the_rest(told):
    told.lost(1)
    told.watch.stop()
    assert told.observed.lost_ever == 1


def test_a_lease_given_to_the_worker_is_fixed_and_counted(tmp_path):
    told = Told(tmp_path, lease=7.0)
    told.lost(3)
    told.now += LOSS_SECONDS
    told.tick()
    assert told.watch.seconds("q") == 7.0
    assert told.observed.lost_ever == 3
    told.watch.stop()
    told.app.close()
