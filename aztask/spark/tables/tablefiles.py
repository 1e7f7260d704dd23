"""What executors do for a table: they write rows into Parquet files, which the driver commits, and
read them.

Rules
1. No file is part of a table before the driver commits it, and every attempt writes files under
   names of its own. So an attempt that dies, or that Spark repeats, adds nothing; VACUUM removes
   its files.
2. A file holds rows of one value of the partition column. Readers take that value from the table's
   log, so the files lack the column.
3. This module needs no ``deltalake``: executors do without it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aztask.spark.events.compactfiles import origin_of, read_compacted
from aztask.spark.events.lines import ARROW, EVENT_COLUMNS, ODD_COLUMNS
from aztask.spark.events.places import EventPlace
from aztask.spark.events.source import Portion, read_file

GROUP_ROWS: Final = 1 << 18
"""Rows of one row group of a file."""
TIME: Final = pa.timestamp("us", tz="UTC")
REMOVED: Final = "removed"

# Microseconds of the years 1 to 9999, which is what Delta, Spark and Python's datetime can hold.
_FIRST_MICROS: Final = -62_135_596_800_000_000
_LAST_MICROS: Final = 253_402_300_799_999_999

_WRITTEN: Final = {
    "table": pa.string(),
    "source": pa.string(),
    "value": pa.string(),
    "path": pa.string(),
    "size": pa.int64(),
    "stats": pa.string(),
}
WRITTEN_ARROW: Final = pa.schema(list(_WRITTEN.items()))
WRITTEN_DDL: Final = (
    "table STRING, source STRING, value STRING, path STRING, size BIGINT, stats STRING"
)


@dataclass(frozen=True, slots=True)
class TableKind:
    """One of the tables. name: of its folder. schema: all columns, as Arrow has them.

    partition: the column by which it is partitioned. time: the column of which the log keeps the
    first and the last value in each file, so that readers skip files.
    """

    name: str
    schema: pa.Schema
    partition: str
    time: str | None = None

    @property
    def stored(self) -> pa.Schema:
        """The columns that its files hold: all but the partition column."""
        return pa.schema([each for each in self.schema if each.name != self.partition])


_PLACED: Final = [("date", pa.date32()), ("hour", pa.int32()), ("source", pa.string())]

EVENTS: Final = TableKind(
    "events",
    pa.schema(
        [
            *(("at", TIME) if name == "ts" else ARROW.field(name) for name in EVENT_COLUMNS),
            *_PLACED,
        ]
    ),
    partition="date",
    time="at",
)
ODD: Final = TableKind(
    "odd", pa.schema([*(ARROW.field(name) for name in ODD_COLUMNS), *_PLACED]), partition="date"
)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that is not part of its table yet. path: relative to the table.

    source: the compacted file from which it was made, "" if it may hold rows of several files.
    value: of the partition column. stats: for the table's log, as JSON. Without path and table, the
    source has no rows.
    """

    table: str | None
    source: str
    value: str | None
    path: str | None
    size: int
    stats: str | None


def written_batch(files: Iterable[WrittenFile]) -> pa.RecordBatch:
    """The files as rows, for the way from an executor to the driver."""
    rows = [{name: getattr(each, name) for name in _WRITTEN} for each in files]
    return pa.RecordBatch.from_pylist(rows, WRITTEN_ARROW)


@dataclass(slots=True)
class TableWriter:
    """Writes batches into files of tables, one file for each table and partition value.

    Use it as a context manager. `finish` publishes the files; without it, none appears.
    """

    place: EventPlace
    source: str = ""
    _open: dict[tuple[str, str], _OpenFile] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, kind: TableKind, value: str, batch: pa.RecordBatch) -> None:
        """Add rows, with the columns of ``kind.stored``, to the file of this partition."""
        if not batch.num_rows:
            return
        key = (kind.name, value)
        if key not in self._open:
            folder = f"{kind.partition}={quote(value, safe='')}"
            path = f"{folder}/part-{uuid.uuid4().hex}.parquet"
            scratch = self._stack.enter_context(self.place.scratch(f"{kind.name}/{path}"))
            writer = self._stack.enter_context(
                pq.ParquetWriter(scratch, kind.stored, compression="zstd")
            )
            self._open[key] = _OpenFile(kind, value, path, scratch, writer)
        self._open[key].add(batch)

    def finish(self) -> list[WrittenFile]:
        """Publish the files. If the process dies here, the files that exist belong to no table."""
        done = []
        for file in self._open.values():
            file.close()
            size = file.scratch.stat().st_size
            stats = _stats(file.kind, file.scratch)
            self.place.publish(file.scratch, f"{file.kind.name}/{file.path}")
            done.append(
                WrittenFile(file.kind.name, self.source, file.value, file.path, size, stats)
            )
        return done


@dataclass(slots=True)
class _OpenFile:
    kind: TableKind
    value: str
    path: str
    scratch: Path
    writer: pq.ParquetWriter
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.waiting.append(batch)
        self.rows += batch.num_rows
        if self.rows >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self.writer.close()

    def _flush(self) -> None:
        if self.waiting:
            self.writer.write_table(pa.Table.from_batches(self.waiting, self.kind.stored))
            self.waiting, self.rows = [], 0


def _stats(kind: TableKind, path: Path) -> str:
    """What the log says of a file: its rows, and the span of its time column, in milliseconds.

    Delta's own writers cut times off to milliseconds. The end is rounded up, so the span holds.
    """
    metadata = pq.read_metadata(path)
    stats: dict[str, Any] = {"numRecords": metadata.num_rows}
    if kind.time is not None:
        column = metadata.schema.to_arrow_schema().get_field_index(kind.time)
        groups = (metadata.row_group(n).column(column) for n in range(metadata.num_row_groups))
        found = [group.statistics for group in groups]
        if all(each is not None and each.has_min_max for each in found):
            low = min(each.min for each in found)
            high = max(each.max for each in found)
            stats["minValues"] = {kind.time: _millis(low)}
            stats["maxValues"] = {kind.time: _millis(_up(high))}
            stats["nullCount"] = {kind.time: sum(each.null_count for each in found)}
    return json.dumps(stats)


def _up(moment: datetime) -> datetime:
    """The moment, rounded up to a millisecond; the last one of year 9999 stays."""
    try:
        return moment + timedelta(microseconds=-moment.microsecond % 1000)
    except OverflowError:
        return moment


def _millis(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z".rjust(24, "0")


# -- Events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteEvents:
    """The work of a Spark task: it writes the rows of one compacted file, events and odd rows."""

    place: EventPlace
    tables: EventPlace

    def __call__(self, name: str) -> Iterator[pa.RecordBatch]:
        """The files that were written for the compacted file `name`, as rows."""
        yield written_batch(self.files(name))

    def files(self, name: str) -> list[WrittenFile]:
        """As the call; none if the file was removed since it was listed, or its footer is damaged.

        Such a file is no part of the table yet: it may be compacted again under the same name.
        """
        with TableWriter(self.tables, name) as writer:
            try:
                if origin_of(self.place, name) is None:
                    return []
                for batch in read_compacted(self.place, name):
                    _add(writer, name, batch)
            except FileNotFoundError:
                return []
            return writer.finish() or [WrittenFile(None, name, None, None, 0, None)]


@dataclass(frozen=True, slots=True)
class WritePortion:
    """The work of a Spark task: it writes the rows of a portion's files, events and odd rows."""

    place: EventPlace
    tables: EventPlace

    def __call__(self, portion: Portion) -> Iterator[pa.RecordBatch]:
        """The files that were written, as rows."""
        yield written_batch(self.files(portion))

    def files(self, portion: Portion) -> list[WrittenFile]:
        """As the call. If a file cannot be read to its end, nothing is written.

        Then its name and the reason are returned as `source` and `value` of one entry without a
        table; the reason is `REMOVED` if the file was removed since it was listed.
        """
        with TableWriter(self.tables) as writer:
            for file in portion.files:
                try:
                    for batch in read_file(self.place, file):
                        _add(writer, file.name, batch)
                except FileNotFoundError:
                    return [WrittenFile(None, file.name, REMOVED, None, 0, None)]
                except OSError as error:
                    reason = error.strerror or str(error)
                    return [WrittenFile(None, file.name, reason, None, 0, None)]
            return writer.finish()


def has_date(name: str) -> bool:
    """Whether the file's folder is of a day that a column can hold."""
    try:
        date.fromisoformat(name.partition("/")[0].removeprefix("date="))
    except ValueError:
        return False
    return True


def _add(writer: TableWriter, name: str, batch: pa.RecordBatch) -> None:
    """Add rows of the event file `name`, which says their day and hour, to both tables."""
    folder, hour = name.split("/")[:2]
    day, placed = folder.removeprefix("date="), int(hour.removeprefix("hour="))
    odd = pc.is_valid(batch.column("odd"))
    writer.write(EVENTS, day, _typed(batch.filter(pc.invert(odd)), placed, name))
    writer.write(ODD, day, _chosen(batch.filter(odd), ODD, placed, name, {}))


def _typed(batch: pa.RecordBatch, hour: int, source: str) -> pa.RecordBatch:
    """The events with a timestamp `at`, null where no calendar has the time."""
    micros = pc.round(pc.multiply(batch.column("ts"), 1e6))
    known = pc.and_(
        pc.greater_equal(micros, float(_FIRST_MICROS)), pc.less_equal(micros, float(_LAST_MICROS))
    )
    whole = pc.if_else(known, micros, pa.scalar(None, pa.float64())).cast(pa.int64())
    return _chosen(batch, EVENTS, hour, source, {"at": whole.cast(TIME)})


def _chosen(
    batch: pa.RecordBatch, kind: TableKind, hour: int, source: str, made: dict[str, pa.Array]
) -> pa.RecordBatch:
    made = {
        "hour": pa.repeat(pa.scalar(hour, pa.int32()), batch.num_rows),
        "source": pa.repeat(pa.scalar(source), batch.num_rows),
        **made,
    }
    columns = [
        made[each.name] if each.name in made else batch.column(each.name) for each in kind.stored
    ]
    return pa.RecordBatch.from_arrays(columns, schema=kind.stored)


# -- The rows of a DataFrame -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteRows:
    """The function of each Spark task: it writes its rows into files of one table.

    For ``DataFrame.mapInArrow``, with the columns of the kind in any order.
    """

    tables: EventPlace
    kind: TableKind

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with TableWriter(self.tables) as writer:
            for batch in batches:
                values = batch.column(self.kind.partition)
                for value in pc.unique(values):
                    rows = batch.filter(pc.equal(values, value))
                    columns = [rows.column(each.name).cast(each.type) for each in self.kind.stored]
                    writer.write(
                        self.kind,
                        value.as_py(),
                        pa.RecordBatch.from_arrays(columns, schema=self.kind.stored),
                    )
            yield written_batch(writer.finish())


@dataclass(frozen=True, slots=True)
class ReadFile:
    """The work of a Spark task: the rows of one file, which Python opens."""

    tables: EventPlace
    kind: TableKind

    def __call__(self, part: tuple[str, str]) -> Iterator[pa.RecordBatch]:
        path, value = part
        with (
            self.tables.local_copy(f"{self.kind.name}/{path}") as copy,
            pq.ParquetFile(copy) as file,
        ):
            known = file.schema_arrow.names
            for batch in file.iter_batches():
                yield pa.RecordBatch.from_arrays(
                    [self._column(each, batch, known, value) for each in self.kind.schema],
                    schema=self.kind.schema,
                )

    def _column(self, each: Any, batch: pa.RecordBatch, known: Sequence[str], value: str) -> Any:
        if each.name == self.kind.partition:
            return pa.repeat(pa.scalar(value).cast(each.type), batch.num_rows)
        if each.name in known:
            return batch.column(each.name).cast(each.type)
        return pa.nulls(batch.num_rows, each.type)
