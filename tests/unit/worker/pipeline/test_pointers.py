"""Pointers and what they point to: fetched, waited for, settled in the right order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from still import Still

from aztask import App
from aztask.errors import BrokerUnavailable
from aztask.message.envelope import Envelope
from aztask.queues.base import Receiver
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.engine import Database
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.queues.lease.state import LeaseState
from aztask.queues.local.broker import LocalBroker
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Decision,
    Defer,
    Hold,
    Release,
    Settlement,
)
from aztask.stores.records.base import RunKey, RunRecord, Start, State
from aztask.support.floodlog import FloodLog
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.pointers import LAST_LOOK, Pointers
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Stage, WorkItem, message_of

LEASE = 10.0


@dataclass
class Bench:
    """A queue, and pointers on it."""

    app: App
    clock: Still
    keeper: LeaseKeeper
    pointers: Pointers
    redelivery: Redelivery
    receiver: Receiver
    deliveries: Deliveries

    def item(self) -> WorkItem:
        """The next message, opened."""
        (delivery,) = self.receiver.receive(1, 0.0)
        item = self.deliveries.add("default", self.receiver, delivery)
        item.open(self.app.codec.from_envelope(delivery.envelope, "default"), None)
        self.keeper.hold(self.receiver, [item.lease])
        return item

    def settle(self, item: WorkItem, how: Settlement) -> None:
        item.decide(how)
        assert self.keeper.begin_settlement([item.lease]) == [True]
        answers = self.receiver.settle([(item.delivery, how)])
        self.pointers.follow([item], answers)

    def deferred(self, task_id: str = "a") -> WorkItem:
        """A message that was deferred for a retry, its pointer in the queue."""
        self.app.send("shop.resize", ["a.png"], task_id=task_id)
        item = self.item()
        item.decide(Defer(0.0))
        self.pointers.send([item])
        self.settle(item, item.settlement)
        return item

    def left(self) -> tuple[int | None, ...]:
        stats = self.app.broker.stats("default")
        return stats.active, stats.leased, stats.deferred, stats.dead


@pytest.fixture(params=[True, False], ids=["results", "no results"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    clock = Still()
    database = Database(str(tmp_path / "queues.db"))
    broker = LocalBroker(database, clock=clock)
    results = f"local://{tmp_path}/results.db" if request.param else None
    app = App("shop", broker=broker, results=results)
    keeper = LeaseKeeper(broker, clock=clock)
    redelivery = Redelivery(app, keeper, clock)
    receiver = broker.receiver("default", lease=LEASE)
    pointers = Pointers(app, keeper, redelivery, FloodLog(clock))
    yield Bench(app, clock, keeper, pointers, redelivery, receiver, Deliveries("w", clock))
    app.close()
    database.close()


def test_a_pointers_job_becomes_the_deferred_messages(bench: Bench) -> None:
    original = bench.deferred()
    item = bench.item()
    pointing = item.delivery
    assert bench.pointers.fetch([item]) == [item]
    assert bench.pointers.fetch([item]) == [item], "once"
    assert item.pointer is not None
    assert item.pointer.delivery is pointing
    assert item.delivery.position == original.delivery.position
    assert item.key == original.key
    message = message_of(item)
    assert (message.pointer, message.body) == (None, message_of(original).body)
    assert message.resubmit_count == (0 if bench.app.results else 1), "else its row counts"
    assert len(item.leases) == 2
    assert bench.left() == (0, 2, 0, 0)


def test_what_does_not_point_is_passed_on(bench: Bench) -> None:
    bench.app.send("shop.resize", ["a.png"])
    item = bench.item()
    assert bench.pointers.fetch([item]) == [item]
    assert item.pointer is None


@pytest.mark.parametrize(
    ("how", "left"),
    [
        (Complete(), (0, 0, 0, 0)),
        (DeadLetter("why"), (0, 0, 0, 1)),
        (Defer(), (0, 0, 1, 0)),
        (Abandon(), (1, 0, 1, 0)),
        (Release(), (1, 0, 1, 0)),
    ],
)
def test_the_pointer_follows_its_message(
    bench: Bench, how: Settlement, left: tuple[int, ...]
) -> None:
    """It ends, unless the message is deferred again without another pointer."""
    bench.deferred()
    item = bench.item()
    bench.pointers.fetch([item])
    bench.settle(item, how)
    assert bench.left() == left


def test_a_message_that_is_not_deferred_is_waited_for_two_leases_long(bench: Bench) -> None:
    bench.app.send("shop.resize", ["a.png"], task_id="a")
    bench.app.send("shop.resize", ["a.png"], task_id="late")
    held = bench.item()
    held.decide(Defer(0.0))
    bench.settle(bench.item(), Complete())
    bench.pointers.send([held])
    waits: list[Decision | None] = []
    for _ in range(LAST_LOOK):
        item = bench.item()
        assert bench.pointers.fetch([item]) == []
        waits.append(item.settlement)
        if isinstance(item.settlement, Hold):
            bench.receiver.settle([(item.delivery, Abandon())])
            bench.keeper.drop(item.leases)
    pauses = [each.delay for each in waits if isinstance(each, Hold)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, LEASE, LEASE]
    assert waits[-1] == Complete(), "it comes by itself"


def ran(bench: Bench, item: WorkItem) -> None:
    """Record, as a worker does before it defers, that a run of this message failed."""
    if bench.app.results is not None:
        key, at = item.key, bench.clock.wall()
        bench.app.results.start(
            [Start(key, "shop.resize", "default", item.delivery.position, "w/1", "w", at)]
        )


@pytest.mark.parametrize("expected", [True, False], ids=["sent with an id", "unknown"])
def test_a_pointer_that_no_worker_sent_is_dead_if_a_store_can_tell(
    bench: Bench, expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a store it could be the rest of a run that has ended, so it is completed."""
    original = bench.deferred("other")
    bench.settle(bench.item(), Complete())
    stray = replace(message_of(original), id="stray").pointing(
        999_999, counted=True, delivery_base=0
    )
    if expected and bench.app.results is not None:
        key = RunKey("stray")
        bench.app.results.expect([RunRecord(key, "shop.resize", "default", State.PENDING)])
    bench.app.broker.send("default", [bench.app.codec.to_envelope(stray)])
    item = bench.item()
    assert bench.pointers.fetch([item]) == []
    if bench.app.results is None:
        assert item.settlement == Complete()
    else:
        text = "it points to message 999999, which is gone; the task id never ran"
        assert item.settlement == DeadLetter("foreign-pointer", text)
        assert text in caplog.text


def test_where_nothing_can_be_deferred_a_pointer_is_dead_and_no_other_message_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.deferred()
    pointer = bench.item()
    bench.app.send("shop.resize", ["b.png"], task_id="b")
    plain = bench.item()
    cannot = replace(bench.app.broker.capabilities, name="storagequeue", defer=False)
    monkeypatch.setattr(type(bench.app.broker), "capabilities", cannot)
    assert bench.pointers.fetch([pointer, plain]) == [plain]
    assert isinstance(pointer.settlement, DeadLetter)
    assert pointer.settlement.reason == "foreign-pointer"
    assert "storagequeue cannot defer" in pointer.settlement.description


def test_a_pointer_to_nothing_ends(bench: Bench) -> None:
    original = bench.deferred()
    ran(bench, original)
    (found,) = bench.receiver.receive_deferred([original.delivery.position])
    bench.receiver.settle([(found, Complete())])
    item = bench.item()
    assert bench.pointers.fetch([item]) == []
    assert item.settlement == Complete()


def test_a_replayed_pointer_runs_its_message_as_a_new_generation(bench: Bench) -> None:
    """Its counts start over, whatever the message had before, and its deliveries too."""
    original = bench.deferred()
    first = bench.item()
    pointer = message_of(first)
    bench.settle(first, Complete())
    bench.app.broker.send("default", [bench.app.codec.to_envelope(pointer.replayed())])
    item = bench.item()
    assert bench.pointers.fetch([item]) == [item]
    message = message_of(item)
    assert message.key == ("a", 1, 0)
    assert message.body == message_of(original).body
    assert (message.resubmit_count, message.delivery_base) == (0, item.delivery.delivery_count - 1)


def test_two_pointers_at_once_get_one_message(bench: Bench) -> None:
    bench.deferred()
    (peeked,) = [each for each in bench.app.broker.peek("default") if each.envelope.body == b""]
    bench.app.broker.send("default", [replace(peeked.envelope, message_id="twice")])
    items = [bench.item(), bench.item()]
    assert bench.pointers.fetch(items) == [items[0]]
    assert isinstance(items[1].settlement, Hold)


def test_a_pointer_to_another_tasks_message_is_dead_and_the_message_stays(bench: Bench) -> None:
    original = bench.deferred()
    bench.settle(bench.item(), Complete())
    bench.app.send("shop.resize", [], task_id="other")
    other = bench.item()
    forged = message_of(other).pointing(
        int(original.delivery.position), counted=True, delivery_base=0
    )
    bench.settle(other, Complete())
    bench.app.broker.send("default", [bench.app.codec.to_envelope(forged)])
    item = bench.item()
    assert bench.pointers.fetch([item]) == []
    assert item.settlement is not None
    bench.settle(item, Abandon())
    assert bench.left() == (0, 0, 1, 1)
    (dead,) = bench.app.broker.peek("default", dead_letter=True)
    assert dead.dead_letter_reason == "foreign-pointer"


def test_a_deferred_message_that_cannot_be_read_is_dead(bench: Bench) -> None:
    bench.app.broker.send("default", [Envelope(b"junk", message_id="junk")])
    (junk,) = bench.receiver.receive(1, 0.0)
    bench.receiver.settle([(junk, Defer())])
    bench.app.send("shop.resize", [], task_id="a")
    first = bench.item()
    pointer = message_of(first).pointing(int(junk.position), counted=True, delivery_base=0)
    bench.settle(first, Complete())
    bench.app.broker.send("default", [bench.app.codec.to_envelope(pointer)])
    item = bench.item()
    assert bench.pointers.fetch([item]) == []
    assert isinstance(item.settlement, DeadLetter)
    assert item.settlement.reason == "undecodable"


# -- answers and failures ----------------------------------------------------------------------


def fetched(bench: Bench) -> WorkItem:
    """A deferred message that its pointer called for."""
    bench.deferred()
    item = bench.item()
    assert bench.pointers.fetch([item]) == [item]
    item.decide(Complete())
    assert item.pointer is not None
    return item


@pytest.mark.parametrize("answer", [Lost("taken over"), Unknown("no answer")])
def test_a_pointer_stays_until_its_message_is_settled(bench: Bench, answer: Lost | Unknown) -> None:
    item = fetched(bench)
    bench.pointers.follow([item], [answer])
    assert item.pointer is not None
    assert item.pointer.lease.state is LeaseState.HELD
    assert bench.left() == (0, 2, 0, 0)


def test_only_pointers_of_settled_messages_follow(bench: Bench) -> None:
    bench.app.send("shop.resize", ["b.png"], task_id="b")
    other = bench.item()
    item = fetched(bench)
    bench.pointers.follow([other, item], [Settled(), Settled()])
    assert item.pointer is not None
    assert item.pointer.lease.state is LeaseState.SETTLED
    assert other.lease.state is LeaseState.HELD
    assert bench.left() == (0, 2, 0, 0), "the message itself is the caller's business"


def test_a_pointer_that_cannot_be_settled_is_held_and_comes_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = fetched(bench)
    assert item.pointer is not None

    def away(pairs: object) -> object:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(bench.receiver, "settle", away)
    bench.pointers.follow([item], [Settled()])
    assert item.pointer.lease.state is LeaseState.HELD
    assert item.stage is Stage.DECIDED


@pytest.mark.parametrize("answer", [Lost("taken over"), Unknown("no answer"), Settled()])
def test_what_the_broker_says_of_a_pointer_is_booked_on_its_lease(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, answer: Lost | Unknown | Settled
) -> None:
    item = fetched(bench)
    assert item.pointer is not None
    asked: list[object] = []
    monkeypatch.setattr(bench.receiver, "settle", lambda pairs: asked.append(pairs) or [answer])
    bench.pointers.follow([item], [Settled()])
    assert asked == [[(item.pointer.delivery, Complete())]]
    states = {Lost: LeaseState.LOST, Unknown: LeaseState.HELD, Settled: LeaseState.SETTLED}
    assert item.pointer.lease.state is states[type(answer)]


def test_a_pointer_whose_lease_is_lost_is_left_alone(bench: Bench) -> None:
    item = fetched(bench)
    assert item.pointer is not None
    bench.keeper.begin(item.pointer.lease)
    bench.keeper.lapse(item.pointer.lease, "lost")
    bench.pointers.follow([item], [Settled()])
    assert bench.left() == (0, 2, 0, 0)


def test_only_what_is_deferred_gets_a_pointer(bench: Bench) -> None:
    for task_id in "ab":
        bench.app.send("shop.resize", ["a.png"], task_id=task_id)
    items = [bench.item(), bench.item()]
    items[0].decide(Complete())
    items[1].decide(Defer(7.0))
    bench.pointers.send(items)
    assert bench.app.broker.stats("default").scheduled == 1
    bench.pointers.send(items[:1])
    bench.pointers.send([])
    assert bench.app.broker.stats("default").scheduled == 1


def test_pointers_go_to_the_queues_of_their_messages(bench: Bench) -> None:
    items = []
    for queue in ("default", "other"):
        bench.app.send("shop.resize", ["a.png"], task_id=queue, queue=queue)
        (delivery,) = bench.app.broker.receiver(queue, lease=LEASE).receive(1, 0.0)
        item = bench.deliveries.add(queue, bench.receiver, delivery)
        item.open(bench.app.codec.from_envelope(delivery.envelope, queue), None)
        item.decide(Defer(7.0))
        items.append(item)
    bench.pointers.send(items)
    counts = [bench.app.broker.stats(queue).scheduled for queue in ("default", "other")]
    assert counts == [1, 1]


def test_a_broker_that_is_unreachable_is_the_callers_to_know(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.deferred()
    item = bench.item()

    def away(positions: object) -> object:
        raise BrokerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(bench.receiver, "receive_deferred", away)
        with pytest.raises(BrokerUnavailable):
            bench.pointers.fetch([item])
    assert (item.stage, item.pointer) == (Stage.RECEIVED, None)
    assert bench.pointers.fetch([item]) == [item]


# -- what is passed on -------------------------------------------------------------------------


def test_pointers_and_others_keep_their_order(bench: Bench) -> None:
    bench.deferred("a")
    bench.app.send("shop.resize", ["b.png"], task_id="b")
    pointer, plain = bench.item(), bench.item()
    bench.app.send("shop.resize", ["c.png"], task_id="c")
    gone = bench.item()
    gone.rewrite(pointer=999_999)
    ran(bench, gone)
    assert bench.pointers.fetch([plain, gone, pointer]) == [plain, pointer]
    assert gone.settlement == Complete()
    assert plain.pointer is None


def test_each_receiver_is_asked_for_its_own(bench: Bench) -> None:
    for task_id in "ab":
        bench.app.send("shop.resize", ["a.png"], task_id=task_id)
    originals = [bench.item(), bench.item()]
    for original in originals:
        original.decide(Defer(0.0))
    bench.pointers.send(originals)
    for original in originals:
        bench.settle(original, Defer(0.0))
    items = [bench.item(), bench.item()]
    other = bench.app.broker.receiver("default", lease=LEASE)
    items[1].receiver = other
    asked: list[object] = []
    for receiver in (bench.receiver, other):
        real = receiver.receive_deferred

        def note(positions: list[int], real: object = real) -> object:
            asked.append(list(positions))
            return real(positions)  # type: ignore[operator]

        receiver.receive_deferred = note  # type: ignore[method-assign, assignment]
    assert bench.pointers.fetch(items) == items
    assert [len(each) for each in asked] == [1, 1]  # type: ignore[arg-type]


def test_what_a_pointer_says_of_counts_holds_where_no_row_does(bench: Bench) -> None:
    bench.deferred()
    item = bench.item()
    item.rewrite(resubmit_count=5, snooze_count=6, delivery_base=3)
    bench.pointers.fetch([item])
    message = message_of(item)
    counts = (message.resubmit_count, message.snooze_count, message.delivery_base)
    assert counts == ((0, 0, 0) if bench.app.results else (5, 6, 3))


def test_of_a_replayed_pointer_the_counts_start_where_it_says(bench: Bench) -> None:
    original = bench.deferred()
    item = bench.item()
    item.rewrite(generation=1, hop=4, resubmit_count=5, snooze_count=6)
    bench.pointers.fetch([item])
    message = message_of(item)
    assert message.key == ("a", 1, 4)
    counts = (message.resubmit_count, message.snooze_count)
    assert counts == ((0, 0) if bench.app.results else (5, 6))
    assert message.delivery_base == item.delivery.delivery_count - 1
    assert message.body == message_of(original).body


@pytest.mark.parametrize(
    ("lease", "looks", "pause"),
    [
        (3.0, 1, 1.0),
        (3.0, 2, 2.0),
        (3.0, 4, 3.0),
        (3.0, 7, None),
        (100.0, 4, 8.0),
        (100.0, 5, 100.0),
        (100.0, 6, 100.0),
        (100.0, 7, None),
    ],
)
def test_it_is_never_waited_for_longer_than_a_lease_at_a_time(
    bench: Bench, lease: float, looks: int, pause: float | None
) -> None:
    bench.app.send("shop.resize", ["a.png"], task_id="a")
    held = bench.item()
    held.decide(Defer(0.0))
    bench.pointers.send([held])
    item = bench.item()
    item.delivery.lease_seconds = lease
    item.delivery.delivery_count = looks
    assert bench.pointers.fetch([item]) == []
    assert item.settlement == (Complete() if pause is None else Hold(pause))


def test_the_message_is_held_by_a_lease_of_its_own(bench: Bench) -> None:
    bench.deferred()
    item = bench.item()
    held = len(bench.keeper)
    bench.pointers.fetch([item])
    assert item.pointer is not None
    assert len(bench.keeper) == held + 1, "both are renewed"
    assert item.lease is not item.pointer.lease
    assert item.lease.delivery is item.delivery
