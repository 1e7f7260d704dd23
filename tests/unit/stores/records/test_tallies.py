"""Sums of short times: percentiles, and how they fit into a row."""

from __future__ import annotations

import zlib
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as some

from aztask.stores.records.damage import Damaged
from aztask.stores.records.tallies import (
    DAY_SLOT,
    HOUR,
    MOST_BYTES,
    MOST_SERIES,
    MOST_TALLIES,
    OTHERS,
    SLOT,
    Author,
    Day,
    Hour,
    Tally,
    bucket_of,
    coarser,
    fold,
    pack_day,
    pack_hour,
    percentile,
    total,
    unpack_day,
    unpack_hour,
)

BEGINS = 500_000 * HOUR
AUTHOR = Author("w", BEGINS, "1.0")


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        *((0.0, 0), (-1.0, 0), (float("nan"), 0), (0.0009, 0), (0.001, 1), (0.0015, 3)),
        *((0.002, 5), (1.0, 40), (1e12, 127), (float("inf"), 127)),
    ],
)
def test_durations_have_buckets(seconds: float, bucket: int) -> None:
    assert bucket_of(seconds) == bucket


@given(some.lists(some.floats(0.001, 1e5), min_size=1, max_size=50), some.floats(0.01, 1.0))
def test_a_percentile_is_at_most_a_fifth_off(durations: list[float], share: float) -> None:
    buckets: dict[int, int] = {}
    for each in durations:
        bucket = bucket_of(each)
        buckets[bucket] = buckets.get(bucket, 0) + 1
    found = percentile(buckets, share)
    assert found is not None
    rank = next(n for n in range(1, len(durations) + 1) if n >= share * len(durations))
    exact = sorted(durations)[rank - 1]
    assert exact / 1.1893 <= found <= exact * 1.1893


def test_percentiles_of_nothing_and_of_one() -> None:
    assert percentile({}, 0.5) is None
    assert percentile({0: 4}, 0.5) == 0.0005
    assert percentile({1: 1, 3: 3}, 0.95) == pytest.approx(0.00166, rel=0.01)


def hour_of(tasks: int, step: int = SLOT) -> Hour:
    hour = Hour(AUTHOR)
    for number in range(tasks):
        for slot in range(0, HOUR, step):
            seen = {(number * 7 + slot + each) % 40: 1 + each for each in range(8)}
            tally = Tally(number + 1, slot % 3, 1, 0, 0, dict(seen), dict(seen))
            hour.series.setdefault(("orders", f"task{number:04d}"), {})[BEGINS + slot] = tally
    return hour


def sums(hour: Hour) -> Tally:
    return total(tally for each in hour.series.values() for tally in each.values())


@pytest.mark.parametrize("tasks", [0, 1, 10, MOST_SERIES + 50])
def test_an_hour_fits_whatever_ran_and_keeps_its_sums(tasks: int) -> None:
    hour = hour_of(tasks, SLOT if tasks < 20 else 60)
    packed = pack_hour(hour, BEGINS)
    assert len(packed.data) <= MOST_BYTES
    assert len(packed.brief) < 64_000
    fine = unpack_hour(packed.brief, packed.data, BEGINS)
    brief = unpack_hour(packed.brief, None, BEGINS)
    assert sums(fine) == sums(brief) == sums(hour)
    assert fine.author == brief.author == AUTHOR
    assert len(fine.series) <= MOST_SERIES + 1
    if tasks == 1:
        assert fine == hour
    if tasks > MOST_SERIES:
        assert ("orders", OTHERS) in fine.series
        assert ("orders", f"task{tasks - 1:04d}") in fine.series  # the busiest stay apart


def test_an_hour_that_was_too_fine_is_as_coarse_the_next_time() -> None:
    """A worker packs every ten seconds: it must not try in vain what did not fit before."""
    hour = hour_of(60)
    before = sums(hour)
    packed = pack_hour(hour, BEGINS)
    assert hour.step > SLOT
    assert sum(map(len, hour.series.values())) <= MOST_TALLIES
    assert sums(hour) == before
    assert pack_hour(hour, BEGINS) == packed


def test_more_queues_than_fit_become_one() -> None:
    hour = Hour(AUTHOR)
    for number in range(6_000):
        hour.series[f"queue-{number * 7919 % 10_007}", "t"] = {BEGINS: Tally(succeeded=number)}
    packed = pack_hour(hour, BEGINS)
    assert len(packed.data) <= MOST_BYTES
    assert sums(unpack_hour(packed.brief, packed.data, BEGINS)) == sums(hour)


def test_the_rarest_are_folded_and_all_who_fold_find_the_same() -> None:
    series = {
        ("q", name): {0: Tally(succeeded=each)}
        for name, each in {"a": 5, "b": 1, "c": 5, "d": 1}.items()
    }
    found = fold(series, 2)
    assert set(found) == {("q", "a"), ("q", "c"), ("q", OTHERS)}
    assert fold(found, 2) == found
    assert fold(dict(reversed(series.items())), 2) == found


def test_a_day_replaces_an_hour() -> None:
    day = Day(("orders", "pay"), notes=[(5, "1.0")])
    first = {5 * HOUR + 10: Tally(succeeded=1), 6 * HOUR - 10: Tally(failed=2)}
    day.replace(4, {4 * HOUR: Tally(succeeded=9)})
    day.replace(5, first)
    day.replace(5, first)
    assert total(day.slots.values()) == total(day.hours.values())
    assert sorted(day.slots) == [4 * HOUR, 5 * HOUR, 6 * HOUR - DAY_SLOT]
    packed = pack_day(day)
    assert unpack_day(packed.brief, packed.data) == day
    assert unpack_day(packed.brief).slots == {}
    day.replace(5, {})
    assert sorted(day.hours) == [4]
    assert coarser(first, HOUR) == {5 * HOUR: Tally(succeeded=1, failed=2)}


HOUR_ROW = pack_hour(hour_of(2, 600), BEGINS)
DAY_ROW = pack_day(Day(("q", "t"), {3: Tally(1)}, {3 * HOUR: Tally(1)}))


def squeezed(value: object) -> bytes:
    return zlib.compress(msgpack.packb(value))


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 5, "text", b"", b"x", zlib.compress(b"\xc1"), squeezed(5), squeezed([2, []])),
        *(squeezed([1, 5]), squeezed([1, [1, 2, 3, 4]]), squeezed([1, ["w", -1, "v", []]])),
        *(squeezed([1, ["w", 1, "v", [5]]]), squeezed([1, ["q", "t", [[24, []]], []]])),
        *(squeezed([1, ["w", 1, "v", [["q", "t", [1, 2]]]]]), HOUR_ROW.brief[:-5]),
        *(squeezed([1, ["q", "t", [[3, [1, 0, 0, 0, -1, {}, {}]]], []]]), b"x\x9c" + bytes(9)),
        *(squeezed([1, ["q", "t", [[3, [1, 0, 0, 0, 0, {128: 1}, {}]]], []]]),),
        *(squeezed([1, ["w", 1, "v", [["q", "t", [1, 0, 0, 0, 0, [], {}]]]]]),),
        zlib.compress(bytes(5 << 20)),
    ],
)
def test_what_is_no_history_is_damage(wrong: object) -> None:
    with pytest.raises(Damaged):
        unpack_hour(wrong, None, BEGINS)
    with pytest.raises(Damaged):
        unpack_day(wrong)
    if wrong is not None:  # no finer values were asked for
        with pytest.raises(Damaged):
            unpack_hour(HOUR_ROW.brief, wrong, BEGINS)
        with pytest.raises(Damaged):
            unpack_day(DAY_ROW.brief, wrong)


@given(some.binary(max_size=200))
def test_any_bytes_are_read_or_damage(data: bytes) -> None:
    for given_data in (data, zlib.compress(data), squeezed([1, [data, 5, "", []]])):
        for read in (
            lambda each=given_data: unpack_hour(HOUR_ROW.brief, each, BEGINS),
            lambda each=given_data: unpack_day(each),
        ):
            with suppress(Damaged):
                read()
