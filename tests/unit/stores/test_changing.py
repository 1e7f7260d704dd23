"""The one loop of compare-and-set."""

from __future__ import annotations

import pytest

from aztask.errors import BrokerUnavailable
from aztask.stores.rows import TRIES, Kept, New, change
from aztask.support import chance, clock


class Number:
    """A number with versions, which other writers may change before a write."""

    def __init__(self, *others: int) -> None:
        self.value, self.version = 0, 0
        self.reads = 0
        self._others = list(others)

    def read(self) -> tuple[int, int]:
        self.reads += 1
        return self.value, self.version

    def write(self, data: int, before: tuple[int, int]) -> bool:
        if self._others:
            self.value, self.version = self._others.pop(0), self.version + 1
        if self.version != before[1]:
            return False
        self.value, self.version = data, self.version + 1
        return True


def plus_one(before: tuple[int, int]) -> New[int, str]:
    return New(before[0] + 1, f"from {before[0]}")


def test_a_change_starts_from_what_other_writers_left() -> None:
    cell = Number(10, 20)
    assert change(cell, plus_one, "the number") == "from 20"
    assert (cell.value, cell.reads) == (21, 3)


def test_a_decision_to_keep_it_writes_nothing() -> None:
    cell = Number(10)
    assert change(cell, lambda before: Kept(before[0]), "the number") == 0
    assert (cell.value, cell.version, cell.reads) == (0, 0, 1)


def test_the_last_decision_counts() -> None:
    cell = Number(10)
    decided = change(
        cell, lambda before: Kept("there") if before[0] else New(1, "made"), "the number"
    )
    assert decided == "there"
    assert cell.value == 10


@pytest.mark.parametrize("tries", [1, 3, TRIES])
def test_a_cell_that_always_changes_is_given_up(tries: int) -> None:
    cell = Number(*range(100))
    with pytest.raises(BrokerUnavailable, match="other processes keep changing the number; try"):
        change(cell, plus_one, "the number", tries=tries)
    assert cell.reads == tries


def test_writers_pause_from_their_second_meeting_on() -> None:
    """A row that is made without a look first, such as a unique key's, is often there."""
    for others, pauses in ([10], 0), ([10, 20, 30], 2):
        slept: list[float] = []
        with clock.replaced(clock.Clock(sleep=slept.append)):
            change(Number(*others), plus_one, "the number")
        assert len(slept) == pauses


def test_the_pauses_of_a_slow_store_are_as_long_as_its_tries() -> None:
    """Four writers that claim three entries each met twelve times where a request took 20 ms."""
    now = [0.0]

    class Slow(Number):
        def write(self, data: int, before: tuple[int, int]) -> bool:
            now[0] += 0.1
            return super().write(data, before)

    def longest(low: float, high: float) -> float:
        return high

    slept: list[float] = []
    with (
        clock.replaced(clock.Clock(monotonic=lambda: now[0], sleep=slept.append)),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(chance, "uniform", longest)
        change(Slow(*range(6)), plus_one, "the number")
    assert slept == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])


def test_an_error_of_the_decision_ends_it() -> None:
    cell = Number()

    def damaged(before: tuple[int, int]) -> New[int, None]:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        change(cell, damaged, "the number")
    assert (cell.reads, cell.version) == (1, 0)
