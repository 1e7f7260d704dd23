"""Pointers and what they point to: fetched, waited for, settled in the right order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from still import Still

from aztask import App
from aztask.brokers.base import Receiver
from aztask.brokers.local.broker import LocalBroker
from aztask.engine import Database
from aztask.lease.keeper import LeaseKeeper
from aztask.message.envelope import Envelope
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
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.pointers import LAST_LOOK, Pointers
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Job, message_of

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

    def job(self) -> Job:
        """The next message, opened."""
        (delivery,) = self.receiver.receive(1, 0.0)
        job = self.deliveries.add("default", self.receiver, delivery)
        job.message = self.app.codec.from_envelope(delivery.envelope, "default")
        self.keeper.hold(self.receiver, [job.lease])
        return job

    def settle(self, job: Job, how: Settlement) -> None:
        job.settlement = how
        assert self.keeper.begin_settlement([job.lease]) == [True]
        answers = self.receiver.settle([(job.delivery, how)])
        self.pointers.follow([job], answers)

    def deferred(self, task_id: str = "a") -> Job:
        """A message that was deferred for a retry, its pointer in the queue."""
        self.app.send("shop.resize", ["a.png"], task_id=task_id)
        job = self.job()
        job.settlement = Defer(0.0)
        self.pointers.send([job])
        self.settle(job, job.settlement)
        return job

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
    pointers = Pointers(app, keeper, redelivery)
    yield Bench(app, clock, keeper, pointers, redelivery, receiver, Deliveries("w", clock))
    app.close()
    database.close()


def test_a_pointers_job_becomes_the_deferred_messages(bench: Bench) -> None:
    original = bench.deferred()
    job = bench.job()
    pointing = job.delivery
    assert bench.pointers.fetch([job]) == [job]
    assert bench.pointers.fetch([job]) == [job], "once"
    assert job.pointer is not None
    assert job.pointer.delivery is pointing
    assert job.delivery.position == original.delivery.position
    assert job.key == original.key
    message = message_of(job)
    assert (message.pointer, message.body) == (None, message_of(original).body)
    assert message.resubmit_count == (0 if bench.app.results else 1), "else its row counts"
    assert len(job.leases) == 2
    assert bench.left() == (0, 2, 0, 0)


def test_what_does_not_point_is_passed_on(bench: Bench) -> None:
    bench.app.send("shop.resize", ["a.png"])
    job = bench.job()
    assert bench.pointers.fetch([job]) == [job]
    assert job.pointer is None


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
    job = bench.job()
    bench.pointers.fetch([job])
    bench.settle(job, how)
    assert bench.left() == left


def test_a_message_that_is_not_deferred_is_waited_for_two_leases_long(bench: Bench) -> None:
    bench.app.send("shop.resize", ["a.png"], task_id="a")
    bench.app.send("shop.resize", ["a.png"], task_id="late")
    held = bench.job()
    held.settlement = Defer(0.0)
    bench.settle(bench.job(), Complete())
    bench.pointers.send([held])
    waits: list[Decision | None] = []
    for _ in range(LAST_LOOK):
        job = bench.job()
        assert bench.pointers.fetch([job]) == []
        waits.append(job.settlement)
        if isinstance(job.settlement, Hold):
            bench.receiver.settle([(job.delivery, Abandon())])
            bench.keeper.drop(job.leases)
    pauses = [each.delay for each in waits if isinstance(each, Hold)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, LEASE, LEASE]
    assert waits[-1] == Complete(), "it comes by itself"


def test_a_pointer_to_nothing_ends(bench: Bench) -> None:
    original = bench.deferred()
    (found,) = bench.receiver.receive_deferred([original.delivery.position])
    bench.receiver.settle([(found, Complete())])
    job = bench.job()
    assert bench.pointers.fetch([job]) == []
    assert job.settlement == Complete()


def test_a_replayed_pointer_runs_its_message_as_a_new_generation(bench: Bench) -> None:
    """Its counts start over, whatever the message had before, and its deliveries too."""
    original = bench.deferred()
    first = bench.job()
    pointer = message_of(first)
    bench.settle(first, Complete())
    bench.app.broker.send("default", [bench.app.codec.to_envelope(pointer.replayed())])
    job = bench.job()
    assert bench.pointers.fetch([job]) == [job]
    message = message_of(job)
    assert message.key == ("a", 1, 0)
    assert message.body == message_of(original).body
    assert (message.resubmit_count, message.delivery_base) == (0, job.delivery.delivery_count - 1)


def test_two_pointers_at_once_get_one_message(bench: Bench) -> None:
    bench.deferred()
    (peeked,) = [each for each in bench.app.broker.peek("default") if each.envelope.body == b""]
    bench.app.broker.send("default", [replace(peeked.envelope, message_id="twice")])
    jobs = [bench.job(), bench.job()]
    assert bench.pointers.fetch(jobs) == [jobs[0]]
    assert isinstance(jobs[1].settlement, Hold)


def test_a_pointer_to_another_tasks_message_is_dead_and_the_message_stays(bench: Bench) -> None:
    original = bench.deferred()
    bench.settle(bench.job(), Complete())
    bench.app.send("shop.resize", [], task_id="other")
    other = bench.job()
    forged = message_of(other).pointing(
        int(original.delivery.position), counted=True, delivery_base=0
    )
    bench.settle(other, Complete())
    bench.app.broker.send("default", [bench.app.codec.to_envelope(forged)])
    job = bench.job()
    assert bench.pointers.fetch([job]) == []
    assert job.settlement is not None
    bench.settle(job, Abandon())
    assert bench.left() == (0, 0, 1, 1)
    (dead,) = bench.app.broker.peek("default", dead_letter=True)
    assert dead.dead_letter_reason == "foreign-pointer"


def test_a_deferred_message_that_cannot_be_read_is_dead(bench: Bench) -> None:
    bench.app.broker.send("default", [Envelope(b"junk", message_id="junk")])
    (junk,) = bench.receiver.receive(1, 0.0)
    bench.receiver.settle([(junk, Defer())])
    bench.app.send("shop.resize", [], task_id="a")
    first = bench.job()
    pointer = message_of(first).pointing(int(junk.position), counted=True, delivery_base=0)
    bench.settle(first, Complete())
    bench.app.broker.send("default", [bench.app.codec.to_envelope(pointer)])
    job = bench.job()
    assert bench.pointers.fetch([job]) == []
    assert isinstance(job.settlement, DeadLetter)
    assert job.settlement.reason == "undecodable"
