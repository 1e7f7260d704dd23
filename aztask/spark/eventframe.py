"""Events as DataFrames: each event once, what is odd kept apart, everything counted.

Rules
1. No event counts twice: not one that is in two files, nor one that is in the lines and in the
   compacted file made from them.
2. Nothing is left out in silence: lines that are no events, files that are not read and events
   dropped as duplicates are in `EventCounts`.
3. Every row has the explicit columns of `aztask.spark.eventcolumns`; nothing is inferred.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from aztask.spark.compactfiles import Plan, plan_of
from aztask.spark.eventcolumns import CLOCK_BACK, DDL, EVENT_COLUMNS, ODD_COLUMNS
from aztask.spark.eventdirectory import Directory
from aztask.spark.eventfiles import EventFile
from aztask.spark.eventplaces import EventPlace, place_of
from aztask.spark.eventportions import read_files
from aztask.spark.eventsource import FORMAT, EventSource

FEW: Final = 100_000
"""Repeated ids that are told to every executor; where there are more, all rows are shuffled."""


@dataclass(frozen=True, slots=True)
class EventCounts:
    """What a place holds. files: that were read, compacted_files among them. events: each once.

    duplicates: further copies of events, dropped now or by a compaction. odd: lines by what is
    wrong with them ("clock went back" is about sound ones). skipped: files that were not read.
    """

    files: int
    compacted_files: int
    events: int
    duplicates: int
    odd: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Events:
    """The events of a place. events: each one once. odd: columns odd (what is wrong), odd_text (how
    the line begins), odd_file, odd_line. DataFrames are lazy; `counts` runs a job, once.
    """

    def __init__(
        self, place: EventPlace, plan: Plan, rows: DataFrame, kept: DataFrame, *, unique: bool
    ) -> None:
        self.place = place
        self._plan = plan
        self._rows = rows
        self._kept = kept
        self._all = rows.where(F.col("odd").isNull()).select(*EVENT_COLUMNS)
        self.odd = rows.where(F.col("odd").isNotNull()).select(*ODD_COLUMNS)
        self._doubtful = unique

    @property
    def files(self) -> int:
        """How many files are read."""
        return len(self._plan.lines) + len(self._plan.compacted)

    @property
    def bytes(self) -> int:
        """How large they are together."""
        return sum(file.size for file in (*self._plan.lines, *self._plan.compacted))

    @cached_property
    def events(self) -> DataFrame:
        """Every event once. The first use looks for duplicates: a job over the ids alone."""
        return self._unique[0]

    @property
    def corrupt(self) -> DataFrame:
        """The odd rows that are about lines which are no sound events."""
        return self.odd.where(F.col("odd") != CLOCK_BACK)

    @cached_property
    def counts(self) -> EventCounts:
        """How many of what. Runs a job over two columns."""
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
        """Forget the lines that were kept in memory and on disk. The frames work on, slower."""
        self._kept.unpersist()

    @cached_property
    def _unique(self) -> tuple[DataFrame, int]:
        return without_duplicates(self._all) if self._doubtful else (self._all, 0)


def read_events(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    account_variable: str | None = None,
    check_duplicates: bool = True,
) -> Events:
    """The events under `path`: a directory, or ``blob://ACCOUNT/CONTAINER[/FOLDER]`` (Entra ID), or
    ``CONTAINER`` where `account_variable` names the environment variable with the account's
    connection string (read by the driver and by each executor; never an option of Spark's).

    Lines and compacted hours are read together, nothing twice. check_duplicates: False trusts that
    no event is in two files, and saves a job over the ids. Raises ConfigurationError.
    """
    place = place_of(path, account_variable)
    plan = plan_of(place)
    rows, kept = _rows(spark, place, plan)
    return Events(place, plan, rows, kept, unique=check_duplicates)


def stream_events(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    account_variable: str | None = None,
    watermark: str = "1 hour",
    max_files_per_trigger: int | None = None,
    settle_seconds: float | None = None,
) -> DataFrame:
    """A stream of the events whose files appear under `path`, with a column ``at`` (a timestamp).

    Of an event that comes twice within `watermark` the second is dropped. A stream reads lines: let
    a compaction come well behind it (see `aztask.spark.compact`, ``closed_seconds``).
    """
    place = place_of(path, account_variable)
    spark.dataSource.register(EventSource)
    reader = spark.readStream.format(FORMAT).option("path", os.fspath(path))
    if isinstance(place, Directory):
        reader = reader.option("path", place.path)
    for name, value in (
        ("accountvariable", account_variable),
        ("maxfilespertrigger", max_files_per_trigger),
        ("settleseconds", settle_seconds),
    ):
        if value is not None:
            reader = reader.option(name, str(value))
    rows = reader.load()
    events = rows.where(F.col("odd").isNull()).select(
        *EVENT_COLUMNS, F.timestamp_micros((F.col("ts") * 1e6).cast("long")).alias("at")
    )
    return events.withWatermark("at", watermark).dropDuplicatesWithinWatermark(["id"])


def without_duplicates(events: DataFrame) -> tuple[DataFrame, int]:
    """Each id once, and how many further copies there are; which copy stays is not defined.

    Runs a job over hashes of the ids. Where none repeats, which is the rule, the rows themselves
    are not shuffled; where a few do, only theirs are.
    """
    hashed = events.select(F.xxhash64("id").alias("mark"))
    repeated = hashed.groupBy("mark").count().where("count > 1").select("mark")
    marks = repeated.limit(FEW + 1).collect()
    if not marks:
        return events, 0
    if len(marks) > FEW:
        once = events.dropDuplicates(["id"])
        return once, events.count() - once.count()
    table = events.sparkSession.createDataFrame(marks, "mark BIGINT")
    marked = events.withColumn("mark", F.xxhash64("id"))
    doubtful = marked.join(F.broadcast(table), "mark", "left_semi").drop("mark")
    once = doubtful.dropDuplicates(["id"])
    sure = marked.join(F.broadcast(table), "mark", "left_anti").drop("mark")
    return sure.unionByName(once), doubtful.count() - once.count()


def _rows(spark: SparkSession, place: EventPlace, plan: Plan) -> tuple[DataFrame, DataFrame]:
    """Every row of the planned files, and the part of them that is kept once read.

    Spark's own reader takes the Parquet files of a directory; the rest is read by us.
    """
    ours: list[EventFile] = list(plan.lines)
    frames: list[DataFrame] = []
    if isinstance(place, Directory):
        if plan.compacted:
            frames.append(_parquet(spark, place, plan.compacted))
    else:
        ours += plan.compacted
    if ours or not frames:
        # Lines are parsed once; the columns wait in memory, and on disk where that is short.
        frames.append(read_files(spark, place, ours).persist())
    rows = frames[0]
    for frame in frames[1:]:
        rows = rows.unionByName(frame)
    return rows, frames[-1]


def _parquet(spark: SparkSession, place: Directory, files: Sequence[EventFile]) -> DataFrame:
    # a plain URI would not do: Spark takes these characters for a pattern, and leaves %20 as it is
    paths = [
        "file://" + re.sub(r"([\[\]{}*?\\])", r"\\\1", str(Path(place.path, file.name)))
        for file in files
    ]
    names = [*EVENT_COLUMNS, *ODD_COLUMNS]
    return spark.read.schema(DDL).parquet(*paths).select(*names)
