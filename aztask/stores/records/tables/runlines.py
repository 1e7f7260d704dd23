"""A list of runs for a search: the rows of the index, in bulk and in the order of their ends.

The index has a range for each owner, shard and state. All of them are read side by side, a page of
each, and merged; a range goes on where its page ended when few of its lines are left. So the first
lines cost a request for each range, and each further thousand of a busy range costs one.

Ranges of rows without an owner, which only older releases write, cost one request for all if there
are none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from aztask.errors import ConfigurationError
from aztask.stores.layout import SHARDS
from aztask.stores.records.base import NO_SUCH_PLACE, RunLine, RunRecord, State
from aztask.stores.records.tables.index import (
    END,
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
from aztask.stores.records.tables.runs import RunOwners, Runs
from aztask.stores.tables.client import PAGE, TableRequests, TimeBudget

FIRST_PAGE: Final = 50
"""Rows of each range at first: most lists show the newest fifty of all."""
LARGER: Final = 4
"""A page of a range is so many times larger than the one before it, up to `PAGE`."""
FEW: Final = 16
"""Shards end at about the same run. Those with less than this share of a page left go on together,
in one round of requests, and not one after the other."""
_PLACE: Final = re.compile(r"[0-9]{14}-[0-9a-f]{24}")
_HASHED: Final = "t-~"
_RANGE: Final = "PartitionKey ge @first and PartitionKey lt @end and RowKey gt @row"


@dataclass(slots=True)
class _Range:
    """One range of the index, and its rows that were read and not given yet.

    * `state`: of its runs.
    * `first`, `end`: the partitions that are left. `row`: the last row key that was read.
    * `size`: rows of the next page. `whole`: whether all rows were read.
    """

    state: State
    first: str
    end: str
    row: str
    size: int
    whole: bool = False
    lines: list[tuple[RunLine, IndexEntry]] = field(default_factory=list)

    @property
    def hungry(self) -> bool:
        """Whether its next page is read together with those of others."""
        return not self.whole and len(self.lines) <= self.size // FEW

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take what was read of it."""
        self.lines += (_line(self.state, row) for row in rows if _PLACE.fullmatch(row["RowKey"]))
        self.whole = len(rows) < self.size
        self.size = min(self.size * LARGER, PAGE)
        if rows:
            self.first, self.row = rows[-1]["PartitionKey"], rows[-1]["RowKey"]

    def until(self, row: str) -> list[tuple[RunLine, IndexEntry]]:
        """Give the lines up to that row key, and keep the others."""
        count = sum(line.place <= row for line, _ in self.lines)
        given, self.lines = self.lines[:count], self.lines[count:]
        return given


class IndexLines:
    """Implements `aztask.stores.records.base.RunLines` with the ranges of all owners and states."""

    def __init__(
        self,
        requests: TableRequests,
        index: EndIndex,
        runs: Runs,
        owners: RunOwners,
        states: Sequence[State],
        after: str,
        *,
        everyone: bool,
    ) -> None:
        """after: behind which line the list begins. Raises ConfigurationError for one that is none.

        everyone: with runs of other owners.
        """
        if after and not _PLACE.fullmatch(after):
            raise ConfigurationError(NO_SUCH_PLACE)
        self._requests = requests
        self._index = index
        self._runs = runs
        self._owners = owners
        self._states = states
        self._everyone = everyone
        self._ranges: list[_Range] | None = None
        self._entries: dict[str, IndexEntry] = {}
        self.place = after

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
        for each, rows in zip(hungry, self._requests.each(call, self._page, hungry), strict=True):
            each.add(rows)
        # A page that is not the last of its range has rows, and the next one begins behind them.
        upto = min((each.row for each in self._ranges if not each.whole), default=END)
        found = [pair for each in self._ranges for pair in each.until(upto)]
        found.sort(key=lambda pair: pair[0].place)
        self._entries = {line.place: entry for line, entry in found}
        if found:
            self.place = found[-1][0].place
        return [line for line, _ in found]

    def read(self, lines: Sequence[RunLine], seconds: float) -> list[RunRecord | None]:
        """The runs, in parallel, one request for each."""
        entries = [self._entries[each.place] for each in lines]
        return self._requests.each(TimeBudget(seconds), self._run, entries)

    def _run(self, call: TimeBudget, entry: IndexEntry) -> RunRecord | None:
        run = self._index.read(call, entry)
        return None if run is None else self._runs.complete(call, run)

    def _opened(self, call: TimeBudget) -> list[_Range]:
        """The ranges of all owners whose runs are listed."""
        asked = [self._unowned, *([self._known] if self._everyone else [])]
        found = self._requests.each(call, lambda call, ask: ask(call), asked)
        brokers = {self._index.mine}.union(*found)
        at = time_of(self.place) if self.place else None
        ranges = []
        for parts in product(sorted(brokers), range(SHARDS), self._states):
            start = start_of(*parts)
            # Older rows have larger row keys in later partitions: one range for both conditions.
            first = start if at is None else start + hours(at)
            ranges.append(_Range(parts[-1], first, start + END, self.place, FIRST_PAGE))
        return ranges

    def _known(self, call: TimeBudget) -> set[str]:
        return {each.broker for each in self._owners.known(call)}

    def _unowned(self, call: TimeBudget) -> set[str]:
        """The owner "" if there are rows without an owner."""
        values = {"first": UNOWNED, "end": UNOWNED + END}
        text = "PartitionKey ge @first and PartitionKey lt @end"
        return {""} if self._requests.query(call, text, values, 1, ("RowKey",)) else set()

    def _page(self, call: TimeBudget, which: _Range) -> list[dict[str, Any]]:
        values = {"first": which.first, "end": which.end, "row": which.row}
        return self._requests.query(call, _RANGE, values, which.size, (*NAMES, *SUMMARY))


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
