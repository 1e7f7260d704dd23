"""JSON lines to Arrow batches, in bounded memory, whatever the file holds.

Rules
1. What counts as an event is what `aztask.events.event.from_line` takes. Whole blocks go through
   Arrow's own parser where their bytes show that both would agree; any other block goes line by
   line.
2. What is no event becomes an odd row: what is wrong, the file, the line's number, its first bytes.
3. At most one block and one line's limit are in memory, be a line as long as it likes.
4. A worker's clock that was set back shows in its file, which is written in order: an odd row tells
   of each step back of more than `CLOCK_STEP`. The events themselves stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from aztask.events.event import EVENT_KINDS, VERSION, Event, from_line
from aztask.events.sink import LINE_LIMIT
from aztask.spark.events.columns import (
    ARROW,
    CLOCK_BACK,
    COUNTS,
    EMPTY,
    EVENT_COLUMNS,
    EXCERPT,
    NOT_AN_EVENT,
    NULS,
    NUMBERS,
    TEXTS,
    TOO_LONG,
    TORN,
    odd_table,
    storable,
    table_of,
)

BLOCK: Final = 4 << 20
"""Bytes that are read and parsed at once; more than `LINE_LIMIT`."""
CLOCK_STEP: Final = 1.0
"""Seconds by which the clock must go back to be told; threads may swap neighbouring events."""
LONGEST_NUMBER: Final = 1e15

_NULL: Final = re.compile(rb":\s*null")
_LINE: Final = pa.schema(
    [("v", pa.int64()), *(ARROW.field(name) for name in EVENT_COLUMNS)],
)


@cache
def _kinds() -> pa.Array:
    """Made when it is needed, for Arrow imports pandas with its first array: workers of Spark that
    only plan do without.
    """
    return pa.array(sorted(EVENT_KINDS))


def read_lines(stream: BinaryIO, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of one file; the odd rows of a block follow it. name: the file's, for these."""
    reader = _Reader(name)
    rest = b""
    skipping = False
    while data := stream.read(BLOCK):
        if skipping:
            _, newline, data = data.partition(b"\n")
            skipping = not newline
        block, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield from reader.block(block + newline)
        if len(rest) >= LINE_LIMIT:
            reader.odd(TOO_LONG, rest)
            rest = b""
            skipping = True
    if rest:
        reader.odd(TORN, rest)
    yield from reader.odd_batches()


class _Reader:
    """One file's reading so far: the line's number, the last time, odd rows not yet given."""

    def __init__(self, name: str) -> None:
        self._number = 1
        self._name = name
        self._last_ts = -math.inf
        self._odd: list[tuple[str, str, int | None]] = []

    def block(self, block: bytes) -> Iterator[pa.RecordBatch]:
        """The rows of some whole lines."""
        lines = block.split(b"\n")
        del lines[-1]
        first = self._number
        table = _parsed_whole(block, lines)
        if table is None:
            table, numbers = self._one_by_one(lines)
        else:
            self._number += len(lines)
            numbers = range(first, self._number)
        self._watch_clock(table, numbers)
        yield from table.to_batches()
        yield from self.odd_batches()

    def odd(self, what: str, data: bytes, number: int | None = None) -> None:
        """Note an odd line: the next one, unless `number` says which."""
        text = data[: 2 * EXCERPT].decode("utf-8", "replace")
        self._odd.append((what, text, number or self._number))
        if number is None:
            self._number += 1

    def odd_batches(self) -> Iterator[pa.RecordBatch]:
        """The odd rows noted since the last call."""
        if self._odd:
            table = odd_table(self._name, self._odd)
            self._odd = []
            yield from table.to_batches()

    def _one_by_one(self, lines: Sequence[bytes]) -> tuple[pa.Table, Sequence[int]]:
        """The events among the lines, as `aztask.events.sink.EventReader` finds them."""
        events: list[Event] = []
        numbers: list[int] = []
        for line in lines:
            text = line.strip(b"\0\r\n ")
            event = from_line(text) if len(line) < LINE_LIMIT else None
            if event is not None:
                events.append(event)
                numbers.append(self._number)
                if b"\0" in line:
                    self.odd(NULS, line, self._number)
                self._number += 1
            else:
                self.odd(_what_is_wrong(line, text), line)
        return _from_events(events), numbers

    def _watch_clock(self, table: pa.Table, numbers: Sequence[int]) -> None:
        """Note where the writer's clock went back. A start is told late, so it does not count."""
        told_at_once = pc.not_equal(table.column("event"), "started").to_numpy()
        times = np.concatenate(([self._last_ts], table.column("ts").to_numpy()[told_at_once]))
        if len(times) == 1:
            return
        self._last_ts = float(times[-1])
        back = times[:-1] - times[1:]
        places = np.flatnonzero(told_at_once)
        for index in np.flatnonzero(back > CLOCK_STEP):
            text = f"by {back[index]:.1f} s, to {times[index + 1]:.6f}"
            self.odd(CLOCK_BACK, text.encode(), numbers[int(places[index])])


def _what_is_wrong(line: bytes, text: bytes) -> str:
    if len(line) >= LINE_LIMIT:
        return TOO_LONG
    if text:
        return NOT_AN_EVENT
    return NULS if b"\0" in line else EMPTY


def _parsed_whole(block: bytes, lines: Sequence[bytes]) -> pa.Table | None:
    """All lines at once; None unless each one is an event and both parsers must agree.

    They agree on ASCII lines that begin with ``{`` and end with ``}`` (so that no line holds two
    objects, nor an object two lines), are not too long, hold no null (which we refuse and Arrow
    takes), and whose fields Arrow finds complete and in range.
    """
    doubtful = (
        not block.isascii()
        or b"\0" in block
        or block.count(b"}\n") != len(lines)
        or block.count(b"\n{") != len(lines) - 1
        or not block.startswith(b"{")
        or max(map(len, lines)) >= LINE_LIMIT
        or _NULL.search(block) is not None
    )
    if doubtful:
        return None
    try:
        table = arrow_json.read_json(
            pa.BufferReader(block),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=_LINE, unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowInvalid:
        return None
    if table.num_rows != len(lines) or not _sound(table):
        return None
    columns = {name: table.column(name) for name in EVENT_COLUMNS}
    columns |= {name: pc.fill_null(table.column(name), 0) for name in COUNTS}
    return table_of(columns, table.num_rows)


def _sound(table: pa.Table) -> bool:
    """Whether every row is an event of this version, its values in range."""
    if any(table.column(name).null_count for name in ("v", "ts", *TEXTS)):
        return False
    if not pc.all(pc.equal(table.column("v"), VERSION)).as_py():
        return False
    if not pc.all(pc.is_in(table.column("event"), _kinds())).as_py():
        return False
    for name in ("ts", *NUMBERS):
        in_range = pc.less(pc.abs(table.column(name)), LONGEST_NUMBER)  # false for nan too
        if pc.all(in_range).as_py() is False:
            return False
    return True


def _from_events(events: Sequence[Event]) -> pa.Table:
    columns: dict[str, Any] = {}
    for name in EVENT_COLUMNS:
        values: list[Any] = [getattr(event, name) for event in events]
        kind = ARROW.field(name).type
        if kind == pa.string():
            values = [None if value is None else storable(value) for value in values]
        elif kind == pa.float64():
            values = [None if value is None else float(value) for value in values]
        columns[name] = pa.array(values, kind)
    return table_of(columns, len(events))
