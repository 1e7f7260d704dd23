"""Deliveries that wait in hand for a permit."""

from __future__ import annotations

from pipelinebench import Bench, Make

from aztask.worker.limiting.slots import LONGEST_PARKED, MOST_PARKED, Parking
from aztask.worker.pipeline.work import AwaitsPermit, WorkItem


def park(parking: Parking, bench: Bench, item: WorkItem, ticket: float) -> WorkItem | None:
    item.parked = AwaitsPermit("e", ticket, "limit api")
    return parking.add(item, bench.clock.now)


def test_the_oldest_ticket_comes_first_and_the_youngest_has_to_go(make: Make) -> None:
    bench, parking = make(), Parking()
    items = bench.items(*[f"t{n}" for n in range(MOST_PARKED + 1)])
    for ticket, item in zip(range(MOST_PARKED, 0, -1), items, strict=False):
        assert park(parking, bench, item, float(ticket)) is None
    assert park(parking, bench, items[-1], 0.5) is items[0], "its ticket is the youngest"
    assert parking.ticket("e") == 0.5
    assert parking.next("e") is items[-1]
    assert parking.ticket("e") == 1.0
    assert len(parking) == MOST_PARKED - 1


def test_those_that_ended_meanwhile_are_skipped(make: Make) -> None:
    bench, parking = make(), Parking()
    first, second = bench.items("a", "b")
    park(parking, bench, first, 1.0)
    park(parking, bench, second, 2.0)
    first.end()
    assert parking.oldest() == [second]
    assert parking.oldest() == []
    assert parking.ticket("e") is None


def test_those_that_wait_for_long_are_given_up(make: Make) -> None:
    bench, parking = make(), Parking()
    first, second = bench.items("a", "b")
    park(parking, bench, first, 1.0)
    bench.clock.now += LONGEST_PARKED
    park(parking, bench, second, 2.0)
    assert parking.too_long(bench.clock.now) == [first]
    assert parking.clear() == [second]
    assert len(parking) == 0
