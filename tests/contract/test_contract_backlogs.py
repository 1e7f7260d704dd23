"""What waited in each queue, in every store of rows: added by several, read, kept, damaged."""

from __future__ import annotations

import threading

import pytest
from rowstores import RowSubject

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.records.backlogs import DAY, Backlogs, waiting_at
from aztask.stores.records.history import BACKLOG, KEPT_DAYS, HistoryStore
from aztask.stores.records.tallies import HOUR

MINE = Owner("servicebus://mine.servicebus.windows.net", "shop")
THEIRS = Owner("servicebus://theirs.servicebus.windows.net", "shop")
BEGINS = 20_000 * DAY


@pytest.fixture(params=[NO_OWNER, MINE], ids=["no owner", "owner"])
def backlogs(request: pytest.FixtureRequest, row_subject: RowSubject) -> Backlogs:
    return Backlogs(HistoryStore(row_subject.store, request.param))


def test_samples_are_read_by_point_and_queue(backlogs: Backlogs) -> None:
    backlogs.add("orders", BEGINS + 60.0, 5)
    backlogs.add("orders", BEGINS + 61.5, 3)  # of the same minute: the larger one stays
    backlogs.add("mail", BEGINS + 90.0, 2)
    backlogs.add("orders", BEGINS + 120.0, 7)
    backlogs.add("orders", BEGINS + DAY - 1.0, 1)
    backlogs.add("orders", BEGINS + DAY, 4)
    end = BEGINS + 2 * DAY
    # Each sample holds until the next one of its queue, or for two minutes.
    fine = {60: 7, 80: 7, 100: 7, 120: 9, 140: 9, 160: 9, 180: 7, 200: 7, 220: 7}
    found = waiting_at(backlogs, BEGINS, BEGINS + HOUR, 20)
    assert found == {BEGINS + second: waiting for second, waiting in fine.items()}
    assert waiting_at(backlogs, BEGINS, BEGINS + HOUR, 300) == {BEGINS: 9}
    assert waiting_at(backlogs, BEGINS, end, 300, "mail") == {BEGINS: 2}
    hours = {BEGINS: 9, BEGINS + DAY - HOUR: 1, BEGINS + DAY: 4}
    assert waiting_at(backlogs, BEGINS, end, HOUR) == hours
    # The steps of a window need not begin with a day.
    early = BEGINS - HOUR
    assert waiting_at(backlogs, early, end, 2 * HOUR) == {
        early: 9, early + 24 * HOUR: 4
    }  # fmt: skip
    assert waiting_at(backlogs, BEGINS + 100, end, 20, "orders")[BEGINS + 120] == 7


def test_the_newest_sample_of_a_day_says_when_it_was(backlogs: Backlogs) -> None:
    assert backlogs.newest(BEGINS) == {}
    backlogs.add("orders", BEGINS + 60.0, 5)
    backlogs.add("orders", BEGINS + 30.0, 1)  # by a slow worker
    assert backlogs.newest(BEGINS + 90.0) == {"orders": BEGINS + 60}
    assert backlogs.newest(BEGINS + DAY) == {}


def test_two_workers_that_add_at_once_lose_nothing(backlogs: Backlogs) -> None:
    both = threading.Barrier(2)

    def add(first: int) -> None:
        both.wait()
        for minute in range(first, 20, 2):
            backlogs.add("orders", BEGINS + 60.0 * minute, 1 + minute)

    threads = [threading.Thread(target=add, args=(first,)) for first in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    ((_, day),) = backlogs.days(BEGINS, BEGINS + 1, brief=False)
    assert day.minutes == {minute: 1 + minute for minute in range(20)}


def test_a_damaged_row_is_a_gap_until_the_next_sample(backlogs: Backlogs) -> None:
    history = backlogs.history
    backlogs.add("mail", BEGINS + 60.0, 2)
    backlogs.add("orders", BEGINS + 60.0, 5)
    place = history.of_day(BACKLOG, BEGINS // DAY, "orders")
    for values in ({"brief": b"", "data": b""}, {"brief": b"x" * 9, "data": b"\x80"}):
        history.rows.put(place, values)
        assert waiting_at(backlogs, BEGINS, BEGINS + HOUR, 300) == {BEGINS: 2}
        assert backlogs.newest(BEGINS) == {"mail": BEGINS + 60}
    backlogs.add("orders", BEGINS + 400.0, 8)
    found = waiting_at(backlogs, BEGINS, BEGINS + HOUR, 300)
    assert found == {BEGINS: 2, BEGINS + 300: 8}


def test_samples_are_kept_for_their_time(backlogs: Backlogs) -> None:
    backlogs.add("orders", BEGINS + 60.0, 5)
    backlogs.history.purge(BEGINS + KEPT_DAYS * DAY)
    assert backlogs.newest(BEGINS)
    backlogs.history.purge(BEGINS + (KEPT_DAYS + 1) * DAY)
    assert backlogs.newest(BEGINS) == {}


def test_the_samples_of_another_owner_are_left_alone(row_subject: RowSubject) -> None:
    mine, theirs = (Backlogs(HistoryStore(row_subject.store, each)) for each in (MINE, THEIRS))
    theirs.add("orders", BEGINS + 60.0, 5)
    mine.add("orders", BEGINS + 60.0, 1)
    mine.history.purge(BEGINS + 60 * DAY)
    assert mine.newest(BEGINS) == {}
    assert waiting_at(theirs, BEGINS, BEGINS + HOUR, 300) == {BEGINS: 5}
    mine.history.adopt(THEIRS)
    assert waiting_at(mine, BEGINS, BEGINS + HOUR, 300) == {BEGINS: 5}
