"""The sums of a window are those of its rows one by one, whatever is kept of earlier readings."""

from __future__ import annotations

import gc
import random
import zlib

import msgpack
import pytest

from aztask.stores.records import tallysums
from aztask.stores.records.damage import Damaged
from aztask.stores.records.tallies import (
    HOUR,
    SLOT,
    Author,
    Hour,
    PackedHour,
    Tally,
    pack_hour,
    unpack_hour,
)
from aztask.stores.records.tallysums import BY, KeptHours, WindowSums, add_rows

BEGINS = 500_000 * HOUR
ONLY = [{}, {"queue": "mail"}, {"task": "pay", "queue": ""}, {"worker": "w1"}, {"task": "none"}]


def packed(worker: str, seed: int, begins: int = BEGINS, tasks: int = 4) -> PackedHour:
    """A busy hour of a worker."""
    made = random.Random(seed)
    hour = Hour(Author(worker, begins, "1.0"))
    for number in range(tasks):
        name = (made.choice(["mail", "orders"]), "pay" if number == 0 else f"task-{number}")
        times = range(begins, begins + HOUR, SLOT)
        hour.series[name] = {
            at: Tally(
                *(made.choice([0, 0, 1, 70_000]) for _ in range(5)),
                {made.randrange(128): made.randint(1, 9) for _ in range(made.randint(0, 4))},
                {made.randrange(128): made.randint(1, 9) for _ in range(made.randint(0, 4))},
            )
            for at in made.sample(times, 40)
        }
    return pack_hour(hour, begins)


def plainly(rows, begins, step, by, only):
    """The same sums, by unpacking each row and adding each time."""
    points, named = {}, {}
    for first, (brief, data) in rows:
        hour = unpack_hour(brief, data, first)
        for (queue, task), tallies in hour.series.items():
            names = (queue, task, hour.author.name)
            if any(
                only.get(each, "") not in ("", has) for each, has in zip(BY, names, strict=True)
            ):
                continue
            for at, tally in tallies.items():
                if at >= begins:
                    point = at - (at - begins) % step
                    points.setdefault(point, Tally()).add(tally)
                    named.setdefault(names[BY.index(by)], Tally()).add(tally)
    return points, named


TWO = [
    *((BEGINS - HOUR, packed(f"w{number}", number, BEGINS - HOUR)) for number in range(3)),
    *((BEGINS, packed(f"w{number}", number + 9)) for number in range(3)),
]


@pytest.mark.parametrize("most", [8_000, 5, 0])
@pytest.mark.parametrize("only", ONLY)
@pytest.mark.parametrize("by", BY)
def test_the_sums_are_those_of_each_row_alone(monkeypatch, by, only, most):
    monkeypatch.setattr(tallysums, "MOST_CELLS", most)
    for begins, step in ((BEGINS - HOUR, 20), (BEGINS - 1700, 20), (BEGINS + 600, 300)):
        sums = WindowSums(begins, step, by, only)
        for first, row in TWO:
            assert sums.add_hour(*row, first).name.startswith("w")
        wanted = plainly(TWO, begins, step, by, only)
        assert sums.totals() == wanted
        assert bool(wanted[0]) == (only != {"task": "none"})


def test_what_is_unpacked_already_is_added_too():
    for by in BY:
        sums, twin = WindowSums(BEGINS, 20, by), WindowSums(BEGINS, 20, by)
        for first, row in TWO:
            sums.add_hour(*row, first)
            hour = unpack_hour(*row, first)
            for (queue, task), tallies in hour.series.items():
                twin.add(queue, task, hour.author.name, tallies)
        assert sums.totals() == twin.totals()


# -- damage ----------------------------------------------------------------------------------


def with_data(value: object, version: int = 1) -> bytes:
    return zlib.compress(msgpack.packb([version, value]))


COUNTS = [1, 0, 0, 0, 0, {1: 1}, {2: 1}]


@pytest.mark.parametrize(
    "value",
    [
        "text",
        [["mail", "pay"]],
        [["mail", 5, []]],
        [["mail", "pay", "text"]],
        [["mail", "pay", [[0]]]],
        [["mail", "pay", [[360, COUNTS]]]],
        [["mail", "pay", [[-1, COUNTS]]]],
        [["mail", "pay", [["0", COUNTS]]]],
        [["mail", "pay", [[0, COUNTS[:6]]]]],
        [["mail", "pay", [[0, "text"]]]],
        *(
            [["mail", "pay", [[0, [*COUNTS[:place], wrong, *COUNTS[place + 1 :]]]]]]
            for place in range(5)
            for wrong in (-1, 1.5, "1", None, 10**9 + 1, 2**64 - 1)
        ),
        *(
            [["mail", "pay", [[0, [*COUNTS[:place], wrong, *COUNTS[place + 1 :]]]]]]
            for place in (5, 6)
            for wrong in ({128: 1}, {-1: 1}, {"1": 1}, {1: -1}, {1: 0.5}, {1: "1"}, [1], None)
        ),
    ],
)
def test_a_damaged_row_is_a_gap_as_a_whole(value):
    brief, _ = packed("w1", 1)
    right = ["orders", "pay", [[0, COUNTS]]]
    data = with_data([right, *value] if isinstance(value, list) else value)
    sums = WindowSums(BEGINS, 20, "task")
    with pytest.raises(Damaged):
        unpack_hour(brief, data, BEGINS)
    with pytest.raises(Damaged):
        sums.add_hour(brief, data, BEGINS)
    assert sums.totals() == ({}, {})
    rows = [(brief, data), packed("w2", 2), (b"broken", data), (None, b""), (brief, None)]
    assert [each.name for each in add_rows(sums, BEGINS, rows)] == ["w2"]
    assert sums.totals() == plainly([(BEGINS, packed("w2", 2))], BEGINS, 20, "task", {})


def test_a_later_release_may_write_more_values():
    brief, _ = packed("w1", 1)
    sums = WindowSums(BEGINS, 20, "task")
    sums.add_hour(brief, with_data([["mail", "pay", [[0, [*COUNTS, 9], 9]], 9]]), BEGINS)
    assert sums.totals()[1] == {"pay": Tally(1, waits={1: 1}, runs={2: 1})}


@pytest.mark.parametrize("collects", [True, False])
def test_the_search_for_garbage_goes_on_as_it_was(collects):
    try:
        (gc.enable if collects else gc.disable)()
        add_rows(WindowSums(BEGINS, 20, "task"), BEGINS, [packed("w1", 1), (b"", b"")])
        assert gc.isenabled() is collects
    finally:
        gc.enable()


# -- hours that are kept ---------------------------------------------------------------------


@pytest.fixture
def added(monkeypatch):
    """How many rows were unpacked."""
    found = []
    read = WindowSums.add_hour

    def counts(self, brief, data, begins):
        found.append(begins)
        return read(self, brief, data, begins)

    monkeypatch.setattr(WindowSums, "add_hour", counts)
    return found


def asked(kept, rows, begins, by="task", only=None, step=20):
    """What a reading gives that knows the earlier ones; checked against one that does not."""
    sums = WindowSums(begins, step, by, only or {})
    authors = kept.add_hour(sums, BEGINS, rows)
    assert [each.name for each in authors] == [f"w{number}" for number in range(len(rows))]
    found = sums.totals()
    assert found == plainly([(BEGINS, each) for each in rows], begins, step, by, only or {})
    return found


ROWS = [packed("w0", 1), packed("w1", 2)]


def test_an_hour_that_has_ended_is_added_up_once(added):
    kept = KeptHours()
    for begins in range(BEGINS - 40, BEGINS + HOUR, 20):
        asked(kept, ROWS, begins)
    assert len(added) == 2
    assert asked(kept, ROWS, BEGINS + HOUR)[0] == {}


def test_a_row_that_changes_late_an_earlier_window_and_another_question_are_read_again(added):
    kept = KeptHours()
    asked(kept, ROWS, BEGINS + 600)
    asked(kept, ROWS, BEGINS + 600)
    assert len(added) == 2
    later = [ROWS[0], packed("w1", 3)]
    asked(kept, later, BEGINS + 600)
    asked(kept, later, BEGINS + 620)
    assert len(added) == 4
    asked(kept, [*later, packed("w2", 4)], BEGINS + 620)
    assert len(added) == 7
    asked(kept, later, BEGINS)
    assert len(added) == 9
    for question in ({"by": "queue"}, {"only": {"queue": "mail"}}, {"step": 300}):
        asked(kept, later, BEGINS, **question)
        asked(kept, later, BEGINS, **question)
    assert len(added) == 15


@pytest.mark.parametrize("by", BY)
def test_an_hour_with_too_many_names_is_not_kept(monkeypatch, added, by):
    monkeypatch.setattr(tallysums, "MOST_CELLS", 5)
    kept = KeptHours()
    for _ in range(2):
        asked(kept, ROWS, BEGINS, by)
    assert len(added) == 4


def test_kept_hours_have_a_bound(added):
    kept = KeptHours()
    for number in range(tallysums.MOST_KEPT + 5):
        asked(kept, ROWS, BEGINS, only={"task": f"task-{number}"})
    assert len(kept._hours) == tallysums.MOST_KEPT
    before = len(added)
    asked(kept, ROWS, BEGINS, only={"task": f"task-{number}"})
    assert len(added) == before
    asked(kept, ROWS, BEGINS, only={"task": "task-0"})
    assert len(added) == before + 2
