"""Events, results and dead letters as Delta tables in one folder, for any engine that reads Delta.

Rules
1. The table ``events`` holds the events of compacted files, and ``odd`` their problem rows. Each
   compacted file is added once, however often and by how many processes that is tried. Tables that
   `aztask.spark.tables.follow` keeps are left to it.
2. Two compactions at the same time may have put one event into two files. `read_table` drops the
   second copy, and so must other readers: see the view on the page.
3. ``results`` holds one snapshot of each submission, ``dead_letters`` one of each queue: a later
   snapshot replaces the earlier one at once, and an earlier one that comes late is dropped.
   Earlier versions of the table have the earlier snapshots, until VACUUM.
4. The rows never pass through the driver: executors write files, and the driver commits their list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType

from aztask.errors import ConfigurationError
from aztask.spark.deadletters import SCHEMA as LETTERS
from aztask.spark.dealing import deal
from aztask.spark.events.compaction import JOB_CHUNKS
from aztask.spark.events.files import Directory
from aztask.spark.events.frame import without_duplicates
from aztask.spark.events.places import EventPlace
from aztask.spark.events.sparkfiles import escaped
from aztask.spark.submission.results import KEY, columns
from aztask.spark.tables.deltalog import (
    Unit,
    commit,
    files_of,
    missing,
    open_table,
    refuse_kept,
)
from aztask.spark.tables.tablefiles import (
    EVENTS,
    ODD,
    TIME,
    WRITTEN_DDL,
    ReadFile,
    TableKind,
    WriteEvents,
    WritePortion,
    WriteRows,
    WrittenFile,
    has_date,
)
from aztask.support.clock import wall
from aztask.support.failpoint import hit

RESULTS: Final = TableKind(
    "results",
    pa.schema(
        [
            ("submission_id", pa.string()),
            (KEY, pa.string()),
            *columns(pa.string()),
            ("taken_at", TIME),
        ]
    ),
    partition="submission_id",
    time="ended_at",
)
DEAD_LETTERS: Final = TableKind(
    "dead_letters",
    pa.schema([*LETTERS, ("taken_at", TIME)]),
    partition="queue",
    time="enqueued_at",
)
POSITION: Final = "stream"
"""The transaction whose version says up to when `follow_events` has read, in microseconds."""
KINDS: Final = {kind.name: kind for kind in (EVENTS, ODD, RESULTS, DEAD_LETTERS)}


@dataclass(slots=True)
class TableReport:
    """What was added to a table.

    files: compacted files, or snapshots, that were added. there: those that the table had already,
    or whose later snapshot it has. skipped: compacted files that were removed since they were
    listed, or are damaged at their end. rows: of events, results or dead letters. odd: problem
    rows. bytes: of the new files. version: the table's.
    """

    files: int = 0
    there: int = 0
    skipped: int = 0
    rows: int = 0
    odd: int = 0
    bytes: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a table. version: the table's, for the next ``since``. files: that hold the rows."""

    rows: DataFrame
    version: int
    files: Sequence[str]


# -- Events ----------------------------------------------------------------------------------------


def append_events(
    spark: SparkSession | None,
    place: EventPlace,
    tables: EventPlace,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> TableReport:
    """Add the compacted files of `place` that the tables lack, one Spark task for each file.

    spark: None works in this process. tables: the folder of the tables ``events`` and ``odd``, as
    `place_of` gives it. progress: called with (files added, files in all) after each commit.

    You can repeat it at any time and run it twice at once: each file is added once. If the process
    dies, the files of the last commits are in the table, and the next run adds the others. Raises
    ConfigurationError, also if `follow_events` keeps the tables, and BrokerUnavailable.
    """
    names = [file.name for file in place.list().files if file.compacted and has_date(file.name)]
    table = open_table(tables, EVENTS.name)
    refuse_kept(table, tables, POSITION)
    new = [unit.name for unit in missing(table, [Unit(name, 1, ()) for name in names])]
    report = TableReport(there=len(names) - len(new), version=table.version() if table else 0)
    for first in range(0, len(new), JOB_CHUNKS):
        some = new[first : first + JOB_CHUNKS]
        add_compacted(spark, some, place, tables, report, unless=POSITION)
        if progress is not None:
            progress(first + len(some), len(new))
    return report


def add_compacted(
    spark: SparkSession | None,
    names: Sequence[str],
    place: EventPlace,
    tables: EventPlace,
    report: TableReport,
    *,
    unless: str | None = None,
) -> None:
    """Write the rows of compacted files, and commit the odd ones, then the events.

    The events say that the files were added. If the process dies in between, the next run writes
    both again, and its odd rows are skipped. unless: as for `commit`.
    """
    written = written_files(spark, names, WriteEvents(place, tables))
    hit("table-written")
    found = {each.source for each in written}

    def units(kind: TableKind) -> list[Unit]:
        return [
            Unit(name, 1, [f for f in written if f.source == name and f.table == kind.name])
            for name in names
            if name in found
        ]

    if odd := [unit for unit in units(ODD) if unit.files]:
        _, added = commit(tables, ODD, odd, unless=unless)
        report.odd += rows_of(added)
        hit("table-odd")
    report.version, added = commit(tables, EVENTS, units(EVENTS), unless=unless)
    hit("table-committed")
    report.files += len(added)
    report.there += len(found) - len(added)
    report.skipped += len(names) - len(found)
    report.rows += rows_of(added)
    report.bytes += sum(file.size for unit in added for file in unit.files)


def written_files(
    spark: SparkSession | None, parts: Sequence[Any], work: WriteEvents | WritePortion
) -> list[WrittenFile]:
    """What `work` writes of the parts, in one Spark task for each; without Spark, here."""
    if spark is None:
        return [file for part in parts for file in work.files(part)]
    return _collected(deal(spark, parts, work, WRITTEN_DDL))


def _collected(frame: DataFrame) -> list[WrittenFile]:
    return [WrittenFile(**row.asDict()) for row in frame.collect()]


def rows_of(units: Iterable[Unit]) -> int:
    """The number of rows in the units' files."""
    return sum(
        int(json.loads(file.stats)["numRecords"]) for unit in units for file in unit.files
        if file.stats is not None
    )  # fmt: skip


# -- Results and dead letters ----------------------------------------------------------------------


def store_results(found: DataFrame, tables: EventPlace, submission_id: str) -> TableReport:
    """Make the rows of `aztask.spark.results` the ones of this submission in the table ``results``.

    found: as `results` gives it without ``schema``: the table has the values as JSON. Keys are
    texts. It looks all keys up once. If the process dies, the rows before stay. Raises
    ConfigurationError and BrokerUnavailable.
    """
    if not isinstance(found.schema["value"].dataType, StringType):
        raise ConfigurationError("the table has values as JSON: call results() without schema=")
    made = {"submission_id": F.lit(submission_id), KEY: F.col(KEY).cast("string")}
    return _replace(found, tables, RESULTS, [submission_id], made)


def store_dead_letters(
    letters: DataFrame, tables: EventPlace, queues: Sequence[str]
) -> TableReport:
    """Make the rows of `aztask.spark.dead_letters` the ones of these queues in ``dead_letters``.

    queues: all that `letters` was read from, also those without any. The table then has no other
    rows of them. If the process dies, the rows before stay. Raises ConfigurationError if `letters`
    has rows of other queues, and BrokerUnavailable.
    """
    return _replace(letters, tables, DEAD_LETTERS, queues, {})


def _replace(
    frame: DataFrame,
    tables: EventPlace,
    kind: TableKind,
    values: Sequence[str],
    made: dict[str, Column],
) -> TableReport:
    """Replace partitions by the rows of the frame, unless the table has later ones.

    The version of a snapshot is when it was begun, by the clock of this machine.
    """
    taken = int(wall() * 1_000_000)
    made = {"taken_at": F.timestamp_micros(F.lit(taken)), **made}
    rows = frame.select(*(made.get(name, F.col(name)).alias(name) for name in kind.schema.names))
    written = _collected(rows.mapInArrow(WriteRows(tables, kind), WRITTEN_DDL))
    hit("table-written")
    if others := sorted({str(file.value) for file in written} - set(values)):
        raise ConfigurationError(f"there are rows of {', '.join(others)}, which is not replaced")
    units = [
        Unit(f"{kind.partition}={value}", taken, [f for f in written if f.value == value], value)
        for value in values
    ]
    version, added = commit(tables, kind, units)
    return TableReport(
        files=len(added),
        there=len(units) - len(added),
        rows=rows_of(added),
        bytes=sum(file.size for unit in added for file in unit.files),
        version=version,
    )


# -- Reading ---------------------------------------------------------------------------------------


def read_table(
    spark: SparkSession, tables: EventPlace, name: str, *, since: int | None = None
) -> TableRows:
    """The rows of the table ``events``, ``odd``, ``results`` or ``dead_letters``, without jars.

    since: a version that an earlier call returned: only rows that came after it. Events are each
    there once; with `since`, once among the new ones. Columns that the table lacks are null. Raises
    ConfigurationError if there is no such table, or if the log does not reach back to `since`.
    """
    kind = KINDS.get(name)
    if kind is None:
        raise ConfigurationError(f"there is no table {name!r}; there are {', '.join(KINDS)}")
    table = open_table(tables, name)
    if table is None:
        raise ConfigurationError(f"there is no table {name!r} in {tables} yet")
    files = files_of(table, tables, name, since)
    schema = from_arrow_schema(kind.schema)
    paths = [f"{tables}/{name}/{file.path}" for file in files]
    if not files:
        rows = spark.createDataFrame([], schema)
    elif isinstance(tables, Directory) and kind.partition == "date":
        # Spark takes the partition from the path, which it decodes in a way of its own: right for
        # days, not for every name of a queue or a submission.
        folder = f"file://{tables}/{name}"
        reader = spark.read.schema(schema).option("basePath", escaped(folder))
        rows = reader.parquet(*(escaped(f"file://{path}") for path in paths))
        rows = rows.select(*kind.schema.names)
    else:
        parts = [(file.path, file.value) for file in files]
        rows = deal(spark, parts, ReadFile(tables, kind), schema)
    if kind is EVENTS:
        rows, _ = without_duplicates(rows)
    return TableRows(rows, table.version(), paths)
