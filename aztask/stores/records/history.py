"""The history: what workers did in the last 30 days, in a few rows of the result store.

Rules
1. Each worker has a row for each hour, which it rewrites with what it did since (`write`). Only it
   writes that row, so that no write can be lost behind another one.
2. `merge` makes of the rows of an hour that has ended one row a day for each queue and task, kept
   for `KEPT_DAYS`, and one a day for each worker, kept for a day. It *replaces* that hour in the
   day's rows with the sums of all workers' rows, which stay for `HOURS_KEPT`: an hour that any
   worker merges again is the same, and counts once.
3. The head says which hour is merged next. Who reads the history takes older hours from the days'
   rows, and this one and later ones from the workers' rows. So no hour is missing while no worker
   merges.
4. A write to an hour that may be merged already sets the head back, in one transaction with the
   worker's row: a worker that could not reach the store for a while is not forgotten.
5. Rows belong to the broker, as runs do. A damaged row, or one of another release, is a gap. If it
   is a day's row, the next merge of that day begins it anew.

Crash windows of a merge. It reads the head, then the day's rows, then the workers' rows; it writes
the day's rows, each compared with what it read, and at last the head.

* If the process dies between two writes, the head still names the hour, and the next merge makes
  all of its rows again.
* If it only stands still there, and another one merges in the meantime, each of its writes finds
  another version than it read, and it begins anew. A merge that read less wrote before: the day's
  rows are read before those of the workers.
* If a worker writes late (rule 4) after its row was read, the head has another version, and the
  merge of that hour is made again.

The lease in the head only keeps several workers from the same work; the above holds without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final, TypeAlias

import msgpack

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.layout import SqlLayout, TablesLayout
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.owners import is_other_broker
from aztask.stores.records.tallies import (
    HOUR,
    MOST_SERIES,
    Author,
    Day,
    Hour,
    PackedHour,
    Series,
    Tallies,
    fold,
    joined,
    pack_day,
    pack_hour,
    unpack_day,
    unpack_hour,
)
from aztask.stores.records.tallysums import KeptHours, WindowSums, add_rows
from aztask.stores.rows import (
    TRIES,
    Change,
    KeepsRows,
    Kind,
    New,
    Place,
    Row,
    Rows,
    RowStore,
    change,
    move_rows,
)

_STEPS: Final = (
    """
    CREATE TABLE history (
        part TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, brief BLOB NOT NULL,
        data BLOB, PRIMARY KEY (part, key))
    WITHOUT ROWID;
    """,
)
_OWNED_STEPS: Final = (
    """
    CREATE TABLE owned_history (
        broker TEXT NOT NULL, part TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL,
        brief BLOB NOT NULL, data BLOB, PRIMARY KEY (broker, part, key))
    WITHOUT ROWID;
    """,
)
# The sums of an hour are in `brief`, so that a page about a month does not read what is finer.
HISTORY: Final = Kind(
    {"brief": bytes, "data": bytes},
    SqlLayout(
        "owned_history",
        "history",
        "part",
        "key",
        steps={"history": _STEPS, "owned_history": _OWNED_STEPS},
    ),
    TablesLayout("J", "j"),
    long="data",
)
# Keys begin with the number of the hour or day since 1970, so that a range of keys is one of times.
HOURS: Final = "hours"
TASKS: Final = "tasks"
WORKERS: Final = "workers"
BACKLOG: Final = "backlog"
"""What waited in each queue, by day: `aztask.stores.records.backlogs`."""

HEAD: Final = "head"
"""Its key among the hours, whose keys begin with a digit: both can change in one transaction."""

KEPT_DAYS: Final = 30
HOURS_KEPT: Final = 26
"""Hours that a worker's own row is kept: what shows the last day reads them."""

LATE_HOURS: Final = 12
"""A worker drops what it could not write for so long: the rows of that hour may be deleted soon."""

GRACE: Final = 180.0
"""Seconds after an hour's end until it is merged: workers write its last slots in this time."""

LATE: Final = 60.0
"""Seconds after an hour's end from which a write to it is late (rule 4). A write that is not lasts
less than the rest of `GRACE`, with the difference of the clocks."""

LEASE: Final = 120.0
MOST_ROWS: Final = 100_000
REMOVED: Final = 500
VERSION: Final = 1

DayRows: TypeAlias = dict[str, Row]


def hour_of(at: float) -> int:
    """The number of an hour since 1970."""
    return int(at // HOUR)


def digest(*names: str) -> str:
    """Names as the end of a key."""
    return sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _hour_key(hour: int) -> str:
    return f"{max(0, hour):07d}"


def _day_key(day: int) -> str:
    return f"{max(0, day):06d}"


@dataclass(frozen=True, slots=True)
class HistoryHead:
    """Which hour is merged next, and who does it until when, by the store's clock."""

    following: int
    holder: str = ""
    until: float = 0.0

    def values(self) -> dict[str, bytes]:
        """The columns of the row."""
        return {"brief": msgpack.packb([VERSION, self.following, self.holder, self.until])}


def _head_in(row: Row | None) -> HistoryHead | None:
    """The head; None if there is none yet. One that is damaged merges all that is left again."""
    if row is None:
        return None
    try:
        found = Columns(row.values).unpacked("brief")
        if not isinstance(found, list) or found[:1] != [VERSION] or len(found) < 4:
            raise Damaged("it is of another release")
        fields = Columns(dict(zip(("following", "holder", "until"), found[1:4], strict=True)))
        return HistoryHead(fields.count("following"), fields.text("holder"), fields.time("until"))
    except Damaged:
        return HistoryHead(0)


@dataclass(frozen=True, slots=True)
class StoredHour:
    """What one worker did in one hour. `begins`: UTC epoch seconds."""

    begins: int
    hour: Hour


@dataclass(frozen=True, slots=True)
class _HourRows:
    """Rows of one hour, for `aztask.stores.records.tallysums.HourRows`."""

    port: Rows
    rows: Sequence[Row]
    brief: bool
    """Whether they were read without `data`."""

    def __iter__(self) -> Iterator[tuple[object, object]]:
        for row in self.rows:
            yield row.values.get("brief"), _data(row, brief=self.brief)

    def whole(self, numbers: Sequence[int]) -> list[tuple[object, object]]:
        """Read some of them again, with `data`; a row that is gone is skipped."""
        found = self.port.get([self.rows[each].place for each in numbers])
        return [(row.values.get("brief"), _data(row, brief=False)) for row in found if row]


@dataclass(slots=True)
class _LateCell:
    """A worker's row and the head, which change together (rule 4)."""

    history: HistoryStore
    places: tuple[Place, Place]

    def read(self) -> Sequence[Row | None]:
        """The worker's row, and the head."""
        return self.history.rows.get(self.places)

    def write(self, data: PackedHour, before: Sequence[Row | None]) -> bool:
        """Write the row, and set the head back to its hour at the latest."""
        own, top = before
        row, place = self.places
        hour = int(row.key.partition(".")[0])
        head = _head_in(top)
        back = (
            HistoryHead(hour)
            if head is None
            else replace(head, following=min(hour, head.following))
        )
        changes = (Change(row, data._asdict(), own), Change(place, back.values(), top))
        return self.history.rows.together(changes) is not None


@dataclass(slots=True)
class HistoryStore:
    """The history of one broker. Any thread may call. All methods raise BrokerUnavailable."""

    store: RowStore
    owner: Owner
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.owner = self.owner.of_broker
        self.rows = self.store.of(HISTORY)

    # -- writing -----------------------------------------------------------------------------

    def write(self, holder: str, begins: int, hour: Hour, now: float) -> None:
        """Write what a worker did in an hour, in place of its row. One request; late ones take two.

        * `holder`: tells the worker from others under its name.
        * `begins`: the hour's first second. `now`: the store's time.
        """
        number = hour_of(begins)
        row = self._at(HOURS, f"{_hour_key(number)}.{digest(holder)}")
        packed = pack_hour(hour, begins)
        if now < begins + HOUR + LATE:
            self.rows.put(row, packed._asdict())
            return
        cell = _LateCell(self, (row, self._at(HOURS, HEAD)))
        change(cell, lambda before: New(packed, None), "the history")

    # -- reading -----------------------------------------------------------------------------

    def following(self) -> int:
        """The hour that is merged next, and from which workers' own rows count (rule 3)."""
        (row,) = self.rows.get([self._at(HOURS, HEAD)])
        head = _head_in(row)
        return 0 if head is None else head.following

    def hours(self, first: int, end: int, *, brief: bool = False) -> list[StoredHour]:
        """What workers did from one hour to before another. brief: the sums of each hour."""
        found = []
        for row in self._range(HOURS, _hour_key(first), _hour_key(end), brief=brief):
            begins = int(row.place.key.partition(".")[0]) * HOUR
            try:
                hour = unpack_hour(row.values.get("brief"), _data(row, brief=brief), begins)
            except Damaged:
                continue  # a gap (rule 5)
            found.append(StoredHour(begins, hour))
        return found

    def add_hours(
        self, sums: WindowSums, first: int, end: int, kept: KeptHours | None = None
    ) -> list[Author]:
        """Add what workers did from one hour to before another; returns who did it.

        kept: of earlier calls. It knows all hours but the last one, which goes on.
        """
        hours: dict[int, list[Row]] = defaultdict(list)
        # The hours that need all of their rows are the first ones: the window begins within one.
        short = next((each for each in range(first, end) if sums.brief_answers(each * HOUR)), end)
        for part, until, brief in ((first, short, False), (short, end, True)):
            if part < until:
                for row in self._range(HOURS, _hour_key(part), _hour_key(until), brief=brief):
                    hours[int(row.place.key.partition(".")[0])].append(row)
        found: list[Author] = []
        for number, rows in hours.items():
            read = _HourRows(self.rows, rows, brief=number >= short)
            if kept is not None and number < end - 1:
                found += kept.add_hour(sums, number * HOUR, read)
            else:
                found += add_rows(sums, number * HOUR, read)
        return found

    def days(
        self, part: str, first: int, end: int, *, brief: bool = False
    ) -> list[tuple[int, Day]]:
        """Merged days from one to before another, each with its first second.

        part: `TASKS` or `WORKERS`. brief: without what is finer than an hour.
        """
        found = []
        for begins, row in self.rows_of_days(part, first, end, brief=brief):
            try:
                day = unpack_day(row.values.get("brief"), _data(row, brief=brief))
            except Damaged:
                continue
            found.append((begins, day))
        return found

    def rows_of_days(
        self, part: str, first: int, end: int, *, brief: bool
    ) -> list[tuple[int, Row]]:
        """The rows from one day to before another, each with the day's first second."""
        rows = self._range(part, _day_key(first), _day_key(end), brief=brief)
        return [(int(row.place.key.partition(".")[0]) * 24 * HOUR, row) for row in rows]

    def of_day(self, part: str, day: int, *names: str) -> Place:
        """Where a day's row about these names is. day: its number since 1970."""
        return self._at(part, f"{_day_key(day)}.{digest(*names)}")

    def _range(self, part: str, first: str, end: str, *, brief: bool) -> list[Row]:
        found = self.rows.range(self.owner, part, first, end, limit=MOST_ROWS, short=brief)
        return [row for row in found if row.place.key.partition(".")[0].isdigit()]

    # -- merging -----------------------------------------------------------------------------

    def merge(self, holder: str, now: float) -> int:
        """Merge the hours that have ended; returns how many. Nothing if another worker does it.

        * `holder`: who merges. `now`: the store's time.
        """
        merged = 0
        for _ in range(TRIES):
            (top,) = self.rows.get([self._at(HOURS, HEAD)])
            head = _head_in(top) or HistoryHead(0)
            if head.until > now and head.holder != holder:
                return merged  # another worker is at it
            hour = self._next_hour(head, now)
            if hour is None:
                return merged
            held = HistoryHead(head.following, holder, now + LEASE)
            mine = self.rows.write(Change(self._at(HOURS, HEAD), held.values(), top))
            if mine is None or not self._merge_hour(hour):
                continue
            done = Change(mine.place, HistoryHead(hour + 1).values(), mine)
            merged += self.rows.write(done) is not None
        return merged

    def _next_hour(self, head: HistoryHead, now: float) -> int | None:
        """The first hour that has ended, and that has a row of a worker."""
        first, end = _hour_key(head.following), _hour_key(hour_of(now - GRACE))
        if first >= end:
            return None
        found = self.rows.range(self.owner, HOURS, first, end, limit=1, short=True)
        return int(found[0].place.key.partition(".")[0]) if found else None

    def _merge_hour(self, hour: int) -> bool:
        """Write an hour into the rows of its day; False if another process was faster."""
        day = hour // 24
        # Before the rows of the workers: see the crash windows.
        before = {part: self._of_day(part, day) for part in (TASKS, WORKERS)}
        stored = [each.hour for each in self.hours(hour, hour + 1)]
        series: dict[Series, list[Tallies]] = defaultdict(list)
        workers: dict[Series, list[Tallies]] = defaultdict(list)
        notes: dict[Series, list[tuple[int, str]]] = defaultdict(list)
        for each in stored:
            for name, tallies in each.series.items():
                series[name].append(tallies)
            workers[each.author.name, ""].append(joined(each.series.values()))
            notes[each.author.name, ""].append((each.author.born, each.author.release))
        tasks = fold({name: joined(parts) for name, parts in series.items()}, MOST_SERIES)
        people = {name: joined(parts) for name, parts in workers.items()}
        changes = [
            *self._changes(TASKS, hour, before[TASKS], tasks, {}),
            *self._changes(WORKERS, hour, before[WORKERS], people, notes),
        ]
        return None not in self.rows.write_all(changes)

    def _of_day(self, part: str, day: int) -> DayRows:
        found = self._range(part, _day_key(day), _day_key(day + 1), brief=False)
        return {row.place.key: row for row in found}

    def _changes(
        self,
        part: str,
        hour: int,
        before: DayRows,
        tallies: Mapping[Series, Tallies],
        notes: Mapping[Series, list[tuple[int, str]]],
    ) -> Iterable[Change]:
        """The day's rows with this hour, those that have it no longer included."""
        number, begins = hour % 24, hour // 24 * 24 * HOUR
        keys = {f"{_day_key(hour // 24)}.{digest(*name)}": name for name in tallies}
        for key in keys.keys() | before.keys():
            row, name = before.get(key), keys.get(key)
            day = _day_in(row)
            if name is None:
                if day is None or number not in day.hours:
                    continue
                day.replace(number, {})
            else:
                day = day or Day(name)
                day.replace(number, {at - begins: each for at, each in tallies[name].items()})
                day.notes = sorted({*day.notes, *notes.get(name, ())})
            yield Change(self._at(part, key), pack_day(day)._asdict(), row)

    # -- keeping -----------------------------------------------------------------------------

    def purge(self, now: float) -> None:
        """Delete rows that were kept long enough, of hours only those that are merged."""
        hour = hour_of(now)
        ends = {
            HOURS: _hour_key(min(hour - HOURS_KEPT, self.following())),
            TASKS: _day_key(hour // 24 - KEPT_DAYS),
            WORKERS: _day_key(hour // 24 - 1),
            BACKLOG: _day_key(hour // 24 - KEPT_DAYS),
        }
        for part, end in ends.items():
            more = True
            while more:
                found = self.rows.range(self.owner, part, "0", end, limit=REMOVED, short=True)
                self.rows.remove([row.place for row in found])
                more = len(found) == REMOVED

    def owners(self) -> set[Owner]:
        """Whose history is in the store."""
        return self.rows.owners()

    def adopt(self, old: Owner) -> int:
        """Make the history of another owner's broker ours; returns how many rows were found.

        Of a day and a task that both have, ours stays.
        """
        if not is_other_broker(self.owner, old):
            return 0
        return move_rows(self.store, self.rows, old.of_broker, self.owner)

    def _at(self, part: str, key: str) -> Place:
        return Place(self.owner, part, key)


def _data(row: Row, *, brief: bool) -> object:
    """The finer values of a row. Missing ones are damage, and not a wish for brevity."""
    if brief:
        return None
    found = row.values.get("data")
    return b"" if found is None else found


def _day_in(row: Row | None) -> Day | None:
    """The day in a row; None if there is none, or a damaged one (rule 5)."""
    if row is None:
        return None
    try:
        return unpack_day(row.values.get("brief"), _data(row, brief=False))
    except Damaged:
        return None


def history_of(results: object) -> HistoryStore | None:
    """The history in a result store; None if there is no store, or if it keeps none."""
    if not isinstance(results, KeepsRows):
        return None
    return HistoryStore(results.rows, results.owner or NO_OWNER)
