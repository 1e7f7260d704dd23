"""Every result store that keeps schedules: one transaction for an occurrence and its watermark."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import Store

from aztask.stores.records.base import ResultStore
from aztask.stores.records.schedules import COMMITTED, Occurrence, ScheduleStore, schedules_of

DATA = bytes(range(256))


@pytest.fixture
def schedules(results: ResultStore) -> ScheduleStore:
    found = schedules_of(results)
    assert found is not None
    return found


@pytest.fixture
def another(store: Store) -> ScheduleStore:
    """The same schedules, as another process has them."""
    found = schedules_of(store.another)
    assert found is not None
    return found


def row(number: int, data: bytes = b"x", *, is_open: bool = True, suffix: str = "") -> Occurrence:
    return Occurrence(f"{number:014d}{suffix}", data, is_open)


def keys(found: list[Occurrence] | tuple[Occurrence, ...]) -> list[int]:
    return [int(each.key[:14]) for each in found]


def test_a_head_is_made_once_and_read_by_all(
    schedules: ScheduleStore, another: ScheduleStore
) -> None:
    assert not schedules.any()
    assert schedules.overview() == []
    assert schedules.read("shop.nightly") is None
    tag = schedules.commit("shop.nightly", DATA, None)
    assert tag is not None
    assert another.commit("shop.nightly", b"two", None) is None
    (found,) = another.overview()
    assert (found.head.schedule, found.head.data, found.head.tag) == ("shop.nightly", DATA, tag)
    assert found == another.read("shop.nightly")
    assert another.any()


def test_the_occurrence_and_the_head_are_one_transaction(
    schedules: ScheduleStore, another: ScheduleStore
) -> None:
    first = schedules.commit("s", b"1", None)
    second = another.commit("s", b"2", first, [row(5), row(3)])
    assert second is not None
    assert schedules.commit("s", b"late", first, [row(9)]) is None
    kept = schedules.read("s")
    assert kept is not None
    assert (kept.head.data, kept.head.tag, keys(kept.open)) == (b"2", second, [3, 5])
    third = schedules.commit("s", b"3", second, [row(7)], [row(3, b"new", is_open=False)])
    assert third is not None
    kept = another.read("s")
    assert kept is not None
    assert (kept.head.data, keys(kept.open)) == (b"3", [5, 7])
    assert [each.data for each in another.newest("s", 10)] == [b"x", b"x", b"new"]


def test_a_stale_writer_changes_no_occurrence(schedules: ScheduleStore) -> None:
    first = schedules.commit("s", b"1", None, [row(1)])
    assert schedules.commit("s", b"2", first) is not None
    assert schedules.commit("s", b"3", first, [row(2)], [row(1, b"no", is_open=False)]) is None
    (found,) = schedules.newest("s", 10)
    assert (found.data, found.open) == (b"x", True)


def test_an_occurrence_that_exists_is_not_made_again(schedules: ScheduleStore) -> None:
    first = schedules.commit("s", b"1", None, [row(1, b"old")])
    assert schedules.close_occurrence("s", row(1).key, b"sent")
    second = schedules.commit("s", b"2", first, [row(1, b"again"), row(2)])
    assert second is not None
    assert [(each.data, each.open) for each in schedules.newest("s", 10)] == [
        (b"x", True),
        (b"sent", False),
    ]


def test_the_newest_come_first_and_until_a_key(schedules: ScheduleStore) -> None:
    made = [row(number) for number in (1, 2, 3)] + [row(2, suffix="-abcdefg1")]
    schedules.commit("s", b"1", None, made)
    schedules.commit("other", b"1", None, [row(4)])
    assert keys(schedules.newest("s", 10)) == [3, 2, 2, 1]
    assert keys(schedules.newest("s", 1)) == [3]
    assert keys(schedules.newest("s", 10, row(2).key)) == [2, 1]


def test_a_closed_occurrence_is_no_longer_open(
    schedules: ScheduleStore, another: ScheduleStore
) -> None:
    schedules.commit("s", b"1", None, [row(1), row(2)])
    assert another.close_occurrence("s", row(1).key, b"sent")
    assert another.close_occurrence("s", row(1).key, b"sent")
    assert not another.close_occurrence("s", row(9).key, b"sent")
    kept = schedules.read("s")
    assert kept is not None
    assert keys(kept.open) == [2]
    assert [each.open for each in schedules.newest("s", 5)] == [True, False]


def test_pruning_keeps_the_newest_and_the_open_ones(schedules: ScheduleStore) -> None:
    made = [row(number, is_open=number == 2) for number in range(1, 8)]
    schedules.commit("s", b"1", None, made)
    assert schedules.prune("s", 3) == 3
    assert keys(schedules.newest("s", 10)) == [7, 6, 5, 2]
    assert schedules.prune("s", 10) == 0


def test_a_full_transaction(schedules: ScheduleStore) -> None:
    made = [row(number) for number in range(COMMITTED)]
    tag = schedules.commit("s", b"1", None)
    assert schedules.commit("s", b"2", tag, made) is not None
    assert len(schedules.newest("s", 1000)) == COMMITTED


def test_a_deleted_schedule_is_gone(schedules: ScheduleStore, another: ScheduleStore) -> None:
    schedules.commit("s", b"1", None, [row(1)])
    schedules.commit("s2", b"1", None, [row(1)])
    assert another.delete("s")
    assert not another.delete("s")
    assert schedules.read("s") is None
    assert schedules.newest("s", 5) == []
    assert keys(schedules.newest("s2", 5)) == [1]


@pytest.mark.parametrize("name", ["a b/c?d#e\\f", "ä" * 200, "s-;'\""])
def test_any_name(schedules: ScheduleStore, name: str) -> None:
    schedules.commit(name, b"1", None, [row(1)])
    (found,) = schedules.overview()
    assert found.head.schedule == name
    assert keys(found.open) == [1]


def test_of_many_writers_at_once_one_succeeds(
    schedules: ScheduleStore, another: ScheduleStore
) -> None:
    tag = schedules.commit("s", b"0", None)

    def write(number: int) -> str | None:
        return (schedules, another)[number % 2].commit("s", b"%d" % number, tag, [row(number)])

    with ThreadPoolExecutor(8) as pool:
        tags = list(pool.map(write, range(8)))
    (winner,) = [number for number, each in enumerate(tags) if each is not None]
    kept = schedules.read("s")
    assert kept is not None
    assert (kept.head.data, keys(kept.open)) == (b"%d" % winner, [winner])


def test_the_time_is_the_stores(schedules: ScheduleStore) -> None:
    before = time.time()
    now = schedules.now()
    assert before - 2.0 < now <= time.time()
    assert schedules.now() >= now
