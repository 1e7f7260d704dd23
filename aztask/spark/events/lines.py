"""Reads JSON lines into Arrow batches, in bounded memory, whatever the file holds.

Rules
1. A line is an event if `aztask.stores.events.event.from_line` accepts it. Arrow's own, faster
   parser takes a whole block if the bytes show that both would agree; other blocks are read line by
   line.
2. A damaged line becomes a problem row: the problem, the file, the line's number, its first bytes.
   So does an event of a newer release, as in a rolling upgrade: it is not read, but told apart.
3. At most one block and `LINE_LIMIT` are in memory, however long a line is.
4. A worker writes its file in order, so a clock that was set back shows there: each step back of
   more than `CLOCK_STEP` becomes a problem row. The events themselves stay.
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

from aztask.stores.events.event import EVENT_KINDS, VERSION, Event, from_line, is_newer
from aztask.stores.events.sink import LINE_LIMIT
from aztask.support.display import mask

# -- the columns of event rows, for Spark and for Arrow ------------------------------------
#
# Rules
# 1. A row is either an event or a problem found in a file. ``odd`` is null for events and names the
#    problem otherwise, so one file can hold both, and one filter separates them.
# 2. Times are seconds since 1970 (UTC) and durations are seconds, as in the lines.


TEXTS: Final = ("id", "event", "task_id", "task", "queue", "worker")
"""Text columns that every event has."""
COUNTS: Final = ("delivery_count", "resubmit_count")
"""Whole numbers; 0 if a line has none."""
NUMBERS: Final = (
    "duration_seconds",
    "wait_seconds",
    "lease_seconds",
    "margin_seconds",
    "held_seconds",
)
"""Optional numbers; null if a line has none."""
WORKFLOW: Final = ("workflow_id", "parent_id")
"""Optional texts; null in events of 0.1 and in files that it compacted."""
ACTED: Final = ("reason", "by", "action")
"""Optional texts of what operators did; null in files that 0.1 compacted."""
ACTED_COUNTS: Final = ("selected", "done")

ODD_COLUMNS: Final = ("odd", "odd_text", "odd_file", "odd_line")

ARROW: Final = pa.schema(
    [
        ("id", pa.string()),
        ("event", pa.string()),
        ("ts", pa.float64()),
        *((name, pa.string()) for name in ("task_id", "task", "queue", "worker")),
        *((name, pa.int64()) for name in COUNTS),
        *((name, pa.float64()) for name in NUMBERS),
        ("renewals", pa.int64()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        *((name, pa.string()) for name in (*WORKFLOW, *ACTED)),
        *((name, pa.int64()) for name in ACTED_COUNTS),
        ("odd", pa.string()),
        ("odd_text", pa.string()),
        ("odd_file", pa.string()),
        ("odd_line", pa.int64()),
    ]
)
EVENT_COLUMNS: Final = tuple(name for name in ARROW.names if name not in ODD_COLUMNS)

_SQL_TYPES: Final = {pa.string(): "STRING", pa.float64(): "DOUBLE", pa.int64(): "BIGINT"}
DDL: Final = ", ".join(f"{field.name} {_SQL_TYPES[field.type]}" for field in ARROW)
"""The columns of `ARROW` as Spark writes a schema."""

NOT_AN_EVENT: Final = "not an event"
NEWER: Final = "event of a newer release"
EMPTY: Final = "empty line"
TORN: Final = "torn line"
TOO_LONG: Final = "line too long"
NULS: Final = "NUL bytes"
CLOCK_BACK: Final = "clock went back"
CORRUPT: Final = (NOT_AN_EVENT, NEWER, EMPTY, TORN, TOO_LONG, NULS)
"""Problems of lines that are not read. `CLOCK_BACK` is none: its lines are valid events."""
DAMAGED: Final = "damaged Parquet file"
UNREADABLE: Final = "unreadable file"
"""Problems of files: one row for each file, after the events that could be read."""
EXCERPT: Final = 200
"""Characters that are kept of a damaged line or an error text."""


def table_of(columns: dict[str, Any], rows: int) -> pa.Table:
    """A table of all columns in order; those not given are null."""
    return pa.table(
        [columns.get(field.name, pa.nulls(rows, field.type)) for field in ARROW], schema=ARROW
    )


def odd_table(file: str, rows: Sequence[tuple[str, str, int | None]]) -> pa.Table:
    """Problem rows of one file. rows: (problem, excerpt, line number; None: the whole file)."""
    problems, texts, numbers = zip(*rows, strict=True)
    columns: dict[str, Any] = {
        "odd": pa.array(problems, pa.string()),
        "odd_text": pa.array(map(_excerpt, texts), pa.string()),
        "odd_file": pa.array([file] * len(problems), pa.string()),
        "odd_line": pa.array(numbers, pa.int64()),
    }
    return table_of(columns, len(problems))


def storable(text: str) -> str:
    """The text with lone surrogates escaped, because Arrow stores UTF-8 only."""
    return text.encode("utf-8", "backslashreplace").decode()


def _excerpt(text: str) -> str:
    """The beginning of a text, with secrets masked."""
    return mask(storable(text[: 2 * EXCERPT]).replace("\0", "\\0"))[:EXCERPT]


BLOCK: Final = 4 << 20
"""Bytes that are read and parsed at a time; more than `LINE_LIMIT`."""
CLOCK_STEP: Final = 1.0
"""Smaller steps back, in seconds, are not reported: threads may swap neighbouring events."""
MAX_NUMBER: Final = 1e15

_NULL: Final = re.compile(rb":\s*null")
_LINE: Final = pa.schema(
    [("v", pa.int64()), *(ARROW.field(name) for name in EVENT_COLUMNS)],
)


@cache
def _kinds() -> pa.Array:
    """All kinds of events as an Arrow array.

    Made on first use: the first array makes Arrow import pandas, which workers that only plan a
    read do not need.
    """
    return pa.array(sorted(EVENT_KINDS))


def read_lines(stream: BinaryIO, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of one file; a block's problem rows, which name the file, follow the block."""
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
    """The state of reading one file: line number, last event's time, pending problem rows."""

    def __init__(self, name: str) -> None:
        self._number = 1
        self._name = name
        self._last_ts = -math.inf
        self._odd: list[tuple[str, str, int | None]] = []

    def block(self, block: bytes) -> Iterator[pa.RecordBatch]:
        """The rows of a block of complete lines."""
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

    def odd(self, problem: str, data: bytes, number: int | None = None) -> None:
        """Record a problem with the next line, or with the line of that number."""
        text = data[: 2 * EXCERPT].decode("utf-8", "replace")
        self._odd.append((problem, text, number or self._number))
        if number is None:
            self._number += 1

    def odd_batches(self) -> Iterator[pa.RecordBatch]:
        """The problem rows recorded since the last call."""
        if self._odd:
            table = odd_table(self._name, self._odd)
            self._odd = []
            yield from table.to_batches()

    def _one_by_one(self, lines: Sequence[bytes]) -> tuple[pa.Table, Sequence[int]]:
        """(the events among the lines, their line numbers), as `EventReader` finds them."""
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
                self.odd(_problem_of(line, text), line)
        return _from_events(events), numbers

    def _watch_clock(self, table: pa.Table, numbers: Sequence[int]) -> None:
        """Record where the writer's clock went back.

        A start is written late, with its time of then, so it proves nothing.
        """
        in_order = pc.not_equal(table.column("event"), "started").to_numpy()
        times = np.concatenate(([self._last_ts], table.column("ts").to_numpy()[in_order]))
        if len(times) == 1:
            return
        self._last_ts = float(times[-1])
        back = times[:-1] - times[1:]
        places = np.flatnonzero(in_order)
        for index in np.flatnonzero(back > CLOCK_STEP):
            text = f"by {back[index]:.1f} s, to {times[index + 1]:.6f}"
            self.odd(CLOCK_BACK, text.encode(), numbers[int(places[index])])


def _problem_of(line: bytes, text: bytes) -> str:
    if len(line) >= LINE_LIMIT:
        return TOO_LONG
    if text:
        return NEWER if is_newer(text) else NOT_AN_EVENT
    return NULS if b"\0" in line else EMPTY


def _parsed_whole(block: bytes, lines: Sequence[bytes]) -> pa.Table | None:
    """All lines parsed by Arrow; None if one may not be an event, or the parsers may disagree.

    They agree on ASCII lines that begin with ``{`` and end with ``}`` (so no line holds two
    objects, and no object two lines), are not too long, hold no null (which we refuse and Arrow
    accepts), and whose fields Arrow finds complete and in range.
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
    if table.num_rows != len(lines) or not _is_valid(table):
        return None
    columns = {name: table.column(name) for name in EVENT_COLUMNS}
    columns |= {name: pc.fill_null(table.column(name), 0) for name in COUNTS}
    return table_of(columns, table.num_rows)


def _is_valid(table: pa.Table) -> bool:
    """Whether every row is an event of this version, its values in range."""
    if any(table.column(name).null_count for name in ("v", "ts", *TEXTS)):
        return False
    if not pc.all(pc.equal(table.column("v"), VERSION)).as_py():
        return False
    if not pc.all(pc.is_in(table.column("event"), _kinds())).as_py():
        return False
    for name in ("ts", *NUMBERS):
        in_range = pc.less(pc.abs(table.column(name)), MAX_NUMBER)  # false for nan too
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
