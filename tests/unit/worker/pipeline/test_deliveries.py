"""What a worker holds: where each delivery waits, and when it is tried again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from still import Still

from aztask.message.envelope import Envelope
from aztask.queues.delivery import Delivery
from aztask.queues.lease.state import Lease
from aztask.settlement import Abandon
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.work import Pointer, WorkItem

NOW = 1_000_000.0


def delivery(number: int = 1) -> Delivery:
    return Delivery("q", Envelope(b""), number, "t", 1, 0.0, NOW + 60.0, 60.0)


class Bench:
    def __init__(self) -> None:
        self.clock = Still(NOW)
        self.deliveries = Deliveries("w", self.clock)
        self.receiver: Any = SimpleNamespace()

    def add(self, count: int = 1) -> list[WorkItem]:
        return [self.deliveries.add("q", self.receiver, delivery()) for _ in range(count)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_each_delivery_has_a_number_and_an_owner_of_its_own(bench: Bench) -> None:
    bench.clock.now = NOW + 3.0
    slot: Any = object()
    one = bench.deliveries.add("q", bench.receiver, delivery())
    two = bench.deliveries.add("other", bench.receiver, delivery(), slot)
    assert [(each.number, each.owner, each.queue) for each in (one, two)] == [
        (1, "w/1", "q"),
        (2, "w/2", "other"),
    ]
    assert (one.session, two.session) == (None, slot)
    assert one.received_at == NOW + 3.0
    assert (one.lease.seconds, one.lease.deadline) == (60.0, NOW + 60.0)
    assert one.receiver is bench.receiver


def test_what_is_held_is_found_by_its_lease(bench: Bench) -> None:
    one, two = bench.add(2)
    assert list(bench.deliveries) == [one, two]
    assert len(bench.deliveries) == 2
    assert bench.deliveries.of(two.lease) is two
    assert bench.deliveries.remove(two) is True
    assert bench.deliveries.remove(two) is False, "once"
    assert bench.deliveries.of(two.lease) is None
    assert list(bench.deliveries) == [one]


def test_it_may_be_changed_while_it_is_walked_through(bench: Bench) -> None:
    bench.add(3)
    for each in bench.deliveries:
        bench.deliveries.remove(each)
    assert len(bench.deliveries) == 0


def test_an_item_that_a_pointer_called_for_is_found_by_its_new_lease(bench: Bench) -> None:
    (item,) = bench.add()
    bench.deliveries.swapped(item)
    assert bench.deliveries.of(item.lease) is item
    old = item.lease
    item.pointer = Pointer(item.delivery, old)
    item.delivery = delivery(2)
    item.lease = Lease.of(item.delivery)
    bench.deliveries.swapped(item)
    bench.deliveries.swapped(item)
    assert bench.deliveries.of(item.lease) is item
    assert bench.deliveries.of(old) is None
    assert bench.deliveries.remove(item) is True
    assert bench.deliveries.of(item.lease) is None


def test_one_that_is_done_with_before_it_was_swapped_is_forgotten_altogether(
    bench: Bench,
) -> None:
    (item,) = bench.add()
    old = item.lease
    item.pointer = Pointer(item.delivery, old)
    item.lease = Lease.of(delivery(2))
    bench.deliveries.remove(item)
    assert bench.deliveries.of(old) is None
    bench.deliveries.swapped(item)
    assert bench.deliveries.of(item.lease) is None, "it does not come back"


def test_what_was_taken_out_too_early_goes_in_front_in_order(bench: Bench) -> None:
    one, two, three = bench.add(3)
    bench.deliveries.ready.append(three)
    bench.deliveries.back(each for each in (one, two))
    assert list(bench.deliveries.ready) == [one, two, three]


# -- trying again ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tries", "pause"),
    [(0, 0.01), (1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 10.0), (60, 10.0)],
)
def test_a_stage_is_tried_again_after_a_pause_that_grows(
    bench: Bench, tries: int, pause: float
) -> None:
    """At once when only a renewal was in the way."""
    (item,) = bench.add()
    item.tries = tries
    at = bench.deliveries.try_later(item)
    assert at == NOW + pause
    assert bench.deliveries.due(at - 0.001) == []
    assert bench.deliveries.due(at) == [item]
    assert bench.deliveries.due(at) == [], "once"


def test_of_those_that_wait_the_due_ones_are_taken_out(bench: Bench) -> None:
    items = bench.add(3)
    for n, item in enumerate(items):
        item.tries = 3 - n
        bench.deliveries.try_later(item)
    assert bench.deliveries.due(NOW + 1.0) == items[1:]
    assert bench.deliveries.due(NOW + 2.0) == items[:1]


# -- held --------------------------------------------------------------------------------------


def test_what_is_held_is_let_go_when_it_is_due_in_the_order_of_time(bench: Bench) -> None:
    items = bench.add(3)
    for item, until in zip(items, (30.0, 10.0, 20.0), strict=True):
        item.held_until = NOW + until
        assert bench.deliveries.hold(item) == NOW + until
    assert bench.deliveries.held == 3
    assert bench.deliveries.let_go(NOW + 9.999) == []
    assert bench.deliveries.let_go(NOW + 10.0) == [items[1]]
    assert bench.deliveries.held == 2
    assert bench.deliveries.let_go(float("inf")) == [items[2], items[0]]
    assert bench.deliveries.held == 0
    assert bench.deliveries.let_go(float("inf")) == []


def test_what_is_done_with_is_held_no_longer(bench: Bench) -> None:
    one, two = bench.add(2)
    for item in (one, two):
        item.held_until = NOW + 1.0
        bench.deliveries.hold(item)
    bench.deliveries.remove(one)
    assert bench.deliveries.held == 1
    assert bench.deliveries.let_go(NOW + 1.0) == [two]


# -- giving back -------------------------------------------------------------------------------


def test_what_has_neither_started_nor_ended_is_given_back(bench: Bench) -> None:
    """A run that has finished and waits for its record is not: it would run twice."""
    opened, ready, later, decided, running = bench.add(5)
    bench.deliveries.opened.append(opened)
    bench.deliveries.ready.append(ready)
    decided.decide(Abandon())
    for item in (later, decided):
        bench.deliveries.try_later(item)
    assert bench.deliveries.waiting() == [opened, ready, later]
    assert bench.deliveries.waiting() == []
    assert (len(bench.deliveries.opened), len(bench.deliveries.ready)) == (0, 0)
    assert bench.deliveries.due(NOW + 60.0) == [decided], "it is tried again"
    assert running in list(bench.deliveries)
