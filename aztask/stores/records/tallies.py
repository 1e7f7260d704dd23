"""What workers did, as sums of short times: the values of the history, and how rows hold them.

Rules
1. Sums of several workers and times add up without loss: counts are whole numbers, and durations
   are counted in buckets that are the same everywhere. Each bucket ends a fifth behind the one
   before (2 to the power of 1/4), so that a percentile is at most a fifth off.
2. A packed row has a bound (`MOST_BYTES`), however many tasks ran. What does not fit is made
   coarser: first the times are joined, then the rarest tasks of each queue become `OTHERS`. The
   totals stay.
3. A row that cannot be read is a gap: `unpack_hour` and `unpack_day` raise Damaged.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from aztask.stores.records.damage import COUNT_LIMIT, Damaged, unpacked

HOUR: Final = 3600
SLOT: Final = 10
"""Seconds of the finest time that is kept apart."""

DAY_SLOT: Final = 300
"""Seconds that are kept apart in the row of a day."""

COARSER: Final = (SLOT, 30, 60, DAY_SLOT)
"""The times that an hour's row may keep apart; each divides the one behind it."""

MOST_BYTES: Final = 32_000
"""Bytes of one worker's hour. A page reads those of 500 workers; Tables sends 4 MiB at a time."""

MOST_TALLIES: Final = 4_000
"""Sums in one worker's hour: packing them takes 60 ms of CPU time, every ten seconds."""

MOST_SERIES: Final = 200
"""Tasks of all queues that are kept apart; the dashboard reads a row a day for each."""

MOST_PLAIN: Final = 4 << 20
"""Bytes of a row once it is not compressed: more is no row of ours."""

OTHERS: Final = "(other tasks)"
LONGEST_NAME: Final = 200

VERSION: Final = 1
_LEAST: Final = 0.001
LAST_BUCKET: Final = 127
_AN_OCTAVE: Final = 4

Series: TypeAlias = tuple[str, str]
"""A queue, and a task in it."""


# -- durations -------------------------------------------------------------------------------


def bucket_of(seconds: float) -> int:
    """The bucket of a duration: 0 is below a millisecond, the last one has no end."""
    if not seconds >= _LEAST:
        return 0
    return 1 + int(min(_AN_OCTAVE * math.log2(seconds / _LEAST), LAST_BUCKET - 1))


def percentile(buckets: Mapping[int, int], share: float) -> float | None:
    """The duration, in seconds, that this share of the counted ones does not exceed.

    Within its bucket it is taken as evenly spread on the logarithm. None without any.
    """
    total = sum(buckets.values())
    if not total:
        return None
    below, wanted = 0, share * total
    for bucket in sorted(buckets):
        count = buckets[bucket]
        if below + count >= wanted:
            inside = (wanted - below) / count
            above = (bucket - 1 + inside) / _AN_OCTAVE
            return float(_LEAST * 2**above) if bucket else _LEAST * inside
        below += count
    raise AssertionError("a share of all is never more than all")


# -- sums ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What happened in one time, of one task or of several.

    * `succeeded`, `failed`, `retried`: runs that ended so. `other`: that were snoozed, wait inside
      their code, expired or were cancelled.
    * `lost`: leases that ended before their message was settled.
    * `waits`, `runs`: how many first runs waited, and how many runs took, so long: by bucket.
    """

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    other: int = 0
    lost: int = 0
    waits: dict[int, int] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        """Runs that ended, in whatever way."""
        return self.succeeded + self.failed + self.retried + self.other

    def add(self, more: Tally) -> None:
        """Add the counts of another one."""
        self.succeeded += more.succeeded
        self.failed += more.failed
        self.retried += more.retried
        self.other += more.other
        self.lost += more.lost
        for mine, theirs in ((self.waits, more.waits), (self.runs, more.runs)):
            for bucket, count in theirs.items():
                mine[bucket] = mine.get(bucket, 0) + count

    def packed(self) -> list[Any]:
        """The counts as a row holds them."""
        counts = [self.succeeded, self.failed, self.retried, self.other, self.lost]
        return [*counts, self.waits, self.runs]


Tallies: TypeAlias = dict[int, Tally]
"""Sums by the time at which theirs begins, UTC epoch seconds."""


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of all of them."""
    found = Tally()
    for each in tallies:
        found.add(each)
    return found


def coarser(tallies: Mapping[int, Tally], seconds: int) -> Tallies:
    """The same sums in times of so many seconds."""
    found: dict[int, Tally] = defaultdict(Tally)
    for at, tally in tallies.items():
        found[at - at % seconds].add(tally)
    return dict(found)


def joined(parts: Iterable[Mapping[int, Tally]]) -> Tallies:
    """The sums of several at each time."""
    found: dict[int, Tally] = defaultdict(Tally)
    for part in parts:
        for at, tally in part.items():
            found[at].add(tally)
    return dict(found)


def fold(series: Mapping[Series, Tallies], most: int) -> dict[Series, Tallies]:
    """At most so many series and one of `OTHERS` for each queue: the busiest stay apart."""
    if len(series) <= most:
        return dict(series)
    # By name among equals, so that all who fold the same find the same.
    busy = {name: total(each.values()).ended for name, each in series.items() if name[1] != OTHERS}
    kept = set(sorted(busy, key=lambda name: (-busy[name], name))[:most])
    found: dict[Series, list[Tallies]] = defaultdict(list)
    for name, each in series.items():
        found[name if name in kept else (name[0], OTHERS)].append(each)
    return {name: joined(parts) for name, parts in found.items()}


# -- rows ------------------------------------------------------------------------------------


class Author(NamedTuple):
    """Who wrote an hour: the worker's name, when it started, UTC epoch seconds, and what it runs
    (`aztask.version.release_of`)."""

    name: str
    born: int
    release: str

    @classmethod
    def of(cls, name: str, born: float, release: str) -> Author:
        """With names as long as a row takes."""
        return cls(name[:LONGEST_NAME], max(0, int(born)), release[:LONGEST_NAME])


class PackedHour(NamedTuple):
    """A worker's hour as a row holds it.

    * `brief`: the sums of the hour by series, and those of each time for all series together, if
      they fit. It is enough for most pages, and a tenth of what is in `data`.
    * `data`: the sums of each time by series.
    """

    brief: bytes
    data: bytes


@dataclass(slots=True)
class Hour:
    """What one worker did in one hour, by series. `step`: the seconds that it keeps apart."""

    author: Author
    series: dict[Series, Tallies] = field(default_factory=dict)
    step: int = SLOT


def pack_hour(hour: Hour, begins: int) -> PackedHour:
    """As fine as fits (rule 2). begins: the hour's first second.

    The hour itself becomes as coarse, so that the next call does not try what is finer again.
    """
    series = fold(hour.series, MOST_SERIES)
    while True:
        for step in (each for each in COARSER if each >= hour.step):
            if step > hour.step:
                hour.series = {name: coarser(each, step) for name, each in hour.series.items()}
                series = {name: coarser(each, step) for name, each in series.items()}
                hour.step = step
            if step < DAY_SLOT and sum(map(len, series.values())) > MOST_TALLIES:
                continue
            data = squeezed([[*name, _pairs(each, begins)] for name, each in series.items()])
            if len(data) <= MOST_BYTES:
                return PackedHour(_packed_brief(hour.author, series, begins), data)
        fewer = fold(series, len(series) // 2)
        series = fewer if len(fewer) < len(series) else {("", OTHERS): joined(series.values())}


def _packed_brief(author: Author, series: Mapping[Series, Tallies], begins: int) -> bytes:
    sums = [[*name, total(each.values()).packed()] for name, each in series.items()]
    brief = squeezed([*author, sums, _pairs(joined(series.values()), begins)])
    return brief if len(brief) <= MOST_BYTES else squeezed([*author, sums])


def unpack_hour(brief: Any, data: Any, begins: int) -> Hour:
    """What `pack_hour` packed. Without `data`, the sums of the hour. Raises Damaged."""
    author, found = opened_brief(brief)
    hour = Hour(author)
    if data is None:
        for queue, task, sums in _threes(found[3]):
            hour.series[_name(queue), _name(task)] = {begins: _tally(sums)}
        return hour
    for queue, task, pairs in _threes(plain_of(data)):
        hour.series[_name(queue), _name(task)] = _read_pairs(pairs, begins, HOUR)
    return hour


def opened_brief(brief: Any) -> tuple[Author, list[Any]]:
    """Who wrote an hour, and the values of its `brief`, which are not checked. Raises Damaged.

    Of the values, the fourth are the sums by series. The fifth are the sums of each time; a
    release before this one, and a worker of very many tasks, writes none.
    """
    found = plain_of(brief)
    if not isinstance(found, list) or len(found) < 4 or not isinstance(found[3], list):
        raise Damaged("its hour is no hour of a worker")
    return Author(_name(found[0]), whole_number(found[1], most=2**40), _name(found[2])), found


@dataclass(slots=True)
class Day:
    """What was done in one day, by hour: in one queue and task, or by one worker.

    * `name`: the queue and the task; or the worker and "".
    * `hours`: the sums of each hour, by its number in the day.
    * `slots`: those of `DAY_SLOT` seconds in each hour, by the seconds of the day.
    * `notes`: of a worker: when each of its processes started, and its `release`.
    """

    name: Series
    hours: dict[int, Tally] = field(default_factory=dict)
    slots: dict[int, Tally] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)

    def replace(self, number: int, tallies: Mapping[int, Tally]) -> None:
        """Replace an hour, so that one which is merged again counts once.

        tallies: by the seconds of the day; empty for an hour in which nothing was done.
        """
        first, end = number * HOUR, (number + 1) * HOUR
        kept = {at: each for at, each in self.slots.items() if not first <= at < end}
        self.slots = kept | coarser(tallies, DAY_SLOT)
        self.hours.pop(number, None)
        if tallies:
            self.hours[number] = total(tallies.values())


def pack_day(day: Day) -> PackedHour:
    """The row of a day: `brief` has the hours and the notes."""
    hours = [[number, tally.packed()] for number, tally in sorted(day.hours.items())]
    notes = [list(each) for each in sorted(day.notes)]
    return PackedHour(squeezed([*day.name, hours, notes]), squeezed(_pairs(day.slots, 0)))


def unpack_day(brief: Any, data: Any = None) -> Day:
    """What `pack_day` packed. Without `data`, only the hours. Raises Damaged."""
    found = plain_of(brief)
    if not isinstance(found, list) or len(found) < 4:
        raise Damaged("its day is no day")
    day = Day((_name(found[0]), _name(found[1])))
    for number, tally in _twos(found[2]):
        day.hours[whole_number(number, most=23)] = _tally(tally)
    day.notes = [(whole_number(at, most=2**40), _name(release)) for at, release in _twos(found[3])]
    if data is not None:
        day.slots = _read_pairs(plain_of(data), 0, 24 * HOUR)
    return day


def squeezed(value: list[Any]) -> bytes:
    """Values as a row holds them."""
    plain: bytes = msgpack.packb([VERSION, value], unicode_errors="surrogatepass")
    return zlib.compress(plain, 6)


def plain_of(data: Any) -> Any:
    """The values of a row, unpacked and not checked. Raises Damaged."""
    if not isinstance(data, bytes):
        raise Damaged("its history is missing")
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, MOST_PLAIN)
    except zlib.error:
        raise Damaged("its history is not compressed as it should be") from None
    if not stream.eof:
        raise Damaged("its history is too long, or ends too early")
    found = unpacked(plain, "history")
    if not isinstance(found, list) or len(found) < 2 or found[0] != VERSION:
        raise Damaged("its history is of another release")
    return found[1]


def _pairs(tallies: Mapping[int, Tally], begins: int) -> list[Any]:
    """Times in steps from the beginning, and their counts."""
    return [[(at - begins) // SLOT, tally.packed()] for at, tally in sorted(tallies.items())]


def _read_pairs(pairs: Any, begins: int, seconds: int) -> Tallies:
    most = seconds // SLOT - 1
    return {begins + SLOT * whole_number(at, most=most): _tally(each) for at, each in _twos(pairs)}


def _tally(found: Any) -> Tally:
    if not isinstance(found, list) or len(found) < 7:
        raise Damaged("its counts are no counts")
    succeeded, failed, retried, other, lost = map(whole_number, found[:5])
    return Tally(succeeded, failed, retried, other, lost, _buckets(found[5]), _buckets(found[6]))


def _buckets(found: Any) -> dict[int, int]:
    if not isinstance(found, dict):
        raise Damaged("its durations are no durations")
    return {
        whole_number(key, most=LAST_BUCKET): whole_number(count) for key, count in found.items()
    }


def whole_number(found: Any, most: int = COUNT_LIMIT) -> int:
    """A number of a row, if it is one from 0 to `most`. Raises Damaged."""
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= most:
        raise Damaged("one of its counts is out of range")
    return found


def _name(found: Any) -> str:
    if not isinstance(found, str):
        raise Damaged("one of its names is no text")
    return found


def _lists(found: Any, length: int) -> list[list[Any]]:
    if not isinstance(found, list) or not all(
        isinstance(each, list) and len(each) >= length for each in found
    ):
        raise Damaged("its history is no list")
    return [each[:length] for each in found]


def _twos(found: Any) -> list[list[Any]]:
    return _lists(found, 2)


def _threes(found: Any) -> list[list[Any]]:
    return _lists(found, 3)
