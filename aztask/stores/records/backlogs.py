"""How many messages waited in each queue: a row a day for each queue, beside the history.

Rules
1. Any worker of a queue may add a sample (`add`), compared with the row that it read: two workers
   that add at the same time keep both. Within one minute the larger sample stays.
2. A row has the largest sample of each hour in its `brief`, so that a page about a month reads only
   those, and the largest of each minute in `data`.
3. Rows are the history's: they belong to the broker, are kept for `KEPT_DAYS`, and one that is
   damaged is a gap, which the next sample begins anew.

A sample is one write, so that a crash leaves all of it or nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from aztask.stores.records.damage import Damaged
from aztask.stores.records.history import BACKLOG, HistoryStore
from aztask.stores.records.tallies import (
    HOUR,
    LONGEST_NAME,
    PackedHour,
    plain_of,
    squeezed,
    whole_number,
)
from aztask.stores.rows import Change, New, Place, Row, change

MINUTE: Final = 60
DAY: Final = 24 * HOUR
HELD_SECONDS: Final = 2 * MINUTE
"""Samples that are a minute apart may leave out one by the clock, and that is no gap."""


@dataclass(slots=True)
class BacklogDay:
    """What waited in one queue on one day.

    * `last`: when the newest sample was taken, UTC epoch seconds.
    * `hours`, `minutes`: the largest sample of each, by its number in the day.
    """

    queue: str
    last: int = 0
    hours: dict[int, int] = field(default_factory=dict)
    minutes: dict[int, int] = field(default_factory=dict)

    def add(self, at: float, waiting: int) -> None:
        """Add a sample. at: UTC epoch seconds of this day."""
        second = int(at) % DAY
        for found, number in ((self.hours, second // HOUR), (self.minutes, second // MINUTE)):
            found[number] = max(found.get(number, 0), waiting)
        self.last = max(self.last, int(at))

    def packed(self) -> PackedHour:
        """The row of the day."""
        hours = [list(each) for each in sorted(self.hours.items())]
        minutes = [list(each) for each in sorted(self.minutes.items())]
        return PackedHour(squeezed([self.queue, self.last, hours]), squeezed(minutes))

    @classmethod
    def read(cls, row: Row, *, brief: bool) -> BacklogDay:
        """The day in a row. brief: without the minutes. Raises Damaged."""
        found = plain_of(row.values.get("brief"))
        if not isinstance(found, list) or len(found) < 3 or not isinstance(found[0], str):
            raise Damaged("its day is no day of a queue")
        day = cls(found[0], whole_number(found[1], most=2**40), _numbers(found[2], DAY // HOUR))
        if not brief:
            day.minutes = _numbers(plain_of(row.values.get("data")), DAY // MINUTE)
        return day


def _numbers(found: Any, end: int) -> dict[int, int]:
    if not isinstance(found, list) or not all(
        isinstance(each, list) and len(each) >= 2 for each in found
    ):
        raise Damaged("its samples are no samples")
    return {whole_number(each[0], most=end - 1): whole_number(each[1]) for each in found}


@dataclass(frozen=True, slots=True)
class _Cell:
    """The row of one queue and day."""

    history: HistoryStore
    place: Place

    def read(self) -> Row | None:
        (row,) = self.history.rows.get([self.place])
        return row

    def write(self, data: PackedHour, before: Row | None) -> bool:
        return self.history.rows.write(Change(self.place, data._asdict(), before)) is not None


@dataclass(frozen=True, slots=True)
class Backlogs:
    """The samples of one broker. Any thread may call. All methods raise BrokerUnavailable."""

    history: HistoryStore

    def newest(self, at: float) -> dict[str, int]:
        """When each queue was last looked at, on this day; UTC epoch seconds. One request."""
        return {day.queue: day.last for _, day in self.days(int(at), int(at) + 1, brief=True)}

    def add(self, queue: str, at: float, waiting: int) -> None:
        """Add a sample. at: UTC epoch seconds. Two requests."""
        name = queue[:LONGEST_NAME]
        place = self.history.of_day(BACKLOG, int(at) // DAY, name)

        def with_sample(before: Row | None) -> New[PackedHour, None]:
            day = BacklogDay(name)
            if before is not None:
                with suppress(Damaged):  # it begins anew (rule 3)
                    day = BacklogDay.read(before, brief=False)
            day.add(at, waiting)
            return New(day.packed(), None)

        change(_Cell(self.history, place), with_sample, "the history")

    def days(self, begins: int, end: int, *, brief: bool) -> list[tuple[int, BacklogDay]]:
        """The days from the one of a second to before another second, each with its first second.

        One request. brief: without what is finer than an hour.
        """
        found = []
        days = begins // DAY, (end - 1) // DAY + 1
        for first, row in self.history.rows_of_days(BACKLOG, *days, brief=brief):
            try:
                found.append((first, BacklogDay.read(row, brief=brief)))
            except Damaged:
                continue
        return found


def waiting_at(
    backlogs: Backlogs, begins: int, end: int, step: int, queue: str = ""
) -> dict[int, int]:
    """The messages that waited at each step of a window, of one queue or of all; gaps are missing.

    A step of several samples has the largest of each queue; a sample holds for `HELD_SECONDS`, or
    until the next one. step: seconds.
    """
    brief = step >= HOUR
    largest: dict[tuple[int, str], int] = {}
    for first, day in backlogs.days(begins, end, brief=brief):
        if queue and day.queue != queue[:LONGEST_NAME]:
            continue
        unit, samples = (HOUR, day.hours) if brief else (MINUTE, day.minutes)
        starts = sorted(samples)
        for number, following in zip(starts, [*starts[1:], DAY // unit], strict=True):
            held = unit if brief else min((following - number) * unit, HELD_SECONDS)
            for at in range(first + number * unit, first + number * unit + held, min(step, unit)):
                key = at - (at - begins) % step, day.queue
                if begins <= at < end:
                    largest[key] = max(largest.get(key, 0), samples[number])
    found: dict[int, int] = {}
    for (at, _), waiting in largest.items():
        found[at] = found.get(at, 0) + waiting
    return found
