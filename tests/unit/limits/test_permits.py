"""Permits of two workers in a real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from still import Still

from aztask.engine import Database
from aztask.errors import BrokerUnavailable
from aztask.limits.holders import LEASE_SECONDS, RENEW_SECONDS, STOP_SECONDS, Holders, Row
from aztask.limits.permits import IDLE_SECONDS, REFUSED_SECONDS, YIELDED_SECONDS, Permits
from aztask.limits.storeclock import StoreClock
from aztask.results.controls import EntryChange
from aztask.results.local.store import LocalResults

ENTRY = "limit-held-a"


class Fleet:
    """Workers that share a store and a clock. requests: how often they asked the store."""

    def __init__(self, path: str) -> None:
        self.clock = Still()
        self.store: Any = LocalResults(Database(path), clock=self.clock).controls
        self.requests = 0

    def worker(self, name: str) -> Permits:
        time = StoreClock(self, self.clock)
        time.refresh()
        return Permits(self, time, name, self.clock)

    def time(self) -> Any:
        return self.store.time()

    def read(self, names: Any) -> Any:
        self.requests += 1
        return self.store.read(names)

    def write(self, changes: Any) -> Any:
        self.requests += 1
        return self.store.write(changes)

    def purge(self, prefix: str, before: float) -> int:
        raise NotImplementedError

    @property
    def held(self) -> dict[str, int]:
        """{worker: permits} in the store."""
        (found,) = self.store.read([ENTRY])
        rows = Holders.from_data(found.data).valid(self.clock.now).rows
        return {name: row.count for name, row in rows.items()}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(str(tmp_path / "results.db"))


def test_two_workers_share_the_permits_and_no_more(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert [one.take(ENTRY, 5, 0.0) for _ in range(3)] == [True] * 3
    assert [two.take(ENTRY, 5, 0.0) for _ in range(3)] == [True, True, False]
    assert fleet.held == {"one": 3, "two": 2}
    one.free(ENTRY)
    assert not two.take(ENTRY, 5, 0.0), "the first one keeps it"
    assert one.take(ENTRY, 5, 0.0)


def test_a_permit_is_used_again_without_a_request(fleet: Fleet) -> None:
    one = fleet.worker("one")
    assert one.take(ENTRY, 5, 0.0, wanted=5)
    before = fleet.requests
    for _ in range(100):
        one.free(ENTRY)
        assert one.take(ENTRY, 5, 0.0)
    assert [one.take(ENTRY, 5, 0.0) for _ in range(4)] == [True] * 4, "all five were granted"
    assert fleet.requests == before
    assert before <= 2, "a cold key"


def test_a_refused_worker_does_not_ask_for_each_delivery(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert one.take(ENTRY, 1, 0.0)
    two.take(ENTRY, 1, 0.0)
    before = fleet.requests
    for _ in range(100):
        assert not two.take(ENTRY, 1, 0.0)
    assert fleet.requests == before
    fleet.clock.now += REFUSED_SECONDS + 0.1
    assert not two.take(ENTRY, 1, 0.0)
    assert fleet.requests > before


def test_permits_that_nothing_uses_go_back(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    one.take(ENTRY, 1, 0.0)
    one.free(ENTRY)
    one.waits(ENTRY, None)
    one.maintain()
    assert fleet.held == {"one": 1}, "the next task may come at once"
    fleet.clock.now += IDLE_SECONDS + 0.1
    one.maintain()
    assert fleet.held == {}
    assert two.take(ENTRY, 1, 0.0)


def test_those_of_a_killed_worker_are_free_after_one_lease(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert one.take(ENTRY, 1, 0.0)
    ends = one.deadline(ENTRY)
    fleet.clock.now += LEASE_SECONDS - 0.1
    assert not two.take(ENTRY, 1, 0.0)
    assert fleet.clock.now > ends, "tasks of the first worker have stopped by now"
    fleet.clock.now += REFUSED_SECONDS
    assert two.take(ENTRY, 1, 0.0)


def test_a_renewal_moves_the_deadline(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    one.take(ENTRY, 1, 0.0)
    for _ in range(10):
        fleet.clock.now += RENEW_SECONDS + 0.1
        assert one.maintain() == [ENTRY]
        assert one.deadline(ENTRY) == fleet.clock.now + LEASE_SECONDS - STOP_SECONDS
        assert not two.take(ENTRY, 1, 0.0)
        assert one.maintain() == [], "it is not due"


def test_a_worker_that_was_frozen_gets_no_new_deadline_for_what_runs(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    one.take(ENTRY, 1, 0.0)
    fleet.clock.now += LEASE_SECONDS + 1.0
    assert two.take(ENTRY, 1, 0.0)
    assert one.maintain() == [], "its task must end at the old deadline"
    assert fleet.held == {"two": 1}
    assert not one.take(ENTRY, 1, 0.0)
    one.free(ENTRY)
    assert not one.take(ENTRY, 1, 0.0)
    assert fleet.held["two"] == 1


def test_a_worker_yields_to_one_that_has_waited_for_longer(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    one.take(ENTRY, 1, 50.0)
    assert not two.take(ENTRY, 1, 10.0)
    one.waits(ENTRY, 50.0)
    fleet.clock.now += RENEW_SECONDS + 0.1
    one.maintain()  # it reads that the other one waits
    one.free(ENTRY)
    assert not one.take(ENTRY, 1, 50.0), "it is not for its own deliveries"
    one.maintain()
    assert fleet.clock.now < one._stocks[ENTRY].ask_at <= fleet.clock.now + YIELDED_SECONDS
    fleet.clock.now += REFUSED_SECONDS
    assert two.take(ENTRY, 1, 10.0)


def test_everything_is_given_back_at_the_end(fleet: Fleet) -> None:
    one = fleet.worker("one")
    one.take(ENTRY, 5, 0.0, wanted=3)
    one.release_all()
    assert fleet.held == {}


def test_a_damaged_entry_counts_as_full_for_one_lease(fleet: Fleet) -> None:
    fleet.store.write([EntryChange(ENTRY, b"damaged")])
    one = fleet.worker("one")
    assert not one.take(ENTRY, 5, 0.0)
    fleet.clock.now += LEASE_SECONDS + 0.1
    assert one.take(ENTRY, 5, 0.0)


def test_an_entry_that_always_changes_is_given_up(fleet: Fleet) -> None:
    one = fleet.worker("one")
    fleet.store.write = lambda changes: [None]
    with pytest.raises(BrokerUnavailable, match="permits"):
        one.take(ENTRY, 1, 0.0)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["take", "free", "maintain", "wait", "die"])),
        max_size=60,
    )
)
def test_never_more_than_the_limit_are_granted(steps: list[tuple[int, str]]) -> None:
    """Whatever workers do, and whichever dies."""
    fleet = Fleet(":memory:")
    workers = [fleet.worker(f"w{n}") for n in range(3)]
    used = [0, 0, 0]
    born = 3
    for number, step in steps:
        if step == "take":
            used[number] += workers[number].take(ENTRY, 2, fleet.clock.now)
        elif step == "free" and used[number]:
            workers[number].free(ENTRY)
            used[number] -= 1
        elif step == "maintain":
            workers[number].maintain()
        elif step == "wait":
            fleet.clock.now += 0.7
            for each in workers:
                each.maintain()
        elif step == "die":
            workers[number], used[number] = fleet.worker(f"w{born}"), 0
            born += 1
        assert sum(used) <= 2


def test_the_state_is_read_as_it_was_written() -> None:
    state = Holders({"a": Row(2, 5.0), "b": Row(0, 6.0, 1.0)})
    assert Holders.from_data(state.to_data()) == state
    assert state.valid(5.0).rows == {"b": Row(0, 6.0, 1.0)}
    assert state.others("b") == 2
    assert state.waiting("a") == [1.0]
    for data in (b"", b"[]", b'[9,{},""]', b'[1,{"a":[1]},""]', b'[1,{"a":[-1,0,null]},""]'):
        with pytest.raises(ValueError, match="damaged"):
            Holders.from_data(data)
