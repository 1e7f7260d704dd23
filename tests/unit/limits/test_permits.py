"""Permits of two workers in a real store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from still import Still

from aztask.errors import BrokerUnavailable
from aztask.limits.holders import LEASE_SECONDS, RENEW_SECONDS, STOP_SECONDS, HolderRow, Holders
from aztask.limits.permits import IDLE_SECONDS, REFUSED_SECONDS, YIELDED_SECONDS, Permits
from aztask.limits.storeclock import StoreClock
from aztask.queues.engine import Database
from aztask.stores.records.controls import EntryChange
from aztask.stores.records.local.store import LocalResults

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

    @property
    def tickets(self) -> set[str]:
        """The workers that wait, by the store."""
        (found,) = self.store.read([ENTRY])
        rows = Holders.from_data(found.data).valid(self.clock.now).rows
        return {name for name, row in rows.items() if row.ticket is not None}


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
    one, tries = fleet.worker("one"), []
    fleet.store.write = lambda changes: [tries.append(changes)]
    with pytest.raises(BrokerUnavailable, match="permits"):
        one.take(ENTRY, 1, 0.0)
    assert len(tries) == 12


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


@given(
    before=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["take", "free"])), max_size=20),
    after=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["take", "free", "maintain", "wait"])),
        max_size=40,
    ),
    low=st.integers(1, 4),
)
def test_none_is_granted_above_a_limit_that_became_lower(
    before: list[tuple[int, str]], after: list[tuple[int, str]], low: int
) -> None:
    """Whichever workers hold permits then, or have some that nothing uses."""
    fleet = Fleet(":memory:")
    workers = [fleet.worker(f"w{n}") for n in range(3)]
    used = [0, 0, 0]

    def step(number: int, what: str, most: int) -> None:
        if what == "take" and workers[number].take(ENTRY, most, fleet.clock.now, wanted=2):
            used[number] += 1
            assert sum(used) <= most
        elif what == "free" and used[number]:
            workers[number].free(ENTRY)
            used[number] -= 1
        elif what == "maintain":
            workers[number].maintain()
        elif what == "wait":
            fleet.clock.now += 0.7
            for each in workers:
                each.maintain()

    for number, what in before:
        step(number, what, 6)
    for number, what in after:
        step(number, what, low)


def test_the_state_is_read_as_it_was_written() -> None:
    state = Holders({"a": HolderRow(2, 5.0), "b": HolderRow(0, 6.0, 1.0)})
    assert Holders.from_data(state.to_data()) == state
    assert state.valid(5.0).rows == {"b": HolderRow(0, 6.0, 1.0)}
    assert state.others("b") == 2
    assert state.waiting("a") == [1.0]
    for data in (b"", b"[]", b'[9,{},""]', b'[1,{"a":[1]},""]', b'[1,{"a":[-1,0,null]},""]'):
        with pytest.raises(ValueError, match="damaged"):
            Holders.from_data(data)


def test_an_entry_is_read_as_every_release_writes_it() -> None:
    data = b'[1,{"one":[2,50.0,null],"two":[0,60.0,40.5]},"text"]'
    assert Holders.from_data(data) == Holders(
        {"one": HolderRow(2, 50.0), "two": HolderRow(0, 60.0, 40.5)}
    )
    assert json.loads(Holders({"one": HolderRow(2, 50.0)}).to_data())[:2] == [
        1, {"one": [2, 50.0, None]},
    ]  # fmt: skip


def test_a_worker_that_nothing_waits_in_any_longer_leaves_the_queue(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert one.take(ENTRY, 1, 0.0)
    assert not two.take(ENTRY, 1, 0.0)
    assert fleet.tickets == {"two"}
    two.maintain()
    assert fleet.tickets == {"two"}, "its delivery waits"
    two.waits(ENTRY, None)
    two.maintain()
    assert fleet.tickets == set()


def test_permits_in_use_cost_no_request_until_they_are_renewed(fleet: Fleet) -> None:
    one = fleet.worker("one")
    one.take(ENTRY, 2, 0.0)
    before = fleet.requests
    for _ in range(5):
        assert one.maintain() == []
        fleet.clock.now += RENEW_SECONDS / 6
    assert fleet.requests == before
    fleet.clock.now += RENEW_SECONDS
    assert one.maintain() == [ENTRY]
    assert fleet.requests == before + 1


# -- times: 10 s leases, renewed every 3 s, used for 8 s -------------------------------------------


def test_a_permit_is_valid_for_ten_seconds_and_used_for_eight(fleet: Fleet) -> None:
    one = fleet.worker("one")
    began = fleet.clock.now
    assert one.take(ENTRY, 2, 0.0)
    assert one.deadline(ENTRY) == began + 8.0
    (found,) = fleet.store.read([ENTRY])
    assert Holders.from_data(found.data).rows["one"].until == began + 10.0
    fleet.clock.now = began + 2.9
    assert one.maintain() == []
    fleet.clock.now = began + 3.0
    assert one.maintain() == [ENTRY], "it is renewed after three seconds"


def test_an_entry_that_cannot_be_written_stops_no_other(fleet: Fleet) -> None:
    """Their tasks would end themselves, although the store takes their renewals."""
    one, write = fleet.worker("one"), fleet.store.write
    entries = [ENTRY, f"{ENTRY}-2", f"{ENTRY}-3"]
    for entry in entries:
        assert one.take(entry, 1, 0.0)

    def refuse(changes: Any) -> Any:
        if changes[0].name == entries[1]:
            raise BrokerUnavailable("refused")
        return write(changes)

    fleet.store.write = refuse
    fleet.clock.now += RENEW_SECONDS
    assert one.maintain() == [entries[0], entries[2]]
    assert str(one.error) == "refused"
    fleet.store.write = write
    assert one.maintain() == [entries[1]]
    assert one.error is None


def test_at_its_deadline_a_permit_is_no_longer_used(fleet: Fleet) -> None:
    """Nor one that this worker has but could not renew: another worker gets it soon."""
    one = fleet.worker("one")
    began = fleet.clock.now
    assert one.take(ENTRY, 3, 0.0, wanted=3)
    fleet.store.write = lambda changes: [None]  # the store takes no renewal
    fleet.clock.now = began + 7.9
    assert one.take(ENTRY, 3, 0.0)
    fleet.clock.now = began + 8.0
    with pytest.raises(BrokerUnavailable):
        one.take(ENTRY, 3, 0.0)


def test_a_refused_worker_asks_again_after_half_a_second(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert one.take(ENTRY, 1, 0.0)
    assert not two.take(ENTRY, 1, 0.0)
    one.free(ENTRY)
    one.waits(ENTRY, None)
    one.release_all()
    fleet.clock.now += 0.4
    assert not two.take(ENTRY, 1, 0.0), "it does not know yet"
    fleet.clock.now += 0.125
    assert two.take(ENTRY, 1, 0.0)


def test_a_worker_that_is_granted_permits_may_ask_for_more_at_once(fleet: Fleet) -> None:
    one = fleet.worker("one")
    assert one.take(ENTRY, 5, 0.0)
    assert fleet.held == {"one": 1}, "no more than it needs"
    assert one.take(ENTRY, 5, 0.0)
    assert fleet.held == {"one": 2}


def test_a_worker_that_yielded_asks_again_after_two_seconds(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert one.take(ENTRY, 1, 50.0)
    assert not two.take(ENTRY, 1, 10.0)
    fleet.clock.now += 3.0
    one.maintain()  # it reads that the other one waits
    one.waits(ENTRY, 50.0)
    one.free(ENTRY)
    one.maintain()
    assert fleet.held == {"one": 0, "two": 0}
    two.waits(ENTRY, None)
    two.maintain()  # its delivery went elsewhere, so the permit is free
    fleet.clock.now += 1.9
    assert not one.take(ENTRY, 1, 50.0)
    fleet.clock.now += 0.125
    assert one.take(ENTRY, 1, 50.0)


def test_unused_permits_go_back_after_one_second_and_those_in_use_stay(fleet: Fleet) -> None:
    one = fleet.worker("one")
    assert one.take(ENTRY, 5, 0.0, wanted=4)
    assert all(one.take(ENTRY, 5, 0.0) for _ in range(2))
    one.free(ENTRY)
    one.waits(ENTRY, None)
    fleet.clock.now += 0.9
    one.maintain()
    assert fleet.held == {"one": 4}
    fleet.clock.now += 0.125
    one.maintain()
    assert fleet.held == {"one": 2}


def test_permits_stay_while_deliveries_wait_for_them(fleet: Fleet) -> None:
    one = fleet.worker("one")
    assert one.take(ENTRY, 2, 0.0, wanted=2)
    one.free(ENTRY)
    one.waits(ENTRY, 5.0)
    fleet.clock.now += 2.0
    one.maintain()
    assert fleet.held == {"one": 2}


# -- yielding to workers that have none ------------------------------------------------------------


def waiting(fleet: Fleet, one: Permits, *tickets: float) -> list[Permits]:
    """Workers that hold no permit and wait since these times, of which the first one knows."""
    others = [fleet.worker(f"other-{number}") for number in range(len(tickets))]
    for each, ticket in zip(others, tickets, strict=True):
        assert not each.take(ENTRY, 3, ticket)
    fleet.clock.now += 3.0
    assert one.maintain() == [ENTRY]
    return others


@pytest.mark.parametrize(
    ("mine", "tickets", "left"),
    [
        (None, [20.0], 2),
        (None, [20.0, 30.0], 1),
        (None, [20.0, 30.0, 40.0, 50.0], 0),
        (25.0, [20.0, 30.0], 1),
        (20.0, [20.0], 3),
        (10.0, [20.0, 30.0], 3),
    ],
    ids=str,
)
def test_of_three_permits_those_go_back_for_which_others_have_waited_longer(
    fleet: Fleet, mine: float | None, tickets: list[float], left: int
) -> None:
    """One for each worker that waits, whether deliveries wait here since `mine` or none does."""
    one = fleet.worker("one")
    assert [one.take(ENTRY, 3, 0.0) for _ in range(3)] == [True] * 3
    waiting(fleet, one, *tickets)
    one.waits(ENTRY, mine)
    for _ in range(3):
        one.free(ENTRY)
    one.maintain()
    assert fleet.held.get("one", 0) == left


def test_the_row_of_a_worker_says_since_when_its_oldest_delivery_waits(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert one.take(ENTRY, 1, 0.0)
    for ticket in (30.0, 20.0, 40.0):
        assert not two.take(ENTRY, 1, ticket)
        fleet.clock.now += 0.75
    (found,) = fleet.store.read([ENTRY])
    assert Holders.from_data(found.data).waiting("one") == [20.0]


def test_a_delivery_that_got_its_permit_leaves_no_ticket(fleet: Fleet) -> None:
    """Otherwise the permits that nothing uses would never go back."""
    one = fleet.worker("one")
    assert one.take(ENTRY, 2, 5.0, wanted=2)
    one.free(ENTRY)
    fleet.clock.now += 1.125
    one.maintain()
    assert fleet.held == {}


# -- a limit that becomes lower --------------------------------------------------------------------


def test_a_busy_worker_refills_nothing_above_a_lower_limit(fleet: Fleet) -> None:
    """There is always a delivery that waits, so no permit is ever idle."""
    one = fleet.worker("one")
    assert all(one.take(ENTRY, 5, 0.0) for _ in range(5))
    running = 5
    while running > 2:
        assert not one.take(ENTRY, 2, 1.0)
        one.free(ENTRY)
        running -= 1
        fleet.clock.now += REFUSED_SECONDS
        assert one.take(ENTRY, 2, 1.0) is False
        one.maintain()
        assert fleet.held == {"one": running}
    one.free(ENTRY)
    assert one.take(ENTRY, 2, 1.0), "it keeps what the lower limit allows"
    fleet.clock.now += REFUSED_SECONDS
    assert one.take(ENTRY, 3, 1.0), "and gets more when the limit rises"
    assert fleet.held == {"one": 3}


def test_two_workers_together_come_down_to_a_lower_limit(fleet: Fleet) -> None:
    workers = [fleet.worker("one"), fleet.worker("two")]
    for each in workers:
        assert all(each.take(ENTRY, 6, 0.0) for _ in range(3))
    for each in workers:
        for _ in range(2):
            each.free(ENTRY)
            assert not each.take(ENTRY, 2, 1.0)
    fleet.clock.now += REFUSED_SECONDS
    for each in workers:
        each.maintain()
    assert fleet.held == {"one": 1, "two": 1}


def test_what_nothing_uses_goes_back_at_once_when_the_limit_becomes_lower(fleet: Fleet) -> None:
    """One worker has learnt of the lower limit by a delivery, and another delivery waits there."""
    one, two = fleet.worker("one"), fleet.worker("two")
    assert two.take(ENTRY, 6, 0.0)
    assert one.take(ENTRY, 6, 0.0, wanted=4)
    one.waits(ENTRY, 5.0)
    assert not one.take(ENTRY, 2, 1.0)
    assert fleet.held == {"one": 1, "two": 1}


# -- the end, and what is forgotten ----------------------------------------------------------------


def test_a_worker_that_only_waits_leaves_the_queue_at_its_end(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert one.take(ENTRY, 1, 0.0)
    assert not two.take(ENTRY, 1, 0.0)
    two.release_all()
    assert fleet.tickets == set()
    before = fleet.requests
    two.release_all()
    assert fleet.requests == before, "it has nothing left to give back"


def test_a_key_that_nothing_uses_takes_no_memory_and_one_in_use_does(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert one.take(ENTRY, 1, 0.0)
    assert not two.take(ENTRY, 1, 0.0)
    for _ in range(3):
        fleet.clock.now += 1.125
        one.maintain()
        two.maintain()
        assert one.deadline(ENTRY) > fleet.clock.now
        assert two.deadline(ENTRY), "its delivery waits"
    two.waits(ENTRY, None)
    one.free(ENTRY)
    for _ in range(3):
        fleet.clock.now += 1.125
        one.maintain()
        two.maintain()
    for each in (one, two):
        with pytest.raises(KeyError):
            each.deadline(ENTRY)
        each.waits(ENTRY, None)  # nothing happens


def test_what_runs_under_a_lost_permit_is_still_known_until_it_ends(fleet: Fleet) -> None:
    one, two = fleet.worker("one"), fleet.worker("two")
    assert one.take(ENTRY, 1, 0.0)
    fleet.clock.now += LEASE_SECONDS + 1.0
    assert two.take(ENTRY, 1, 0.0)
    for _ in range(3):
        fleet.clock.now += 1.0
        assert one.maintain() == []
    one.free(ENTRY)
    one.maintain()
    with pytest.raises(KeyError):
        one.deadline(ENTRY)


def test_a_worker_whose_permits_were_lost_holds_only_what_it_is_granted_anew(fleet: Fleet) -> None:
    one = fleet.worker("one")
    assert [one.take(ENTRY, 3, 0.0) for _ in range(2)] == [True, True]
    fleet.clock.now += LEASE_SECONDS + 1.0
    one.free(ENTRY)
    one.free(ENTRY)
    assert one.take(ENTRY, 3, 0.0)
    assert fleet.held == {"one": 1}


def test_a_damaged_row_of_an_entry_is_damaged() -> None:
    for row in ("[1,NaN,null]", "[1,5,Infinity]", "[true,5,null]", "[1.5,5,null]", "[0,5]"):
        with pytest.raises(ValueError, match="damaged"):
            Holders.from_data(f'[1,{{"a":{row}}},""]'.encode())
    assert Holders.from_data(b'[1,{"a":[0,5,2]},""]') == Holders({"a": HolderRow(0, 5.0, 2.0)})


def test_the_oldest_of_those_that_hold_none_comes_first() -> None:
    state = Holders(
        {
            "a": HolderRow(0, 9.0, 3.0),
            "b": HolderRow(0, 9.0, 2.0),
            "c": HolderRow(1, 9.0, 1.0),
            "d": HolderRow(2, 9.0),
        }
    )
    assert state.waiting("x") == [2.0, 3.0]
    assert state.waiting("b") == [3.0]
    assert state.with_row("a", HolderRow(0, 9.0)).rows.keys() == {"b", "c", "d"}
    assert state.with_row("a", HolderRow(1, 9.0)).rows["a"] == HolderRow(1, 9.0)


def test_a_task_that_runs_is_told_of_renewals_that_requests_for_more_have_made(
    fleet: Fleet,
) -> None:
    """Deliveries that wait in hand ask again and again; each request renews the whole row."""
    one = fleet.worker("one")
    assert one.take(ENTRY, 1, 0.0)
    until = one.deadline(ENTRY)
    for _ in range(40):
        fleet.clock.now += 1.0
        assert not one.take(ENTRY, 1, 1.0)
        if one.maintain():
            until = one.deadline(ENTRY)
        assert fleet.clock.now < until, "the task that runs would end here"
    assert fleet.held == {"one": 1}
