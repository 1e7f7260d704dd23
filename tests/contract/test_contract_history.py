"""The history in every store of rows: written, merged once, read; late, interrupted, damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rowstores import RowSubject

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.records.history import (
    GRACE,
    HOURS,
    HOURS_KEPT,
    KEPT_DAYS,
    LATE,
    LEASE,
    TASKS,
    WORKERS,
    HistoryStore,
)
from aztask.stores.records.tallies import HOUR, Author, Hour, Tally, total
from aztask.stores.rows import Change, Row, Rows

MINE = Owner("servicebus://mine.servicebus.windows.net", "shop")
THEIRS = Owner("servicebus://theirs.servicebus.windows.net", "shop")
DAY = 20_000
BEGINS = (DAY * 24 + 5) * HOUR
"""Five o'clock of a day."""
OVER = BEGINS + HOUR + GRACE + 1.0
"""When that hour may be merged."""


@pytest.fixture(params=[NO_OWNER, MINE], ids=["no owner", "owner"])
def history(request: pytest.FixtureRequest, row_subject: RowSubject) -> HistoryStore:
    return HistoryStore(row_subject.store, request.param)


def hour_of(worker: str, *counts: tuple[str, int, int], begins: int = BEGINS) -> Hour:
    """Of each task, how many succeeded and failed in the hour's first and last slot."""
    hour = Hour(Author(worker, begins, "1.0"))
    for task, succeeded, failed in counts:
        hour.series["orders", task] = {
            begins: Tally(succeeded=succeeded, runs={3: succeeded}, waits={1: succeeded}),
            begins + HOUR - 10: Tally(failed=failed, runs={9: failed}),
        }
    return hour


def days(history: HistoryStore, part: str = TASKS) -> dict[tuple[str, str], tuple[int, int]]:
    """What succeeded and failed by queue and task, or by worker, in all merged days.

    The finer slots and the hours of each day must say the same.
    """
    found: dict[tuple[str, str], Tally] = {}
    for _, day in history.days(part, 0, 10**6 - 1):
        assert total(day.slots.values()) == total(day.hours.values())
        found.setdefault(day.name, Tally()).add(total(day.hours.values()))
    return {name: (each.succeeded, each.failed) for name, each in found.items()}


def test_an_hour_is_rewritten_and_read(history: HistoryStore) -> None:
    for succeeded in (1, 2):
        hour = hour_of("w", ("pay", succeeded, 0))
        history.write("w!1", BEGINS, hour, BEGINS + 20.0)
    history.write("v!1", BEGINS, hour_of("v", ("pay", 5, 1)), BEGINS + 20.0)
    number = BEGINS // HOUR
    found = {each.hour.author.name: each for each in history.hours(number, number + 1)}
    assert found["w"].hour == hour_of("w", ("pay", 2, 0))
    assert found["w"].begins == BEGINS
    assert found["v"].hour.series["orders", "pay"][BEGINS + HOUR - 10].failed == 1
    (brief,) = history.hours(number, number + 1, brief=True)[:1]
    assert list(brief.hour.series["orders", "pay"]) == [BEGINS]
    assert history.hours(number + 1, number + 9) == history.hours(0, number) == []


def test_an_hour_is_merged_by_task_and_by_worker(history: HistoryStore) -> None:
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 1), ("ship", 7, 0)), BEGINS + 20.0)
    history.write("v!1", BEGINS, hour_of("v", ("pay", 5, 0)), BEGINS + 20.0)
    history.write("v!2", BEGINS, hour_of("v", ("pay", 1, 0)), BEGINS + 30.0)
    assert history.merge("a", OVER - 2.0) == 0  # workers may still write their last slots
    assert (history.merge("a", OVER), history.merge("b", OVER)) == (1, 0)
    assert days(history) == {("orders", "pay"): (8, 1), ("orders", "ship"): (7, 0)}
    assert days(history, WORKERS) == {("w", ""): (9, 1), ("v", ""): (6, 0)}
    assert history.following() == BEGINS // HOUR + 1
    (pay,) = [day for _, day in history.days(TASKS, DAY, DAY + 1) if day.name[1] == "pay"]
    assert sorted(pay.hours) == [5]
    assert sorted(pay.slots) == [5 * HOUR, 6 * HOUR - 300]
    assert pay.hours[5].runs == {3: 8, 9: 1}
    workers = {day.name[0]: day for _, day in history.days(WORKERS, DAY, DAY + 1)}
    assert workers["v"].notes == [(BEGINS, "1.0")]
    # Without what is finer, a page about a month reads the hours alone.
    brief = [day for _, day in history.days(TASKS, DAY, DAY + 1, brief=True)]
    assert {day.name[1]: day.slots for day in brief} == {"pay": {}, "ship": {}}
    assert {day.name[1]: day.hours[5].succeeded for day in brief} == {"pay": 8, "ship": 7}


def test_all_hours_since_the_last_merge_are_merged(history: HistoryStore) -> None:
    for number in (0, 1, 30):
        begins = BEGINS + number * HOUR
        hour = hour_of("w", ("pay", number + 1, 0), begins=begins)
        history.write("w!1", begins, hour, begins + 20.0)
    assert history.merge("a", OVER + 30 * HOUR) == 3
    assert days(history) == {("orders", "pay"): (34, 0)}
    assert [at for at, _ in history.days(TASKS, 0, 99_999)] == [86400 * DAY, 86400 * (DAY + 1)]


def test_a_late_hour_is_merged_again(history: HistoryStore) -> None:
    """A worker could not reach the store until the hour was merged."""
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 1)), BEGINS + 20.0)
    history.write("v!1", BEGINS, hour_of("v", ("pay", 5, 0)), BEGINS + 20.0)
    later = BEGINS + HOUR
    history.write("v!1", later, hour_of("v", ("pay", 4, 0), begins=later), later + 20.0)
    assert history.merge("a", OVER + HOUR) == 2
    history.write("w!1", BEGINS, hour_of("w", ("pay", 3, 1)), OVER + HOUR)
    assert history.following() == BEGINS // HOUR
    assert history.merge("b", OVER + HOUR) == 2
    assert days(history) == {("orders", "pay"): (12, 1)}
    # Before anything is merged, it is just a row.
    history.write("x!1", BEGINS - HOUR, hour_of("x", begins=BEGINS - HOUR), OVER)
    assert history.following() == BEGINS // HOUR - 1


def test_one_worker_merges_at_a_time(history: HistoryStore) -> None:
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 1)), BEGINS + 20.0)
    whole = history.rows
    history.rows = Wired(whole, at=1)
    with pytest.raises(Killed):
        history.merge("a", OVER)
    history.rows = whole
    assert history.merge("b", OVER + LEASE - 1.0) == 0
    assert history.merge("b", OVER + LEASE + 1.0) == 1
    assert days(history) == {("orders", "pay"): (2, 1)}


class Killed(Exception):
    """The process dies here."""


class Wired:
    """The rows of a store; before the write number `at`, counted from 0, `then` is called.

    Without `then`, the process dies there. Each row of a `write_all` is a write of its own, as over
    Tables.
    """

    def __init__(self, inner: Rows, at: int, then: Callable[[], None] | None = None) -> None:
        self._inner = inner
        self._at = at
        self._then = then
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, change: Change) -> Row | None:
        if self.writes == self._at:
            self.writes += 1
            if self._then is None:
                raise Killed
            self._then()
        self.writes += 1
        return self._inner.write(change)

    def write_all(self, changes: Sequence[Change]) -> list[Row | None]:
        return [self.write(change) for change in changes]


HEAD_TASKS_WORKERS_HEAD = range(6)
"""The writes of a merge of two tasks of two workers."""


@pytest.mark.parametrize("at", HEAD_TASKS_WORKERS_HEAD)
def test_a_merge_that_dies_anywhere_is_made_by_another(history: HistoryStore, at: int) -> None:
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 1), ("ship", 7, 0)), BEGINS + 20.0)
    history.write("v!1", BEGINS, hour_of("v", ("pay", 5, 0)), BEGINS + 20.0)
    whole = history.rows
    history.rows = wired = Wired(whole, at)  # type: ignore[assignment]
    with pytest.raises(Killed):
        history.merge("a", OVER)
    assert wired.writes == at + 1
    history.rows = whole
    history.write("v!1", BEGINS, hour_of("v", ("pay", 6, 0)), OVER + 1.0)  # and one comes late
    assert history.merge("b", OVER + LEASE + 1.0) == 1
    assert days(history) == {("orders", "pay"): (8, 1), ("orders", "ship"): (7, 0)}
    assert days(history, WORKERS) == {("w", ""): (9, 1), ("v", ""): (6, 0)}


@pytest.mark.parametrize("at", HEAD_TASKS_WORKERS_HEAD)
def test_a_merge_that_stood_still_writes_nothing_old(
    history: HistoryStore, row_subject: RowSubject, at: int
) -> None:
    """Its lease is over, another one has merged more; then it goes on with what it read before."""
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 1), ("ship", 7, 0)), BEGINS + 20.0)
    history.write("v!1", BEGINS, hour_of("v", ("pay", 5, 0)), BEGINS + 20.0)
    other = HistoryStore(row_subject.another, history.owner)

    def meanwhile() -> None:
        late = hour_of("v", ("pay", 6, 0), ("pack", 1, 0))
        other.write("v!1", BEGINS, late, OVER + LEASE)
        assert other.merge("b", OVER + LEASE + 1.0) == 1

    whole = history.rows
    history.rows = wired = Wired(whole, at, meanwhile)  # type: ignore[assignment]
    history.merge("a", OVER)
    assert wired.writes > at
    history.rows = whole
    assert history.following() == BEGINS // HOUR + 1
    all_tasks = {
        ("orders", "pay"): (8, 1),
        ("orders", "ship"): (7, 0),
        ("orders", "pack"): (1, 0),
    }
    assert days(history) == all_tasks
    assert days(history, WORKERS) == {("w", ""): (9, 1), ("v", ""): (7, 0)}


class Reading:
    """The rows of a store; after the range number `at`, counted from 0, `then` is called."""

    def __init__(self, inner: Rows, at: int, then: Callable[[], None]) -> None:
        self._inner = inner
        self._at = at
        self._then = then
        self.ranges = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def range(self, *arguments: Any, **options: Any) -> list[Row]:
        found = self._inner.range(*arguments, **options)
        self.ranges += 1
        if self.ranges == self._at + 1:
            self._then()
        return found


NEXT_TASKS_WORKERS_HOURS = range(4)
"""The ranges that a merge reads."""


@pytest.mark.parametrize("at", NEXT_TASKS_WORKERS_HOURS)
def test_a_merge_that_stood_still_while_it_read_forgets_nothing(
    history: HistoryStore, row_subject: RowSubject, at: int
) -> None:
    """What it reads of the workers is no older than what it reads of the day."""
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 1)), BEGINS + 20.0)
    other = HistoryStore(row_subject.another, history.owner)

    def meanwhile() -> None:
        other.write("v!1", BEGINS, hour_of("v", ("pay", 6, 0)), OVER + LEASE)
        assert other.merge("b", OVER + LEASE + 1.0) == 1

    whole = history.rows
    history.rows = reading = Reading(whole, at, meanwhile)  # type: ignore[assignment]
    history.merge("a", OVER)
    history.rows = whole
    assert reading.ranges > at
    assert days(history) == {("orders", "pay"): (8, 1)}
    assert days(history, WORKERS) == {("w", ""): (2, 1), ("v", ""): (6, 0)}


def test_a_worker_that_writes_late_while_an_hour_is_merged_is_not_forgotten(
    history: HistoryStore, row_subject: RowSubject
) -> None:
    """Its row was read before, and the head has not moved yet."""
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 1)), BEGINS + 20.0)
    late = HistoryStore(row_subject.another, history.owner)

    def meanwhile() -> None:
        late.write("v!1", BEGINS, hour_of("v", ("pay", 5, 0)), OVER)

    whole = history.rows
    history.rows = Wired(whole, 3, meanwhile)  # type: ignore[assignment]
    assert history.merge("a", OVER) == 1
    history.rows = whole
    assert days(history) == {("orders", "pay"): (7, 1)}


def test_a_task_that_an_hour_has_no_longer_is_taken_out_of_it(history: HistoryStore) -> None:
    """A worker with too many tasks may have joined it with the others since."""
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 0), ("ship", 7, 0)), BEGINS + 20.0)
    history.merge("a", OVER)
    history.write("w!1", BEGINS, hour_of("w", ("pay", 9, 0)), OVER + 60.0)
    history.merge("a", OVER + 60.0)
    assert days(history) == {("orders", "pay"): (9, 0), ("orders", "ship"): (0, 0)}


def test_a_damaged_row_is_a_gap(history: HistoryStore) -> None:
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 0)), BEGINS + 20.0)
    history.write("v!1", BEGINS, hour_of("v", ("pay", 5, 0)), BEGINS + 20.0)
    (row, _) = history.rows.range(history.owner, HOURS)
    for values in ({"brief": b"", "data": b""}, {"brief": b"x" * 9, "data": b"\x80"}):
        history.rows.put(row.place, values)
        assert len(history.hours(0, 10**7 - 1)) == 1
    assert history.merge("a", OVER) == 1
    assert sum(succeeded for succeeded, _ in days(history).values()) in (2, 5)
    for day in history.rows.range(history.owner, TASKS):
        history.rows.put(day.place, {"brief": b"\xc1", "data": b""})
    assert days(history) == {}
    later = BEGINS + HOUR
    history.write("w!1", later, hour_of("w", ("pay", 3, 0), begins=later), later + 20.0)
    assert history.merge("a", OVER + HOUR) == 1
    assert days(history) == {("orders", "pay"): (3, 0)}  # the day begins anew
    # A head that cannot be read merges all that is left again, and counts nothing twice.
    (head,) = history.rows.range(history.owner, HOURS, "head")
    history.rows.put(head.place, {"brief": b"\xc1", "data": b""})
    assert history.merge("a", OVER + HOUR) == 2
    assert sum(succeeded for succeeded, _ in days(history).values()) in (5, 8)


def test_rows_are_kept_for_their_time(history: HistoryStore) -> None:
    for number in range(2):
        begins = BEGINS + number * HOUR
        hour = hour_of("w", ("pay", 1, 0), begins=begins)
        history.write("w!1", begins, hour, begins + 20.0)
    history.purge(BEGINS + 60 * 86400)
    assert len(history.hours(0, 10**7 - 1)) == 2  # none is merged, so none is deleted
    history.merge("a", OVER + HOUR)
    history.purge(BEGINS + HOURS_KEPT * HOUR)
    assert len(history.hours(0, 10**7 - 1)) == 2
    history.purge(BEGINS + (HOURS_KEPT + 1) * HOUR)
    assert [each.begins for each in history.hours(0, 10**7 - 1)] == [BEGINS + HOUR]
    assert days(history, WORKERS) == {("w", ""): (2, 0)}
    history.purge(BEGINS + 2 * 86400)
    assert days(history, WORKERS) == {}
    history.purge(BEGINS + KEPT_DAYS * 86400)
    assert days(history) == {("orders", "pay"): (2, 0)}
    history.purge(BEGINS + (KEPT_DAYS + 1) * 86400)
    assert days(history) == {}
    assert history.following() == BEGINS // HOUR + 2  # the head stays


def test_the_history_of_another_owner_is_left_alone(row_subject: RowSubject) -> None:
    mine, theirs = HistoryStore(row_subject.store, MINE), HistoryStore(row_subject.store, THEIRS)
    mine.write("w!1", BEGINS, hour_of("w", ("pay", 2, 0)), BEGINS + 20.0)
    assert theirs.hours(0, 10**7 - 1) == []
    assert theirs.merge("a", OVER) == 0
    assert mine.merge("a", OVER) == 1
    theirs.write("w!1", BEGINS, hour_of("w", ("pay", 5, 0)), OVER)
    theirs.merge("a", OVER)
    theirs.purge(BEGINS + 90 * 86400)
    assert days(theirs) == {}
    assert days(mine) == {("orders", "pay"): (2, 0)}
    assert {MINE.of_broker, THEIRS.of_broker} == mine.owners()
    assert mine.adopt(MINE) == 0
    assert mine.adopt(THEIRS) == 1  # their head; ours stays
    assert mine.following() == BEGINS // HOUR + 1


def test_a_lost_answer_counts_nothing_twice(history: HistoryStore, row_subject: RowSubject) -> None:
    history.write("w!1", BEGINS, hour_of("w", ("pay", 2, 0)), BEGINS + 20.0)
    row_subject.lose()
    history.merge("a", OVER)
    history.merge("a", OVER)
    row_subject.lose()
    history.write("v!1", BEGINS, hour_of("v", ("pay", 5, 0)), OVER + LATE)
    history.merge("a", OVER)
    assert days(history) == {("orders", "pay"): (7, 0)}
