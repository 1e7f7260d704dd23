"""Sums of many workers' hours for one question: by time, and by queue, task or worker.

An hour of a busy worker has some thousand sums, and a page reads those of 500 workers. So this
makes no `Tally` of each, as `unpack_hour` does for a merge: it adds the values of a row to the sums
as they are unpacked. And where a row's `brief` answers the question (`WindowSums.brief_answers`),
it does not unpack the rest: that takes a tenth of the time.

Rules
1. A row is checked before any of it is added: one that is damaged is a gap as a whole.
2. Only what the question needs is checked and added. What lies before the window, or belongs to
   another queue, costs its share of the unpacking alone.
3. The sums are those of `Tally.add` over `unpack_hour`, whatever the rows hold.
4. The sums of an hour that has ended may be kept (`KeptHours`). They count while its rows are the
   same, byte for byte: so a kept hour shows what a new reading would.

A kept hour is absent, or it is the sums of certain rows from a certain time on:

    absent               read: its rows are added up                 -> kept, if the hour has ended
    kept, same rows      read of this window or a later one: taken   -> kept
    kept, other rows     read: a worker wrote late, or it was merged -> added up again, kept
    kept, earlier window read: it may lack what lies before          -> added up again, kept
    kept                 another hour or question needs the room     -> absent, the oldest first
"""

from __future__ import annotations

import gc
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any, Final, Protocol

from aztask.stores.records.damage import COUNT_LIMIT, Damaged
from aztask.stores.records.tallies import (
    HOUR,
    LAST_BUCKET,
    SLOT,
    Author,
    Tally,
    opened_brief,
    plain_of,
)

BY: Final = ("queue", "task", "worker")
_COUNTS: Final = 5
_COLUMNS: Final = 7
MOST_CELLS: Final = 20_000
"""Each takes 2 KB while rows are added. 50 tasks have 18,000 in an hour."""

MOST_KEPT: Final = 16


class HourRows(Protocol):
    """The rows of one hour: `brief` and `data` of each, or None where `data` was not read."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Their values, in the order of their keys."""
        ...

    def whole(self, numbers: Sequence[int]) -> list[tuple[Any, Any]]:
        """Some of them, by number, with `data`; those that are gone are skipped."""
        ...


class _Sum:
    """Sums that grow: as a `Tally`, with a place for each bucket, since a list is added to in half
    the time of a dictionary.
    """

    __slots__ = ("ends", "runs", "waits")

    def __init__(self) -> None:
        self.ends = [0] * _COUNTS
        self.waits = [0] * (LAST_BUCKET + 1)
        self.runs = [0] * (LAST_BUCKET + 1)

    def add(self, tally: Sequence[Any]) -> None:
        """Add checked counts, as a row has them."""
        for place, count in enumerate(tally[:_COUNTS]):
            if count:
                self.ends[place] += count
        mine = self.waits
        for bucket, count in tally[_COUNTS].items():
            mine[bucket] += count
        mine = self.runs
        for bucket, count in tally[_COUNTS + 1].items():
            mine[bucket] += count

    def tally(self) -> Tally:
        """What was added so far."""
        waits, runs = (
            {bucket: count for bucket, count in enumerate(each) if count}
            for each in (self.waits, self.runs)
        )
        succeeded, failed, retried, other, lost = self.ends
        return Tally(succeeded, failed, retried, other, lost, waits, runs)


@dataclass(slots=True)
class WindowSums:
    """What is asked, and the sums so far.

    * `begins`: the first second of the window. `step`: seconds of one point; it divides an hour.
    * `by`: what the rows are about, of `BY`. `only`: what they are narrowed to, by the same names.
    """

    begins: int
    step: int
    by: str
    only: Mapping[str, str] = field(default_factory=dict)
    # Each value is added to one cell, of which there are few for many workers; points and rows are
    # the sums of cells. Names without a bound, such as workers, get no cells once there are
    # `MOST_CELLS`: their values are added to a point and to a row, which takes twice as long.
    _cells: dict[tuple[str, int], _Sum] = field(default_factory=dict)
    _points: dict[int, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    _rows: dict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    _taken: list[Mapping[tuple[str, int], Tally]] = field(default_factory=list)
    _joined: list[WindowSums] = field(default_factory=list)

    def add(self, queue: str, task: str, worker: str, tallies: Mapping[int, Tally]) -> None:
        """Add what was done at some times, UTC epoch seconds."""
        names = (queue, task, worker)
        inside = [(at, tally.packed()) for at, tally in tallies.items() if at >= self.begins]
        if inside and self._wants(names):
            self._add(names[BY.index(self.by)], inside, 0, 1)

    def add_hour(self, brief: Any, data: Any, begins: int) -> Author:
        """Add a worker's row of an hour; returns who wrote it. Raises Damaged, and adds nothing.

        brief, data: as `pack_hour` made them. begins: the hour's first second.
        """
        author, _ = opened_brief(brief)
        first = self._first_slot(begins)
        wanted: list[tuple[str, list[list[Any]]]] = []
        for queue, task, pairs in _lists(plain_of(data), 3):
            names = (queue, task, author.name)
            if not (isinstance(queue, str) and isinstance(task, str)):
                raise Damaged("one of its names is no text")
            if self._wants(names):
                found = _lists(pairs, 2)
                _check([at for at, _ in found])
                if inside := [pair for pair in found if pair[0] >= first]:
                    wanted.append((names[BY.index(self.by)], inside))
        _check_tallies([tally for _, found in wanted for _, tally in found])
        for name, found in wanted:
            self._add(name, found, begins, SLOT)
        return author

    def brief_answers(self, begins: int) -> bool:
        """Whether rows of this hour answer the question with their `brief` alone, if it is whole.

        It has one sum for each series. So they must not be narrowed to some, and the hour must not
        begin before the window, unless it is only asked what each worker did.
        """
        narrowed = any(self.only.get(each) for each in ("queue", "task"))
        return not narrowed and (self.by == "worker" or self.has_whole(begins))

    def has_whole(self, begins: int) -> bool:
        """Whether no part of this hour lies before the window."""
        return begins >= self.begins

    def add_brief(self, brief: Any, begins: int) -> Author | None:
        """As `add_hour`, where `brief_answers`; None, with nothing added, if `brief` is not whole.

        Raises Damaged, and adds nothing.
        """
        author, values = opened_brief(brief)
        if len(values) < 5:
            return None
        first = self._first_slot(begins)
        times = _lists(values[4], 2)
        _check([at for at, _ in times])
        inside = [(at, tally) for at, tally in times if at >= first]
        series = _lists(values[3], 3)
        if not all(isinstance(name, str) for names in series for name in names[:2]):
            raise Damaged("one of its names is no text")
        _check_tallies([tally for _, tally in inside] + [tally for _, _, tally in series])
        if not self._wants(("", "", author.name)):
            return author
        for at, tally in inside:
            moment = begins + SLOT * at
            self._points[moment - (moment - self.begins) % self.step].add(tally)
        if self.by != "worker":
            for queue, task, tally in series:
                self._rows[queue if self.by == "queue" else task].add(tally)
        elif inside:
            row = self._rows[author.name]
            for tally in [each[2] for each in series] if first == 0 else [t for _, t in inside]:
                row.add(tally)
        return author

    def _first_slot(self, begins: int) -> int:
        """The first slot of an hour that is in the window."""
        return max(0, -(-(self.begins - begins) // SLOT))

    def _add(self, name: str, found: Sequence[Sequence[Any]], begins: int, scale: int) -> None:
        """Add checked counts, whose times are so many seconds each, from `begins` on."""
        first, step = self.begins, self.step
        for at, tally in found:
            moment = begins + scale * at
            for each in self._sums(name, moment - (moment - first) % step):
                each.add(tally)

    def _sums(self, name: str, point: int) -> tuple[_Sum, ...]:
        cell = self._cells.get((name, point))
        if cell is not None:
            return (cell,)
        if len(self._cells) < MOST_CELLS:
            made = self._cells[name, point] = _Sum()
            return (made,)
        return self._points[point], self._rows[name]

    def _wants(self, names: tuple[str, str, str]) -> bool:
        only = self.only
        return all(only.get(each, "") in ("", name) for each, name in zip(BY, names, strict=True))

    def cells(self) -> dict[tuple[str, int], Tally] | None:
        """What was done by name and point; None if there was not room for all."""
        if self._points or self._taken or self._joined:
            return None
        return {key: each.tally() for key, each in self._cells.items()}

    def take(self, cells: Mapping[tuple[str, int], Tally]) -> None:
        """Count what another one has added up, from the beginning of this window on."""
        self._taken.append(cells)

    def join(self, more: WindowSums) -> None:
        """Count what another one of the same question has added up."""
        self._joined.append(more)

    def alike(self) -> WindowSums:
        """The same question, with nothing added."""
        return WindowSums(self.begins, self.step, self.by, self.only)

    def totals(self) -> tuple[dict[int, Tally], dict[str, Tally]]:
        """What was done in each point of which something is known; and in the window, by name."""
        points = {at: each.tally() for at, each in self._points.items()}
        rows = {name: each.tally() for name, each in self._rows.items()}
        own = {key: each.tally() for key, each in self._cells.items()}
        for (name, point), tally in chain(own.items(), *(each.items() for each in self._taken)):
            if point >= self.begins:
                points.setdefault(point, Tally()).add(tally)
                rows.setdefault(name, Tally()).add(tally)
        for more in self._joined:
            their_points, their_rows = more.totals()
            for point, tally in their_points.items():
                points.setdefault(point, Tally()).add(tally)
            for name, tally in their_rows.items():
                rows.setdefault(name, Tally()).add(tally)
        return points, rows


@dataclass(frozen=True, slots=True)
class _KeptHour:
    """The sums of an hour (rule 4). `of`: its rows. `begins`: what lies before is not in them.

    * `cells`: by name and point, so that later windows take a part of them; None if there was no
      room. `whole`: the sums of the whole hour; None if a part of it lay before the window.
    """

    of: int
    begins: int
    authors: Sequence[Author]
    cells: Mapping[tuple[str, int], Tally] | None
    whole: WindowSums | None

    def counts(self, begins: int, *, whole: bool) -> bool:
        """Whether they are those of a window. whole: the window has the whole hour."""
        if self.cells is None:
            return whole and self.whole is not None
        return self.begins <= begins

    def give(self, sums: WindowSums) -> Sequence[Author]:
        """Add them to those of the window; returns who wrote the rows."""
        if self.cells is not None:
            sums.take(self.cells)
        elif self.whole is not None:
            sums.join(self.whole)
        return self.authors


@dataclass(slots=True)
class KeptHours:
    """The sums of hours that have ended, for those who ask again and again. Any thread may call."""

    _hours: dict[object, _KeptHour] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def add_hour(self, sums: WindowSums, begins: int, rows: HourRows) -> Sequence[Author]:
        """Add all rows of an hour that has ended, as `add_rows` does; returns who wrote."""
        question = (begins, sums.step, sums.by, tuple(sorted(sums.only.items())))
        of, whole = hash(tuple(rows)), sums.has_whole(begins)
        with self._lock:
            kept = self._hours.pop(question, None)
        if kept is None or kept.of != of or not kept.counts(sums.begins, whole=whole):
            fresh = sums.alike()
            authors = add_rows(fresh, begins, rows)
            kept = _KeptHour(of, sums.begins, authors, fresh.cells(), fresh if whole else None)
            if not kept.counts(sums.begins, whole=whole):
                # by more names than there is room for, such as those of workers
                sums.join(fresh)
                return authors
        with self._lock:
            self._hours[question] = kept
            while len(self._hours) > MOST_KEPT:
                del self._hours[next(iter(self._hours))]
        return kept.give(sums)


def add_rows(sums: WindowSums, begins: int, rows: HourRows) -> list[Author]:
    """Add the rows of an hour, without damaged ones; returns who wrote them.

    Rows whose `brief` is not whole are read once more, with `data`, all of them together.
    """
    found: list[Author] = []
    others: list[int] = []
    for number, (brief, data) in enumerate(rows):
        with suppress(Damaged), _without_search():  # a damaged row is a gap
            if data is not None:
                found.append(sums.add_hour(brief, data, begins))
            elif (author := sums.add_brief(brief, begins)) is not None:
                found.append(author)
            else:
                others.append(number)
    for brief, data in rows.whole(others) if others else ():
        with suppress(Damaged), _without_search():
            found.append(sums.add_hour(brief, data, begins))
    return found


@contextmanager
def _without_search() -> Iterator[None]:
    """Without Python's search for garbage, in all threads: for some milliseconds at a time.

    Unpacking a row makes some thousand lists, which live as long as it is added. The search would
    look at all of them, several times, and find nothing: it takes as long as the rest.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _lists(found: Any, length: int) -> list[list[Any]]:
    """Lists of so many values; a later release may write longer ones."""
    if not isinstance(found, list) or not set(map(type, found)) <= {list}:
        raise Damaged("its history is no list")
    sizes = set(map(len, found))
    if min(sizes, default=length) < length:
        raise Damaged("its history is no list")
    return found if sizes <= {length} else [each[:length] for each in found]


def _check(numbers: Iterable[Any], most: int = HOUR // SLOT - 1) -> None:
    """Check counts in one pass outside of Python. Raises Damaged."""
    try:
        checked = array("Q", numbers)
    except (TypeError, OverflowError):
        raise Damaged("one of its counts is out of range") from None
    if checked and max(checked) > most:
        raise Damaged("one of its counts is out of range")


def _check_tallies(tallies: Sequence[Any]) -> None:
    lists = _lists(tallies, _COLUMNS)
    _check(chain.from_iterable(each[:_COUNTS] for each in lists), COUNT_LIMIT)
    buckets = [each[_COUNTS] for each in lists] + [each[_COUNTS + 1] for each in lists]
    if not set(map(type, buckets)) <= {dict}:
        raise Damaged("its durations are no durations")
    _check(set().union(*buckets), LAST_BUCKET)
    _check(chain.from_iterable(map(dict.values, buckets)), COUNT_LIMIT)
