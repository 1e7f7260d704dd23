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
    MOST_BYTES,
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


class Rows(list):
    """Rows of which `data` was not read; `again` holds the numbers of those that were read then."""

    def __init__(self, rows):
        super().__init__((brief, None) for brief, _ in rows)
        self.all, self.again = rows, []

    def whole(self, numbers):
        self.again += numbers
        return [self.all[each] for each in numbers]


@pytest.mark.parametrize("only", ONLY)
@pytest.mark.parametrize("by", BY)
def test_where_it_answers_the_brief_gives_the_same_sums(by, only):
    for begins, step in ((BEGINS - HOUR, 20), (BEGINS - 1700, 20), (BEGINS + 600, 300)):
        sums = WindowSums(begins, step, by, only)
        taken = []
        for first in (BEGINS - HOUR, BEGINS):
            if sums.brief_answers(first):
                rows = Rows([row for at, row in TWO if at == first])
                taken += [(first, row) for row in rows.all]
                assert [each.name for each in add_rows(sums, first, rows)] == ["w0", "w1", "w2"]
                assert rows.again == []
        assert sums.totals() == plainly(taken, begins, step, by, only)
        narrowed = bool(only.get("queue") or only.get("task"))
        whole = sum(first >= begins for first in (BEGINS - HOUR, BEGINS))
        assert len(taken) == 3 * (0 if narrowed else 2 if by == "worker" else whole)


def without_times(row: PackedHour) -> PackedHour:
    """A row as the release before this one wrote it."""
    version, values = msgpack.unpackb(zlib.decompress(row.brief), strict_map_key=False)
    return row._replace(brief=zlib.compress(msgpack.packb([version, values[:4]])))


def test_rows_whose_brief_has_no_times_are_read_whole_together():
    new, old, large = packed("w0", 1), without_times(packed("w1", 2)), packed("w2", 3)
    gone = (without_times(packed("w3", 4)).brief, None)
    rows = Rows([new, old, without_times(large), gone])
    sums = WindowSums(BEGINS, 20, "task")
    assert [each.name for each in add_rows(sums, BEGINS, rows)] == ["w0", "w1", "w2"]
    assert rows.again == [1, 2, 3]
    wanted = plainly([(BEGINS, each) for each in (new, old, large)], BEGINS, 20, "task", {})
    assert sums.totals() == wanted


def test_an_hour_whose_times_do_not_fit_beside_its_sums_is_written_without_them():
    noise = random.Random(7)
    hour = Hour(Author("w0", BEGINS, "1.0"))
    times = hour.series["mail", "pay"] = {
        BEGINS + SLOT * number: Tally(runs={noise.randrange(128): noise.randrange(90_000)})
        for number in range(360)
    }
    for number, tally in enumerate(noise.sample(list(times.values()), 360)):
        if number % 10 == 0 and len((row := pack_hour(hour, BEGINS)).data) > MOST_BYTES - 2_000:
            break
        for _ in range(30):
            tally.waits[noise.randrange(128)] = noise.randrange(90_000)
    assert hour.step == SLOT
    assert MOST_BYTES - 2_000 < len(row.data) <= MOST_BYTES
    assert len(row.brief) < 5_000
    rows = Rows([row])
    sums = WindowSums(BEGINS, 20, "task")
    add_rows(sums, BEGINS, rows)
    assert rows.again == [0]
    assert sums.totals() == plainly([(BEGINS, row)], BEGINS, 20, "task", {})


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
    rows = [(brief, data), packed("w2", 2), (b"broken", data), (None, b"")]
    assert [each.name for each in add_rows(sums, BEGINS, rows)] == ["w2"]
    assert sums.totals() == plainly([(BEGINS, packed("w2", 2))], BEGINS, 20, "task", {})


@pytest.mark.parametrize(
    "values",
    [
        [["mail", "pay", COUNTS], "text"],
        [["mail", 5, COUNTS]],
        [["mail", "pay", COUNTS[:6]]],
        [["mail", "pay", [*COUNTS[:4], -1, {}, {}]]],
        [["mail", "pay"]],
    ],
)
def test_a_damaged_brief_is_a_gap_as_a_whole(values):
    brief = with_data(["w1", BEGINS, "1.0", values, [[0, COUNTS]]])
    sums = WindowSums(BEGINS, 20, "task")
    with pytest.raises(Damaged):
        sums.add_brief(brief, BEGINS)
    assert sums.totals() == ({}, {})
    assert add_rows(sums, BEGINS, [(brief, None), (b"broken", None), (None, None)]) == []


@pytest.mark.parametrize(
    "times", ["text", [[0]], [[360, COUNTS]], [[0, COUNTS[:6]]], [["0", COUNTS]], [[0, None]]]
)
def test_damaged_times_of_a_brief_are_a_gap_as_a_whole(times):
    brief = with_data(["w1", BEGINS, "1.0", [["mail", "pay", COUNTS]], times])
    sums = WindowSums(BEGINS, 20, "task")
    with pytest.raises(Damaged):
        sums.add_brief(brief, BEGINS)
    assert sums.totals() == ({}, {})


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
        asked(kept, ROWS, BEGINS + 20, by)
    assert len(added) == 4
    for begins in (BEGINS, BEGINS - 20):
        asked(kept, ROWS, begins, by)
    assert len(added) == 6, "a whole hour needs a sum for each name alone"


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
