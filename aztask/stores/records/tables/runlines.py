"""A list of runs for a search: the rows of the index, in bulk and in the order of their ends.

The index has a range for each owner, shard and state. They are read side by side, a page of each,
and merged; a range goes on where its page ended when few of its lines are left. What is shown comes
from the same rows, unless an older release wrote them.

Rules
1. States that follow each other in the index are read as one range, if all but the last of them
   have few runs as a rule (`GROUPS`). If one of them fills the page all the same, those behind it
   are a range of their own from then on. So a first page costs three requests for each shard, and a
   page behind a place five: there, one range over two busy states would read all rows of the second
   one that are newer than the place.
2. Behind a place, a filter of partitions and row keys makes the service read all newer rows of the
   hour, too, a thousand for each answer. Where an hour has so many, as lists have shown
   (`BusyRanges`), the rest of the hour is asked for first, by its one partition, and what is behind
   it only if that does not fill the page.
3. Ranges of rows without an owner, which only older releases write, cost one request for all if
   there are none. Which owners there are is asked once in `OWNERS_SECONDS`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, Final

from aztask.errors import ConfigurationError
from aztask.stores.layout import SHARDS
from aztask.stores.records.base import NO_SUCH_PLACE, RunLine, RunRecord, State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.tables.index import (
    COPY,
    END,
    ENDED,
    NAMES,
    SUMMARY,
    UNOWNED,
    EndIndex,
    IndexEntry,
    entry_of,
    hours,
    start_of,
    time_of,
)
from aztask.stores.records.tables.names import key_of_row
from aztask.stores.records.tables.rows import run_in_copy
from aztask.stores.records.tables.runs import RunOwners, Runs
from aztask.stores.tables.client import PAGE, TableRequests, TimeBudget
from aztask.support.clock import monotonic

FIRST_PAGE: Final = 50
"""Rows of each range at first: most lists show the newest fifty of all."""
LARGER: Final = 4
"""A page of a range is so many times larger than the one before it, up to `PAGE`."""
MANY: Final = 400
"""As `FIRST_PAGE`, for those who look at thousands."""
GROUPS: Final = (
    (State.CANCELLED, State.EXPIRED, State.FAILED),
    (State.RETRYING,),
    (State.SNOOZED, State.SUCCEEDED),
)
"""The states whose runs end, in the order of their partitions (rule 1)."""
GROUPS_BEHIND: Final = ((State.CANCELLED, State.EXPIRED), *((each,) for each in ENDED))
"""As `GROUPS`, behind a place."""
OWNERS_SECONDS: Final = 60.0
FEW: Final = 16
"""Shards end at about the same run. Those with less than this share of a page left go on together,
in one round of requests, and not one after the other."""
_PLACE: Final = re.compile(r"[0-9]{14}-[0-9a-f]{24}")
_HASHED: Final = "t-~"
_COLUMNS: Final = (*NAMES, *SUMMARY, COPY)
_RANGE: Final = "PartitionKey ge @first and PartitionKey lt @end and RowKey gt @row"
_HOUR: Final = "PartitionKey eq @first and RowKey gt @row"
_BEHIND: Final = "PartitionKey gt @first and PartitionKey lt @end and RowKey gt @row"
_HOUR_DIGITS: Final = 7
_TOLD_BY: Final = 20
"""So many runs of one state tell how many an hour has."""


@dataclass(slots=True)
class _Range:
    """One range of the index, and its rows that were read and not given yet.

    * `starts`: the beginning of the partitions of each of its states, in their order.
    * `hour`: of the place behind which it begins; "" from the newest row on.
    * `row`: the last row key that was read. `first`: the partition of that row.
    * `size`: rows of the next page. `whole`: whether all rows were read.
    """

    starts: dict[State, str]
    hour: str
    row: str
    size: int
    first: str = ""
    whole: bool = False
    lines: list[tuple[RunLine, IndexEntry]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Older rows have larger row keys in later partitions: one range for both conditions.
        self.first = next(iter(self.starts.values())) + self.hour

    @property
    def end(self) -> str:
        """The partition behind its last one."""
        return list(self.starts.values())[-1] + END

    @property
    def hungry(self) -> bool:
        """Whether its next page is read together with those of others."""
        return not self.whole and self._count(self.row) <= self.size // FEW

    def _count(self, row: str) -> int:
        """Lines up to that row key; those of states that are read whole may be older."""
        return bisect_right(self.lines, row, key=lambda pair: pair[0].place)

    def add(self, rows: Sequence[dict[str, Any]]) -> _Range | None:
        """Take what was read of it; returns the range of the states behind a full page (rule 1)."""
        place, size = self.row, self.size
        self.whole = len(rows) < self.size
        self.size = min(self.size * LARGER, PAGE)
        self.lines += filter(None, map(self._line, rows))
        self.lines.sort(key=lambda pair: pair[0].place)
        if not rows:
            return None
        self.first, self.row = rows[-1]["PartitionKey"], rows[-1]["RowKey"]
        states = list(self.starts)
        read = states.index(self._state(self.first)) + 1
        if self.whole or read == len(states):
            return None
        behind = {state: self.starts.pop(state) for state in states[read:]}
        return _Range(behind, self.hour, place, size)

    def _line(self, row: dict[str, Any]) -> tuple[RunLine, IndexEntry] | None:
        """The line of a row; None for one of another program."""
        state = self._state(row["PartitionKey"])
        known = row["PartitionKey"].startswith(self.starts[state])
        return _line(state, row) if known and _PLACE.fullmatch(row["RowKey"]) else None

    def _state(self, partition: str) -> State:
        """The state whose partitions a page that ends there has come to."""
        begun = [state for state, start in self.starts.items() if start <= partition]
        return begun[-1] if begun else next(iter(self.starts))

    def until(self, row: str) -> list[tuple[RunLine, IndexEntry]]:
        """Give the lines up to that row key, and keep the others."""
        count = self._count(row)
        given, self.lines = self.lines[:count], self.lines[count:]
        return given


class BusyRanges:
    """Which states of which shards have more runs an hour than an answer has. Any thread may call.

    A hint, learned from lists: without it, an answer takes longer.
    """

    def __init__(self) -> None:
        self._busy: set[str] = set()

    def __contains__(self, partition: str) -> bool:
        return partition[:-_HOUR_DIGITS] in self._busy

    def learn(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take from a page of a range how fast the runs of its last state ended."""
        start = rows[-1]["PartitionKey"][:-_HOUR_DIGITS] if rows else ""
        times = [
            time_of(each["RowKey"])
            for each in rows
            if each["PartitionKey"].startswith(start) and _PLACE.fullmatch(each["RowKey"])
        ]
        if len(times) < _TOLD_BY:
            return
        if len(times) * 3600 > PAGE * (times[0] - times[-1]):
            self._busy.add(start)
        else:
            self._busy.discard(start)


class ListedOwners:
    """Whose runs are listed. Any thread may call."""

    def __init__(self, requests: TableRequests, owners: RunOwners, mine: str) -> None:
        self._requests = requests
        self._owners = owners
        self._mine = mine
        self._known: frozenset[str] = frozenset()
        self._at = float("-inf")

    def brokers(self, call: TimeBudget, *, everyone: bool) -> list[str]:
        """This owner and "" if there are rows without an owner; with `everyone`, all others, too.

        Raises BrokerUnavailable.
        """
        if monotonic() - self._at >= OWNERS_SECONDS:
            asked = [self._unowned, self._all]
            found = self._requests.each(call, lambda call, ask: ask(call), asked)
            self._known, self._at = frozenset().union(*found), monotonic()
        others = self._known if everyone else self._known & {""}
        return sorted({self._mine, *others})

    def _all(self, call: TimeBudget) -> set[str]:
        return {each.broker for each in self._owners.known(call)}

    def _unowned(self, call: TimeBudget) -> set[str]:
        values = {"first": UNOWNED, "end": UNOWNED + END}
        text = "PartitionKey ge @first and PartitionKey lt @end"
        return {""} if self._requests.query(call, text, values, 1, ("RowKey",)) else set()


class IndexLines:
    """Implements `aztask.stores.records.base.RunLines` with the ranges of all owners and states."""

    def __init__(
        self,
        requests: TableRequests,
        index: EndIndex,
        runs: Runs,
        owners: ListedOwners,
        busy: BusyRanges,
        states: Sequence[State],
        after: str,
        *,
        everyone: bool,
        many: bool = False,
    ) -> None:
        """after: behind which line the list begins. Raises ConfigurationError for one that is none.

        everyone: with runs of other owners. many: see `ResultStore.lines`.
        """
        if after and not _PLACE.fullmatch(after):
            raise ConfigurationError(NO_SUCH_PLACE)
        self._requests = requests
        self._index = index
        self._runs = runs
        self._owners = owners
        self._busy = busy
        self._states = states
        self._everyone = everyone
        self._size = MANY if many else FIRST_PAGE
        self._ranges: list[_Range] | None = None
        self._entries: dict[str, IndexEntry] = {}
        self._asked = 0
        self.place = after

    @property
    def requests(self) -> int:
        return self._asked + sum(each.hungry for each in self._ranges or ())

    @property
    def ended(self) -> bool:
        """Whether all ranges have come to their ends."""
        ranges = self._ranges
        return ranges is not None and all(each.whole and not each.lines for each in ranges)

    def more(self, seconds: float) -> Sequence[RunLine]:
        """The lines up to where the first range has to be read on."""
        call = TimeBudget(seconds)
        if self._ranges is None:
            self._ranges = self._opened(call)
        hungry = [each for each in self._ranges if each.hungry]
        self._asked += len(hungry)
        for each, rows in zip(hungry, self._requests.each(call, self._page, hungry), strict=True):
            if (behind := each.add(rows)) is not None:
                self._ranges.append(behind)
        # A page that is not the last of its range has rows, and the next one begins behind them.
        upto = min((each.row for each in self._ranges if not each.whole), default=END)
        found = [pair for each in self._ranges for pair in each.until(upto)]
        found.sort(key=lambda pair: pair[0].place)
        self._entries = {line.place: entry for line, entry in found}
        if found:
            self.place = found[-1][0].place
        return [line for line, _ in found]

    def read(self, lines: Sequence[RunLine], seconds: float) -> list[RunRecord | None]:
        """The runs; those without a copy in parallel, one request for each."""
        found = {line.place: self._copied(line) for line in lines}
        missing = [place for place, run in found.items() if run is None]
        self._asked += len(missing)
        entries = [self._entries[place] for place in missing]
        read = self._requests.each(TimeBudget(seconds), self._run, entries)
        found.update(zip(missing, read, strict=True))
        return [found[line.place] for line in lines]

    def _copied(self, line: RunLine) -> RunRecord | None:
        """The run in the index itself; None if it has to be read."""
        entry = self._entries[line.place]
        if entry.copy is None:
            return None
        try:
            run = run_in_copy(entry.copy, line.state, asdict(line))
            return self._runs.copied(run) if entry.shows(run) else None
        except Damaged:
            return None

    def _run(self, call: TimeBudget, entry: IndexEntry) -> RunRecord | None:
        run = self._index.read(call, entry)
        return None if run is None else self._runs.complete(call, run)

    def _opened(self, call: TimeBudget) -> list[_Range]:
        """The ranges of all owners whose runs are listed."""
        brokers = self._owners.brokers(call, everyone=self._everyone)
        hour = hours(time_of(self.place)) if self.place else ""
        ranges = []
        for broker, shard, states in product(brokers, range(SHARDS), self._groups()):
            starts = {state: start_of(broker, shard, state) for state in states}
            ranges.append(_Range(starts, hour, self.place, self._size))
        return ranges

    def _groups(self) -> list[tuple[State, ...]]:
        left, groups = set(self._states), list[tuple[State, ...]]()
        for each in GROUPS_BEHIND if self.place else GROUPS:
            if left.issuperset(each):
                groups.append(each)
                left.difference_update(each)
        return [*groups, *((each,) for each in sorted(left))]

    def _page(self, call: TimeBudget, which: _Range) -> list[dict[str, Any]]:
        values = {"first": which.first, "end": which.end, "row": which.row}
        rows: list[dict[str, Any]] = []
        rest = _RANGE
        if which.row and which.first in self._busy:  # rule 2
            rows = self._requests.query(call, _HOUR, values, which.size, _COLUMNS)
            rest = _BEHIND
        if (left := which.size - len(rows)) > 0:
            rows = [*rows, *self._requests.query(call, rest, values, left, _COLUMNS)]
        self._busy.learn(rows)
        return rows


def _line(state: State, entity: dict[str, Any]) -> tuple[RunLine, IndexEntry]:
    """What a row of the index says of its run, as far as it can be read."""
    entry = entry_of(entity)
    known: dict[str, Any] = {}
    if not entry.damage:
        hashed = entry.run_partition.startswith(_HASHED)
        known["task_id"] = (
            None if hashed else key_of_row(entry.run_partition, entry.run_row).task_id
        )
        for name in SUMMARY:
            kind = float if name == "duration" else str
            known[name] = value if isinstance(value := entity.get(name), kind) else None
    return RunLine(entry.row, state, time_of(entry.row), **known), entry
