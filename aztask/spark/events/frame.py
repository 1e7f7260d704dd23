"""Events as DataFrames: each event once, damaged lines kept apart, everything counted.

Rules
1. No event counts twice, whether it is in two files, or in lines and in the compacted file made
   from them.
2. Nothing is skipped silently: damaged lines, skipped files and dropped duplicates are counted in
   `EventCounts`.
3. Every row has the explicit columns of `aztask.spark.events.lines`; nothing is inferred.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from aztask.spark.events.compactfiles import ReadingPlan, plan_of, planned
from aztask.spark.events.files import Directory, EventFile
from aztask.spark.events.lines import CLOCK_BACK, DDL, EVENT_COLUMNS, ODD_COLUMNS
from aztask.spark.events.places import EventPlace, place_of
from aztask.spark.events.source import (
    FORMAT,
    EventSource,
    check_stream_options,
    read_files,
    unsound_files,
)
from aztask.spark.events.sparkfiles import SparkPath, escaped, is_of_spark
from aztask.spark.kind import kept, release

MAX_BROADCAST_IDS: Final = 100_000
"""Up to so many repeated ids are broadcast to every executor; beyond it, all rows are shuffled."""


@dataclass(frozen=True, slots=True)
class EventCounts:
    """What was found in a place.

    files: that were read, compacted_files included. events: each once. duplicates: further copies
    of events, dropped now or by a compaction. odd: damaged lines and files, by problem ("clock went
    back" counts valid lines). skipped: files that were not read, by reason.
    """

    files: int
    compacted_files: int
    events: int
    duplicates: int
    odd: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The counts as plain data, for JSON."""
        return asdict(self)


class Events:
    """The events of a place, as DataFrames.

    events: each event once. odd: problems, with the columns odd (the problem), odd_text (how the
    line begins), odd_file and odd_line. The frames are lazy, but their first use runs a job that
    checks the compacted files of a directory. `counts` runs another job, once.
    """

    def __init__(
        self,
        spark: SparkSession,
        place: EventPlace | SparkPath,
        plan: ReadingPlan,
        *,
        unique: bool,
        check: bool,
    ) -> None:
        self.place = place
        self._spark = spark
        self._plan = plan
        self._doubtful = unique
        self._check = check

    @property
    def files(self) -> int:
        """The number of files to read."""
        return len(self._plan.lines) + len(self._plan.compacted)

    @property
    def bytes(self) -> int:
        """The size of these files together."""
        return sum(file.size for file in (*self._plan.lines, *self._plan.compacted))

    @cached_property
    def events(self) -> DataFrame:
        """Every event once. The first use checks for duplicates: a job over the ids alone."""
        return self._unique[0]

    @property
    def odd(self) -> DataFrame:
        """The problems in the files, one row for each line or file."""
        return self._rows.where(F.col("odd").isNotNull()).select(*ODD_COLUMNS)

    @property
    def corrupt(self) -> DataFrame:
        """The problem rows without those about clocks: damaged lines and files."""
        return self.odd.where(F.col("odd") != CLOCK_BACK)

    @cached_property
    def counts(self) -> EventCounts:
        """Count events, duplicates and problems. Runs a job over two columns."""
        by_oddity = {
            row["odd"]: row["count"] for row in self._rows.groupBy("odd").count().collect()
        }
        found = by_oddity.pop(None, 0)
        dropped = self._unique[1]
        return EventCounts(
            files=self.files,
            compacted_files=len(self._plan.compacted),
            events=found - dropped,
            duplicates=dropped + self._plan.duplicates,
            odd=dict(sorted(by_oddity.items())),
            skipped=dict(sorted(self._plan.listing.skipped.items())),
        )

    def close(self) -> None:
        """Free the lines that Spark keeps in memory and on disk. The frames still work, slower."""
        if "_frames" in self.__dict__:
            release(self._frames[1])

    @property
    def _rows(self) -> DataFrame:
        return self._frames[0]

    @cached_property
    def _frames(self) -> tuple[DataFrame, DataFrame]:
        """(every row of the planned files, the part of them that Spark persists)."""
        return _rows(self._spark, self.place, self._plan, check=self._check)

    @cached_property
    def _unique(self) -> tuple[DataFrame, int]:
        found = self._rows.where(F.col("odd").isNull()).select(*EVENT_COLUMNS)
        return without_duplicates(found) if self._doubtful else (found, 0)


def read_events(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    account_variable: str | None = None,
    check_duplicates: bool = True,
    check_files: bool = True,
) -> Events:
    """The events under `path`. Lines and compacted hours are read together, no event twice.

    path: a directory, ``blob://ACCOUNT/CONTAINER[/FOLDER]`` (Entra ID), a container's name with
    `account_variable`, or a path that Spark reads, such as ``abfss://CONTAINER@ACCOUNT.../FOLDER``,
    ``dbfs:/FOLDER`` or ``file:///FOLDER`` (of Spark's machines). account_variable: the environment
    variable with the account's connection string, which the driver and each executor read; the
    string is never an option of Spark.
    check_duplicates: False trusts that no event is in two files, and saves a job over the ids.
    check_files: False trusts that the compacted files of a directory are intact, and saves a job
    that reads them; a damaged one then fails the jobs that read it.

    Raises ConfigurationError.
    """
    if account_variable is None and is_of_spark(os.fspath(path)):
        ours = SparkPath(spark, os.fspath(path))
        listing = ours.list()
        origins = ours.origins(
            [each for each in listing.files if each.compacted], check=check_files
        )
        plan = planned(listing, origins)
        return Events(spark, ours, plan, unique=check_duplicates, check=check_files)
    place = place_of(path, account_variable)
    return Events(spark, place, plan_of(place), unique=check_duplicates, check=check_files)


def stream_events(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    account_variable: str | None = None,
    watermark: str = "1 hour",
    max_files_per_trigger: int | None = None,
    settle_seconds: float | None = None,
    undivided: str | None = None,
) -> DataFrame:
    """A stream of the events whose files appear under `path`, with a column ``at`` (a timestamp).

    path, account_variable: as in `read_events`. watermark: a second copy of an event is dropped if
    it comes within this time. max_files_per_trigger: of one batch; None: all. settle_seconds: how
    long after it appeared a file is read (default 10). undivided: what to do with a file that an
    earlier release compacted while the query did not run, which may hold events that the query has
    read: "read", "skip" or "error" (default).

    ``at`` is the event's time, but never later than the batch that reads it. The watermark follows
    ``at``: otherwise one event of a clock that runs ahead would make all others late. Files that
    were compacted before the stream read them are read from the compacted file. Raises
    ConfigurationError.
    """
    place = place_of(path, account_variable)
    check_stream_options(max_files_per_trigger, settle_seconds, undivided)
    spark.dataSource.register(EventSource)
    reader = spark.readStream.format(FORMAT).option("path", os.fspath(path))
    if isinstance(place, Directory):
        reader = reader.option("path", place.path)
    for name, value in (
        ("accountvariable", account_variable),
        ("maxfilespertrigger", max_files_per_trigger),
        ("settleseconds", settle_seconds),
        ("undivided", undivided),
    ):
        if value is not None:
            reader = reader.option(name, str(value))
    rows = reader.load()
    events = rows.where(F.col("odd").isNull()).select(
        *EVENT_COLUMNS, F.timestamp_micros((_moment() * 1e6).cast("long")).alias("at")
    )
    return events.withWatermark("at", watermark).dropDuplicatesWithinWatermark(["id"])


def without_duplicates(events: DataFrame) -> tuple[DataFrame, int]:
    """(each event once, the number of further copies); any one of the copies is kept.

    Runs a job over hashes of the ids. Normally no id repeats, and the rows are not shuffled; if a
    few do, only their rows are.
    """
    hashed = events.select(F.xxhash64("id").alias("mark"))
    repeated = hashed.groupBy("mark").count().where("count > 1").select("mark")
    marks = repeated.limit(MAX_BROADCAST_IDS + 1).collect()
    if not marks:
        return events, 0
    if len(marks) > MAX_BROADCAST_IDS:
        once = events.dropDuplicates(["id"])
        return once, events.count() - once.count()
    table = events.sparkSession.createDataFrame(marks, "mark BIGINT")
    marked = events.withColumn("mark", F.xxhash64("id"))
    doubtful = marked.join(F.broadcast(table), "mark", "left_semi").drop("mark")
    once = doubtful.dropDuplicates(["id"])
    sure = marked.join(F.broadcast(table), "mark", "left_anti").drop("mark")
    return sure.unionByName(once), doubtful.count() - once.count()


def _moment() -> Column:
    """The event's time in seconds since 1970, limited to 1970 and the beginning of the batch."""
    return F.greatest(F.lit(0.0), F.least(F.col("ts"), F.current_timestamp().cast("double")))


def _rows(
    spark: SparkSession, place: EventPlace | SparkPath, plan: ReadingPlan, *, check: bool
) -> tuple[DataFrame, DataFrame]:
    """(every row of the planned files, the part of them that Spark persists).

    Spark's own reader takes the Parquet files that it can reach. It fails the whole job at the
    first damaged one, so those are found first and read here, as lines and blobs are.
    """
    ours: list[EventFile] = list(plan.lines)
    frames: list[DataFrame] = []
    unsound = plan.compacted
    if isinstance(place, SparkPath):
        unsound = [file for file in plan.compacted if file.name in place.unsound]
    elif isinstance(place, Directory):
        unsound = unsound_files(spark, place, plan.compacted) if check else []
    ours += unsound
    if sound := [file for file in plan.compacted if file not in unsound]:
        frames.append(_parquet(spark, place, sound))
    if ours or not frames:
        # Lines are parsed once; Spark keeps the columns in memory, or on disk if that is short.
        read = place.read(ours) if isinstance(place, SparkPath) else read_files(spark, place, ours)
        frames.append(kept(read))
    rows = frames[0]
    for frame in frames[1:]:
        rows = rows.unionByName(frame)
    return rows, frames[-1]


def _parquet(
    spark: SparkSession, place: EventPlace | SparkPath, files: Sequence[EventFile]
) -> DataFrame:
    folder = place.path if isinstance(place, SparkPath) else f"file://{place}"
    paths = [escaped(f"{folder.rstrip('/')}/{file.name}") for file in files]
    names = [*EVENT_COLUMNS, *ODD_COLUMNS]
    return spark.read.schema(DDL).parquet(*paths).select(*names)
